"""Pairs of texts, an input and the output that a sequence-to-sequence model learns to write for it."""

import datetime
import gzip
import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lineage.data.loader import Source
from lineage.data.tokenizers import Tokenizer

Texts = tuple[list[str], list[str]]
_DAYS = range(datetime.date(1950, 1, 1).toordinal(), datetime.date(2050, 1, 1).toordinal())
_LOCALES = ("en", "en_GB", "de", "fr", "es", "it", "pt", "nl", "sv", "pl", "tr", "fi")
_FORMATS = ("full", "long", "medium", "d MMMM y", "MMMM d, y", "EEE d MMM y")


@dataclass(frozen=True, eq=False)
class Pairs(Source):
    """Token ids of inputs and targets, padded to one length.

    An example has `inputs` int32 [T] and `inputs_mask` bool [T] (True = a token), and of the output `tokens`, `targets`
    int32 [T] and `mask` bool [T]. Inputs and targets end with `end`; `tokens` are `start` and the targets but for their
    end. What is longer than T is cut before its end; `references` are the whole texts of the targets.
    """

    inputs: Sequence[np.ndarray]
    targets: Sequence[np.ndarray]
    references: Sequence[str]
    length: int
    end: int
    start: int

    def __len__(self) -> int:
        return len(self.inputs)

    @property
    def lengths(self) -> np.ndarray:
        """Tokens int64 [N] of the longer side of each pair, with its end."""
        longest = [max(len(a), len(b)) + 1 for a, b in zip(self.inputs, self.targets)]
        return np.minimum(longest, self.length)

    def take(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        inputs, inputs_mask = self._padded([self.inputs[index] for index in indices])
        targets, mask = self._padded([self.targets[index] for index in indices])
        return {"inputs": inputs, "inputs_mask": inputs_mask} | shifted(targets, mask, self.start)

    def _padded(self, rows: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        ids = np.full((len(rows), self.length), self.end, np.int32)
        mask = np.zeros(ids.shape, bool)
        for row, tokens in enumerate(rows):
            kept = tokens[: self.length - 1]
            ids[row, : len(kept)] = kept
            mask[row, : len(kept) + 1] = True
        return ids, mask


def shifted(targets: np.ndarray, mask: np.ndarray, start: int) -> dict[str, np.ndarray]:
    """Targets and their mask, both [N, T], and `tokens`: `start` and the targets but for the last."""
    tokens = np.roll(targets, 1, axis=1)
    tokens[:, 0] = start
    return {"tokens": tokens, "targets": targets, "mask": mask}


class Continuations(Pairs):
    """The same pairs for a decoder alone: each one is a row of the input, `end`, the target and `end`.

    An example has `tokens`, `targets` (each token's next), int32 [T], and `mask` bool [T], True where the target and
    its end are to be guessed. An input is cut to make room for the target.
    """

    @property
    def lengths(self) -> np.ndarray:
        """Tokens int64 [N] of each row but its last."""
        return np.minimum([len(a) + len(b) + 1 for a, b in zip(self.inputs, self.targets)], self.length)

    def take(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        rows = np.full((len(indices), self.length + 1), self.end, np.int32)
        mask = np.zeros((len(indices), self.length), bool)
        for row, index in enumerate(indices):
            target = self.targets[index][: self.length - 1]
            given = self.inputs[index][: self.length - 1 - len(target)]
            whole = [*given, self.end, *target]
            rows[row, : len(whole)] = whole
            mask[row, len(given) : len(whole)] = True
        return {"tokens": rows[:, :-1], "targets": rows[:, 1:], "mask": mask}


def encode(texts: Texts, tokenizer: Tokenizer, length: int, drop: bool, start: int, kind: type[Pairs] = Pairs) -> Pairs:
    """Pairs of texts as token ids; `drop` leaves out what does not fit `length`: a side with its end, or a row.

    Raises ValueError for a tokenizer without an end of text, and when no pair is left.
    """
    if length < 2:
        raise ValueError(f"sequence_length={length}: pairs need at least 2, a token and the end")
    if tokenizer.end_of_text is None:
        raise ValueError("pairs need a tokenizer with an end of text: this one has none")
    inputs, targets = (tokenizer.encode_batch(side) for side in texts)
    add = sum if kind is Continuations else max
    kept = [i for i in range(len(inputs)) if not drop or add((len(inputs[i]), len(targets[i]))) < length]
    if not kept:
        raise ValueError(f"no pair of {len(inputs)} fits sequence_length={length}: give a larger one")
    inputs, targets, references = ([side[i] for i in kept] for side in (inputs, targets, texts[1]))
    return kind(inputs, targets, references, length, tokenizer.end_of_text, start)


def read(path: str) -> Texts:
    """The pairs in files: "a.tsv" (two columns), "a.jsonl" (objects with `input` and `target`), or "a.en,a.de" (a line
    each of two files); any of them may be gzipped (.gz).

    Raises FileNotFoundError, and ValueError, naming the line, for what are no pairs.
    """
    files = path.split(",")
    if len(files) > 2:
        raise ValueError(f"{path!r} must be one file of pairs, or two parallel ones with a comma between")
    if len(files) == 2:
        inputs, targets = map(read_lines, files)
        if len(inputs) != len(targets):
            raise ValueError(f"{files[0]} has {len(inputs)} lines and {files[1]} {len(targets)}: they must be parallel")
        return inputs, targets
    rows = read_rows(path, ("input", "target"), columns="2", others=", or two files with a comma between")
    return [given for given, _ in rows], [target for _, target in rows]


def cldr() -> dict[str, Texts]:
    """Dates as twelve locales of the Unicode CLDR write them (from Babel), and as ISO 8601 has them.

    Every day of 1950 to 2049 once, in a locale and a format drawn for it; a tenth of the days is for validation, and
    another for test.
    """
    from babel.dates import format_date

    splits: dict[str, Texts] = {name: ([], []) for name in ("train", "validation", "test")}
    for ordinal in _DAYS:
        day = datetime.date.fromordinal(ordinal)
        draw = zlib.crc32(str(ordinal).encode())
        locale, form = _LOCALES[draw % len(_LOCALES)], _FORMATS[draw // 64 % len(_FORMATS)]
        tenth = draw // 4096 % 10
        inputs, targets = splits["test" if tenth == 9 else "validation" if tenth == 8 else "train"]
        inputs.append(format_date(day, form, locale))
        targets.append(day.isoformat())
    return splits


def read_lines(path: str) -> list[str]:
    """The lines of a file of UTF-8 text, which may be gzipped (.gz)."""
    opened: Any = gzip.open if path.endswith(".gz") else open
    if not Path(path).is_file():
        raise FileNotFoundError(f"there is no file {path}")
    try:
        with opened(path, "rt", encoding="utf-8-sig") as file:
            lines = [line.rstrip("\r") for line in file.read().split("\n")]
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error}") from None
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path} is not a whole gzip file: {error}") from None
    return lines if lines[-1] else lines[:-1]


def read_rows(
    path: str, keys: Sequence[str], *, columns: str, optional: str = "", others: str = ""
) -> list[tuple[str, ...]]:
    """The rows of a `.tsv`, or of a `.jsonl` of objects with the `keys`, of which one may be `optional`; either may be
    gzipped (.gz).

    `columns` says how many those of a .tsv must be, and `others` what else than such a file is allowed.

    Raises FileNotFoundError, and ValueError, naming the line, for another row.
    """
    suffix = Path(path.removesuffix(".gz")).suffix
    if suffix not in (".tsv", ".jsonl"):
        raise ValueError(f"{path} must be a .tsv or .jsonl file{others}")
    needed = [key for key in keys if key != optional]
    rows = []
    for number, line in enumerate(read_lines(path), 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        if suffix == ".tsv":
            row = line.split("\t")
            if not len(needed) <= len(row) <= len(keys):
                raise ValueError(f"{where} has {len(row)} columns: it must have {columns}")
        else:
            try:
                entry = json.loads(line)
                row = [entry[key] for key in keys if key in needed or key in entry]
                if None in row:
                    raise ValueError
            except (ValueError, KeyError, TypeError):
                names = " and ".join(f"`{key}`" for key in needed)
                raise ValueError(f"{where} must be a JSON object with {names}, none of them null") from None
        rows.append(tuple(map(str, row)))
    return rows
