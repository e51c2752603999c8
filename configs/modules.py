"""Modules and Python files that register parts of experiments."""

import hashlib
import importlib
import importlib.util
import sys
import types
from collections.abc import Iterable
from pathlib import Path

import cloudpickle


def import_module(name: str) -> types.ModuleType:
    """Import a module of `config.imports` by name, or a Python file by path; a file is executed only once."""
    if not isinstance(name, str):
        raise ValueError(f"imports has {str(name)[:60]}: it must be the name of a module or the path of a file.")
    if not name.endswith(".py"):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(f"imports has {name!r}: {error}.", name=error.name) from error
    return sys.modules.get(_module_name(Path(name))) or execute(Path(name))


def source_code(names: Iterable[str]) -> str:
    """Return the content of the files of modules of `config.imports`."""
    files = (getattr(import_module(name), "__file__", None) for name in names)
    return "".join(Path(file).read_text(encoding="utf-8", errors="replace") for file in files if file)


def resolved(name: str) -> str:
    """Return a name of `config.imports` that does not depend on the current folder: a path becomes absolute."""
    return str(Path(name).resolve()) if isinstance(name, str) and name.endswith(".py") else name


def is_imported(name: str) -> bool:
    """Return whether `import_module` would execute nothing."""
    return (_module_name(Path(name)) if name.endswith(".py") else name) in sys.modules


def execute(path: Path) -> types.ModuleType:
    """Execute a Python file as a module with a unique name, even if another file has the same stem."""
    if not path.is_file():
        raise FileNotFoundError(f"There is no file {path} to import.")
    if path.suffix != ".py":
        raise ValueError(f"{path} is not a Python file: its name must end with .py.")
    spec = importlib.util.spec_from_file_location(_module_name(path), path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look up their module here
    cloudpickle.register_pickle_by_value(module)  # worker processes of the loader cannot import it
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[spec.name]
        beside = path.resolve().with_name(f"{getattr(error, 'name', '')}.py")
        if isinstance(error, ModuleNotFoundError) and beside.is_file():
            advised = f"{error}; to import {beside}, set PYTHONPATH={beside.parent}."
            raise ModuleNotFoundError(advised, name=error.name).with_traceback(error.__traceback__) from None
        raise
    return module


def _module_name(path):
    return f"{path.stem}_{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:8]}"
