"""Configs of pre-trained models: the architecture and the preprocessing of a run, or of a `transformers` folder."""

from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from lineage.configs import base, modules, schema
from lineage.configs.registry import variants
from lineage.configs.storage import local
from lineage.data import Facts, Tokenizer
from lineage.data.facts import FACTS
from lineage.models import MODELS, Model, convert
from lineage.models.convert import companions
from lineage.runs.folder import CONFIG, changed_since_checkpoint, is_run_config, read_json
from lineage.tasks import TASKS, Task

# Model options that the task, the data or the machine determine, not the pre-trained model.
NOT_COPIED = ("num_classes", "head", "image_size", "mask_rate", "attend", "remat", "unroll")
# Sizes that a model of another architecture takes over.
SIZES = ("depth", "width", "num_heads", "mlp_dim", "patch_size", "vocab_size", "max_length")
LAYERS = ("activation", "epsilon")  # options of layers that a model takes over from a variant of it, besides the sizes
# Task options that a pre-trained model determines.
PREPARATION = ("image_size", "mean", "std", "resample", "evaluation_crop", "squash", "shorter_side", "start_token")
LENGTH = 512  # default sequence length of models without a maximum length


def not_copied(task: type[Task]) -> tuple[str, ...]:
    """Return the model options that a model for a task does not take from the pre-trained one."""
    return (*NOT_COPIED, "distillation_head") if task.needs_teacher else NOT_COPIED


def is_run(path: str | Path) -> bool:
    """Return whether a folder contains a run with checkpoints; raise ValueError if they are missing from a run."""
    if (Path(path) / "checkpoints").is_dir():
        return True
    config: dict[str, Any] = {}
    with suppress(OSError, ValueError):  # a damaged file may be that of a model
        config = read_json(Path(path) / CONFIG)
    if is_run_config(config):
        advice = "restore it, or let the command `train` write it"
        raise ValueError(f"{path} has the config of a run but no folder `checkpoints`: {advice}.")
    return False


def check_imports(path: str | Path) -> None:
    """Raise ValueError if a folder has a run whose `imports` would be executed: another run may name the folder."""
    names = read_json(Path(path) / CONFIG).get("imports", ()) if is_run(path) else ()
    names = names if isinstance(names, list | tuple) else [names]
    if unknown := [name for name in map(str, names) if not modules.is_imported(name)]:
        named = f"--config.imports={','.join(unknown)}"
        raise ValueError(f"the run in {path} would execute {unknown[0]!r}: give {named} if you trust it.")


def model_of(path: str | Path, trusted: bool = False) -> Model:
    """Return the model of a run, or in a folder in the layout of `transformers`; see `check_imports` for `trusted`.

    Raises:
        ValueError: the model or the task in the config of a run is not that of its newest checkpoint.
    """
    if not is_run(path):
        return convert.describe(path)[0]
    if not trusted:
        check_imports(path)
    config, sizes = base.read(Path(path) / CONFIG), Facts.load(Path(path) / FACTS).model_options
    if changed := [key for key in changed_since_checkpoint(Path(path)) if key.startswith(("model.", "task."))]:
        raise ValueError(
            f"{Path(path) / CONFIG} is not the config of the newest checkpoint ({', '.join(changed[:4])}): restore it, "
            "or let the command `train` write it again."
        )
    known = schema.build(TASKS, config.task).model_options()
    return schema.build(MODELS, config.model, **known | {key: size for key, size in sizes.items() if size is not None})


def adopt(config: ConfigDict, typed: Collection[str] = (), saved: Mapping[str, Any] | None = None) -> None:
    """Copy the architecture and the preprocessing of the model in `init.path` to the config, except for `typed` keys.

    The heads and the number of classes stay those of the config. If the model cannot perform the task but is a variant
    of the config's model (such as a masked autoencoder that is fine-tuned), or if `typed` has another model, only the
    sizes that both models have are copied, and of a variant the options in `LAYERS`. With `init.rename`, which inserts
    the model into a larger one, nothing is copied.

    Args:
        typed: keys set on the command line.
        saved: config of the run to resume. If it has the same `init.path`, which may no longer exist, the architecture
            is taken from this config.

    Raises:
        ValueError: the model cannot perform the task.
    """
    init = config.init
    if init.rename:
        return
    if saved and saved.get("init", {}).get("path") == init.path:
        _adopt_saved(config, typed, saved)
        return
    path = local(init.path)
    if Path(path).exists():
        model = model_of(path, trusted=True)
        _adopt_architecture(config, typed, model)
        _adopt_preparation(config, typed, path, model)


