"""Fingerprints of files, by which a resumed run notices that its data have changed."""

import glob
import hashlib
import os
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path

from lineage.configs.storage import local, name

LIMIT = 1 << 30
BLOCK = 1 << 16
MIN_SHARE = 1 << 12


def fingerprint(paths: Iterable[str], limit: int = LIMIT) -> dict[str, list[int]]:
    """Return the size and the CRC-32 of each file, given files, folders and globs, or several with commas between.

    If the files have more than `limit` bytes together, only that many are read: of each file the same number, in evenly
    spaced blocks that include its ends. The CRC-32 is 0 if that would be less than 4 KiB of each.
    """
    files = sorted({file for path in paths for file in _files(local(path, ()))})
    sizes = [file.stat().st_size for file in files]
    share = limit // max(len(files), 1)
    if sum(sizes) <= limit:
        share = limit
    return {name(file): [size, crc(file, share) if share >= MIN_SHARE else 0] for file, size in zip(files, sizes)}


def identity(files: Iterable[str | Path], *others: object) -> str:
    """Return a string that identifies the content and the names of files, wherever they are, and other values."""
    found = sorted(fingerprint(map(str, files)).items())
    parts = *others, [(os.path.basename(file), value) for file, value in found]
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def crc(file: Path, limit: int | None = None) -> int:
    """Return the CRC-32 of a file, or of evenly spaced blocks of it if it has more than `limit` bytes."""
    size, value = file.stat().st_size, 0
    with file.open("rb") as content:
        if limit is None or size <= limit:
            while part := content.read(1 << 20):
                value = zlib.crc32(part, value)
            return value
        block = min(BLOCK, limit // 2)
        count = limit // block
        for number in range(count):
            content.seek(number * (size - block) // (count - 1))
            value = zlib.crc32(content.read(block), value)
    return value


def _files(path: str) -> Iterator[Path]:
    found = [path] if path and Path(path).exists() else glob.glob(path, recursive=True)
    for place in map(Path, found):
        yield from (file for file in place.rglob("*") if file.is_file()) if place.is_dir() else [place]
    if not found and "," in path:
        for part in path.split(","):
            yield from _files(part)
