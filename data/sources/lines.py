"""Files of texts with an example in each line, and those of CoNLL-U and SQuAD; all may be gzipped (.gz).

The readers raise FileNotFoundError if there is no such file, and ValueError with the number of the line that is wrong.
"""

import gzip
import json
import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lineage.data.content import Documents, LabeledTexts, PairedTexts, Question, TaggedSentence
from lineage.data.sources.base import SOURCES, SplitFiles

_ID = re.compile(r"\d+([-.]\d+)?")  # of a word in CoNLL-U


@SOURCES.register("pairs")
@dataclass(frozen=True)
class PairFiles(SplitFiles):
    """Files of pairs of texts, which may be gzipped (.gz).

    A path is "a.tsv" (two columns), "a.jsonl" (objects with `input` and `target`) or "a.en,a.de" (two parallel files).
    """

    def pairs(self) -> dict[str, PairedTexts]:
        return self.each(read_pairs)

    def files(self) -> list[str]:
        return [file for path in self.paths().values() for file in path.split(",")]


@SOURCES.register("labels")
@dataclass(frozen=True)
class LabelFiles(SplitFiles):
    """Files of texts, or pairs of texts, with a label each; they may be gzipped (.gz).

    A path is a `.tsv` file whose last column is the label of the one or two texts before it, or a `.jsonl` file of
    objects with `text`, `label` and optionally `second`. As pairs, the labels are the targets (T5, arXiv 1910.10683).
    """

    def labeled_texts(self) -> dict[str, LabeledTexts]:
        return self.each(read_labeled_texts)

    def pairs(self) -> dict[str, PairedTexts]:
        return {
            name: PairedTexts([" ".join(row) for row in part.texts], list(part.labels))
            for name, part in self.labeled_texts().items()
        }


@SOURCES.register("squad")
@dataclass(frozen=True)
class SQuAD(SplitFiles):
    """JSON files of questions in the format of SQuAD 1.1 or 2.0 (arXiv 1606.05250); they may be gzipped (.gz)."""

    def questions(self) -> dict[str, list[Question]]:
        return self.each(read_questions)


@SOURCES.register("conllu")
@dataclass(frozen=True)
class CoNLLU(SplitFiles):
    """CoNLL-U files of sentences with universal parts of speech; they may be gzipped (.gz).

    Words are the syntactic ones (of "1-2 don't": do and n't), without empty nodes ("8.1"). Each sentence is a document.

    Attributes:
        path: training file, or a folder with the files of a Universal Dependencies treebank
            (*-train.conllu, *-dev.conllu and *-test.conllu).
        validation_path: validation file; "": the folder's, if any.
        test_path: test file; "": the folder's, if any.
    """

    def paths(self) -> dict[str, str]:
        given = super().paths()
        if not Path(self.path).is_dir():
            return given
        names = {"train": "train", "dev": "validation", "test": "test"}
        files = {split: sorted(Path(self.path).glob(f"*-{name}.conllu*")) for name, split in names.items()}
        if not files["train"]:
            raise FileNotFoundError(f"There is no file *-train.conllu in {self.path}.")
        del given["train"]
        return {split: str(some[0]) for split, some in files.items() if some} | given

    def files(self) -> list[str]:
        return list(super().paths().values())

    def tagged_sentences(self) -> dict[str, list[TaggedSentence]]:
        return self.each(read_sentences)

    def documents(self) -> dict[str, Documents]:
        splits = self.tagged_sentences().items()
        return {split: Documents(["".join(sentence.words) for sentence in part]) for split, part in splits}


def read_pairs(path: str) -> PairedTexts:
    """Return the pairs of texts in one file, or in two parallel files with a comma between their paths."""
    files = path.split(",")
    if len(files) > 2:
        raise ValueError(f"{path!r} must be one file of pairs, or two parallel files separated by a comma.")
    if len(files) == 2:
        inputs, targets = map(read_lines, files)
        if len(inputs) != len(targets):
            raise ValueError(f"{files[0]} has {len(inputs)} lines and {files[1]} {len(targets)}: they must be equal.")
        return PairedTexts(inputs, targets)
    rows = read_rows(path, ("input", "target"), columns="2", others=", or two files separated by a comma")
    return PairedTexts([given for given, _ in rows], [target for _, target in rows])


