"""Configs: every file builds, every key is documented, and overrides are typed and checked."""

import dataclasses
import json
import re
import sys
from functools import partial
from pathlib import Path

import jax
import pytest
from ml_collections import ConfigDict

from lineage.configs import adoption, base, cli, modules, schema
from lineage.data import SOURCES
from lineage.evaluation import EVALUATORS
from lineage.models import MODELS
from lineage.runs import folder
from lineage.tasks import TASKS
from lineage.train.experiment import Experiment

ROOT = Path(__file__).parents[2]
FILES = list(cli.experiments().values())


@pytest.fixture
def config():
    return cli.load(str(ROOT / "configs" / "small" / "vit_digits.py"))[0]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_config_loads_with_the_keys_of_base(path):
    config, _ = cli.load(str(path))
    fresh = base.get_config(**{part: config[part].name for part in base.REGISTRIES})
    keys = {key for key in schema.describe(config, {}) if not key.startswith("evaluators.")}
    assert keys == {key for key in schema.describe(fresh, {}) if not key.startswith("evaluators.")}
    assert set(fresh.evaluators) <= set(config.evaluators)
    assert config.is_locked
    stored = folder.plain(base.resolved(config))
    assert stored["model"].get("width", 0) is not None
    assert stored["model"].get("depth", 0) is not None
    loaded = base.from_json(stored)
    given, actual = folder.flatten(folder.plain(config)), folder.flatten(folder.plain(loaded))
    assert not [key for key, value in actual.items() if value not in (None, given[key])]  # another variant has effect
    assert folder.plain(base.resolved(loaded)) == stored


PARTS = [(registry, name) for registry in (*base.REGISTRIES.values(), EVALUATORS) for name in registry]


@pytest.mark.parametrize(("registry", "name"), PARTS, ids=lambda part: part if isinstance(part, str) else part.kind)
def test_sections_match_the_defaults_of_their_class(registry, name):
    """Check the default values, and that each key is documented."""
    section, cls = schema.section(registry, name), registry[name]
    variants = {key for variant in getattr(cls, "VARIANTS", {}).values() for key in variant}
    fields = {field.name: field for field in dataclasses.fields(cls) if field.name not in ("parent", "name")}
    assert set(section) == {"name", *fields, *(["variant"] if variants else [])}
    for key, field in fields.items():
        if section[key] is not None and not isinstance(section[key], ConfigDict):
            default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
            assert section[key] == default, key
        else:
            assert field.default is None or key in variants | set(getattr(cls, "FROM_DATA", ())), key
    for key in schema.keys(cls):
        assert key.documentation, f"{cls.__name__}.{key.name} is not documented"


OPTIONS = [(name, field.name) for name, cls in TASKS.items() for field in dataclasses.fields(cls)]


@pytest.mark.parametrize(("name", "option"), OPTIONS)
def test_explicit_zero_is_not_treated_as_unset(name, option):
    """Check that every task option accepts 0 or False, or requires a positive value; none treats 0 as unset."""
    cls = TASKS[name]
    kind = type(schema.section(TASKS, name)[option])
    if kind not in (int, float, bool):
        return
    section = schema.section(TASKS, name, **{option: kind(0)})
    if option in ("evaluation_crop", "mask_rate", "max_boxes"):
        with pytest.raises(ValueError, match=rf"task\.{option} is 0"):
            schema.build(TASKS, section)
    else:
        value = getattr(schema.build(TASKS, section), option)
        assert (value, type(value)) == (kind(0), kind)
    assert cls


def test_replacing_a_component_updates_its_keys(config):
    """Check that overridden values are kept if both classes have the key, in any order of the overrides."""
    cli.override(config, {"model.width": 24, "model.depth": "7", "model.name": "gpt"})
    assert set(config.model) == set(schema.section(MODELS, "gpt"))
    assert (config.model.name, config.model.variant, config.model.width, config.model.depth) == ("gpt", None, 24, 7)
    assert config.model.activation == "gelu_tanh"  # the default of the new class
    assert config.is_locked
    with pytest.raises(ValueError, match=r"unknown config key 'model\.patch_size'"):
        cli.override(config, {"model.patch_size": 4})
    cli.override(config, {"task.sequence_length": "9", "task": "sequence_to_sequence", "evaluators.extra": "loss"})
    task = config.task
    assert (task.name, task.sequence_length, task.label_smoothing) == ("sequence_to_sequence", 9, 0.1)
    assert set(config.evaluators) == {"loss", "generation", "extra"}
    cli.override(config, {"task.name": "causal_lm"})
    assert set(config.evaluators) == {"loss", "extra"}
    with pytest.raises(ValueError, match=r"Unknown task 'causal_ml'\. Did you mean 'causal_lm'"):
        cli.override(config, {"task.name": "causal_ml"})


