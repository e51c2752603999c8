"""Provenance of a run: the commits of its code and the versions of its packages."""

import contextlib
import hashlib
import os
import subprocess
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).resolve().parent.parent
PACKAGES = (
    "lineage",
    "jax",
    "jaxlib",
    "flax",
    "optax",
    "orbax-checkpoint",
    "numpy",
    "scipy",
    "ml-collections",
    "grain",
    "tensorflow-datasets",
    "tokenizers",
    "safetensors",
    "sacrebleu",
)


def provenance(folder: Path) -> dict[str, Any]:
    """Return metadata about the code of a run whose config file is in `folder`.

    `git` has the commit of the checkout, and whether it has changes (`dirty`); `config_git` has the same for another
    repository that contains the config; `packages` has the versions by name. Keys that do not apply are left out.
    """
    code: dict[str, Any] = {"packages": versions(PACKAGES)}
    project, config = checkout(PROJECT), checkout(folder)
    if project and project["root"] == str(PROJECT):  # not a repository around an installed package
        code["git"] = {key: project[key] for key in ("commit", "dirty")}
    if config and config["root"] != str(PROJECT):
        code["config_git"] = config
    return code


def fingerprint() -> str:
    """Return a string that identifies the code of Lineage and the versions of its packages."""
    digest = hashlib.sha256(repr(versions(PACKAGES)).encode())
    folders = (path.parent for path in PROJECT.glob("*/__init__.py"))
    for path in sorted([PROJECT / "launch.py", *(path for folder in folders for path in folder.rglob("*.py"))]):
        digest.update(repr((str(path.relative_to(PROJECT)), path.read_bytes())).encode())
    return digest.hexdigest()


def versions(packages: Sequence[str]) -> dict[str, str]:
    """Return the versions of the packages that are installed."""
    installed = {}
    for name in packages:
        with contextlib.suppress(metadata.PackageNotFoundError):
            installed[name] = metadata.version(name)
    return installed


def checkout(folder: Path) -> dict[str, Any]:
    """Return `root`, `commit` and `dirty` (with changes or new files) of the git repository around a folder, or {}."""
    try:
        root, commit = _git(folder, "rev-parse", "--show-toplevel", "HEAD").rstrip("\n").rsplit("\n", 1)
        dirty = bool(_git(folder, "status", "--porcelain"))
        return {"root": str(Path(root).resolve()), "commit": commit, "dirty": dirty}
    except (OSError, subprocess.SubprocessError):  # no git, no repository, no commit
        return {}


def _git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), *arguments]
    return os.fsdecode(subprocess.run(command, capture_output=True, check=True, timeout=30).stdout)
