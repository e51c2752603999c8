"""Config keys: the options of a run (`lineage.configs.run`), and a section for each part of the experiment.

An experiment's file calls `get_config` and sets the keys that differ from the defaults. The parts are registered
dataclasses whose fields are the keys of their sections (see `REGISTRIES`).
"""

import json
from collections.abc import Iterator
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from lineage.configs import modules, schema
from lineage.configs.atomic import MAX_JSON, regular
from lineage.configs.registry import Registry, field_types
from lineage.configs.run import Run
from lineage.data import SOURCES, TOKENIZERS
from lineage.evaluation import EVALUATORS
from lineage.models import MODELS
from lineage.tasks import TASKS
from lineage.train.adapters import ADAPTERS
from lineage.train.optimizer import OPTIMIZERS, SCHEDULES

REGISTRIES: dict[str, Registry] = {
    "source": SOURCES,
    "tokenizer": TOKENIZERS,
    "task": TASKS,
    "model": MODELS,
    "adapter": ADAPTERS,
    "optimizer": OPTIMIZERS,
    "schedule": SCHEDULES,
}


def get_config(
    model: str = "vit",
    task: str = "image_classification",
    source: str = "digits",
    *,
    tokenizer: str = "bytes",
    adapter: str = "none",
    optimizer: str = "adamw",
    schedule: str = "cosine",
) -> ConfigDict:
    """Return the config of the named parts, with all keys at their defaults.

    A name may include the first option, such as "text:PATH".
    """
    names = source, tokenizer, task, model, adapter, optimizer, schedule
    parts = {part: schema.parse(REGISTRIES[part], shorthand(part, name)) for part, name in zip(REGISTRIES, names)}
    config = schema.Section(parts | schema.plain(Run))
    config.evaluators = default_evaluators(config)
    return config.lock()


def shorthand(part: str, text: str) -> str:
    """Return the shorthand of a part's section; the path of a tokenizer.json or its folder becomes "file:PATH"."""
    is_path = text.endswith(".json") or "/" in text
    return f"file:{text}" if part == "tokenizer" and is_path and text.partition(":")[0] not in TOKENIZERS else text


def default_evaluators(config: ConfigDict) -> ConfigDict:
    """Return the sections of the evaluators that the config's task runs by default."""
    return ConfigDict({name: schema.section(EVALUATORS, name) for name in TASKS[config.task.name].evaluators})


def registering_modules() -> set[str]:
    """Return the names of the modules outside this package that have registered parts or evaluators."""
    registered = (cls.__module__ for registry in (*REGISTRIES.values(), EVALUATORS) for cls in registry.values())
    return {name for name in registered if not name.startswith("lineage.")}


def chooses(key: str) -> bool:
    """Return whether a key chooses a part of the experiment, see `choose`."""
    part, _, option = key.partition(".")
    if part == "evaluators":
        return option != "" and "." not in option.removesuffix(".name")
    return part in REGISTRIES and option in ("", "name")


def choose(config: ConfigDict, key: str, value: str) -> None:
    """Choose another part of the experiment, such as "model.name" or "source" of "text:PATH".

    Its section is replaced, and so are the default evaluators where the task changes. An evaluator is chosen, or added,
    by "evaluators.NAME" and "evaluators.NAME.name". Other keys raise ValueError.
    """
    if not chooses(key):
        raise ValueError(f"{key!r} chooses no part of a config: it must be {', '.join(REGISTRIES)} or evaluators.NAME.")
    part, _, option = key.partition(".")
    if part == "evaluators":
        registry, section, part = EVALUATORS, config.evaluators, option.removesuffix(".name")
    else:
        registry, section, value = REGISTRIES[part], config, shorthand(part, value)
    default = TASKS[config.task.name].evaluators
    extra = {name: evaluator.to_dict() for name, evaluator in config.evaluators.items() if name not in default}
    with config.unlocked():
        old = section.get(part)
        section[part] = schema.parse(registry, value) if old is None else schema.swapped(registry, old, value)
        if part == "task":
            config.evaluators = default_evaluators(config)
            config.evaluators.update(extra)


def from_json(values: dict[str, Any]) -> ConfigDict:
    """Return the config that a run's `config.json` describes, after importing what it names in `imports`."""
    for name in values.get("imports", ()):
        modules.import_module(name)
    config = get_config(**{part: values[part]["name"] for part in REGISTRIES})
    config.evaluators = ConfigDict(
        {name: schema.section(EVALUATORS, section["name"]) for name, section in values["evaluators"].items()}
    )
    schema.update(config, values)
    _each_part(schema.release, config)
    return config


def read(path: str | Path) -> ConfigDict:
    """Return the config in a run's `config.json`; raise ValueError if it is not one."""
    try:
        return from_json(json.loads(regular(Path(path), MAX_JSON).read_text(encoding="utf-8")))
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError, ModuleNotFoundError) as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise ValueError(f"{path} cannot be read as a config: {reason}") from error


def resolved(config: ConfigDict) -> ConfigDict:
    """Return the config as a run stores it, with the values of variants, such as the sizes of a model.

    `from_json` is the inverse.
    """
    config = config.copy_and_resolve_references()
    _each_part(schema.resolve, config)
    return config


def _each_part(change, config):
    options = {"model": schema.build(TASKS, config.task).model_options()}
    for part, registry in REGISTRIES.items():
        change(registry, config[part], options.get(part, {}))


def replace(config: ConfigDict, **parts: str) -> None:
    """Replace sections by those of other parts, with their defaults: `replace(config, model="gpt", task="causal_lm")`.

    The values of the old sections are lost; `choose` keeps those of keys that both have.
    """
    with config.unlocked():
        for part, name in parts.items():
            config[part] = schema.parse(REGISTRIES[part], shorthand(part, name))
        if "task" in parts:
            config.evaluators = default_evaluators(config)


def classes(config: ConfigDict) -> dict[str, type]:
    """Return the dataclass behind each section of a config, by the section's dotted key; "" is the config itself."""
    by_key = {"": Run} | {key: hint for key, hint in field_types(Run).items() if is_dataclass(hint)}
    for part, registry in REGISTRIES.items():
        by_key |= schema.classes(registry, config[part], part)
    return by_key | {f"evaluators.{name}": EVALUATORS[evaluator.name] for name, evaluator in config.evaluators.items()}


def without_effect(config: ConfigDict) -> Iterator[str]:
    """Yield a note for each key that differs from its default, but has no effect because of another key or the task."""
    values, task = resolved(config), schema.build(TASKS, config.task)
    for key, value in task.model_options().items():
        if values.model.get(key, value) is None:
            values.model[key] = value
    yield from schema.without_effect(config, values, classes(config))
    cls, source = MODELS[config.model.name], schema.build(SOURCES, config.source)
    unused = [f"model.{key}" for key in task.unused if config.model.get(key) not in (None, getattr(cls, key, None))]
    unused += [f"source.{option}" for option in source.without_effect(task.reads)]
    yield from (f"{key} has no effect in the task {task.name!r}." for key in unused)
