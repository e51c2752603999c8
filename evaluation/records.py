"""Files of predictions and references of the command `score`.

A file has one text per line, or is a .jsonl of texts, numbers, lists of texts, or objects with one of these as
`prediction` or `text`, or for references as `references`, `reference` or (if they are not labels) `text`; or it is a
.csv or .tsv with such a column; or it is a .json document in the format of COCO or SQuAD, a .conllu, or bio:FILE in the
CoNLL-2003 format. For a folder of images, the labels are the names of the folders in it that contain the images. The
tags of a sentence are a list, or separated by spaces. Files may be compressed.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from lineage.data.content import TaggedSentence
from lineage.data.sources import SOURCES
from lineage.data.sources.base import SPLITS
from lineage.data.sources.files import inside, parse_json, read_json, read_lines, suffix_of
from lineage.data.sources.folder import VALIDATION, image_files
from lineage.data.sources.lines import read_sentences
from lineage.data.sources.tables import UnknownColumnError
from lineage.runs.folder import read_json as read_object

PREDICTIONS, REFERENCES = ("prediction", "text"), ("references", "reference", "text")  # keys of objects in a .jsonl
Readers = tuple[Callable[..., Any], Callable[..., Any]]  # read predictions, and references, from a path, see `read`
Options = Mapping[str, Any]  # options of a source
NO_OPTIONS: Options = MappingProxyType({})
COLUMNS = {"label": "label_key", "text": "target_key"}  # key of references -> option of a source that takes precedence
BIO = "bio:"  # prefix of the path of a CoNLL-2003 file, whose format its name does not show


def place(path: str) -> str:
    """Return the path of a file without the name of a source."""
    return path.removeprefix(BIO)


def source_options(predictions: str) -> Options:
    """Return the options that say how the run of a file of predictions reads its data, if `predict` wrote the file."""
    lines = Path(predictions).absolute().with_suffix(".jsonl")
    about = read_object(lines.with_name(f"{lines.name}.about.json"))
    options = "quotes", "word_column", "tag_column", *COLUMNS.values()
    names = {f"config.source.{name}": name for name in options}
    return {name: about[key] for key, name in names.items() if key in about}


def read(path: str, keys: Sequence[str] = (), errors: bool = False, options: Options = NO_OPTIONS) -> Any:
    """Return the entries of a file; with `keys`, objects are replaced by the value of the first key that they have.

    With `errors`, an object that has an `error` instead, as the command `predict` writes it, becomes None. A table or
    a CoNLL-2003 file is read by a source with those of the `options` that it has. They may name further keys.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: the file is empty, is not JSON, or an entry is neither a text nor a list of texts.
    """
    suffix, keys = suffix_of(path).lower(), _with_columns(keys, options)
    if path.startswith(BIO) or suffix == ".conllu":
        return [sentence.tags for sentence in _sentences(path, options)]
    if Path(path).is_dir():
        return _labels(Path(path))
    if suffix in (".csv", ".tsv"):
        return _column(_source(suffix[1:], path, options), path, keys)
    rows = read_json(path) if suffix == ".json" else read_lines(path)
    if not isinstance(rows, list | dict):
        raise ValueError(f"{path} must have a list or an object, not {str(rows)[:60]}.")
    if not rows and (keys or suffix != ".json"):
        raise ValueError(f"{path} is empty: there is nothing to score.")
    if suffix not in (".json", ".jsonl"):
        return rows
    if suffix == ".jsonl":
        rows = [parse_json(line, f"{path}, line {number}") for number, line in enumerate(rows, 1) if line.strip()]
    if not keys or isinstance(rows, dict):
        return rows
    return [_entry(row, keys, errors, f"{path}, entry {number}") for number, row in enumerate(rows, 1)]


def _with_columns(keys: Sequence[str], options: Options) -> Sequence[str]:
    """Return the keys, and before each of them the column that a source has in its place."""
    return list(dict.fromkeys(name for key in keys for name in (options.get(COLUMNS.get(key, ""), key), key)))


def _labels(folder: Path) -> list[str]:
    """Return the class of each image: the subfolder of `folder` that contains it, or `folder` if it is in none."""
    parts = [file.relative_to(folder).parts[:-1] for file in image_files(folder)]
    labels = [inner[0] if inner else folder.absolute().name for inner in parts]
    if labels and {*labels} <= {*SPLITS, *VALIDATION} and all(len(inner) > 1 for inner in parts):
        raise ValueError(f"{folder} has the folders of splits, such as {labels[0]}: name the folder of one split.")
    return labels


def _sentences(path: str, options: Options) -> list[TaggedSentence]:
    """Return the sentences in a file of CoNLL-2003 or CoNLL-U."""
    if path.startswith(BIO):
        return _source("bio", path, options).tagged_sentences()["train"]
    return read_sentences(path)


def _source(name, path, options):
    known = {field.name for field in dataclasses.fields(SOURCES[name])}
    return SOURCES[name](path=place(path), **{key: value for key, value in options.items() if key in known})


def _entry(row, keys, errors, where):
    """Return the text or texts of a row; None if it is an error and `errors` allows that."""
    if isinstance(row, dict):
        if errors and "error" in row and not ({*keys} - {"file"}) & {*row}:
            return None
        row = next((row[key] for key in keys if key in row), None)
    row = str(row) if type(row) in (bool, int, float) else row
    if not isinstance(row, str) and not (isinstance(row, list) and all(isinstance(text, str) for text in row)):
        raise ValueError(f"{where} must be a text or texts, or an object with {' or '.join(keys)}.")
    return row


def pictures(path: str, errors: bool = False, options: Options = NO_OPTIONS) -> list[Path | None]:
    """Return the image files in a folder, or those listed in a file of predictions or of names; see `read`."""
    if Path(path).is_dir():
        return image_files(path)
    names = read(path, ("reconstructed", "file"), errors, options)
    if wrong := [name for name in names if not isinstance(name, str | None)]:
        raise ValueError(f"{path} has {wrong[0]!r}: each entry must be the name of one image.")
    return [name and inside(Path(path).parent, name, path) for name in names]


def check_same_inputs(path: str, other: str, options: Options = NO_OPTIONS) -> None:
    """Raise ValueError if the entries of two files or folders are about other images, or in another order.

    The names of images may be relative to different folders. Only what both sides name is compared: the images, and the
    order of ids and of the words of sentences.
    """
    for number, (first, second) in enumerate(zip(*map(_images, (path, other))), 1):
        if any(ours != theirs for ours, theirs in zip(first[::-1], second[::-1])):
            names = f"{'/'.join(first)} in {path} and {'/'.join(second)} in {other}"
            raise ValueError(f"Entry {number} is {names}: predictions and references must be of the same images.")
    for key in ("id", "words"):
        ours, theirs = (_named(file, key, options) for file in (path, other))
        if ours != theirs and sorted(ours) == sorted(theirs):
            number = next(place for place, pair in enumerate(zip(ours, theirs)) if pair[0] != pair[1])
            names = f"the {key} {ours[number][:60]!r} in {path} and {theirs[number][:60]!r} in {other}"
            raise ValueError(f"Entry {number + 1} has {names}: predictions and references must be in the same order.")


def _images(path):
    """Return the parts of the path of each entry's image; [] if some entry names none."""
    if Path(path).is_dir():
        return [file.relative_to(path).parts for file in image_files(path)]
    names = [row.get("file") if isinstance(row, dict) else None for row in _rows(path)]
    return [Path(name).parts for name in names] if all(isinstance(name, str) for name in names) else []


