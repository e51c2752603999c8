"""Atomic writes of files, for every package."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def replacing(path: str | os.PathLike) -> Iterator[Path]:
    """Yield a temporary path whose file replaces `path` when the block ends, atomically.

    A reader sees the old file or the new one, never a part. If the block raises, the old file stays. Processes on
    several machines may write the same file at the same time; the last one to finish wins.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.uname().nodename}.{os.getpid()}.partial")
    try:
        yield temporary
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_atomic(path: str | os.PathLike, content: str | bytes) -> Path:
    """Write a text (UTF-8) or bytes to a file, see `replacing`; return its path."""
    with replacing(path) as temporary:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)
    return Path(path)
