"""Files of rows with named columns: CSV, TSV and lines of JSON."""

import csv
import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar

from lineage.configs.registry import Natural, Needs, Rate
from lineage.data.content import LabeledTexts, PairedTexts
from lineage.data.documents import Documents
from lineage.data.fingerprint import identity
from lineage.data.sources.base import SOURCES, For
from lineage.data.sources.files import DataFiles, gathered, held_out, numbered_lines, parse_json

Row = tuple[Any, ...] | ValueError  # values of a row, or its error
csv.field_size_limit(1 << 24)  # characters of a field, which need up to 8 bytes each; the default is 128 KiB


@dataclass(frozen=True)
class Table(DataFiles):
    """Base class of sources of files of rows with named columns. A subclass has a method `rows`.

    Attributes:
        text_key: column with the text; two columns separated by a comma for labeled pairs of texts.
        label_key: column with the label.
        input_key: column with the input of a pair.
        target_key: column with the target of a pair.
        validation_fraction: evenly spread fraction of the training rows, held out if there are no validation data; 0:
            none.
        max_bytes: maximum number of bytes of documents to read for each split, in whole documents; 0: no limit.
    """

    unit: ClassVar[str] = "line"  # name of a row in error messages

    text_key: Annotated[str, For(("documents", "labeled_texts"))] = "text"
    label_key: Annotated[str, For(("labeled_texts", "images"))] = "label"
    input_key: Annotated[str, For(("pairs",))] = "input"
    target_key: Annotated[str, For(("pairs",))] = "target"
    validation_fraction: Annotated[Rate, Needs("validation_path", ("",))] = 0.0
    max_bytes: Annotated[Natural, For(("documents",))] = 0

    def notes(self) -> Iterator[str]:
        yield from super().notes()
        if self.validation_fraction and not self.validation_path and "validation" in self.split_files():
            yield f"source.validation_fraction has no effect, because {self.path} has files of the split validation."

    def rows(self, file: str, keys: Sequence[str]) -> Iterator[tuple[int, Row]]:
        """Yield the number of each row of a file, from 1, and its values in some columns, None if there is no value.

        A row that cannot be read is a ValueError.
        """
        raise NotImplementedError

    def class_names(self, key: str) -> list[str]:
        """Return the names of the classes whose numbers are in a column, if the files have them."""
        return []

    def splits(self) -> list[str]:
        """Return the names of the splits, including that of held-out rows."""
        held = ["validation"] if self.validation_fraction else []
        return list(dict.fromkeys([*self.split_files(), *held]))

    def texts(self, split: str, keys: Sequence[str]) -> Iterator[tuple[str, ...]]:
        """Yield the texts in some columns of a split, row by row; raise ValueError if a row has no text or label."""
        for file, number, values in self.values(split, keys):
            where = f"{file}, {self.unit} {number}"
            row = [None if value == "" and key == self.label_key else value for value, key in zip(values, keys)]
            yield tuple(as_text(value, key, where) for value, key in zip(row, keys))

    def values(self, split: str, keys: Sequence[str], strict: bool = True) -> Iterator[tuple[str, int, Row]]:
        """Yield the file and number of each row of a split, and its values; raise its error, if `strict`.

        ValueError is also raised if there are no rows.
        """
        files, held, fraction = self._part(split)
        index, count = -1, 0
        for file in files:
            for number, row in self.rows(file, keys):
                if strict and isinstance(row, ValueError):
                    raise row
                index += 1
                if not fraction or held_out(index, fraction) == held:
                    count += 1
                    yield file, number, row
        if not count:
            raise ValueError(f"{files[0]} has no rows for the split {split}.")

    def _part(self, split: str) -> tuple[list[str], bool, float]:
        """Return the files of a split, whether it consists of training rows, and the fraction of them held out."""
        files = self.split_files()
        held = split not in files
        fraction = self.validation_fraction if held or (split == "train" and "validation" not in files) else 0.0
        return files["train" if held else split], held, fraction

    def documents(self) -> dict[str, Documents]:
        splits = self.splits()
        return {split: Documents(partial(self._limited, split), partial(self._identity, split)) for split in splits}

    def _limited(self, split: str) -> Iterator[str]:
        """Yield the first texts of a split, with at most `max_bytes` in total."""
        size = 0
        for (text,) in self.texts(split, [self.text_key]):
            size += len(text.encode()) if self.max_bytes else 0
            if size > self.max_bytes:
                return
            yield text

    def pairs(self) -> dict[str, PairedTexts]:
        keys, files = (self.input_key, self.target_key), self.files()
        parts = ((split, gathered(self.texts(split, keys), *files)) for split in self.splits())
        return {split: PairedTexts(*map(list, zip(*part))) for split, part in parts}

    def labeled_texts(self) -> dict[str, LabeledTexts]:
        """Return the texts that have a label, without splits that have none; classes numbered -1 are missing labels."""
        names, splits = self.class_names(self.label_key), {}
        for split in self.splits():
            rows = gathered(self.texts(split, [*self.text_key.split(","), self.label_key]), *self.files())
            if names:
                known = {str(number): name for number, name in enumerate(names)}
                if unknown := {label for *_, label in rows} - known.keys() - {"-1"}:
                    where = f"{self.path} has the class {min(unknown)[:60]} in the split {split}"
                    raise ValueError(f"{where}: there are {len(names)} classes.")
                rows = [(*texts, known[label]) for *texts, label in rows if label != "-1"]
            if rows:
                splits[split] = LabeledTexts([tuple(texts) for *texts, _ in rows], [row[-1] for row in rows], names)
        return splits

    def _identity(self, split: str, cache_dir: str | Path) -> str:
        """Return a string that identifies the documents of a split."""
        files, *part = self._part(split)
        options = {name: value for name, value in dataclasses.asdict(self).items() if not name.endswith("path")}
        return identity(files, self.name, split, part, options, cache_dir=cache_dir)


