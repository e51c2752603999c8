"""Cache of the user: compiled programs, tokenizers, token ids, checksums and copies of remote files, for later runs.

It is `$LINEAGE_CACHE`, by default `$XDG_CACHE_HOME/lineage` or `~/.cache/lineage`; if that variable is empty,
only copies of remote files are kept, in the default folder. All of it can be deleted while no run is in progress.
"""

import contextlib
import os
import time
from collections.abc import MutableMapping
from pathlib import Path

DAYS = 30  # what is made anew if needed is deleted if it was not used for this long
KINDS = ("programs", "tokenizers", "tokens", "fingerprints")  # of files that are made anew


def root() -> Path:
    """Return the folder of the cache, which may not exist."""
    default = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "lineage"
    return Path(os.environ.get("LINEAGE_CACHE") or default).expanduser().absolute()


def folder(kind: str) -> Path | None:
    """Return the folder of one kind of files, such as "tokens"; None if nothing is kept or it cannot be written."""
    if os.environ.get("LINEAGE_CACHE") == "":
        return None
    try:
        path = root() / kind
        path.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):  # RuntimeError: there is no home
        return None
    return path if os.access(path, os.W_OK) else None


def keep_compiled_programs(environment: MutableMapping[str, str] = os.environ) -> None:
    """Let JAX, which must not have been imported yet, keep compiled programs for later processes.

    A `JAX_COMPILATION_CACHE_DIR` of the user takes precedence. JAX looks up a program by its code, the versions, the
    options and the topology of the devices, whose fingerprint holds the instruction sets of a CPU.
    """
    if "JAX_COMPILATION_CACHE_DIR" in environment or not (path := folder("programs")):
        return
    for kind in KINDS:
        delete_unused(path.with_name(kind))
    environment["JAX_COMPILATION_CACHE_DIR"] = str(path)
    environment.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.1")


def delete_unused(path: Path, days: float = DAYS) -> None:
    """Delete the files of a folder that were neither read nor written for some days."""
    for file in path.rglob("*"):
        with contextlib.suppress(OSError):  # another process has deleted it
            about = file.stat()
            if file.is_file() and time.time() - max(about.st_atime, about.st_mtime) > days * 86400:
                file.unlink()
