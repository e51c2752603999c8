"""Locations, splits and lines of data files."""

import bz2
import contextlib
import glob
import gzip
import io
import json
import lzma
import os
import re
import sys
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, ClassVar

import numpy as np

from lineage.configs.hub import COMPRESSED, uncompressed
from lineage.data.fingerprint import files_below
from lineage.data.sources.base import SPLITS, SplitFiles

_LIMIT = "at most {:.0f} MB and 100 times the size of the files are read into memory at a time"
_READ = 1 << 16  # bytes of a file that are decompressed at a time
_LINE, _ALL = 10**7, 10**8  # bytes of a line, which may become many objects, and of all parts of files
_PART = re.compile(r"\d+(-of-(\d+)(?!.*/))")  # number of a file among several, and how many there are
_ROLES = {"training": "train", "valid": "validation", "val": "validation", "dev": "validation"}
_ROLES |= {"testa": "validation", "testb": "test"}  # the names of CoNLL-2003
_NAMES = re.compile(rf"(?<![a-z])(train|validation|test|{'|'.join(_ROLES)})(?![a-z]|_(?!\d))")


@dataclass(frozen=True)
class DataFiles(SplitFiles):
    """Base class of sources that read one or several files for each split; they may be compressed.

    Attributes:
        path: training data: a file, a glob, or a folder whose files or subfolders are named after their split: "train",
            "validation" (or "valid", "val", "dev") or "test", such as train-00000-of-00002.parquet.
        validation_path: validation data: a file, a glob or a folder; "": those in the folder `path`, if any.
        test_path: test data: a file, a glob or a folder; "": those in the folder `path`, if any.
    """

    def split_files(self) -> dict[str, list[str]]:
        """Return the files of each split, sorted by name; raise FileNotFoundError if there are none."""
        source = self.copied()
        paths, splits = source.paths(), {}
        if os.path.isdir(source.path):
            splits = find_splits(paths.pop("train"), source.suffixes, source.known is None)
        for split, path in source.without_training(paths).items():
            splits[split] = list(map(str, distinct(find_files(path, source.suffixes))))
            if not splits[split]:
                raise FileNotFoundError(f"There is no file {path}.")
        return source.without_training({split: splits[split] for split in SPLITS if split in splits})

    def files(self) -> list[str]:
        return [file for files in self.split_files().values() for file in files]

    def notes(self) -> Iterator[str]:
        """Yield notes on numbered files, such as train-00000-of-00002.parquet, of which some are missing."""
        yield from super().notes()
        parts: Counter[tuple[str, int]] = Counter()
        for file in (uncompressed(file) for files in self.split_files().values() for file in files):
            if numbered := _PART.search(file):
                parts[_PART.sub(r"*\1", file), int(numbered[2])] += 1
        for (name, total), count in parts.items():
            if count < total:
                yield f"only {count:,} of the {total:,} files {name} are read: the rows of the others are missing."

    def unread(self) -> list[str]:
        source, read = self.copied(), {*self.files()}
        if not (source.suffixes and os.path.isdir(source.path)):
            return []
        files = find_files(source.path, source.suffixes)
        return [str(file) for file in files if str(file) not in read and not split_in(source.path, file)]


def find_files(path: str, suffixes: tuple[str, ...] = ()) -> list[Path]:
    """Return the file, the files that match a glob, or those in a folder and its subfolders, sorted by path.

    Links to folders are followed. Hidden files and folders in a folder are left out, compressed copies of files next to
    them, and files with none of the suffixes, in lower or upper case, if any are given. Links to missing files are
    included if their names match the suffixes or a glob.
    """
    if is_folder := os.path.isdir(path):
        inside = [(file, file.relative_to(path)) for file in files_below(path)]
        files = [file for file, name in inside if not any(part.startswith(".") for part in name.parts)]
        files = [file for file in files if not suffixes or uncompressed(file.name).lower().endswith(suffixes)]
    else:
        files = [Path(path)] if os.path.exists(path) else [Path(name) for name in glob.glob(path, recursive=True)]
    is_named = bool(suffixes) or not is_folder
    found = [file for file in files if file.is_file() or (is_named and not file.exists())]
    # In reverse order, a file comes after its compressed copies and replaces them.
    by_name = {uncompressed(str(file)): file for file in sorted(found, key=str, reverse=True)}
    return sorted(by_name.values())


def distinct(files: Iterable[Path]) -> list[Path]:
    """Return the files without links to others of them, which would be read twice."""
    by_inode: dict[Any, Path] = {}
    for file in files:
        stat = file.stat() if file.exists() else None
        by_inode.setdefault((stat.st_dev, stat.st_ino) if stat else file, file)
    return list(by_inode.values())


