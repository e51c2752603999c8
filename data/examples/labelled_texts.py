"""Labelled texts and pairs of texts, and what becomes of those that are longer than a model's sequences."""

import re
from collections import Counter
from math import log

import numpy as np

from lineage.data.content import LabelledTexts
from lineage.data.examples import encoded
from lineage.data.examples.encoded import Encoded
from lineage.data.examples.sentence_pairs import ENDS
from lineage.data.tokenizers import Tokenizer

LONG = ("head", "tail", "head_tail", "key_sentences", "segments")


def names(splits: dict[str, LabelledTexts]) -> list[str]:
    """The classes, in order: as the source has them, or the labels of the training split, numbers by their size.

    Raises ValueError for a label of another split that is not among them.
    """
    found = list(splits["train"].names) or sorted(
        set(splits["train"].labels), key=lambda name: (not name.isdecimal(), int(name) if name.isdecimal() else 0, name)
    )
    for split, part in splits.items():
        unknown = sorted(set(part.labels) - set(found))
        if unknown:
            raise ValueError(f"the label {unknown[0]!r} of the {split} split is not one of {', '.join(found[:20])}")
    return found


def encode(part: LabelledTexts, labels: np.ndarray, tokenizer: Tokenizer, length: int, fit: "Fit") -> Encoded:
    """Rows of texts with the `label` of each."""
    ids = zip(*map(tokenizer.encode_batch, zip(*part.texts)))
    made = [(parts, origin) for origin, row in enumerate(zip(part.texts, ids)) for parts in fit(*row)]
    origins = [origin for _, origin in made]
    joined = [encoded.join(tokenizer, *parts) for parts, _ in made]
    return encoded.rows(joined, origins, length, tokenizer, per_row={"label": labels[origins]})


class Fit:
    """Makes texts fit a row of `length` tokens, as `long_text` says:

    head, tail, head_tail    the first tokens, the last, or a quarter first and the others last (arXiv 1905.05583);
                             of a pair, the longer text loses tokens first
    key_sentences            the sentences nearest to what the text is about, in their order
    segments                 all of it, in rows that start `stride` tokens after each other

    Raises:
        ValueError: the rule is unknown, or not for these texts.
    """

    def __init__(self, long_text: str, tokenizer: Tokenizer, length: int, stride: int, train: LabelledTexts):
        encoded.check(length)
        if long_text not in LONG:
            raise ValueError(f"long_text={long_text!r} must be one of {', '.join(LONG)}")
        pairs = any(len(texts) > 1 for texts in train.texts)
        if pairs and long_text in ("key_sentences", "segments"):
            raise ValueError(f"long_text={long_text!r} is for texts alone, not for pairs")
        self.rule, self.encode = long_text, tokenizer.encode
        self.room = length - (3 if pairs else 2)
        self.stride = stride
        self.count, spread = len(train.texts), train.texts if long_text == "key_sentences" else ()
        self.spread = Counter(word for (text,) in spread for word in set(_words(text)))

    def __call__(self, texts: tuple[str, ...], ids: tuple[np.ndarray, ...]) -> list[list[np.ndarray]]:
        """The parts of each row of one or two texts, given and made as token ids."""
        if sum(map(len, ids)) <= self.room:
            return [list(ids)]
        if self.rule == "segments":
            starts = encoded.starts(len(ids[0]), self.room, self.stride)
            return [[ids[0][start : start + self.room]] for start in starts]
        if self.rule == "key_sentences":
            return [[self._key_sentences(texts[0])]]
        sizes = encoded.longest_first(*map(len, ids), self.room) if len(ids) > 1 else [self.room]
        return [[self._cut(part, size) for part, size in zip(ids, sizes)]]

    def _cut(self, ids, size):
        if len(ids) <= size:
            return ids
        head = {"tail": 0, "head_tail": round(size * 128 / 510)}.get(self.rule, size)
        return np.concatenate([ids[:head], ids[len(ids) - size + head :]])

    def _key_sentences(self, text):
        """Sentences by the weight of their words in the text's tf-idf centroid (Radev et al. 2004, section 3.1)."""
        sentences = ENDS.split(text)
        idf = {word: log((1 + self.count) / (1 + self.spread[word])) for word in _words(text)}
        centroid = {word: times * idf[word] for word, times in Counter(_words(text)).items()}
        scores = [sum(centroid[word] for word in set(_words(sentence))) for sentence in sentences]
        ids, kept, room = [self.encode(sentence) for sentence in sentences], [], self.room
        for number in sorted(range(len(sentences)), key=lambda number: -scores[number]):
            if len(ids[number]) <= room:
                kept.append(number)
                room -= len(ids[number])
        return np.concatenate([ids[number] for number in sorted(kept)]) if kept else self.encode(text)[: self.room]


def _words(text):
    return re.findall(r"\w+", text.lower())