def test_shorthands(config):
    cli.override(config, {"source": "text:a:b.txt", "tokenizer": "x/tokenizer.json", "evaluators.knn": "knn"})
    assert (config.source.name, config.source.path) == ("text", "a:b.txt")
    assert (config.tokenizer.name, config.tokenizer.path) == ("file", "x/tokenizer.json")
    for path in ("outputs/gpt", "hf:org/name", "s3://bucket/tokenizer.json"):
        cli.override(config, {"tokenizer": path})
        assert (config.tokenizer.name, config.tokenizer.path) == ("file", path)
    assert config.evaluators.knn.count == 20
    with pytest.raises(ValueError, match="The source 'digits' has no options: 'digits:x' must be 'digits'"):
        cli.override(config, {"source": "digits:x"})


def test_config_file_registers_its_own_classes(tmp_path):
    """Check that config.json of the run names the file, so that the classes are found again."""
    path = tmp_path / "own.py"
    path.write_text(
        "from dataclasses import dataclass\n"
        "from lineage.configs import base\n"
        "from lineage.data import SOURCES, Source\n"
        "@SOURCES.register('own_test_source')\n"
        "@dataclass(frozen=True)\n"
        "class Own(Source):\n"
        "    size: int = 3\n"
        "def get_config():\n"
        "    return base.get_config('vit', 'image_classification', 'own_test_source')\n"
    )
    config, _ = cli.load(str(path))
    assert config.imports == (str(path),)
    del SOURCES["own_test_source"]
    del sys.modules[modules._module_name(path)]
    (tmp_path / "config.json").write_text(config.to_json_best_effort())
    again, _ = cli.load(str(tmp_path / "config.json"))
    assert again.source.size == 3
    del SOURCES["own_test_source"]


def test_three_families_have_the_same_size():
    """Check that parameter counts differ by at most 3% for equal vocabulary sizes."""
    sizes = {}
    for overrides in cli.load(str(ROOT / "configs" / "small" / "families.py"))[1]:
        config, _ = cli.load(str(ROOT / "configs" / "small" / "families.py"))
        cli.override(config, {**overrides, "model.vocab_size": 4100, "total_steps": 1})
        state = Experiment(config).abstract_state
        sizes[config.model.name] = sum(leaf.size for leaf in jax.tree.leaves(state.params))
    assert set(sizes) == {"bert", "gpt", "transformer"}
    assert max(sizes.values()) < 1.03 * min(sizes.values())


def test_cifar10_resnet_has_standard_size():
    """Check that the residual network has the parameter count of the usual ResNet-18 for CIFAR-10."""
    path, known = f"{ROOT / 'configs' / 'small' / 'cifar10.py'}", {"num_classes": 10, "channels": 3, "image_size": 32}
    for name, size in {"resnet": 11_173_962, "vit": 5_362_378}.items():
        config, _ = cli.load(f"{path}:{name},folder")
        cli.override(config, {f"model.{key}": value for key, value in known.items()})
        cli.override(config, {"task.image_size": 32, "total_steps": 1})
        assert (config.source.name, config.source.path) == ("cifar", "folder")
        assert sum(leaf.size for leaf in jax.tree.leaves(Experiment(config).abstract_state.params)) == size
    with pytest.raises(ValueError, match="MODEL is 'swin': it must be one of vit, resnet"):
        cli.load(f"{path}:swin,folder")


def test_tagging_initializes_from_a_run(tmp_path):
    other, _ = cli.load(str(ROOT / "configs" / "small" / "bert_stdlib.py"))
    cli.override(other, {"model.width": 64, "task.sequence_length": 96})
    (tmp_path / "config.json").write_text(other.to_json_best_effort())
    config, _ = cli.load(f"{ROOT / 'configs' / 'small' / 'bert_tagging_ud.py'}:x,{tmp_path}")
    assert (config.model.width, config.model.max_length, config.task.name) == (64, 96, "token_classification")
    assert (config.init.path, config.init.skip) == (str(tmp_path), ("^classifier",))


def test_glue():
    path = ROOT / "configs" / "paper" / "bert_glue.py"
    assert cli.load(f"{path}:stsb")[0].task.name == "text_regression"
    assert cli.load(f"{path}:mnli")[0].model.num_classes == 3
    with pytest.raises(ValueError, match="The GLUE task is 'glue': it must be one of cola, sst2,"):
        cli.load(f"{path}:glue")