@SOURCES.register("csv")
@dataclass(frozen=True)
class CSV(Table):
    """Comma-separated UTF-8 files (.csv) with a header; they may be compressed (.gz, .bz2, .xz or .zst).

    Attributes:
        quotes: whether a field may be in double quotes, in which delimiters and ends of lines are part of the field
            and a double quote is written twice; the TSV files of GLUE have no such fields.
    """

    suffixes = (".csv",)
    delimiter: ClassVar[str] = ","

    quotes: bool = True

    def rows(self, file: str, keys: Sequence[str]) -> Iterator[tuple[int, Row]]:
        errors: list[ValueError] = []  # of the lines of the current row, which may be several
        delimiters: list[int] = []  # number of them in each of these lines

        def lines():
            for _, line, error in numbered_lines(file):
                errors.extend([error] if error else [])
                delimiters.append(line.count(self.delimiter))
                yield line

        quoting = csv.QUOTE_MINIMAL if self.quotes else csv.QUOTE_NONE
        reader = csv.reader(lines(), delimiter=self.delimiter, quoting=quoting, strict=True)
        try:
            header = next(reader, None)
            if errors:
                raise errors[0]
            if header is None:
                raise ValueError(f"{file} is empty: its first line must be a header.")
            check_columns(file, keys, header)
            places = [header.index(key) for key in keys]
            delimiters.clear()
            for row in reader:
                are_rows = len(delimiters) > 1 and len(header) > 1 and {*delimiters} == {len(header) - 1}
                if self.delimiter == "\t" and are_rows:
                    where = f"{file}, line {reader.line_num} is joined to the line before by double quotes"
                    both = f"both have {len(header)} columns: set --config.source.quotes=false"
                    errors.append(ValueError(f"{where}, but {both}."))
                if row and len(row) != len(header):
                    where = f"{file}, line {reader.line_num}"
                    errors.append(ValueError(f"{where} has {len(row)} columns: the header has {len(header)}."))
                if row:
                    yield reader.line_num, errors[0] if errors else tuple(row[place] for place in places)
                errors.clear()
                delimiters.clear()
        except csv.Error as error:
            if errors:  # a line is not UTF-8, such as all lines of a UTF-16 file
                raise errors[0] from None
            if str(error).startswith("new-line character"):
                reason = r"new-line character \r in a field" + (" that is not in double quotes" if self.quotes else "")
            else:
                hint = "; with --config.source.quotes=false, quotes have no meaning" if self.quotes else ""
                reason = f"{error}{hint}"
            raise ValueError(f"{file}, line {reader.line_num} cannot be read: {reason}.") from None