def read_labeled_texts(path: str) -> LabeledTexts:
    """Return the labeled texts in a file, either all single or all in pairs."""
    rows = read_rows(path, ("text", "second", "label"), optional="second", columns="one or two texts and a label")
    if len({len(row) for row in rows}) > 1:
        raise ValueError(f"{path} has some single texts and some pairs: it must have one or the other.")
    return LabeledTexts([row[:-1] for row in rows], [row[-1] for row in rows])


def read_questions(path: str, *, answered: bool = True) -> list[Question]:
    """Return the questions in a file of SQuAD's format, whose answers may be missing unless they are needed."""
    content = "\n".join(read_lines(path))
    try:
        return [
            Question(item["question"], paragraph["context"], _answers(item, answered), str(item.get("id", "")))
            for article in json.loads(content)["data"]
            for paragraph in article["paragraphs"]
            for item in paragraph["qas"]
        ]
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is not a file in SQuAD's format: {type(error).__name__} {error}.") from None


def _answers(item: dict[str, Any], answered: bool) -> list[tuple[int, str]]:
    found = item["answers"] if answered else item.get("answers", ())
    return [(answer["answer_start"], answer["text"]) for answer in found]


def read_sentences(path: str) -> list[TaggedSentence]:
    """Return the sentences in a file with their universal parts of speech; an error has the number of the line."""
    sentences, words, tags = [], [], []
    # `space` precedes the next word; `multiword` is the last word of a multiword token and the space after it.
    space, multiword = "", (0, "")
    for number, line in enumerate([*read_lines(path), ""], 1):
        if not line.strip():
            if words:
                sentences.append(TaggedSentence(words, tags))
            words, tags, space = [], [], ""
        elif not line.startswith("#"):
            columns = line.split("\t")
            if len(columns) != 10:
                raise ValueError(f"{path}, line {number} has {len(columns)} columns: CoNLL-U has 10.")
            if not _ID.fullmatch(columns[0]):
                raise ValueError(f"{path}, line {number} begins with {columns[0]!r}, not with an ID such as 1 or 1-2.")
            after = "" if "SpaceAfter=No" in columns[9].split("|") else " "
            if "-" in columns[0]:
                multiword = int(columns[0].partition("-")[2]), after
            elif "." not in columns[0]:
                index = int(columns[0])
                words.append(space + columns[1])
                tags.append(columns[3])
                space = after if index > multiword[0] else multiword[1] if index == multiword[0] else ""
                multiword = (0, "") if index >= multiword[0] else multiword
    return sentences


def read_lines(path: str) -> list[str]:
    """Return the lines of a UTF-8 text file, which may be gzipped (.gz)."""
    opened: Any = gzip.open if path.endswith(".gz") else open
    if not Path(path).is_file():
        raise FileNotFoundError(f"There is no file {path}.")
    try:
        with opened(path, "rt", encoding="utf-8-sig") as file:
            lines = [line.rstrip("\r") for line in file.read().split("\n")]
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error}.") from None
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path} is not a complete gzip file: {error}.") from None
    return lines if lines[-1] else lines[:-1]


def read_rows(
    path: str, keys: Sequence[str], *, columns: str, optional: str = "", others: str = ""
) -> list[tuple[str, ...]]:
    """Return the rows of a `.tsv` file with columns `keys`, or of a `.jsonl` file of objects, which may be gzipped.

    The key `optional` may be missing; `columns` and `others` describe the columns and other files in error messages.
    """
    suffix = Path(path.removesuffix(".gz")).suffix
    if suffix not in (".tsv", ".jsonl"):
        raise ValueError(f"{path} must be a .tsv or .jsonl file{others}.")
    needed = [key for key in keys if key != optional]
    rows = []
    for number, line in enumerate(read_lines(path), 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        row = line.split("\t") if suffix == ".tsv" else _entries(line, keys, needed, where)
        if not len(needed) <= len(row) <= len(keys):
            raise ValueError(f"{where} has {len(row)} columns: it must have {columns}.")
        rows.append(tuple(map(str, row)))
    return rows


def _entries(line: str, keys: Sequence[str], needed: Sequence[str], where: str) -> list[Any]:
    try:
        entry = json.loads(line)
        row = [entry[key] for key in keys if key in needed or key in entry]
        if None in row:
            raise ValueError
    except (ValueError, KeyError, TypeError):
        names = " and ".join(f"`{key}`" for key in needed)
        raise ValueError(f"{where} must be a JSON object with {names}, none of them null.") from None
    return row
