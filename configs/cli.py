"""Loading of configs (Python files with a `get_config()`) and command-line overrides."""

import ast
import contextlib
import difflib
import inspect
import os
import re
import textwrap
import traceback
from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from types import ModuleType
from typing import Any

from ml_collections import ConfigDict, FieldReference

from lineage.configs import adoption, base, modules, schema
from lineage.configs.registry import did_you_mean, typed
from lineage.configs.sweeps import Search, without_numpy
from lineage.evaluation import EVALUATORS
from lineage.runs.folder import CONFIG


def load(file: str) -> tuple[ConfigDict, list[dict[str, Any]]]:
    """Return the config of a file, and the overrides that its `sweep()` yields (empty if there is none).

    Args:
        file: path of a Python file or of a run's `config.json`, or the bare name of an experiment (see `find`);
            "path.py:argument" calls get_config("argument"), and sweep("argument") if that takes one.
    """
    path, argument = find(file)
    if path.endswith(".json"):
        return base.read(path).lock(), []
    arguments = [argument] if argument else []
    with _described(path):
        module = modules.execute(Path(path))
        if not hasattr(module, "get_config"):
            raise ValueError(f"{path} has no get_config(): it is not a config.")
        try:
            inspect.signature(module.get_config).bind(*arguments)
        except TypeError:
            wants = "takes no argument" if argument else "needs an argument, FILE:ARGUMENT"
            raise ValueError(f"get_config() of {path} {wants}.") from None
        config = module.get_config(*arguments)
        if not isinstance(config, ConfigDict):
            raise ValueError(f"get_config() of {path} returns {str(config)[:60]}: it must return a ConfigDict.")
    if config.get("imports"):
        config.imports = tuple(map(modules.resolved, config.imports))
    if _registers(module, config):  # loading a trained model registers its classes again
        config.imports = (*config.imports, modules.resolved(path))
    return config.lock(), _overrides(module, path, argument)


