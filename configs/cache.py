"""User cache of compiled programs, tokenizers, token ids, checksums and copies of remote files.

The cache is in `$LINEAGE_CACHE` (default `$XDG_CACHE_HOME/lineage` or `~/.cache/lineage`). If that variable is empty,
only copies of remote files are kept, in the default folder. The cache can be deleted while no run is in progress.
"""

import contextlib
import errno
import os
import sys
import time
import zlib
from collections.abc import Callable, MutableMapping
from pathlib import Path
from typing import TypeVar

DAYS = 30  # reproducible files are deleted if unused for this long
# Patterns of the reproducible files. The folder may contain other files, as users choose it.
REPRODUCIBLE = (
    "programs/jit_*-cache",
    "programs/xla_gpu_*/*",
    "tokenizers/tokenizer-*",
    f"tokens/{'[0-9a-f]' * 24}/*",
    "fingerprints/fingerprints-*.json",
)
CHECKED = "checked"  # file whose modification time is that of the last call of `delete_incomplete`
BLOCK = 1 << 20  # bytes of a program that are read at a time
# Errors of a cache that cannot be used: forbidden, read-only, or full.
UNUSABLE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT)
Result = TypeVar("Result")


def root() -> Path:
    """Return the cache folder, which may not exist; raise FileNotFoundError for a user without a home directory."""
    default = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "lineage"
    path = os.path.expanduser(os.environ.get("LINEAGE_CACHE") or default)
    if path.startswith("~"):
        raise FileNotFoundError("This user has no home directory for the cache: set LINEAGE_CACHE to a folder.")
    return Path(path).absolute()


def folder(kind: str) -> Path | None:
    """Return the folder for one kind of files, such as "tokens"; None if the cache is disabled or not writable."""
    if os.environ.get("LINEAGE_CACHE") == "":
        return None
    try:
        path = root() / kind
        path.mkdir(parents=True, exist_ok=True)
    except OSError:
        return None
    return path if os.access(path, os.W_OK) else None


def kept(cached: Callable[[], Result], without: Callable[[], Result]) -> Result:
    """Return the result of `cached`, or print a note and return that of `without` if the cache cannot be used.

    Its disk may be full or read-only, or several users share it and a file can only be opened by another user.
    """
    try:
        return cached()
    except OSError as error:
        if error.errno not in UNUSABLE:
            raise
        with contextlib.suppress(OSError):  # a closed pipe or a full disk
            print(f"continuing without the cache: {error}", file=sys.stderr)
    return without()


def keep_compiled_programs(environment: MutableMapping[str, str] = os.environ) -> None:
    """Enable JAX's persistent compilation cache; call this before JAX is imported.

    A user's `JAX_COMPILATION_CACHE_DIR` takes precedence. JAX keys programs by code, versions, options and device
    topology; the fingerprint of a CPU includes its instruction sets.
    """
    if "JAX_COMPILATION_CACHE_DIR" in environment or not (path := folder("programs")):
        return
    delete_unused(path.parent)
    delete_incomplete(path)
    environment["JAX_COMPILATION_CACHE_DIR"] = str(path)
    environment.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.1")


def delete_unused(path: Path) -> None:
    """Delete the reproducible files of a cache that were neither read nor written for `DAYS` days."""
    for file in (file for pattern in REPRODUCIBLE for file in path.glob(pattern)):
        with contextlib.suppress(OSError):  # deleted by another process
            status = file.stat()
            if file.is_file() and time.time() - max(status.st_atime, status.st_mtime) > DAYS * 86400:
                file.unlink()


def delete_incomplete(path: Path) -> None:
    """Delete the compiled programs in a folder that a kill or a full disk has cut off since the last call.

    JAX does not replace them: it would print a warning and compile the program again at each start.
    """
    with contextlib.suppress(OSError):
        since = (path / CHECKED).stat().st_mtime if (path / CHECKED).exists() else 0
        (path / CHECKED).touch()  # before the files are read: those that are being written are checked again
        for file in path.glob("jit_*-cache"):
            if file.is_file() and file.stat().st_mtime >= since - 1 and not _is_complete(file):
                file.unlink(missing_ok=True)


def _is_complete(path: Path) -> bool:
    """Return whether a file is a complete zlib stream, or has another format, which JAX uses with other packages."""
    stream = zlib.decompressobj()
    with path.open("rb") as file:
        if file.peek(1)[:1] not in (b"", b"\x78"):
            return True
        try:
            while not stream.eof and (block := stream.unconsumed_tail or file.read(BLOCK)):
                stream.decompress(block, BLOCK)
            stream.flush()
        except zlib.error:
            return False
    return stream.eof
