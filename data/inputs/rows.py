"""Texts, words and questions as the inputs of predictions, and the files that have them.

Texts are the lines of a .txt, or columns of a .jsonl, .csv, .tsv or .parquet; words are separated by spaces or listed.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import Any

from lineage.data.content import Question, TaggedSentence
from lineage.data.sources import SOURCES
from lineage.data.sources.files import numbered_lines, suffix_of
from lineage.data.sources.hub import TABLES
from lineage.data.sources.lines import read_questions, read_sentences
from lineage.data.sources.tables import CSV


@dataclass(frozen=True)
class Kind:
    """Format of the inputs of a kind of content.

    With `identifiers`, which maps the number of an input and the input to the entries of its prediction that identify
    it, the inputs of a file are read all together instead of in parts.
    """

    row: Callable[[Sequence[Any], str], Any]  # function of the values of a row and its name in error messages
    columns: tuple[str, ...]  # default names
    readers: Mapping[str, Callable[[str], Sequence[Any]]] = field(default_factory=dict)  # other formats, by suffix
    identifiers: Callable[[int, Any], Mapping[str, Any]] | None = None
    is_list: bool = False  # whether a list is one value of a row instead of the row
    counts: tuple[int, ...] = (1,)  # possible numbers of values in a row

    def check(self, row: Sequence[Any], where: str) -> None:
        """Raise ValueError for a wrong number of values, or of the names of their columns."""
        if len(row) not in self.counts:
            raise ValueError(f"{where} has {len(row)} entries: it must have {' or '.join(map(str, self.counts))}.")


class Rows(Sequence):
    """Rows of a file, read lazily; a slice that starts before the end of the previous one reads the file again."""

    def __init__(self, path: str, read: Callable[[], Iterator[Any]]):
        self.path, self.read = path, read  # `read` yields all rows; the first call counts and checks them
        self._size = self._next = sum(1 for _ in read())
        self._rows: Iterator[Any] = iter(())

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: Any) -> Any:
        if not isinstance(index, slice):
            return self[index : index + 1][0]
        first, stop, _ = index.indices(self._size)
        if first < self._next:
            self._rows, self._next = self.read(), 0
        rows = list(islice(self._rows, first - self._next, stop - self._next))
        if len(rows) < stop - first:
            raise ValueError(f"{self.path} has changed while it was read: it had {self._size:,} rows.")
        self._next = stop
        return rows


def rows_of(path: str, kind: Kind, names: Sequence[str], bad: int, quotes: bool) -> Sequence[Any]:
    """Return the inputs in a file, see `lineage.data.inputs.from_files`."""
    suffix = suffix_of(path)
    if suffix in kind.readers:
        return kind.readers[suffix](path)
    rows = Rows(path, partial(_rows, path, kind.row, suffix, names, bad, quotes))
    return rows[:] if kind.identifiers else rows


def skip(errors: dict[int, str], allowed: int, index: int, error: ValueError) -> None:
    """Add the error of an input to those of others; raise it if more than `allowed` inputs have errors."""
    errors[index] = str(error)
    if len(errors) > allowed:
        raise ValueError(f"{error} (--skip-bad=N continues without N such inputs.)") from None


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
            entry = row(values, f"{path}, line {number}")
        except ValueError as error:
            skip(errors, allowed, len(errors), entry := error)
        yield entry


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
