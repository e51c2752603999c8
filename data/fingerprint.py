"""What the files of a data set hold, so that a run that goes on notices when they have changed."""

import glob
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path

LIMIT = 1 << 30  # bytes that are read through at most; files that are larger together are known by their sizes alone


def fingerprint(places: Iterable[str], limit: int = LIMIT) -> dict[str, list[int]]:
    """The size and the CRC-32 (0 where they are not read) of each file in places as `data.load` takes them.

    What is not a file, such as a source without a path or a split of TFDS, whose files have checksums of their own, has
    none.
    """
    files = sorted({file for place in places for file in _files(place.partition(":")[2] or place)})
    sizes = [file.stat().st_size for file in files]
    read = sum(sizes) <= limit
    return {str(file): [size, _crc(file) if read else 0] for file, size in zip(files, sizes)}


def _files(places: str) -> Iterator[Path]:
    for place in filter(None, places.split(",")):
        for path in map(Path, glob.glob(place, recursive=True)):
            yield from (file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]


def _crc(file):
    value = 0
    with file.open("rb") as content:
        while part := content.read(1 << 20):
            value = zlib.crc32(part, value)
    return value
