"""Files of texts with an example in each line, and files of CoNLL-U, CoNLL-2003 and SQuAD; all may be compressed.

The readers raise FileNotFoundError if there is no such file, and ValueError with the number of an invalid line.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lineage.data.content import LabeledTexts, PairedTexts, Question, TaggedSentence
from lineage.data.documents import Documents
from lineage.data.sources.base import SOURCES, SplitFiles
from lineage.data.sources.files import DataFiles, gathered, iterate_lines, read_json, read_lines, suffix_of
from lineage.data.sources.tables import as_text, json_object

_ID = re.compile(r"\d{1,9}([-.]\d{1,9})?")  # ID of a word in CoNLL-U


@SOURCES.register("pairs")
@dataclass(frozen=True)
class PairFiles(SplitFiles):
    """Files of pairs of texts without a header, which may be compressed (.gz, .bz2, .xz or .zst).

    A path is "a.tsv" (two columns), "a.jsonl" (objects with `input` and `target`) or "a.en,a.de" (two parallel files).
    """

    def pairs(self) -> dict[str, PairedTexts]:
        return self.each(read_pairs)


@SOURCES.register("labels")
@dataclass(frozen=True)
class LabelFiles(SplitFiles):
    """Files of texts, or pairs of texts, with a label each, without a header; they may be compressed.

    A path is a `.tsv` file whose last column is the label of the one or two texts before it, or a `.jsonl` file of
    objects with `text`, `label` and optionally `second`. As pairs, the labels are the targets (T5, arXiv 1910.10683).
    """

    headerless = True

    def labeled_texts(self) -> dict[str, LabeledTexts]:
        return self.each(read_labeled_texts)

    def pairs(self) -> dict[str, PairedTexts]:
        parts = self.labeled_texts().items()
        return {name: PairedTexts(list(map(" ".join, part.texts)), list(part.labels)) for name, part in parts}


@SOURCES.register("squad")
@dataclass(frozen=True)
class SQuAD(SplitFiles):
    """JSON files of questions in the format of SQuAD 1.1 (arXiv 1606.05250) or 2.0 (arXiv 1806.03822).

    Questions that are marked as impossible have no answer, even if the file has plausible ones. The files may be
    compressed (.gz, .bz2, .xz or .zst).
    """

    def questions(self) -> dict[str, list[Question]]:
        splits = self.each(read_questions)
        if empty := [split for split, questions in splits.items() if not questions]:
            raise ValueError(f"{self.paths()[empty[0]]} has no questions.")
        return splits


class TaggedFiles(DataFiles):
    """Base class of sources of tagged sentences, which are also documents. A subclass has a method `read_file`."""

    def read_file(self, path: str) -> list[TaggedSentence]:
        """Return the sentences in a file; raise ValueError with the number of an invalid line."""
        raise NotImplementedError

    def tagged_sentences(self) -> dict[str, list[TaggedSentence]]:
        splits = {}
        for split, files in self.split_files().items():
            splits[split] = [sentence for file in files for sentence in self.read_file(file)]
            if not splits[split]:
                raise ValueError(f"{files[0]} has no sentences.")
        return splits

    def documents(self) -> dict[str, Documents]:
        splits = self.tagged_sentences().items()
        return {split: Documents(["".join(sentence.words) for sentence in part]) for split, part in splits}


@SOURCES.register("conllu")
@dataclass(frozen=True)
class CoNLLU(TaggedFiles):
    """CoNLL-U files (.conllu) of sentences with universal parts of speech; they may be compressed.

    Words are syntactic words (do and n't for "1-2 don't"), without empty nodes ("8.1"). Each sentence is a document.
    """

    suffixes = (".conllu",)

    def read_file(self, path: str) -> list[TaggedSentence]:
        return read_sentences(path)


@SOURCES.register("bio")
@dataclass(frozen=True)
class BIO(TaggedFiles):
    """Files with a word in each line and its tag in another column, as in CoNLL-2003; they may be compressed.

    Columns are separated by spaces or tabs, and sentences by empty lines or lines that begin with -DOCSTART-. Each
    sentence is a document, in which a space precedes every word but the first. A folder may have the files of
    CoNLL-2003 (eng.train, eng.testa and eng.testb).

    Attributes:
        word_column: column of the word, counted from 0; negative: counted from the last one, -1.
        tag_column: column of the tag, counted from 0; negative: counted from the last one, -1.
    """

    word_column: int = 0
    tag_column: int = -1

    def read_file(self, path: str) -> list[TaggedSentence]:
        sentences, words, tags, width = [], [], [], 0
        needed = max(2, *(place + 1 if place >= 0 else -place for place in (self.word_column, self.tag_column)))
        for number, line in enumerate([*read_lines(path), ""], 1):
            row = re.split(r"[ \t]+", line.strip(" \t"))
            if row == [""] or row[0] == "-DOCSTART-":
                if words:
                    sentences.append(TaggedSentence(words, tags))
                words, tags = [], []
                continue
            width = width or len(row)
            if len(row) != width or width < needed:
                expected = f"the lines before have {width}" if len(row) != width else f"it must have at least {needed}"
                raise ValueError(f"{path}, line {number} has {len(row)} columns: {expected}.")
            words.append((" " if words else "") + row[self.word_column])
            tags.append(row[self.tag_column])
        if not sentences:
            raise ValueError(f"{path} has no sentences.")
        return sentences


def read_pairs(path: str) -> PairedTexts:
    """Return the pairs of texts in one file, or in two parallel files whose paths are separated by a comma."""
    files = [path] if Path(path).is_file() else path.split(",")
    if len(files) > 2:
        raise ValueError(f"{path!r} must be one file of pairs, or two parallel files separated by a comma.")
    if len(files) == 2:
        inputs, targets = map(read_lines, files)
        if len(inputs) != len(targets):
            raise ValueError(f"{files[0]} has {len(inputs)} lines and {files[1]} {len(targets)}: they must be equal.")
        if not inputs:
            raise ValueError(f"{files[0]} and {files[1]} are empty: they must have a text in each line.")
        return PairedTexts(inputs, targets)
    rows = read_rows(path, ("input", "target"), columns="2", others=", or two files separated by a comma")
    return PairedTexts([text for text, _ in rows], [target for _, target in rows])


def read_labeled_texts(path: str) -> LabeledTexts:
    """Return the labeled texts in a file, either all single or all in pairs."""
    rows = read_rows(path, ("text", "second", "label"), optional="second", columns="one or two texts and a label")
    if "" in (labels := [row[-1] for row in rows]):
        raise ValueError(f"{path}, example {labels.index('') + 1} has an empty label.")
    if len({len(row) for row in rows}) > 1:
        raise ValueError(f"{path} has some single texts and some pairs: it must have one or the other.")
    return LabeledTexts([row[:-1] for row in rows], labels)


def read_questions(path: str, *, answered: bool = True) -> list[Question]:
    """Return the questions in a file in SQuAD's format, with or without answers.

    Error messages have the number of the question, counted from 1.
    """
    content, questions = read_json(path), []
    try:
        for article in content["data"]:
            for paragraph in article["paragraphs"]:
                for item in paragraph["qas"]:
                    answers = item["answers"] if answered else ()
                    answers = [(answer["answer_start"], answer["text"]) for answer in answers]
                    optional = {name: item.get(name) for name in Question.OPTIONAL}
                    if answered and optional["is_impossible"] is False and not answers:
                        raise ValueError(f"{item['question']!r} has no answer and is not marked as impossible.")
                    questions.append(Question.from_fields(item["question"], paragraph["context"], answers, **optional))
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is not a file in SQuAD's format: {type(error).__name__} {error}.") from None
    except ValueError as error:
        raise ValueError(f"{path}, question {len(questions) + 1}: {error}") from None
    return questions


def read_sentences(path: str) -> list[TaggedSentence]:
    """Return the sentences in a file with their universal parts of speech; error messages have the line number."""
    sentences, words, tags, index = [], [], [], 0
    space = ""  # before the next word
    last_part, space_after_token = 0, ""  # last word of a multiword token, and the space after it
    for number, line in enumerate([*read_lines(path), ""], 1):
        if not line.strip():
            if words:
                sentences.append(TaggedSentence(words, tags))
            words, tags, index, space, last_part = [], [], 0, "", 0
        elif not line.startswith("#"):
            columns = line.split("\t")
            if len(columns) != 10:
                raise ValueError(f"{path}, line {number} has {len(columns)} columns: CoNLL-U has 10.")
            word_id = columns[0]
            if not _ID.fullmatch(word_id):
                raise ValueError(
                    f"{path}, line {number} begins with {word_id[:20]!r}, not with an ID such as 1 or 1-2."
                )
            after = "" if "SpaceAfter=No" in columns[9].split("|") else " "
            if "-" in word_id:
                last_part, space_after_token = int(word_id.partition("-")[2]), after
            elif "." not in word_id:
                if int(word_id) <= index:
                    raise ValueError(f"{path}, line {number} has the ID {word_id} after {index}: IDs must increase.")
                index = int(word_id)
                words.append(space + columns[1])
                tags.append(columns[3])
                if index < last_part:
                    space = ""
                else:
                    space = space_after_token if index == last_part else after
                    last_part, space_after_token = 0, ""
    return sentences


def read_rows(
    path: str, keys: Sequence[str], *, columns: str, optional: str = "", others: str = ""
) -> list[tuple[str, ...]]:
    """Return the rows of a `.tsv` file with columns `keys`, or of a `.jsonl` file of objects, which may be compressed.

    The key `optional` may be missing; `columns` and `others` describe the columns and other files in error messages.
    """
    suffix = suffix_of(path)
    if suffix not in (".tsv", ".jsonl"):
        raise ValueError(f"{path} must be a .tsv or .jsonl file{others}.")

    def row(line, where):
        if suffix == ".jsonl":
            entry = json_object(line, where)
            present = [key for key in keys if key != optional or key in entry]
            return tuple(as_text(entry.get(key), key, where) for key in present)
        values = tuple(line.rstrip("\r\n").split("\t"))
        if len(values) not in (len(keys), len(keys) - bool(optional)):
            raise ValueError(f"{where} has {len(values)} columns: it must have {columns}.")
        return values

    lines = enumerate(iterate_lines(path), 1)
    rows = gathered((row(line, f"{path}, line {number}") for number, line in lines if line.strip(" \r\n")), path)
    if not rows:
        raise ValueError(f"{path} is empty: it must have {columns} in each row.")
    return rows