@pytest.mark.parametrize("name", ["finetune:sequence_to_sequence", "finetune:conditional_lm", "t5_multitask"])
def test_scores_of_generated_texts_are_not_those_of_samples(name):
    config, _ = cli.load(name)
    assert "generation" in config.evaluators
    assert config.sampling.temperature == 0


def test_overrides_are_typed(config):
    changes = {"schedule.learning_rate": "1", "model.depth": "3", "model.remat": "None", "wandb": "1234"}
    changes |= {"task.in_memory": "true", "task.mean": "[0.1]", "task.resample": "bicubic"}
    cli.override(config, changes | {"optimizer.lr_multipliers": "(('kernel', 0.5),)"})
    assert config.schedule.learning_rate == 1.0
    assert isinstance(config.schedule.learning_rate, float)
    assert config.model.depth == 3
    assert config.task.in_memory is True
    assert config.task.mean == (0.1,)
    assert config.task.resample == "bicubic"
    assert config.optimizer.lr_multipliers == (("kernel", 0.5),)
    assert config.model.remat is None
    assert config.wandb == "1234"


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("model.dept", "1", "unknown config key 'model.dept': did you mean 'model.depth'? The keys of model are "),
        ("model.xyz", "1", "unknown config key 'model.xyz'. The keys of model are "),
        ("total_step", "1", "unknown config key 'total_step': did you mean 'total_steps'?"),
        ("modl.depth", "1", "unknown config key 'modl.depth': did you mean 'model.depth'?"),
        ("xyzzy.a", "1", "unknown config key 'xyzzy.a'. The keys of the config are "),
        ("learning_rate", "1", "unknown config key 'learning_rate'"),
        ("optimizer.learning_rate.x", "1", "unknown config key"),
        ("seed", "1.5", "seed is '1.5': it must be of type int."),
        ("seed", "many", "seed is 'many': it must be of type int."),
        ("model.depth", "deep", "model.depth is 'deep': it must be of type int."),
        ("task.in_memory", "1", "task.in_memory is '1': it must be of type bool."),
        ("schedule.learning_rate", "fast", "schedule.learning_rate is 'fast': it must be of type float."),
        ("mesh", "1", "'mesh' is a section of the config, not a value"),
        ("optimizer", "adamv", "Unknown optimizer 'adamv'. Did you mean 'adamw'?"),
        ("total_steps", "None2", "total_steps is 'None2'"),
    ],
)
def test_invalid_override_raises(config, key, value, message):
    before = config.to_json_best_effort()
    with pytest.raises(ValueError, match="^" + message.replace(".", r"\.").replace("(", r"\(").replace("?", r"\?")):
        cli.override(config, {key: value})
    assert config.to_json_best_effort() == before


def test_initialized_run_keeps_its_model_if_the_folder_is_lost(config):
    saved = config.to_dict()
    saved["model"] |= {"width": 24, "depth": 2}
    saved["init"]["path"] = "lost"
    cli.override(config, {"init.path": "lost", "model.depth": 3}, saved)
    assert (config.model.width, config.model.depth) == (24, 3)


def test_keys_are_those_of_the_adopted_architecture(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "config.json").write_text(json.dumps(cli.load("llama_stdlib")[0].to_dict()))
    (tmp_path / "facts.json").write_text("{}")
    config, _ = cli.load("finetune:causal_lm")
    cli.override(config, {"init.path": str(tmp_path), "model.window": "8", "model.dropout": "0.3"})
    assert (config.model.name, config.model.window, config.model.dropout) == ("llama", 8, 0.3)
    with pytest.raises(ValueError, match=r"unknown config key 'model\.use_bias'.* num_kv_heads"):
        cli.override(cli.load("finetune:causal_lm")[0], {"init.path": str(tmp_path), "model.use_bias": "False"})


def test_overriding_a_duration_clears_the_other_unit(config):
    assert config.total_epochs is not None
    cli.override(config, {"total_steps": "7"})
    assert (config.total_steps, config.total_epochs) == (7, None)


def test_missing_config_error_suggests_similar_names(monkeypatch):
    monkeypatch.chdir(ROOT)
    with pytest.raises(FileNotFoundError, match=r"no config 'configs/vit_digit.py': did you mean 'vit_digits'"):
        cli.load("configs/vit_digit.py")


def test_file_without_get_config_raises(tmp_path):
    (tmp_path / "x.py").write_text("a = 1")
    with pytest.raises(ValueError, match="has no get_config"):
        cli.load(str(tmp_path / "x.py"))
    (tmp_path / "x.yaml").write_text("a: 1")
    with pytest.raises(ValueError, match=r"x\.yaml is not a Python file: its name must end with \.py"):
        cli.load(str(tmp_path / "x.yaml"))