@SOURCES.register("tsv")
@dataclass(frozen=True)
class TSV(CSV):
    """Tab-separated UTF-8 files (.tsv) with a header; they may be compressed (.gz, .bz2, .xz or .zst).

    Lines that double quotes join to a row are refused if each of them has all columns: these quotes have no meaning.
    """

    suffixes = (".tsv",)
    delimiter = "\t"


@SOURCES.register("jsonl")
@dataclass(frozen=True)
class JSONLines(Table):
    """UTF-8 files with a JSON object in each line (.jsonl or .json); they may be compressed (.gz, .bz2, .xz or .zst).

    A column in an object in a column is COLUMN.COLUMN, such as translation.en.
    """

    suffixes = (".jsonl", ".json")

    def rows(self, file: str, keys: Sequence[str]) -> Iterator[tuple[int, Row]]:
        for number, line, error in numbered_lines(file):
            if line.strip():
                yield number, error or _json_row(line, keys, f"{file}, line {number}")


class UnknownColumnError(ValueError):
    """Exception raised for a column that a file does not have."""


def json_object(line: str, where: str) -> dict[str, Any]:
    """Return the JSON object in a line."""
    entry = parse_json(line, where)
    if not isinstance(entry, dict):
        raise ValueError(f"{where} is not a JSON object.")
    return entry


def _json_row(line: str, keys: Sequence[str], where: str) -> Row:
    try:
        entry = json_object(line, where)
        check_columns(where, [key.partition(".")[0] for key in keys if key not in entry], entry)
    except ValueError as error:
        return error
    return tuple(_inside(entry, key) for key in keys)


def check_columns(where: str, keys: Sequence[str], known: Sequence[str]) -> None:
    """Raise UnknownColumnError if a column is unknown, ValueError if two columns have its name."""
    known = list(known)
    if twice := [key for key in keys if known.count(key) > 1]:
        raise ValueError(f"{where} has the column {twice[0]!r} twice.")
    if missing := [key for key in keys if key not in known]:
        listed = ", ".join(known) or "none"
        listed = f"{listed[:200]}..." if len(listed) > 200 else listed
        choice = "source.text_key and the like, or --columns, choose others"
        raise UnknownColumnError(f"{where} has no column {missing[0]!r}: its columns are {listed}; {choice}.")


def _inside(entry: dict[str, Any], key: str) -> Any:
    first, _, rest = key.partition(".")
    if key in entry or not rest or entry.get(first) is None:
        return entry.get(key)
    return _inside(entry[first], rest) if isinstance(entry[first], dict) else None


def as_text(value: Any, key: str, where: str) -> str:
    """Return a value of a column as text; raise ValueError unless it is a text or a finite number."""
    try:
        if isinstance(value, str):
            value.encode()  # raises an error for a lone surrogate, which JSON can contain
            return value
        if isinstance(value, bytes):
            return value.decode()
    except UnicodeError as error:
        raise ValueError(f"{where}: the column {key!r} is not UTF-8 text: {error.reason}.") from None
    if not (isinstance(value, int) or (isinstance(value, float) and math.isfinite(value))):
        problem = "has no value" if value is None or isinstance(value, float) else f"is of type {type(value).__name__}"
        raise ValueError(f"{where}: the column {key!r} {problem}: it must be a text or a number.")
    return str(value)
