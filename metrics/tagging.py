"""Spans of tagged sentences, and their precision, recall and F1 as in CoNLL's shared tasks and in seqeval.

A tag is O, or a letter, "-" and the type of the span: B-PER, I-PER. A letter alone has the type "_".
"""

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from lineage.metrics.classification import Scores, from_counts

# Letters of each scheme, and patterns of two consecutive tags (both letters, and "=" if the types are equal) at which a
# span begins, continues, and has ended validly. L and U of BILOU are read as E and S.
_SCHEMES = {
    None: ("OBIES", ".[^O]", "[BI][IE]=", "."),  # as in CoNLL's script: every tag but O is in a span
    "IOB1": ("OIB", ".I|[BI]B=", "[BI]I=", "I|B[OI]|BB="),
    "IOB2": ("OIB", ".B", "[BI]I=", "."),
    "IOE2": ("OIE", ".[IE]", "I[IE]=", "E"),
    "IOBES": ("OBIES", ".[BS]", "[BI][IE]=", "[ES]"),
    "BILOU": ("OBIES", ".[BS]", "[BI][IE]=", "[ES]"),
}
_OUTSIDE = "O", "_"


class Span(NamedTuple):
    """Span of the words from `start` up to, but not including, `stop`."""

    type: str
    start: int
    stop: int


def spans(tags: Sequence[str], scheme: str | None = None) -> list[Span]:
    """Return the spans of a sentence, given a tag for each word.

    The scheme None reads the tags leniently, as CoNLL's script does. "IOB1", "IOB2", "IOE2", "IOBES" and "BILOU" are
    strict: sequences that are not valid in the scheme are not spans.
    """
    if scheme not in _SCHEMES:
        raise ValueError(f"scheme is {scheme!r}: it must be None or one of {', '.join(filter(None, _SCHEMES))}.")
    letters, begin, inside, end = _SCHEMES[scheme]
    complete, start, previous = [], None, _OUTSIDE
    for position, current in enumerate([*(_parsed(tag, letters, scheme) for tag in tags), _OUTSIDE]):
        step = previous[0] + current[0] + ("=" if previous[1] == current[1] else "")
        if start is None or not re.match(inside, step):
            if start is not None and re.match(end, step):
                complete.append(Span(previous[1], start, position))
            start = position if re.match(begin, step) else None
        previous = current
    return complete


def is_chunk(tag: str) -> bool:
    """Return whether a tag is O or one of a span with a type, such as B-PER; NOUN is not."""
    return tag == "O" or re.match("[BIESLU]-", tag) is not None


def word_accuracy(tags: Sequence[Sequence[str]], true_tags: Sequence[Sequence[str]]) -> float:
    """Return the fraction of the words of some sentences whose tags are correct; nan if there are no words."""
    words = [tag == true for pair in _pairs(tags, true_tags) for tag, true in zip(*pair)]
    return sum(words) / len(words) if words else math.nan


def _pairs(tags, true_tags):
    """Return the predicted and true tags of each sentence; raise ValueError for unequal numbers."""
    if len(tags) != len(true_tags):
        counts = f"Got {len(tags)} predicted and {len(true_tags)} true sentences"
        raise ValueError(f"{counts}: the numbers must be equal.")
    pairs = list(zip(tags, true_tags))
    for number, (guess, truth) in enumerate(pairs):
        if len(guess) != len(truth):
            raise ValueError(f"Sentence {number} has {len(guess)} predicted and {len(truth)} true tags.")
    return pairs


def _parsed(tag, letters, scheme):
    """Return the letter and the type of a tag."""
    letter, _, kind = tag.partition("-")
    letter = {"L": "E", "U": "S"}.get(letter, letter) if scheme in (None, "BILOU") else letter
    if len(letter) != 1 or letter not in letters or (letter == "O" and kind):
        raise ValueError(f"The tag {tag!r} is not valid in the scheme {scheme or 'CoNLL'}, which has {letters}.")
    return letter, kind or "_"


@dataclass(frozen=True)
class Spans:
    """Metric state of the numbers of correct, predicted and actual spans of each type."""

    correct: Counter = field(default_factory=Counter)
    predicted: Counter = field(default_factory=Counter)
    actual: Counter = field(default_factory=Counter)

    @classmethod
    def empty(cls) -> "Spans":
        return cls()

    def update(
        self, tags: Sequence[Sequence[str]], true_tags: Sequence[Sequence[str]], scheme: str | None = None
    ) -> "Spans":
        """Add sentences; for `scheme`, see `spans`."""
        predicted, actual = [], []
        for number, (guess, truth) in enumerate(_pairs(tags, true_tags)):
            predicted += [(number, *span) for span in spans(guess, scheme)]
            actual += [(number, *span) for span in spans(truth, scheme)]
        correct = set(predicted) & set(actual)
        return self.merge(Spans(*(Counter(kind for _, kind, *_ in group) for group in (correct, predicted, actual))))

    def merge(self, other: "Spans") -> "Spans":
        """Return the state of the sentences of both states."""
        return Spans(self.correct + other.correct, self.predicted + other.predicted, self.actual + other.actual)

    @property
    def types(self) -> list[str]:
        """Return the sorted types of the predicted and actual spans."""
        return sorted(self.predicted.keys() | self.actual.keys())

    def compute(self, average: str | None = "micro") -> Scores:
        """Return precision, recall and F1, averaged as in `classification.precision_recall_f1`; None: by `types`."""
        counts = (self.correct, self.predicted, self.actual)
        return from_counts(*([count[kind] for kind in self.types] for count in counts), average)