def test_arguments_that_get_config_does_not_take_are_refused(tmp_path):
    (tmp_path / "x.py").write_text("def get_config(path):\n    pass\n")
    for file, wants in (("vit_digits:x", "takes no argument"), (f"{tmp_path}/x.py", "needs an argument, FILE:ARG")):
        with pytest.raises(ValueError, match=rf"^get_config\(\) of .* {wants}"):
            cli.load(file)


def test_config_that_is_none_is_refused(tmp_path):
    (tmp_path / "x.py").write_text("def get_config():\n    pass\n")
    with pytest.raises(ValueError, match=r"get_config\(\) of .*x\.py returns None: it must return a ConfigDict"):
        cli.load(str(tmp_path / "x.py"))


def test_argument_selects_the_variant():
    path = ROOT / "configs" / "small" / "gpt_shakespeare_char.py"
    assert cli.load(str(path))[0].model.depth == 4
    assert cli.load(f"{path}:gpu")[0].model.depth == 6
    with pytest.raises(ValueError, match="The recipe is 'tpu': it must be cpu or gpu"):
        cli.load(f"{path}:tpu")


def test_config_json_round_trip(config, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(config.to_json_best_effort())))
    for file in (path, tmp_path):
        again, sweep = cli.load(str(file))
        assert again.to_dict() == config.to_dict()
        assert sweep == []


@pytest.mark.parametrize("content", ["{", "[1]", "{}", '{"model": 5}', "[" * 100_000])
def test_damaged_config_json_is_named(content, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(content)
    (tmp_path / "checkpoints").mkdir()
    for read, name in ((cli.load, path), (partial(adoption.model_of, trusted=True), tmp_path)):  # of init.path
        with pytest.raises(ValueError, match=f"^{path} cannot be read as a config: .+"):
            read(str(name))


@pytest.mark.parametrize("imports", [None, 5, {"a": 1}])
def test_imports_that_are_no_list_are_refused(imports, tmp_path):
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "config.json").write_text(json.dumps({"imports": imports}))
    with pytest.raises(ValueError, match="would execute"):
        adoption.check_imports(tmp_path)


@pytest.mark.parametrize("value", [None, True, 2.5, "many", [2]])
def test_values_of_a_config_have_its_types(value, config):
    with pytest.raises(ValueError, match=r"^loader\.batch_size is .*: it must be of type int\.$"):
        schema.update(config, {"loader": {"batch_size": value}})
    schema.update(config, {"loader": {"batch_size": 3}, "schedule": {"learning_rate": 1}, "total_steps": None})
    assert (config.loader.batch_size, config.schedule.learning_rate, config.total_steps) == (3, 1.0, None)


def test_unknown_keys_of_a_config_are_named(config):
    schema.update(config, {"model": {"depth": 3}})
    assert config.model.depth == 3
    with pytest.raises(ValueError, match=r"^Unknown config key 'model\.dept'\. Did you mean 'depth'\?"):
        schema.update(config, {"model": {"dept": 3}})


def test_argument_selects_the_sweep():
    path = ROOT / "configs" / "small" / "vit_ablations.py"
    config, sweep = cli.load(f"{path}:pooling,folder")
    assert (config.source.name, config.source.path) == ("idx", "folder")
    assert {changes["model.pooling"] for changes in sweep} == {"token", "gap"}
    with pytest.raises(ValueError, match="STUDY is 'depth': it must be one of position, pooling, size"):
        cli.load(f"{path}:depth,folder")
    for overrides in cli.load(f"{path}:size,folder")[1]:
        config, _ = cli.load(f"{path}:size,folder")
        cli.override(config, overrides)
        alone, _ = cli.load(f"{ROOT / 'configs' / 'small' / 'fashion_mnist.py'}:{config.model.name},folder")
        assert config.model.to_dict() == alone.model.to_dict()


