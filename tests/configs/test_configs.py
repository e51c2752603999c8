"""Configs: every file builds, every key is known, the command line changes them or says why not."""

import dataclasses
import inspect
import json
from pathlib import Path

import jax
import pytest

from lineage import data, models
from lineage.configs import base, cli
from lineage.configs.registry import field_types
from lineage.tasks.objectives import OBJECTIVES
from lineage.train.experiment import Experiment
from lineage.train.optimizer import OPTIMIZERS, SCHEDULES

ROOT = Path(__file__).parents[2]
FILES = list(cli.experiments().values())


@pytest.fixture
def config():
    return cli.load(str(ROOT / "configs" / "small" / "vit_digits.py"))[0]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_config_loads_and_has_the_keys_of_base(path):
    config, _ = cli.load(str(path))
    assert set(cli.keys(config)) == set(cli.keys(base.get_config(config.model.name)))
    assert config.is_locked


@pytest.mark.parametrize("name", base.MODELS)
def test_the_models_keys_are_the_keyword_arguments(name):
    fields = {field.name for field in dataclasses.fields(models.MODELS[name])} - {"parent", "name"}
    assert set(base.MODELS[name]()) == fields | {"name", "variant"}
    assert set(base.MODELS) == set(models.MODELS)


def test_the_data_keys_are_the_keyword_arguments_with_their_defaults():
    parameters = dict(inspect.signature(data.Options).parameters)
    for own in ("seed", "process_index", "process_count", "workdir"):
        parameters.pop(own)
    assert set(base.data()) == set(parameters)
    for key, value in base.data().items():
        if parameters[key].default is not inspect.Parameter.empty:
            assert value == parameters[key].default, key


def test_the_optimizer_and_objective_keys_are_keyword_arguments():
    config = base.get_config("vit")
    classes = [*OPTIMIZERS.values(), *SCHEDULES.values()]
    assert set(config.optimizer) == {"name", "schedule"} | {key for cls in classes for key in field_types(cls)}
    assert set(config.objective) - {"name"} == {
        key for objective in OBJECTIVES.values() for key in list(inspect.signature(objective).parameters)[2:]
    }


def test_another_model_has_its_own_keys(config):
    cli.override(config, {"model.width": 24, "model.name": "gpt", "model.depth": "7"})
    assert set(config.model) == set(base.gpt())
    assert (config.model.name, config.model.variant, config.model.width, config.model.depth) == ("gpt", "small", 24, 7)
    assert config.is_locked
    with pytest.raises(ValueError, match=r"unknown config key 'model\.patch_size'"):
        cli.override(config, {"model.patch_size": 4})


def test_three_families_of_one_size():
    """Within 3% of each other, vocabularies of one size given."""
    sizes = {}
    for overrides in cli.load(str(ROOT / "configs" / "small" / "families.py"))[1]:
        config, _ = cli.load(str(ROOT / "configs" / "small" / "families.py"))
        cli.override(config, {**overrides, "model.vocab_size": 4100, "total_steps": 1})
        state = Experiment(config).abstract_state
        sizes[config.model.name] = sum(leaf.size for leaf in jax.tree.leaves(state.params))
    assert set(sizes) == {"bert", "gpt", "transformer"}
    assert max(sizes.values()) < 1.03 * min(sizes.values())


def test_cifar10():
    """The residual network has as many parameters as everyone's ResNet-18 for CIFAR-10."""
    path, known = f"{ROOT / 'configs' / 'small' / 'cifar10.py'}", {"num_classes": 10, "channels": 3, "image_size": 32}
    for name, size in {"resnet": 11_173_962, "vit": 5_362_378}.items():
        config, _ = cli.load(f"{path}:{name},folder")
        cli.override(config, {f"model.{key}": value for key, value in known.items()})
        cli.override(config, {"data.image_size": 32, "total_steps": 1})
        assert config.data.source == "cifar:folder"
        assert sum(leaf.size for leaf in jax.tree.leaves(Experiment(config).abstract_state.params)) == size
    with pytest.raises(ValueError, match="'swin' is not a model for CIFAR-10: it is one of vit, resnet"):
        cli.load(f"{path}:swin,folder")