def _adopt_architecture(config, typed, model):
    task, name = TASKS[config.task.name], MODELS.name_of(model)
    changes: dict[str, Any] = {"head": task.head} if task.head and model.has_heads else {}
    if model.data_options["num_classes"] == 0:
        changes["num_classes"] = 1  # any number
    headed = model.clone(**changes)
    if not {"model", "model.name"} & {*typed}:
        if {*task.needs} & {*headed.outputs}:
            base.choose(config, "model.name", name)
        _check_related(config, model)
    section, settings = config.model, model.settings
    if section.name != name:
        copied = (*SIZES, *LAYERS) if isinstance(model, MODELS[section.name]) else SIZES
        settings = {key: settings[key] for key in copied if key in settings}
    fixed = variants(MODELS[section.name]).get(section.get("variant"), {}) if "model.variant" in typed else {}
    if section.get("variant") and not fixed:
        section.variant = None
    if config.init.layers:
        settings = settings | dict.fromkeys({"depth", "decoder_depth"} & settings.keys(), len(config.init.layers))
    for key, value in settings.items():
        if key in section and key not in (*not_copied(task), *fixed) and not _is_typed(f"model.{key}", typed):
            _set(section, key, value)
    if "mask_rate" in settings and "mask_rate" in config.task and "task.mask_rate" not in typed:
        config.task.mask_rate = settings["mask_rate"]


def _check_related(config, model):
    """Raise ValueError if the model of the config is not a variant of the pre-trained one, such as MAE and ViT."""
    chosen = MODELS[config.model.name]
    if not (isinstance(model, chosen) or issubclass(chosen, type(model))):
        given = f"{config.init.path} has a {type(model).__name__}, which cannot perform the task {config.task.name!r}"
        only = f"set model.name={config.model.name} to load only the parameters that a {chosen.__name__} also has"
        raise ValueError(f"{given}: choose another model, or {only}.")


def _adopt_preparation(config, typed, path, model):
    for key, value in _preparation(path, model).items():
        if value is not None and key in config.task and f"task.{key}" not in typed:
            _set(config.task, key, value)
    longest = model.data_options["max_length"]
    if longest and "sequence_length" in config.task and "task.sequence_length" not in typed:
        config.task.sequence_length = min(config.task.sequence_length or longest, longest)


def _adopt_saved(config, typed, saved):
    if not {"model", "model.name"} & {*typed}:
        base.choose(config, "model.name", saved["model"]["name"])
    prepared = {*PREPARATION, "sequence_length", *({"mask_rate"} & saved["model"].keys())}
    copied = {"model": saved["model"].keys() - {"name", *NOT_COPIED}, "task": prepared}
    for part, keys in copied.items():
        values = {key: value for key, value in saved[part].items() if key in keys and key in config[part]}
        schema.update(config[part], {k: v for k, v in values.items() if not _is_typed(f"{part}.{k}", typed)})


def _is_typed(key, typed):
    """Return whether a key, or a key in this section, is one of those set on the command line."""
    return any(f"{typed_key}.".startswith(f"{key}.") for typed_key in typed)


def _set(section, key, value):
    """Set a key; a model, such as a backbone, becomes a section."""
    if isinstance(value, Model):
        options = {name: option for name, option in value.settings.items() if option is not None}
        with section.unlocked():
            section[key] = schema.section(MODELS, MODELS.name_of(value), **options)
    else:
        section[key] = float(value) if value is not None and section.get_type(key) is float else value


def _preparation(path, model):
    """Return the task options that prepare the inputs of a model.

    An `image_size` of 0 in a run means that its images had the model's size already.
    """
    options = {"image_size": model.data_options["image_size"]}
    if is_run(path):
        task = read_json(Path(path) / CONFIG)["task"]
        saved = {key: schema.tuples(task[key]) for key in PREPARATION if task.get(key) is not None}
        if saved.get("image_size") == 0:
            del saved["image_size"]
        start = Facts.load(Path(path) / FACTS).start_token  # of pre-training too, which has no such option
        if start is not None:
            saved["start_token"] = "pad" if start == Tokenizer.load(path).pad else "end_of_text"
        return options | saved
    if Path(path).suffix == ".npz":
        return options
    return options | {"start_token": companions.start_role(Path(path))} | companions.preprocessing(Path(path))


def config_of(folder: Path, task: str) -> ConfigDict:
    """Return the config of a task with the model in a folder in the layout of `transformers`."""
    if not folder.exists():
        raise FileNotFoundError(f"{folder} does not exist: give the folder of a run or of a model.")
    if not task:
        known = " or ".join(sorted(TASKS))
        raise ValueError(f"{folder} is not the folder of a run: give the task of its model, {known}.")
    model = convert.describe(folder)[0]
    config = base.get_config(MODELS.name_of(model), task, f"text:{folder}")
    config.init.path = str(folder)
    adopt(config)
    config.init.path = ""
    for key in not_copied(TASKS[task]):
        if key in config.model:
            _set(config.model, key, model.settings[key])
    if hasattr(TASKS[task], "binary") and folder.suffix != ".npz" and companions.is_multi_label(folder):
        if "binary" not in config.task:
            raise ValueError(f"{folder} has classes with separate probabilities, which the task {task} does not have.")
        config.task.binary = True
    if not config.task.get("sequence_length", 1):
        config.task.sequence_length = LENGTH
    return config
