"""Inputs of predictions: texts, words, questions and images, from files or from the content of a source.

Texts are the lines of a .txt, or columns of a .jsonl, .csv, .tsv or .parquet; words are separated by spaces or listed.
"""

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from lineage.configs.storage import local
from lineage.data.content import LabeledTexts, PairedTexts, Question, Subset, TaggedSentence, gather, splits_of
from lineage.data.loader import ExampleSource
from lineage.data.sources import SOURCES
from lineage.data.sources.boxes import BoxedImages, boxed, category_names
from lineage.data.sources.files import inside, numbered_lines, read_json, read_lines, suffix_of
from lineage.data.sources.folder import SUFFIXES, ImageFiles, image_files
from lineage.data.sources.hub import TABLES
from lineage.data.sources.lines import read_questions, read_sentences
from lineage.data.sources.tables import CSV
from lineage.data.transforms.pillow import decode

BOXES = "images_with_boxes"


@dataclass(frozen=True)
class Inputs:
    """Inputs of one kind of content, in order: texts of documents or pairs, tuples of texts to classify,
    `TaggedSentence`s, `Question`s, or examples with an `image`."""

    rows: Sequence[Any] | ExampleSource
    about: Sequence[Mapping[str, Any]] = ()  # entries of each prediction that identify its input; may be empty
    categories: Mapping[str, int] = field(default_factory=dict)  # id of each class by name, from a file of COCO

    def __post_init__(self):
        ids = Counter(repr(each[key]) for each in self.about for key in ("id", "image_id") if key in each)
        if twice := [each for each, count in ids.items() if count > 1]:
            raise ValueError(f"Several inputs have the id {twice[0][:80]}: their ids must differ.")

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
    part = splits[split or next(iter(splits))]
    if isinstance(part, PairedTexts):
        part = part.inputs
    elif isinstance(part, LabeledTexts):
        part = part.texts
    rows = part if isinstance(part, ExampleSource) else list(part)
    if isinstance(part, BoxedImages) and part.ids:
        return Inputs(rows, [{"image_id": id} for id in part.ids], part.categories)
    return Inputs(rows, _about(rows, kind))


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

    Raises FileNotFoundError if there is no such file, ValueError if it is empty or of another format, has no such
    column, or has more bad lines; the message names the line.
    """
    path = local(path, ())
    if kind not in KINDS:
        return _images(path, kind, channels)
    suffix, reading = suffix_of(path), KINDS[kind]
    names = tuple(columns or reading.columns)
    reading.check(names, f"--columns={','.join(names)}")
    if suffix in reading.readers:
        rows = reading.readers[suffix](path)
    else:
        rows = Rows(path, partial(_rows, path, reading.row, suffix, names, bad, quotes))
        rows = rows[:] if reading.about else rows
    if not len(rows):
        raise ValueError(f"{path} is empty: there is no input.")
    return Inputs(rows, _about(rows, kind))


def from_memory(values: Sequence[Any], kind: str, channels: int | None = None) -> Inputs:
    """Return the inputs in a list.

    Args:
        values: texts; texts, or pairs of texts, to classify; lists of words, or texts of words; pairs of a question and
            a context; or images: paths, arrays uint8 [h, w, c], or Pillow's.
        kind: kind of content, see `Source`.
        channels: number of channels of images.
    """
    whole = isinstance(values, str | bytes | Mapping | Set) or hasattr(values, "columns")  # such as a data frame
    given, values = values, [] if whole else list(values)  # a Series in its order, whatever its index
    if not values:
        raise ValueError(f"The inputs are {str(given)[:60]!r}: they must be a list of at least one input.")
    known = Iterable if kind in KINDS else str | bytes | os.PathLike | np.ndarray | Image.Image
    for number, value in enumerate(values):
        if not isinstance(value, known) or isinstance(value, Mapping | Set):
            allowed = "a text, or a list of texts or words" if kind in KINDS else "a path, an array or a Pillow image"
            raise ValueError(f"input {number} is {repr(value)[:60]}: it must be {allowed}.")
    if kind not in KINDS:
        return Inputs(_MemoryImages(values, channels), _about(values, kind))
    reading = KINDS[kind]
    single = [[value] if isinstance(value, str) or reading.is_list else [*value] for value in values]
    for number, row in enumerate(single):
        reading.check(row, f"input {number}")
    rows = [reading.row(row, f"input {number}") for number, row in enumerate(single)]
    return Inputs(rows, _about(rows, kind))


def skip(errors: dict[int, str], allowed: int, index: int, error: ValueError) -> None:
    """Add the error of an input to those of others; raise it if more than `allowed` inputs have errors."""
    errors[index] = str(error)
    if len(errors) > allowed:
        raise ValueError(f"{error} (--skip-bad=N continues without N such inputs.)") from None


class Rows(Sequence):
    """Rows of a file, read lazily; a slice that starts before the end of the previous one reads the file again."""

    def __init__(self, path: str, read: Callable[[], Iterator[Any]]):
        self.path, self.read = path, read  # `read` yields all rows; the first call counts and checks them
        self._size = self._next = sum(1 for _ in read())
        self._rows: Iterator[Any] = iter(())

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, part: Any) -> Any:
        if not isinstance(part, slice):
            return self[part : part + 1][0]
        first, stop, _ = part.indices(self._size)
        if first < self._next:
            self._rows, self._next = self.read(), 0
        found = list(islice(self._rows, first - self._next, stop - self._next))
        if len(found) < stop - first:
            raise ValueError(f"{self.path} has changed while it was read: it had {self._size:,} rows.")
        self._next = stop
        return found


@dataclass(frozen=True)
class _MemoryImages(ExampleSource):
    images: Sequence[Any]
    channels: int

    def __len__(self) -> int:
        return len(self.images)

    def take(self, indices: np.ndarray) -> dict[str, Any]:
        found = [self.images[index] for index in indices.tolist()]
        for one in found:
            if isinstance(one, np.ndarray) and (one.dtype != np.uint8 or one.ndim != 3 or not one.size):
                raise ValueError(f"An image is an array {one.dtype} {list(one.shape)}: it must be uint8 [h, w, c].")
        return {"image": [one if isinstance(one, np.ndarray) else decode(one, self.channels) for one in found]}


def _about(rows, kind):
    """Return the entries that identify each row (see `Kind.about`), if the kind has any; {} for errors."""
    if kind == BOXES:
        return [{"image_id": number} for number in range(len(rows))]
    if kind not in KINDS or not (about := KINDS[kind].about):
        return ()
    return [{} if isinstance(row, ValueError) else about(number, row) for number, row in enumerate(rows)]


def _words(values, where):
    """Return the sentence in a text, or in a list of words."""
    words = values[0].split() if isinstance(values[0], str) else values[0] or []
    if not isinstance(words, list | tuple) or not all(isinstance(word, str) for word in words):
        raise ValueError(f"{where} has {str(words)[:60]}: it must be a text, or a list of words.")
    if not words:
        raise ValueError(f"{where} has no words.")
    return TaggedSentence([words[0], *(f" {word}" for word in words[1:])], [""] * len(words))


def _texts(values, where):
    """Return the texts of a row, which may be in UTF-8."""
    try:
        values = [value.decode() if isinstance(value, bytes) else value for value in values]
    except UnicodeDecodeError as error:
        raise ValueError(f"{where} is not UTF-8 text: {error.reason}.") from None
    if wrong := [value for value in values if not isinstance(value, str)]:
        raise ValueError(f"{where} has {repr(wrong[0])[:60]}: it must be a text.")
    return tuple(values)


def _text(values, where):
    """Return the first text of a row."""
    return _texts(values, where)[0]


def _question(values, where):
    """Return the question of a row, without answers."""
    return Question(*_texts(values, where), ())


@dataclass(frozen=True)
class Kind:
    """Format of the inputs of a kind of content.

    With `about`, which maps the number of an input and the input to the entries of its prediction that identify it, the
    inputs of a file are read all together instead of in parts.
    """

    row: Callable[[Sequence[Any], str], Any]  # function of the values of a row and its name in error messages
    columns: tuple[str, ...]  # default names
    readers: Mapping[str, Callable[[str], Sequence[Any]]] = field(default_factory=dict)  # other formats, by suffix
    about: Callable[[int, Any], Mapping[str, Any]] | None = None
    is_list: bool = False  # whether a list is one value of a row instead of the row
    counts: tuple[int, ...] = (1,)  # possible numbers of values in a row

    def check(self, row: Sequence[Any], where: str) -> None:
        """Raise ValueError for a wrong number of values, or of the names of their columns."""
        if len(row) not in self.counts:
            raise ValueError(f"{where} has {len(row)} entries: it must have {' or '.join(map(str, self.counts))}.")


def _words_of(number, sentence):
    return {"words": [word.strip() for word in sentence.words]}


def _id_of(number, question):
    return {"id": question.id or str(number)}


QUESTION_FILES = {".json": partial(read_questions, answered=False)}
KINDS = {
    "documents": Kind(_text, ("text",)),
    "pairs": Kind(_text, ("input",)),
    "labeled_texts": Kind(_texts, ("text",), counts=(1, 2)),
    "tagged_sentences": Kind(_words, ("words",), {".conllu": read_sentences}, _words_of, is_list=True),
    "questions": Kind(_question, ("question", "context"), QUESTION_FILES, _id_of, counts=(2,)),
}


def _rows(path, row, suffix, names, allowed, quotes):
    """Yield the inputs in a file, and in place of up to `allowed` bad ones their ValueErrors."""
    errors = {}
    if suffix == ".txt" and len(names) == 1:
        lines = ((number, error or (line.rstrip("\r\n"),)) for number, line, error in numbered_lines(path))
    elif suffix[1:] in TABLES:
        source = SOURCES[suffix[1:]](path=path)
        source = replace(source, quotes=quotes) if isinstance(source, CSV) else source
        lines = ((number, values) for _, number, values in source.values("train", names, strict=False))
    else:
        known = ", ".join([".txt"] * (len(names) == 1) + [f".{table}" for table in TABLES])
        raise ValueError(f"{path} must be a file of {known}, or a source such as NAME:PATH.")
    for number, values in lines:
        try:
            if isinstance(values, ValueError):
                raise values
            found = row(values, f"{path}, line {number}")
        except ValueError as error:
            skip(errors, allowed, len(errors), found := error)
        yield found


def _images(path, kind, channels):
    """Return the images of a file or folder, see `from_files`."""
    name, _, folder = (path, "", "") if Path(path).exists() else path.partition(",")
    suffix, ids, categories = Path(name).suffix.lower(), (), {}
    root = Path(folder or (name if Path(name).is_dir() else Path(name).parent))
    if Path(name).is_dir():
        files = image_files(name)
    elif suffix in SUFFIXES:
        files = [Path(name)]
    elif suffix == ".txt":
        files = [inside(root, line, name) for line in read_lines(name) if line.strip()]
    elif suffix == ".json":
        found = read_json(name)
        try:
            ids = [image["id"] for image in found["images"]]
            files = [inside(root, image["file_name"], name) for image in found["images"]]
            categories = {each: id for id, each in category_names(name, found.get("categories", ())).items()}
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{name} is not a file in COCO's format: {type(error).__name__} {error}.") from None
    elif not Path(name).exists():
        raise FileNotFoundError(f"There is no file or folder {name}.")
    else:
        raise ValueError(f"{path} must be an image, a folder, a .txt with paths, a .json of COCO, or a source.")
    if not files:
        raise ValueError(f"There is no image in {path}.")
    about = [{"file": str(file.relative_to(root) if file.is_relative_to(root) else file)} for file in files]
    if kind == BOXES:
        about = [{"image_id": id, **each} for id, each in zip(ids or range(len(files)), about)]
    return Inputs(ImageFiles(files, np.zeros(len(files), np.int32), channels), about, categories)


@dataclass(frozen=True)
class Readable(ExampleSource):
    """Examples of images without labels; after `note`, images that cannot be read are replaced by black ones."""

    images: ExampleSource
    shape: tuple[int, int, int]  # height, width and channels of the model's images
    resized: bool  # whether images are resized, so that they may have any height and width
    has_boxes: bool  # whether examples have (empty) boxes
    note: Callable[[int, ValueError], None]  # called with the index and error of such an image

    def __len__(self) -> int:
        return len(self.images)

    def take(self, indices: np.ndarray) -> dict[str, Any]:
        images = [self._read(index) for index in indices.tolist()]
        return gather([{"image": image, **(boxed([]) if self.has_boxes else {})} for image in images])

    def _read(self, index):
        try:
            image = np.asarray(self.images[index]["image"])
            if image.shape != self.shape and not (self.resized and image.shape[2] == self.shape[2]):
                raise ValueError(f"The image has the shape {image.shape}: the model's images have {self.shape}.")
        except ValueError as error:
            self.note(index, ValueError(f"Image {index}: {error}"))
            return np.zeros(self.shape, np.uint8)
        return image
