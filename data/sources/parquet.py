"""Parquet files, such as those of `datasets` and the Hugging Face Hub."""

import contextlib
import json
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np

from lineage.data.content import Images, Question
from lineage.data.loader import ExampleSource, evenly_spaced
from lineage.data.sources.base import SOURCES, For
from lineage.data.sources.files import check_bytes, gathered, inside
from lineage.data.sources.tables import Row, Table, check_columns
from lineage.data.transforms.pillow import Picture, common_channels

MAX_CLASSES = 1_000_000  # maximum number of classes of images whose classes are numbers
NUM_SAMPLED = 10  # training images from which the channels are determined; each may be in another row group
CACHE = 1 << 28  # bytes of encoded images that a process keeps in memory
BATCH = 1024, 1 << 28  # rows that are decompressed together, and bytes that they need if all have the largest value


@SOURCES.register("parquet")
@dataclass(frozen=True)
class Parquet(Table):
    """Parquet files (.parquet), such as those of a data set on the Hugging Face Hub.

    A column in a struct is COLUMN.COLUMN, such as translation.en. Classes have the names of the feature ClassLabel of
    `datasets`, if the files have it. Images are encoded files in bytes, or structs of `bytes` and `path`. They are read
    by row group, which should have at most a few hundred images, and the last 256 MiB stay in memory. All images are
    gray if ten training images, evenly spaced, are; otherwise, they are RGB.

    Attributes:
        image_key: column with the image.
    """

    suffixes = (".parquet",)
    unit: ClassVar[str] = "row"

    image_key: Annotated[str, For(("images",))] = "image"

    def files(self) -> list[str]:
        """Return the Parquet files, and the image files that they name instead of containing them."""
        files, images = super().files(), dict[str, None]()
        for file in files:
            with contextlib.suppress(ValueError):  # raised again when the images are read
                images |= dict.fromkeys(_named_images(file, self.image_key))
        return [*files, *images]

    def rows(self, file: str, keys: Sequence[str]) -> Iterator[tuple[int, Row]]:
        number = 0
        with _opened(file, lambda: f" after row {number}") as table:
            check_columns(file, keys, _columns(table.schema_arrow))
            groups = (table.metadata.row_group(group) for group in range(table.num_row_groups))
            largest = max((_check_size(file, group, keys) for group in groups), default=0)
            size = max(min(BATCH[0], BATCH[1] // max(largest, 1)), 1)
            for batch in table.iter_batches(size, columns=list(dict.fromkeys(keys))):
                for values in zip(*(_values(batch, key) for key in keys)):
                    number += 1
                    yield number, values

    def class_names(self, key: str) -> list[str]:
        first, *others = super().files()
        names = self._class_names(first, key)
        if other := next((file for file in others if self._class_names(file, key) not in ([], names)), None):
            raise ValueError(f"{other} has other names of the classes of {key!r} than {first}: they must be equal.")
        return names

    def _class_names(self, file: str, key: str) -> list[str]:
        with _opened(file) as table:
            metadata = (table.schema_arrow.metadata or {}).get(b"huggingface", b"{}")
        try:
            names = json.loads(metadata).get("info", {}).get("features", {}).get(key, {}).get("names") or []
        except (ValueError, AttributeError, RecursionError) as error:
            raise ValueError(f"{file} has metadata that are not those of `datasets`: {error}.") from None
        if not isinstance(names, list) or len({name for name in names if isinstance(name, str)}) < len(names):
            raise ValueError(f"{file} has {str(names)[:60]} as names of the classes of {key!r}: they must be texts.")
        return names

    def questions(self) -> dict[str, list[Question]]:
        """Return the questions in the columns `question`, `context` and `answers`, as in SQuAD on the Hub.

        The answers are a struct of lists, `text` and `answer_start`, which are empty for unanswerable questions. The
        columns `id` and `is_impossible` are optional.
        """
        return {split: list(self._questions(split)) for split in self.splits()}

    def _questions(self, split: str) -> Iterator[Question]:
        with _opened(next(iter(self.split_files().values()))[0]) as table:
            optional = [name for name in Question.OPTIONAL if name in table.schema_arrow.names]
        keys = ["question", "context", "answers", *optional]
        for file, row, text, context, answers, *others in self._rows(split, keys):
            try:
                pairs = list(zip(answers["answer_start"], answers["text"], strict=True))
                yield Question.from_fields(text, context, pairs, **dict(zip(optional, others)))
            except (KeyError, TypeError, ValueError) as error:
                raise ValueError(f"{file}, row {row} is not a question: {error}") from None

    def _rows(self, split: str, keys: Sequence[str]) -> list[tuple[Any, ...]]:
        """Return the file and the number of each row of a split, and its values in some columns."""
        return gathered(((file, row, *values) for file, row, values in self.values(split, keys)), *super().files())

    def images(self) -> Images:
        """Return the images with a label, without splits that have none; classes numbered -1 are missing labels."""
        named, splits, channels = self.class_names(self.label_key), {}, self.known.channels if self.known else 0
        names = list(self.known.class_names if self.known else named)
        for split in self.splits():
            rows = self._rows(split, [self.label_key])
            names = names or _class_names([label for *_, label in rows], split)
            if rows := _with_class(rows, names, missing=bool(named)):
                splits[split] = self._images(rows, channels)
                channels = splits[split].channels
        return Images(splits, named or names)

    def _images(self, rows: Sequence[tuple[str, int, int]], channels: int) -> "ParquetImages":
        """Return the images in some rows (file, row, class); 0 `channels` are determined from the images."""
        numbers = {file: number for number, file in enumerate(dict.fromkeys(file for file, *_ in rows))}
        groups = [_groups(file, self.image_key) for file in numbers]
        stamps = [os.stat(file).st_mtime_ns for file in numbers]
        columns = np.array([(numbers[file], row - 1, label) for file, row, label in rows], np.int32).T
        images = ParquetImages(list(numbers), groups, stamps, *columns, self.image_key, channels)
        if channels:
            return images
        sample = evenly_spaced(len(images), NUM_SAMPLED)
        return replace(images, channels=common_channels((images.content(i), images.where(i)) for i in sample))


@dataclass(frozen=True)
class ParquetImages(ExampleSource):
    """Images in the rows of Parquet files, with labels; they are read and decoded on access."""

    files: Sequence[str]
    groups: Sequence[np.ndarray]  # index after the last row of each row group, for each file
    stamps: Sequence[int]  # modification time of each file, in nanoseconds
    file: np.ndarray  # index of each example's file, int32 [N]
    row: np.ndarray  # each example's row in its file, int32 [N]
    label: np.ndarray  # class of each example, int32 [N]
    column: str
    channels: int

    def __len__(self) -> int:
        return len(self.label)

    def content(self, index: int) -> bytes | Path:
        """Return an encoded image, or the path of its file."""
        place, row = self.file[index], self.row[index]
        file, ends = self.files[place], self.groups[place]
        group = int(np.searchsorted(ends, row, side="right"))
        cell = _RECENT.read(file, self.stamps[place], group, self.column)[int(row - (ends[group - 1] if group else 0))]
        try:
            value = cell.as_py()
        except (ArithmeticError, LookupError, ValueError):  # a value that Python does not have, and no image
            value = None
        if isinstance(value, dict):
            path = value.get("path")
            value = value.get("bytes") or (path and inside(Path(file).parent, str(path), self.where(index)))
        if not isinstance(value, bytes | Path):
            raise ValueError(f"{self.where(index)} has no image in the column {self.column!r}.")
        return value

    def where(self, index: int) -> str:
        """Return the file and the row of an image, counted from 1."""
        return f"{self.files[self.file[index]]}, row {self.row[index] + 1}"

    def take(self, indices: np.ndarray) -> dict[str, Any]:
        return {"image": [self._picture(index) for index in indices], "label": self.label[indices]}

    def check(self, index: int) -> None:
        self._picture(index).check()

    def _picture(self, index):
        return Picture(self.content(index), self.channels, self.where(index))


class _Recent:
    """Most recently read row groups of images of a process, as many as fit into `CACHE`."""

    def __init__(self):
        self._groups: OrderedDict[tuple[str, int, int, str], Any] = OrderedDict()
        self._size, self._lock = 0, threading.Lock()

    def read(self, file: str, stamp: int, number: int, column: str) -> Any:
        """Return a column of a row group as pyarrow's array; raise ValueError if the file was modified."""
        if os.stat(file).st_mtime_ns != stamp:
            raise ValueError(f"{file} has changed since its rows and labels were read.")
        key = file, stamp, number, column
        with self._lock:
            if key in self._groups:
                self._groups.move_to_end(key)
                return self._groups[key]
        with _opened(file) as table:
            _check_size(file, table.metadata.row_group(number), [column])
            chunks = _chunks(table.metadata.row_group(number), [column])
        # Columns that pyarrow can read as indices into a list of their different values.
        texts = [c.path_in_schema for c in chunks if c.physical_type == "BYTE_ARRAY" and c.has_dictionary_page]
        with _opened(file, read_dictionary=texts) as table:  # a value that many rows share is in memory once
            values = table.read_row_group(number, columns=[column]).column(column)
        with self._lock:
            self._size += 0 if key in self._groups else values.nbytes
            self._groups[key] = values
            while self._size > CACHE and len(self._groups) > 1:
                self._size -= self._groups.popitem(last=False)[1].nbytes
        return values


_RECENT = _Recent()


@contextlib.contextmanager
def _opened(file: str, where: Callable[[], str] = str, **options: Any) -> Iterator[Any]:
    """Yield pyarrow's `ParquetFile`; raise ValueError with the path and `where()` for an error of pyarrow."""
    import pyarrow.parquet  # imported here because it is slow to import

    try:
        with pyarrow.parquet.ParquetFile(file, **options) as table:
            yield table
    except (pyarrow.ArrowException, OSError) as error:
        reason = str(error).partition("\n")[0][:200]
        raise ValueError(f"{file} cannot be read as a Parquet file{where()}: {reason}") from None


def write_features(path: Path, predictions: Iterator[dict[str, Any]]) -> None:
    """Write the `features` of predictions, with the `file` and the `error` of those that have one, to a file."""
    import pyarrow.parquet

    kinds = {"file": pyarrow.string(), "features": pyarrow.list_(pyarrow.float32()), "error": pyarrow.string()}
    with pyarrow.parquet.ParquetWriter(path, schema := pyarrow.schema(kinds)) as writer:
        while rows := list(islice(predictions, 1024)):
            writer.write_table(pyarrow.Table.from_pylist(rows, schema))


def _class_names(labels: Sequence[Any], split: str) -> list[str]:
    """Return the names of the classes of some labels: the numbers up to the largest, or the different texts."""
    texts = {label for label in labels if label and isinstance(label, str)}
    if texts or not (numbers := [label for label in labels if isinstance(label, int)]):
        return sorted(texts)
    if (largest := max(numbers)) >= MAX_CLASSES:
        raise ValueError(f"The split {split} has the label {largest}: it must be below {MAX_CLASSES:,}.")
    return [str(number) for number in range(largest + 1)]


def _with_class(rows: Iterable[tuple[Any, ...]], names: Sequence[str], missing: bool) -> list[tuple[str, int, int]]:
    """Return the file, the row and the class of the rows with a label; -1 is a `missing` one or raises ValueError."""
    classes = {value: number for number, name in enumerate(names) for value in (name, number)}
    classes |= {-1: -1} if missing else {}
    for file, row, label in rows:
        if not isinstance(label, str | int) or label not in classes:
            allowed = f"a name or number of the {len(names)} classes" if names else "a text or a whole number"
            raise ValueError(f"{file}, row {row} has the label {label!r}: it must be {allowed}.")
    return [(file, row, classes[label]) for file, row, label in rows if classes[label] >= 0]


def _check_size(file: str, group: Any, keys: Sequence[str]) -> int:
    """Return how many bytes a row group's columns need; raise ValueError if these are too many."""
    needed = sum(chunk.total_uncompressed_size for chunk in _chunks(group, keys))
    check_bytes(needed, file)
    return needed


def _chunks(group: Any, keys: Sequence[str]) -> list[Any]:
    """Return the metadata of some columns of a row group, and of those in them."""
    chunks = (group.column(number) for number in range(group.num_columns))
    return [chunk for chunk in chunks if any(f"{chunk.path_in_schema}.".startswith(f"{key}.") for key in keys)]


def _named_images(file: str, column: str) -> Iterator[str]:
    """Yield the paths of the images in a column that are in files of their own."""
    content, path = f"{column}.bytes", f"{column}.path"
    with _opened(file) as table:
        if not {content, path} <= {*_columns(table.schema_arrow)}:
            return
        for number in range(table.num_row_groups):
            (chunk,) = _chunks(group := table.metadata.row_group(number), [content])
            if not (chunk.statistics and chunk.statistics.null_count == 0):
                _check_size(file, group, [path])
                names = table.read_row_group(number, columns=[path]).column(column).to_pylist()
                found = (inside(Path(file).parent, row["path"], file) for row in names if row and row["path"])
                yield from map(str, filter(Path.is_file, found))


def _groups(file: str, column: str) -> np.ndarray:
    """Return the index after the last row of each row group, int64 [G]."""
    with _opened(file) as table:
        check_columns(file, [column], table.schema_arrow.names)
        return np.cumsum([table.metadata.row_group(i).num_rows for i in range(table.num_row_groups)])


def _columns(fields: Iterable[Any], prefix: str = "") -> list[str]:
    """Return the names of columns, including those in structs."""
    import pyarrow

    names = []
    for field in fields:
        names.append(f"{prefix}{field.name}")
        if pyarrow.types.is_struct(field.type):
            names += _columns(field.type, f"{names[-1]}.")
    return names


def _values(batch: Any, key: str) -> list[Any]:
    """Return the values of a column; texts that are not UTF-8 make all of them bytes."""
    import pyarrow.compute

    first, *inside = [key] if key in batch.schema.names else key.split(".")
    column = batch.column(first)
    for name in inside:
        column = pyarrow.compute.struct_field(column, name)
    try:
        return column.to_pylist()
    except UnicodeDecodeError:
        return column.cast(pyarrow.large_binary()).to_pylist()
    except (ArithmeticError, LookupError, ValueError) as error:  # such as a date after the year 9999
        raise pyarrow.ArrowInvalid(f"the column {key!r} has a value that Python does not have: {error}") from None