def test_tagging_starts_from_the_model_of_a_run(tmp_path):
    other, _ = cli.load(str(ROOT / "configs" / "small" / "bert_stdlib.py"))
    cli.override(other, {"model.width": 64, "data.sequence_length": 96})
    (tmp_path / "config.json").write_text(other.to_json_best_effort())
    config, _ = cli.load(f"{ROOT / 'configs' / 'small' / 'bert_tagging_ud.py'}:x,{tmp_path}")
    assert (config.model.width, config.model.max_length, config.model.head) == (64, 96, "tagging")
    assert (config.init.path, config.init.skip) == (str(tmp_path), ("^classifier",))


def test_glue():
    path = ROOT / "configs" / "paper" / "bert_glue.py"
    assert cli.load(f"{path}:stsb")[0].objective.name == "regression"
    assert cli.load(f"{path}:mnli")[0].model.num_classes == 3
    with pytest.raises(ValueError, match="'glue' is not a task of GLUE: it is one of cola, sst2,"):
        cli.load(f"{path}:glue")


def test_overrides_are_typed(config):
    cli.override(
        config,
        {
            "optimizer.learning_rate": "1",
            "model.depth": "3",
            "data.in_memory": "true",
            "data.mean": "[0.1]",
            "objective.name": "causal_lm",
            "optimizer.lr_multipliers": "(('kernel', 0.5),)",
            "model.remat": "None",
            "data.source": "1234",
        },
    )
    assert config.optimizer.learning_rate == 1.0
    assert isinstance(config.optimizer.learning_rate, float)
    assert config.model.depth == 3
    assert config.data.in_memory is True
    assert config.data.mean == (0.1,)
    assert config.objective.name == "causal_lm"
    assert config.optimizer.lr_multipliers == (("kernel", 0.5),)
    assert config.model.remat is None
    assert config.data.source == "1234"


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        (
            "optimizer.learning_rat",
            "1",
            "unknown config key 'optimizer.learning_rat': did you mean 'optimizer.learning_rate'",
        ),
        ("learning_rate", "1", "unknown config key 'learning_rate'"),
        ("optimizer.learning_rate.x", "1", "unknown config key"),
        ("seed", "1.5", "seed is '1.5', but must be of type int."),
        ("seed", "many", "seed is 'many', but must be of type int."),
        ("model.depth", "deep", "model.depth is 'deep', but must be of type int."),
        ("data.in_memory", "1", "data.in_memory is '1', but must be of type bool."),
        ("optimizer.learning_rate", "fast", "optimizer.learning_rate is 'fast', but must be of type float."),
        ("optimizer", "adamw", "'optimizer' is a section of the config, not a value"),
        ("total_steps", "None2", "total_steps is 'None2'"),
    ],
)
def test_a_wrong_override_is_refused_with_a_sentence(config, key, value, message):
    before = config.to_json_best_effort()
    with pytest.raises(ValueError, match="^" + message.replace(".", r"\.").replace("(", r"\(")):
        cli.override(config, {key: value})
    assert config.to_json_best_effort() == before


def test_a_duration_has_one_unit(config):
    assert config.total_epochs is not None
    cli.override(config, {"total_steps": "7"})
    assert (config.total_steps, config.total_epochs) == (7, None)


def test_a_missing_config_names_the_nearest(monkeypatch):
    monkeypatch.chdir(ROOT)
    with pytest.raises(FileNotFoundError, match=r"no config 'configs/vit_digit.py': did you mean 'vit_digits'"):
        cli.load("configs/vit_digit.py")


def test_a_file_without_get_config_is_refused(tmp_path):
    (tmp_path / "x.py").write_text("a = 1")
    with pytest.raises(ValueError, match="has no get_config"):
        cli.load(str(tmp_path / "x.py"))


def test_a_variant_is_an_argument():
    path = ROOT / "configs" / "small" / "gpt_shakespeare_char.py"
    assert cli.load(str(path))[0].model.depth == 4
    assert cli.load(f"{path}:gpu")[0].model.depth == 6
    with pytest.raises(ValueError, match="recipes cpu and gpu"):
        cli.load(f"{path}:tpu")


def test_a_runs_config_json_loads_as_the_config_it_was(config, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(config.to_json_best_effort())))
    again, sweep = cli.load(str(path))
    assert again.to_dict() == config.to_dict()
    assert sweep == []


def test_the_sweep_is_the_arguments():
    path = ROOT / "configs" / "small" / "vit_ablations.py"
    config, sweep = cli.load(f"{path}:pooling,folder")
    assert config.data.source == "idx:folder"
    assert {changes["model.pooling"] for changes in sweep} == {"token", "gap"}
    with pytest.raises(ValueError, match="'depth' is not an ablation of ViT: it is one of position, pooling, size"):
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