def find_splits(folder: str, suffixes: tuple[str, ...] = (), training: bool = True) -> dict[str, list[str]]:
    """Return the files of each split in a folder, by the names of the files or else of the folders that contain them.

    Raises FileNotFoundError if there is no file of the training split or, without `training`, of any split, and
    ValueError if the files of a split are in several folders.
    """
    found: dict[str, list[Path]] = {}
    for file in find_files(folder, suffixes):
        if split := split_in(folder, file):
            found.setdefault(split, []).append(file)
    splits = {split: list(map(str, distinct(files))) for split, files in found.items()}
    if "train" not in splits and (training or not splits):
        example = (*suffixes, ".txt")[0]
        raise FileNotFoundError(f"{folder} has no file named after the split train, such as train{example}.")
    for split, files in splits.items():
        if len(folders := sorted({os.path.dirname(file) for file in files})) > 1:
            where = f"{folders[0]} and {folders[1]}"
            raise ValueError(f"{folder} has files of the split {split} in {where}: choose one of the folders.")
    return splits


def split_in(folder: str, file: Path) -> str:
    """Return the split in the name of a file, or else of the folders around it in `folder`; "" if there is none."""
    return next(filter(None, map(split_of, reversed(file.relative_to(folder).parts))), "")


def split_of(name: str) -> str:
    """Return the split named in the name of a file, "" if there is none.

    The name of a split must not be preceded by a letter, or followed by a letter or by "_" without a digit:
    "my_train_1.csv" is for training, whereas "validation_matched.csv" belongs to no split.
    """
    match = _NAMES.search(name.lower())
    return _ROLES.get(match[1], match[1]) if match else ""


def held_out(index: Any, fraction: float) -> Any:
    """Return which examples (int or int64 [N]) are held out: an evenly spread fraction of them.

    Of the first n examples, floor(n * fraction) are held out; the small constant absorbs rounding errors.
    """
    return np.floor((index + 1) * fraction + 1e-9) > np.floor(index * fraction + 1e-9)


def iterate_lines(path: str) -> Iterator[str]:
    """Yield the lines of a UTF-8 text file (see `numbered_lines`); raise ValueError for a line that is not UTF-8."""
    for _, line, error in numbered_lines(path):
        if error:
            raise error
        yield line


def numbered_lines(path: str) -> Iterator[tuple[int, str, ValueError | None]]:
    """Yield the number (from 1), the text and the error of each line of a UTF-8 text file, which may be compressed.

    The text includes the line end. There is an error if the line is not UTF-8; its invalid bytes are then replaced.

    Raises FileNotFoundError if there is no such file, and ValueError if it cannot be decompressed, has lines that end
    with "\\r" only, or has a line that is too long for the size of the file.
    """
    limit = _max_bytes(_LINE, path)
    with opened(Path(path)) as file:
        for number, line in enumerate(iter(partial(file.readline, limit), b""), 1):
            if len(line) == limit:
                raise ValueError(f"{path}, line {number} has more than {limit:,} bytes: {_LIMIT.format(_LINE / 1e6)}.")
            if number == 1 and not line.endswith(b"\n") and b"\r" in line.rstrip(b"\r"):
                raise ValueError(f"{path} has lines that end with \\r only: they must end with \\n or \\r\\n.")
            encoding = "utf-8" if number > 1 else "utf-8-sig"
            try:
                yield number, line.decode(encoding), None
            except UnicodeDecodeError as error:
                byte, where = f"byte {error.object[error.start]:#04x}", f"offset {error.start} of the line"
                wrong = ValueError(f"{path}, line {number} is not UTF-8 text: {byte} at {where} ({error.reason}).")
                yield number, line.decode(encoding, "replace"), wrong


@contextlib.contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """Open a file of bytes, which may be compressed; raise ValueError if it cannot be decompressed."""
    try:
        if path.suffix in COMPRESSED and not path.stat().st_size:  # which gzip and zstd read as no content
            raise EOFError("it has 0 bytes")
        if path.suffix == ".zst":
            import pyarrow  # imported here because it is slow to import

            file = io.BufferedReader(pyarrow.input_stream(path, compression="zstd"))
        elif path.suffix in _Streams.kinds:
            file = io.BufferedReader(_Streams(path))
        else:
            file = (gzip.open if path.suffix == ".gz" else open)(path, "rb")
        with file:
            yield file
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        if path.suffix not in COMPRESSED:
            raise
        raise ValueError(f"{path} is not a complete {path.suffix} file: {error}.") from None


