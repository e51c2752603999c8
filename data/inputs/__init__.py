"""Inputs of predictions: texts, words, questions and images, from files or from the content of a source."""

import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from lineage.configs.storage import local
from lineage.data.content import LabeledTexts, PairedTexts, Subset, splits_of
from lineage.data.inputs.images import BOXES, MemoryImages, images_of
from lineage.data.inputs.rows import KINDS, rows_of
from lineage.data.loader import ExampleSource
from lineage.data.sources import SOURCES
from lineage.data.sources.boxes import BoxedImages
from lineage.data.sources.files import suffix_of


@dataclass(frozen=True)
class Inputs:
    """Inputs of one kind of content, in order: texts of documents or pairs, tuples of texts to classify,
    `TaggedSentence`s, `Question`s, or examples with an `image`."""

    rows: Sequence[Any] | ExampleSource
    identifiers: Sequence[Mapping[str, Any]] = ()  # entries of each prediction that identify its input; may be empty
    categories: Mapping[str, int] = field(default_factory=dict)  # id of each class by name, from a file of COCO

    def __post_init__(self):
        ids = Counter(repr(row[key]) for row in self.identifiers for key in ("id", "image_id") if key in row)
        if repeated := [id for id, count in ids.items() if count > 1]:
            raise ValueError(f"Several inputs have the id {repeated[0][:80]}: their ids must differ.")

    def part(self, start: int, stop: int) -> Sequence[Any] | ExampleSource:
        """Return some of the rows."""
        if isinstance(self.rows, ExampleSource):
            return Subset(self.rows, np.arange(start, min(stop, len(self.rows))))
        return self.rows[start:stop]


def is_source(text: str) -> bool:
    """Return whether a text is a source, such as "labels:PATH", or its name; raise ValueError if it is also a file."""
    if text in SOURCES and Path(text).exists():
        raise ValueError(f"--inputs is {text!r}, a source and also a file or folder: for the latter, write ./{text}.")
    return text.partition(":")[0] in SOURCES


def from_source(content: Any, kind: str, split: str = "") -> Inputs:
    """Return the inputs in a split of the content that a source provides; "" selects its only split."""
    splits = splits_of(content)
    if split not in splits and (split or len(splits) > 1):
        raise ValueError(f"--split is {split!r}: it must be one of the splits of the inputs, {', '.join(splits)}.")
    chosen = splits[split or next(iter(splits))]
    if isinstance(chosen, PairedTexts):
        chosen = chosen.inputs
    elif isinstance(chosen, LabeledTexts):
        chosen = chosen.texts
    rows = chosen if isinstance(chosen, ExampleSource) else list(chosen)
    if isinstance(chosen, BoxedImages) and chosen.ids:
        return Inputs(rows, [{"image_id": id} for id in chosen.ids], chosen.categories)
    return Inputs(rows, _identifiers(rows, kind))


def from_files(
    path: str,
    kind: str,
    columns: Sequence[str] = (),
    channels: int | None = None,
    bad: int = 0,
    quotes: bool = True,
) -> Inputs:
    """Return the inputs in a file or folder.

    Args:
        path: a file of texts; for words also a .conllu; for questions also a .json of SQuAD; for images a file, a
            folder, or a .txt with their paths or a .json of COCO and, after a comma, the folder of the images. It may
            be remote, see `lineage.configs.storage`.
        kind: kind of content, see `Source`.
        columns: names of columns instead of those of `KINDS`; two for pairs of texts to classify.
        channels: number of channels of images.
        bad: maximum number of bad lines or rows in whose place the inputs have their ValueErrors.
        quotes: whether fields of a .csv or .tsv may be in double quotes, see the source `csv`.

    Raises FileNotFoundError if there is no such file, ValueError if it is empty or of another format, has no columns
    or no such column, or has more bad lines; the message names the line.
    """
    path = local(path, ())
    others = (*KINDS[kind].readers, *[".txt"] * (len(columns) == 1)) if kind in KINDS else (suffix_of(path),)
    if columns and suffix_of(path) in others:
        raise ValueError(f"--columns={','.join(columns)} is for tables: {path} has no columns.")
    if kind not in KINDS:
        return Inputs(*images_of(path, kind, channels))
    names = tuple(columns or KINDS[kind].columns)
    KINDS[kind].check(names, f"--columns={','.join(names)}")
    rows = rows_of(path, KINDS[kind], names, bad, quotes)
    if not len(rows):
        raise ValueError(f"{path} is empty: there is no input.")
    return Inputs(rows, _identifiers(rows, kind))


def from_memory(values: Sequence[Any], kind: str, channels: int | None = None) -> Inputs:
    """Return the inputs in a list.

    Args:
        values: texts; texts, or pairs of texts, to classify; lists of words, or texts of words; pairs of a question and
            a context; or images: paths, arrays uint8 [h, w, c], or Pillow's.
        kind: kind of content, see `Source`.
        channels: number of channels of images.
    """
    is_single = isinstance(values, str | bytes | Mapping | Set) or hasattr(values, "columns")  # such as a data frame
    inputs = [] if is_single or not _is_iterable(values) else list(values)  # a Series in its order, whatever its index
    if not inputs:
        raise ValueError(f"The inputs are {str(values)[:60]!r}: they must be a list of at least one input.")
    types = str | bytes | os.PathLike | Image.Image
    for number, value in enumerate(inputs):
        is_text = _is_iterable(value) and not isinstance(value, Mapping | Set)
        if not (is_text if kind in KINDS else isinstance(value, types) or _is_array(value)):
            allowed = "a text, or a list of texts or words" if kind in KINDS else "a path, an array or a Pillow image"
            raise ValueError(f"input {number} is {repr(value)[:60]}: it must be {allowed}.")
    if kind not in KINDS:
        inputs = [np.asarray(value) if _is_array(value) else value for value in inputs]
        return Inputs(MemoryImages(inputs, channels), _identifiers(inputs, kind))
    reading = KINDS[kind]
    columns = [[value] if isinstance(value, str | bytes) or reading.is_list else [*value] for value in inputs]
    for number, row in enumerate(columns):
        reading.check(row, f"input {number}")
    rows = [reading.row(row, f"input {number}") for number, row in enumerate(columns)]
    return Inputs(rows, _identifiers(rows, kind))


def _is_array(value):
    """Return whether a value is an array, such as one of JAX or a tensor of PyTorch; texts of NumPy are none."""
    return hasattr(value, "__array__") and not isinstance(value, str | bytes)


def _is_iterable(value):
    """Return whether a value can be iterated over; arrays without dimensions are `Iterable`, but cannot.

    Texts in an array of NumPy are instances of `str` with 0 dimensions.
    """
    return isinstance(value, str) or (isinstance(value, Iterable) and getattr(value, "ndim", 1) > 0)


def _identifiers(rows, kind):
    """Return the entries that identify each row (see `Kind.identifiers`), if the kind has any; {} for errors."""
    if kind == BOXES:
        return [{"image_id": number} for number in range(len(rows))]
    if kind not in KINDS or not (identifiers := KINDS[kind].identifiers):
        return ()
    return [{} if isinstance(row, ValueError) else identifiers(number, row) for number, row in enumerate(rows)]
