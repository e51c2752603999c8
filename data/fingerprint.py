"""Fingerprints of files, with which a resumed run detects that its data have changed."""

import contextlib
import glob
import hashlib
import json
import os
import time
import zlib
from collections.abc import Iterable, Iterator, Sequence
from itertools import repeat
from pathlib import Path

from lineage.configs import cache
from lineage.configs.atomic import sealed, unsealed, write_atomic
from lineage.configs.storage import local, name

LIMIT = 1 << 30
BLOCK = 1 << 16
MIN_SHARE = 1 << 12
LARGE = 1 << 24  # minimum total bytes of files whose CRC-32s are kept
SETTLED = 2 * 10**9  # nanoseconds after which another change of a file gives it another time on any file system


def fingerprint(paths: Iterable[str], limit: int = LIMIT, cache_dir: str | Path = "") -> dict[str, list[int]]:
    """Return the size and the CRC-32 of each file, given files, folders and globs, or several separated by commas.

    If the files have more than `limit` bytes in total, only that many are read: the same number from each file, in
    evenly spaced blocks that include its ends. The CRC-32 is 0 if that would be less than 4 KiB of each.

    The CRC-32s of files of at least 16 MiB in total are kept, and a file is read again only if its size, its
    modification time (mtime) or the time of its last change of any kind (ctime, which programs cannot set) differs.

    Args:
        cache_dir: folder that keeps the CRC-32s; "": the cache of the user, if there is one.
    """
    files = sorted({file for path in paths for file in files_of(local(path, ()))})
    stamps = [(stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns) for stat in map(Path.stat, files)]
    total = sum(size for size, *_ in stamps)
    share = limit if total <= limit else limit // len(files)
    folder = (cache_dir or cache.folder("fingerprints")) if total >= LARGE else None
    sums = _cached(files, stamps, share, Path(folder)) if folder else [crc(file, share) for file in files]
    return {name(file): [size, value] for file, (size, *_), value in zip(files, stamps, sums)}


def _cached(files: Sequence[Path], stamps: Sequence[tuple[int, int, int]], share: int, folder: Path) -> list[int]:
    """Return the CRC-32 of each file: the one kept in a folder if the file has the same stamp, else computed and kept.

    The CRC-32 of a file that has just been written is not kept, as the file could change again with the same time.
    """
    key = hashlib.sha256(repr((share, [str(file) for file in files])).encode()).hexdigest()[:24]
    path, now, before = folder / f"fingerprints-{key}.json", time.time_ns(), None
    with contextlib.suppress(OSError, ValueError, LookupError, AttributeError):
        if path.is_file():  # a pipe would be waited for
            before = unsealed(json.loads(path.read_text(encoding="utf-8")))["files"]
    sums = [
        row[-1] if row[:-1] == [*stamp] else crc(file, share)
        for file, stamp, row in zip(files, stamps, before or repeat([None]))
    ]
    after = [[*stamp, value] if max(stamp[1:]) < now - SETTLED else [None] for stamp, value in zip(stamps, sums)]
    if after != before:
        with contextlib.suppress(OSError):  # the folder may be read-only
            folder.mkdir(parents=True, exist_ok=True)
            write_atomic(path, json.dumps(sealed({"files": after})))
    return sums


def identity(files: Iterable[str | Path], *values: object, cache_dir: str | Path = "") -> str:
    """Return a string that identifies the content and names of files, regardless of their location, and other values.

    For `cache_dir`, see `fingerprint`.
    """
    fingerprints = sorted(fingerprint(map(str, files), cache_dir=cache_dir).items())
    content = *values, [(os.path.basename(file), size_and_crc) for file, size_and_crc in fingerprints]
    return hashlib.sha256(repr(content).encode()).hexdigest()


def files_below(folder: str | Path) -> Iterator[Path]:
    """Yield the files in a folder and its subfolders, following links to folders but visiting each folder once.

    Raises OSError if a folder cannot be read.
    """

    def fail(error: OSError) -> None:
        raise error

    seen = set[tuple[int, int]]()
    for place, folders, names in os.walk(folder, onerror=fail, followlinks=True):
        status = os.stat(place)
        if (folder_id := (status.st_dev, status.st_ino)) in seen:  # a link to a parent folder, or a second link
            folders.clear()
            continue
        seen.add(folder_id)
        folders.sort()
        yield from (Path(place, name) for name in names)


def crc(file: Path, limit: int) -> int:
    """Return the CRC-32 of a file, or of evenly spaced blocks of it if it has more than `limit` bytes.

    The result is 0 if `limit` is less than 4 KiB.
    """
    size, value = file.stat().st_size, 0
    if limit < MIN_SHARE:
        return 0
    with file.open("rb") as content:
        if size <= limit:
            while chunk := content.read(1 << 20):
                value = zlib.crc32(chunk, value)
            return value
        block = min(BLOCK, limit // 2)
        count = limit // block
        for number in range(count):
            content.seek(number * (size - block) // (count - 1))
            value = zlib.crc32(content.read(block), value)
    return value


def files_of(path: str) -> Iterator[Path]:
    """Yield the files at a path: a file, a folder or a glob, or several separated by commas."""
    places = [path] if path and Path(path).exists() else glob.glob(path, recursive=True)
    for place in map(Path, places):
        yield from filter(Path.is_file, files_below(place) if place.is_dir() else [place])  # a pipe would be waited for
    if not places and "," in path:
        for item in path.split(","):
            yield from files_of(item)
