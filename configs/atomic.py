"""Atomic writes of files, limits on files that are read, and JSON with a checksum, for every package."""

import contextlib
import fcntl
import json
import math
import os
import sys
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

# Bytes of a JSON file, which may need 20 times as much memory; of one that grows with the data or the vocabulary.
MAX_JSON, MAX_DATA = 1 << 26, 1 << 28


def regular(path: Path, limit: float = math.inf) -> Path:
    """Return the path; raise ValueError if it is a pipe or a device, or has more than `limit` bytes."""
    if path.exists() and not (path.is_dir() or (path.is_file() and path.stat().st_size <= limit)):
        raise ValueError(f"{path} is not a regular file{f' of at most {limit:,} bytes' if limit < math.inf else ''}.")
    return path


def absolute(path: Path) -> Path:
    """Return an absolute path without "..", which Orbax would resolve without following links.

    Other paths keep their links.
    """
    return path.resolve() if ".." in path.parts else path.absolute()


@contextlib.contextmanager
def replacing(path: str | os.PathLike) -> Iterator[Path]:
    """Yield a temporary path whose file replaces `path` when the block ends, atomically.

    A reader sees either the old file or the new one, even after a power failure. If the block raises, the old file is
    kept. Processes on several machines may write the same file at the same time; the last one to finish wins.
    Temporary files of killed processes in the folder are deleted; those in use are locked.
    """
    path = Path(path)
    for leftover in path.parent.glob(".*.[0-9]*.partial"):
        with contextlib.suppress(OSError), open(leftover, "rb", opener=without_links) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # BlockingIOError: it is in use
            leftover.unlink()
    temporary = path.with_name(f".{path.name}.{os.uname().nodename}.{os.getpid()}.partial")
    try:
        with naming(path), _locked(temporary):
            yield temporary
            with open(temporary, "rb", opener=without_links) as written:  # a library may have replaced the file
                os.fsync(written.fileno())
            temporary.replace(path)
    finally:
        with contextlib.suppress(OSError):  # it was renamed, or the file system is read-only
            temporary.unlink()


def _locked(path: Path) -> BinaryIO:
    """Create and lock a file; if another process takes it for a leftover before it is locked, create it again."""
    while True:
        file = os.fdopen(without_links(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), "ab")
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(file, fcntl.LOCK_EX)
        if path.exists():
            return file
        file.close()


def without_links(path: str, flags: int) -> int:
    """Open a file without following a link, and without waiting for the writer of a pipe."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)


def write_atomic(path: str | os.PathLike, content: str | bytes) -> Path:
    """Write text (UTF-8) or bytes to a file atomically (see `replacing`) and return its path.

    A lone surrogate, as in a file name that is not UTF-8, is written as a JSON escape.
    """
    with replacing(path) as temporary:
        temporary.write_bytes(content.encode(errors="backslashreplace") if isinstance(content, str) else content)
    return Path(path)


def check_output(path: str | os.PathLike) -> None:
    """Raise ValueError if the path of a file to write is that of a folder, pipe or device."""
    if os.path.exists(path) and not os.path.isfile(path):
        raise ValueError(f"--output is {os.path.realpath(path)}, which is not a file: choose another one.")


def check_place(path: str | os.PathLike) -> None:
    """Raise ValueError if no file or folder can be created at a path that a user names."""
    path = Path(path).absolute()
    if "\0" in str(path) or any(len(os.fsencode(part)) > 255 for part in path.parts):
        raise ValueError("--output has a name that is too long, or a null character: choose another one.")
    around = next(parent for parent in path.parents if parent.exists())
    if not around.is_dir():
        raise ValueError(f"--output is {path}, but {around} is not a folder: choose another one.")
    if not path.exists() and not os.access(around, os.W_OK | os.X_OK):
        raise ValueError(f"--output is {path}, but {around} is not writable: choose another one.")


def write_output(path: str | os.PathLike, content: str) -> None:
    """Write a file that a user names, atomically and through a link; raise ValueError as `check_output` does."""
    check_output(path)
    path = Path(os.path.realpath(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, content)


def write_record(path: str | os.PathLike, record: Mapping[str, Any]) -> None:
    """Write an object as JSON with its checksum (see `sealed` and `write_atomic`)."""
    write_atomic(path, json.dumps(sealed(json.loads(json.dumps(dict(record)))), indent=2))


def sealed(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a JSON object with its checksum added as `crc32`."""
    return {**record, "crc32": zlib.crc32(json.dumps(record, sort_keys=True).encode())}


def unsealed(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return an object without its checksum; raise ValueError if the checksum does not match."""
    content = {key: value for key, value in record.items() if key != "crc32"}
    if record.get("crc32") not in (None, sealed(content)["crc32"]):
        raise ValueError("its checksum does not match")
    return content


@contextlib.contextmanager
def naming(path: str | os.PathLike) -> Iterator[None]:
    """Add the path to an OSError of the block that names no file or a temporary one."""
    try:
        yield
    except OSError as error:
        if error.errno is None or not str(error.filename or ".partial").endswith(".partial"):
            raise
        raise OSError(error.errno, error.strerror, str(path)) from None


@contextlib.contextmanager
def in_turn(path: str | os.PathLike, work: str) -> Iterator[None]:
    """Let one process at a time execute the block, across all hosts that share the file system, by a lock file.

    The lock is released when its process ends for any reason. On file systems without locks, nothing is locked. A
    waiting process prints `work`, a description of the block, to standard error.
    """
    with open(path, "ab", opener=without_links) as file:  # another user may share the folder
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            with contextlib.suppress(OSError):  # a closed pipe or a full disk
                print(f"waiting for another process: {work}", file=sys.stderr)
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:  # a file system without locks
            pass
        yield