def _registers(module, config):
    """Return whether a config file, or a module that it imports, registers classes that `config.imports` does not."""
    values = vars(module).values()
    names = {value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", "") for value in values}
    own = tuple(f"{name}." for name in {module.__name__, *names})
    return any(f"{name}.".startswith(own) for name in base.registering_modules().difference(config.get("imports", ())))


def _overrides(module, path, argument):
    """Return the overrides that the function `sweep()` of a config file yields; [] if there is no such function."""
    with _described(path):
        overrides = _call(module, "sweep", argument) or []
        if not isinstance(overrides, Iterable):
            needed = "it must yield dictionaries of config keys"
            raise ValueError(f"sweep() of {path} returns {str(overrides)[:60]}: {needed}.")
        overrides = list(overrides)
    for changes in overrides:
        if not isinstance(changes, Mapping) or not all(isinstance(key, str) for key in changes):
            needed = "it must yield dictionaries of config keys"
            raise ValueError(f"sweep() of {path} yields {str(changes)[:60]}: {needed}.")
    return [{key: without_numpy(value) for key, value in changes.items()} for changes in overrides]


def _call(module, name, argument):
    """Call a function of a config file with the file's argument if it takes one; None if there is no such function."""
    function = getattr(module, name, None)
    if function is None:
        return None
    if not callable(function):
        raise ValueError(f"{module.__file__}: {name} is a {type(function).__name__}, but it must be a function.")
    return function(argument) if argument and inspect.signature(function).parameters else function()


@contextlib.contextmanager
def _described(path):
    """Convert an exception of the code in a config file to a ValueError that gives the line."""
    try:
        yield
    except (ValueError, OSError):
        raise
    except Exception as error:
        raise ValueError(_described_error(path, error)) from error


def _described_error(path, error):
    """Describe an exception in a config file: the line, and the message without the config's content."""
    file, frames = Path(path).resolve(), traceback.extract_tb(error.__traceback__)
    frames = [frame for frame in frames if Path(frame.filename).resolve() == file]
    line = frames[-1].lineno if frames else None
    if isinstance(error, SyntaxError):
        line = error.lineno
    while error.args and isinstance(error.args[0], Exception):  # ml_collections raises AttributeError(KeyError(text))
        (error,) = error.args
    message = str(error.args[0] if error.args else "")
    message = re.sub(r' Other fields present: ".*?"(?=\nDid|$)', "", message, flags=re.DOTALL)
    return f"{path}{f', line {line}' if line else ''}: {' '.join(message.split()) or type(error).__name__}"


def find(file: str) -> tuple[str, str]:
    """Return the path and the argument of "FILE:ARGUMENT".

    FILE is the path of a config file, the folder of a run, or the bare name of an experiment. The path of a file or
    folder that exists may have colons.
    """
    paths = [*accumulate(file.split(":"), "{}:{}".format)]  # up to each colon
    existing = (path for path in reversed(paths) if any(map(os.path.isfile, (path, os.path.join(path, CONFIG)))))
    path = next(existing, paths[0])
    argument = file[len(path) + 1 :]
    if Path(path, CONFIG).is_file():
        path = str(Path(path, CONFIG))
    if not Path(path).is_file():
        known = experiments()
        if path not in known:
            hint = did_you_mean(Path(path).stem, known) or ": the command `list` prints the experiments."
            raise FileNotFoundError(f"there is no config {path!r}{hint}")
        path = str(known[path])
    return path, argument


def experiments() -> dict[str, Path]:
    """Return the files of the experiments in `configs/small` and `configs/paper`, by name."""
    folders = (Path(__file__).parent / name for name in ("small", "paper"))
    return {path.stem: path for folder in folders for path in sorted(folder.glob("*.py")) if path.stem != "__init__"}


def summary(path: Path) -> str:
    """Return the first line of a config file's docstring."""
    return (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").partition("\n")[0]


def listing(command: str) -> str:
    """Return a list of the experiments as text; `command` is how to train one."""
    known, lines = experiments(), []
    width = max(map(len, known))
    for folder in ("small", "paper"):
        names = [name for name, path in known.items() if path.parent.name == folder]
        lines += [f"{folder}:", *(f"  {name:{width}}  {summary(known[name])}" for name in names), ""]
    return "\n".join([*lines, f"Train one with `{command}`."])


def described(config: ConfigDict, section: str = "") -> str:
    """Describe the keys of a config or of one section: value, type, default and documentation."""
    lines = []
    for path, (key, value) in schema.describe(config, base.classes(config)).items():
        if section and not f"{path}.".startswith(f"{section}."):
            continue
        default = "" if key.default in (None, value) else f", default {key.default!r}"
        lines.append(f"{path} = {value!r}  [{key.type}{default}]")
        if key.documentation:
            lines.append(textwrap.fill(key.documentation, 116, initial_indent="    ", subsequent_indent="    "))
    if not lines:
        sections = [name for name, value in config.items() if isinstance(value, ConfigDict)]
        raise ValueError(f"the config has no section {section!r}: its sections are {', '.join(sections)}.")
    return "\n".join(lines)


def parts(kind: str) -> str:
    """List the parts of a kind, such as "sources", by name and first line of documentation."""
    registries = {f"{part}s": registry for part, registry in base.REGISTRIES.items()} | {"evaluators": EVALUATORS}
    if kind not in registries:
        raise ValueError(f"unknown kind of parts {kind!r}: it must be one of {', '.join(registries)}.")
    classes = sorted(registries[kind].items())
    width = max(len(name) for name, _ in classes)
    return "\n".join(f"{name:{width}}  {(inspect.getdoc(cls) or '').partition(chr(10))[0]}" for name, cls in classes)


def search(file: str, trials: int | None = None) -> Search | None:
    """Return the result of a config file's `search()`, called like `sweep()`; None if there is none.

    `trials` replaces the number of trials.
    """
    path, argument = find(file)
    if not path.endswith(".py"):
        return None
    with _described(path):
        result = _call(modules.execute(Path(path)), "search", argument)
    if result is not None and not (isinstance(result, Search) and all(isinstance(key, str) for key in result.space)):
        raise ValueError(f"search() of {path} returns {str(result)[:60]}: it must return a Search over config keys.")
    return replace(result, trials=trials) if result and trials is not None else result


def override(config: ConfigDict, changes: Mapping[str, Any], saved: Mapping[str, Any] | None = None) -> None:
    """Set dotted keys, such as "schedule.learning_rate", to values or to their texts on the command line.

    With `init.path`, the section `model` describes the model of that folder, except for the overridden keys. If
    `saved`, the config of the run to resume, has the same `init.path`, its section is used instead.

    Raises:
        ValueError: a key is unknown (the message names the nearest one and lists the keys of its section), or a value
            has the wrong type.
    """
    if "imports" in changes:
        used = [*filter(modules.is_imported, config.imports)]  # such as the config's file, whose classes stay
        added = [*map(modules.resolved, typed("imports", changes["imports"], tuple, optional=False))]
        for module in added:
            modules.import_module(module)
        changes = {**changes, "imports": tuple(dict.fromkeys([*used, *added]))}
    # Other parts come first, so that the order of the overrides does not matter.
    chosen = [key for key, value in changes.items() if isinstance(value, str) and base.chooses(key)]
    for key in chosen:
        base.choose(config, key, changes[key])
    values = {key: value for key, value in changes.items() if key not in chosen}
    of_model = {key for key in values if changes.get("init.path") and key.startswith("model.")} - {"model.variant"}
    _set_values(config, {key: value for key, value in values.items() if key not in of_model})
    if changes.get("init.path"):
        adoption.adopt(config, changes, saved)
    _set_values(config, {key: values[key] for key in values if key in of_model})  # of the adopted architecture


def _set_values(config, values):
    """Set dotted keys of a config to values, or to their texts on the command line."""
    for key, value in values.items():
        section, name = _place(config, key)
        field = dict(section.items(preserve_field_references=True))[name]
        section[name] = typed(key, value, section.get_type(name), optional=isinstance(field, FieldReference))


def _place(config, key):
    """Return the section of a dotted key and the key's name in it."""
    *sections, name = key.split(".")
    section = config
    for section_name in sections:
        section = section.get(section_name) if isinstance(section, ConfigDict) else None
    if not isinstance(section, ConfigDict):
        if sections[0] == "evaluators" and len(sections) == 2:
            added = f"--config.{'.'.join(sections)}=KIND adds it; `lineage list evaluators` lists the kinds"
            raise ValueError(f"unknown config key {key!r}: there is no evaluator {sections[1]!r} ({added}).")
        hint = did_you_mean(key, schema.describe(config, {})) or "." + _listed("the config", config)
        raise ValueError(f"unknown config key {key!r}{hint}")
    if name not in section:
        prefix = ".".join([*sections, ""])
        elsewhere = [other for other in schema.describe(config, {}) if other.endswith(f".{name}")]
        close = [prefix + other for other in difflib.get_close_matches(name, section, n=1)] or elsewhere
        hint = f": did you mean {close[0]!r}?" if close else "."
        listed = _listed(".".join(sections) or "the config", section) if sections or not close else ""
        raise ValueError(f"unknown config key {key!r}{hint}{listed}")
    if isinstance(section[name], ConfigDict):
        raise ValueError(f"{key!r} is a section of the config, not a value: its keys are {', '.join(section[name])}.")
    return section, name


def _listed(name, section):
    return f" The keys of {name} are {', '.join(section)}."