class _Streams(io.RawIOBase):
    """Content of the compressed streams of a file, one after the other.

    Unlike the files of `bz2` and `lzma`, it raises OSError or LZMAError for a stream after the first that is damaged.
    """

    kinds: ClassVar = {".bz2": bz2.BZ2Decompressor, ".xz": lzma.LZMADecompressor}

    def __init__(self, path: Path):
        self._file, self._make = path.open("rb"), self.kinds[path.suffix]
        self._stream, self._rest = self._make(), b""  # `_rest` is the beginning of the stream

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        content = b""
        while not content:
            if self._stream.eof and not self._starts_next():
                return 0
            more, self._rest = self._rest, b""
            if self._stream.needs_input and not more and not (more := self._file.read(_READ)):
                raise EOFError("it ends before the end of a stream")
            content = self._stream.decompress(more, len(buffer))
        buffer[: len(content)] = content
        return len(content)

    def _starts_next(self):
        """Start the next stream, before which there may be zeros; return False if there is none."""
        self._rest = self._stream.unused_data.lstrip(b"\0")
        while not self._rest and (block := self._file.read(_READ)):
            self._rest = block.lstrip(b"\0")
        self._stream = self._make() if self._rest else self._stream
        return bool(self._rest)

    def close(self) -> None:
        self._file.close()
        super().close()


def read_lines(path: str) -> list[str]:
    """Return the lines of a UTF-8 text file, which may be compressed; for the errors, see `iterate_lines`."""
    return gathered((line.rstrip("\r\n") for line in iterate_lines(path)), path)


def read_json(path: str) -> Any:
    """Return the content of a JSON file, which may be compressed and at most as long as a line; see `parse_json`."""
    text, limit = io.StringIO(), _max_bytes(_LINE, path)
    for line in iterate_lines(path):
        if text.tell() + len(line) > limit:
            raise ValueError(f"{path} has more than {limit:,} characters: {_LIMIT.format(_LINE / 1e6)}.")
        text.write(line)
    return parse_json(text.getvalue(), path)


def parse_json(text: str, where: str) -> Any:
    """Return the value of a JSON text; raise ValueError for other texts, and for an object that has a key twice."""
    try:
        return json.loads(text, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} is not JSON: {error}.") from None


def _unique(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Return the object with some pairs of keys and values; raise ValueError for a key that occurs twice."""
    values = dict(pairs)
    if len(values) < len(pairs):
        ((repeated, _),) = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"the key {repeated[:60]!r} occurs twice in an object")
    return values


def gathered(parts: Iterable[Any], *paths: str | Path) -> list[Any]:
    """Return the parts of files (bytes, texts or tuples of values); raise ValueError if they need too much memory."""
    values, needed, limit = [], 0, _max_bytes(_ALL, *paths)
    for part in parts:
        needed += sys.getsizeof(part) + (sum(map(sys.getsizeof, part)) if isinstance(part, tuple) else 0)
        if needed > limit:
            check_bytes(needed, *paths)
        values.append(part)
    return values


def check_bytes(needed: int, *paths: str | Path) -> None:
    """Raise ValueError if parts of files, which need some bytes of memory, are too large for their sizes."""
    if needed > (limit := _max_bytes(_ALL, *paths)):
        raise ValueError(f"{paths[0]} needs more than {limit:,} bytes: {_LIMIT.format(_ALL / 1e6)}.")


def _max_bytes(minimum, *paths):
    """Return how many bytes of files, which may be compressed, are read into memory at a time; they must exist."""
    if missing := [path for path in paths if not Path(path).is_file()]:
        raise FileNotFoundError(f"There is no file {missing[0]}.")
    return minimum + 100 * sum(map(os.path.getsize, paths))


def inside(folder: str | Path, name: str, source: str | Path) -> Path:
    """Return the path of a file in a folder that the data file `source` names.

    Raises ValueError for a file in another folder, and for a name that is too long for most file systems.
    """
    if max(map(len, name.encode(errors="replace").split(b"/"))) > 255:
        raise ValueError(f"{source} names the file {name[:200]!r}, whose name is too long.")
    root, path = os.path.abspath(folder), os.path.abspath(os.path.join(folder, name))
    if os.path.commonpath([root, path]) != root:
        raise ValueError(f"{source} names the file {name[:200]!r}, which is not in {folder}.")
    return Path(folder, name)


def suffix_of(path: str) -> str:
    """Return the last suffix of a path before any suffix of compression, in lower case."""
    return Path(uncompressed(path)).suffix.lower()
