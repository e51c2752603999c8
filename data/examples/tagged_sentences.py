"""Sentences whose words have tags, and how words and the tokens that they are cut into belong together."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np

from lineage.data.examples import encoded
from lineage.data.examples.encoded import Encoded
from lineage.data.examples.pairs import read_lines
from lineage.data.tokenizers import Tokenizer

_ID = re.compile(r"\d+([-.]\d+)?")


@dataclass(frozen=True)
class Sentence:
    """Words, each with the space before it where there is one, and their tags."""

    words: Sequence[str]
    tags: Sequence[str]


def read(path: str) -> list[Sentence]:
    """The sentences in a CoNLL-U file with their universal parts of speech; it may be gzipped (.gz).

    Words are the syntactic ones: of "1-2 don't", do and n't; empty nodes ("8.1") are left out.

    Raises FileNotFoundError, and ValueError, naming the line, for what is not CoNLL-U.
    """
    sentences: list[Sentence] = []
    words: list[str] = []
    tags: list[str] = []
    space, whole = "", (0, "")  # before the next word; the last word of a longer one, and the space after that
    for number, line in enumerate([*read_lines(path), ""], 1):
        if not line.strip():
            if words:
                sentences.append(Sentence(words, tags))
            words, tags, space = [], [], ""
        elif not line.startswith("#"):
            columns = line.split("\t")
            if len(columns) != 10:
                raise ValueError(f"{path}, line {number} has {len(columns)} columns: CoNLL-U has 10")
            if not _ID.fullmatch(columns[0]):
                raise ValueError(
                    f"{path}, line {number} begins with {columns[0]!r}: a word has a number, such as 1 or 1-2"
                )
            after = "" if "SpaceAfter=No" in columns[9].split("|") else " "
            if "-" in columns[0]:
                whole = int(columns[0].partition("-")[2]), after
            elif "." not in columns[0]:
                index = int(columns[0])
                words.append(space + columns[1])
                tags.append(columns[3])
                # Inside a longer word there are no spaces.
                space = after if index > whole[0] else whole[1] if index == whole[0] else ""
                whole = (0, "") if index >= whole[0] else whole
    return sentences


def find_splits(path: str) -> dict[str, str]:
    """The files of the splits: PATH itself, or those in the folder PATH as Universal Dependencies names them.

    Raises FileNotFoundError for a folder without a training file.
    """
    if not Path(path).is_dir():
        return {"train": path}
    names = {"train": "train", "dev": "validation", "test": "test"}
    found = {
        ours: str(file) for name, ours in names.items() for file in sorted(Path(path).glob(f"*-{name}.conllu*"))[:1]
    }
    if "train" not in found:
        raise FileNotFoundError(f"there is no file *-train.conllu in {path}")
    return found


def names(splits: dict[str, list[Sentence]]) -> list[str]:
    """The tags of all splits, in alphabetical order."""
    return sorted({tag for part in splits.values() for sentence in part for tag in sentence.tags})


def encode(sentences: Sequence[Sentence], tags: Sequence[str], tokenizer: Tokenizer, length: int) -> Encoded:
    """Rows of sentences. `targets` int32 [T] has the number of a word's tag at its first token, where `mask` is True.

    A sentence that does not fit goes on in the next row; of a word longer than a row, the first tokens stay; one that
    the tokenizer makes nothing of is a mask.
    """
    encoded.check(length)
    number_of, room = {tag: number for number, tag in enumerate(tags)}, length - 2
    joined, origins, targets, masks = [], [], [], []
    of_words = iter(tokenizer.encode_batch([word for sentence in sentences for word in sentence.words]))
    for origin, sentence in enumerate(sentences):
        words = [ids[:room] if len(ids) else [tokenizer.mask] for ids in islice(of_words, len(sentence.words))]
        ends = np.cumsum([len(ids) for ids in words])
        first = 0
        while first < len(words):
            before = ends[first - 1] if first else 0
            last = int(np.searchsorted(ends, before + room, side="right"))
            joined.append(encoded.join(tokenizer, np.concatenate(words[first:last])))
            starts = 1 + np.concatenate([[0], ends[first : last - 1] - before]).astype(int)
            target, mask = np.zeros(len(joined[-1][0]), np.int32), np.zeros(len(joined[-1][0]), bool)
            target[starts], mask[starts] = [number_of[tag] for tag in sentence.tags[first:last]], True
            origins.append(origin)
            targets.append(target)
            masks.append(mask)
            first = last
    return encoded.rows(joined, origins, length, tokenizer, per_token={"targets": targets, "mask": masks})