def _named(path, key, options):
    """Return the `id` or the `words` of each entry as a text; [] if some entry has none."""
    if path.startswith(BIO) or suffix_of(path) == ".conllu":
        values = [sentence.words for sentence in _sentences(path, options)] if key == "words" else []
    else:
        values = [row.get(key) if isinstance(row, dict) else None for row in _rows(path)]
    texts = [" ".join(map(str.strip, map(str, value))) if isinstance(value, list) else value for value in values]
    return list(map(str, texts)) if all(isinstance(text, str | int) for text in texts) else []


def _rows(path):
    """Return the entries of a .jsonl; of other files, none."""
    return read(path) if not Path(path).is_dir() and suffix_of(path) == ".jsonl" else []


def texts_or(*keys: str) -> Readers:
    """Return readers of texts that prefer the given keys of predictions and of references.

    With a key, the `text` of references is the input of the model.
    """
    of_predictions, of_references = keys[:1] + PREDICTIONS, keys[1:] + REFERENCES[: -1 if keys else None]
    return partial(read, keys=of_predictions, errors=True), partial(read, keys=of_references)


TEXTS = texts_or()
OBJECTS: Readers = (read, read)
IMAGES: Readers = (partial(pictures, errors=True), pictures)


def _column(table, path, keys):
    """Return the values of the first of the columns `keys` that exists in a table."""
    for key in keys:
        with contextlib.suppress(UnknownColumnError):
            return [text for _, _, (text,) in table.values("train", [key])]
    raise ValueError(f"{path} must be a table with a header that has the column {' or '.join(keys)}.")