def test_sweep_yields_overrides(tmp_path):
    (tmp_path / "x.py").write_text(
        "from lineage.configs import base\n"
        "def get_config():\n    return base.get_config('vit')\n"
        "def sweep():\n    for seed in range(3):\n        yield {'seed': seed}\n"
    )
    assert cli.load(str(tmp_path / "x.py"))[1] == [{"seed": 0}, {"seed": 1}, {"seed": 2}]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("sweep():\n    yield 'seed'", r"sweep\(\) of .*x\.py yields seed: it must yield dictionaries of config keys"),
        ("sweep():\n    yield {1: 2}", r"sweep\(\) of .*x\.py yields \{1: 2\}: it must yield dictionaries"),
        ("sweep():\n    return 5", r"sweep\(\) of .*x\.py returns 5: it must yield dictionaries of config keys"),
        ("sweep():\n    yield {'seed': [][1]}", r"x\.py, line 3: list index out of range"),
        ("search():\n    return {'seed': 1}", r"search\(\) of .*x\.py returns .*: it must return a Search"),
        ("search():\n    return seed", r"x\.py, line 3: name 'seed' is not defined"),
        ("f(): pass\nsweep = [{}]", r"x\.py: sweep is a list, but it must be a function\."),
    ],
)
def test_mistakes_in_sweeps_and_searches_are_described(function, message, tmp_path):
    start = "from lineage.configs import base; get_config = lambda: base.get_config('vit')"
    (tmp_path / "x.py").write_text(f"{start}\ndef {function}\n")
    with pytest.raises(ValueError, match=message):
        (cli.search if function.startswith("search") else cli.load)(str(tmp_path / "x.py"))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("config.model.update(deth=1)", 'Key "deth" does not exist'),
        ("config.model.deth = 1", 'Did you mean "depth" instead of "deth"?'),
        ("config.model.depth = '1'", "Could not override field 'depth'"),
        ("config.total_steps = stps", "name 'stps' is not defined"),
        ("config.total_steps =", "invalid syntax"),
        ("from os import nothing", "cannot import name 'nothing'"),
        ("config.total_steps = [][1]", "list index out of range"),
    ],
)
def test_mistakes_in_a_config_file_are_reported_with_their_line(tmp_path, monkeypatch, line, message):
    monkeypatch.chdir(tmp_path)
    Path("wrong.py").write_text(
        "from lineage.configs import base\n\n\ndef get_config():\n"
        f"    config = base.get_config()\n    {line}\n    return config\n"
    )
    with pytest.raises(ValueError, match=rf"wrong\.py, line 6: .*{re.escape(message)}") as raised:
        cli.load("./wrong.py")
    assert len(str(raised.value)) < 300


def test_imports_on_the_command_line_come_before_the_parts_that_they_register(tmp_path):
    path = tmp_path / "extra.py"
    path.write_text(
        "from dataclasses import dataclass\n\nfrom lineage.tasks import TASKS\n"
        "from lineage.tasks.image_classification import ImageClassification\n\n\n"
        '@TASKS.register("extra")\n@dataclass(frozen=True)\nclass Extra(ImageClassification):\n    """Extra task."""\n'
    )
    config, _ = cli.load("vit_digits")
    try:
        cli.override(config, {"task.name": "extra", "imports": str(path)})
        assert config.task.name == "extra"
        assert config.imports == (str(path),)
    finally:
        base.REGISTRIES["task"].pop("extra")


def test_imports_on_the_command_line_keep_those_in_use_and_are_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    part = "from dataclasses import dataclass\nfrom lineage.data import SOURCES\n"
    part += "from lineage.data.sources.packages import Digits\n"
    for name in ("own", "other", "third"):
        (tmp_path / f"{name}.py").write_text(
            f"{part}@SOURCES.register('{name}')\n@dataclass(frozen=True)\nclass Own(Digits):\n    pass\n"
        )
    with (tmp_path / "own.py").open("a") as file:
        file.write("from lineage.configs import base\n\n\ndef get_config():\n")
        file.write("    config = base.get_config('vit', 'image_classification', 'own')\n")
        file.write("    config.imports = ('third.py',)\n    return config\n")
    try:
        assert cli.load("own.py")[0].imports == (str(tmp_path / "third.py"), str(tmp_path / "own.py"))
        config, _ = cli.load("own.py")
        cli.override(config, {"imports": "other.py", "source": "other"})
        assert config.imports == (str(tmp_path / "own.py"), str(tmp_path / "other.py"))
    finally:
        for name in ("own", "other", "third"):
            SOURCES.pop(name, None)
            sys.modules.pop(modules._module_name(tmp_path / f"{name}.py"), None)


def test_missing_imports_are_named(tmp_path):
    config, _ = cli.load("vit_digits")
    with pytest.raises(ModuleNotFoundError, match="imports has 'no_module': No module named 'no_module'"):
        cli.override(config, {"imports": "no_module"})
    with pytest.raises(ValueError, match=r"imports has \[1, 2\]: it must be the name of a module"):
        cli.override(config, {"imports": "[[1, 2]]"})
    path = tmp_path / "config.json"
    path.write_text('{"imports": ["no_module"]}')
    with pytest.raises(ValueError, match=rf"{path} cannot be read as a config: .* imports has 'no_module'"):
        cli.load(str(path))
