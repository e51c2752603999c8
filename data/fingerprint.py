"""Fingerprints of files, by which a resumed run notices that its data have changed."""

import glob
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path

LIMIT = 1 << 30


def fingerprint(paths: Iterable[str], limit: int = LIMIT) -> dict[str, list[int]]:
    """Return the size and the CRC-32 of each file, given files, folders and globs.

    If the files have more than `limit` bytes together, they are not read and their CRC-32 is 0.
    """
    files = sorted({file for path in paths for file in _files(path)})
    sizes = [file.stat().st_size for file in files]
    read = sum(sizes) <= limit
    return {str(file): [size, _crc(file) if read else 0] for file, size in zip(files, sizes)}


def _files(path: str) -> Iterator[Path]:
    for found in map(Path, glob.glob(path, recursive=True)):
        yield from (file for file in found.rglob("*") if file.is_file()) if found.is_dir() else [found]


def _crc(file: Path) -> int:
    value = 0
    with file.open("rb") as content:
        while part := content.read(1 << 20):
            value = zlib.crc32(part, value)
    return value
