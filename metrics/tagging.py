"""Spans that tags stand for, and how well they are found: the F1 of CoNLL's shared tasks, with seqeval's numbers.

A tag is O, or a letter, "-" and the span's type: B-PER, I-PER. A letter alone is of the type "_".
"""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from lineage.metrics.classification import Scores, from_counts

# Of a scheme its letters, and what a word and the one before must be for a span to begin, to go on, and to have ended
# before the word: both letters, and "=" if their types are the same. L and U of BILOU are read as E and S.
_SCHEMES = {
    None: ("OBIES", ".[^O]", "[BI][IE]=", "."),  # as CoNLL's script has it: whatever the tags, all of them are in spans
    "IOB1": ("OIB", ".I|[BI]B=", "[BI]I=", "I|B[OI]|BB="),
    "IOB2": ("OIB", ".B", "[BI]I=", "."),
    "IOE2": ("OIE", ".[IE]", "I[IE]=", "E"),
    "IOBES": ("OBIES", ".[BS]", "[BI][IE]=", "[ES]"),
    "BILOU": ("OBIES", ".[BS]", "[BI][IE]=", "[ES]"),
}
_OUTSIDE = "O", "_"


class Span(NamedTuple):
    """Words from `start` to before `stop`."""

    type: str
    start: int
    stop: int


def spans(tags: Sequence[str], scheme: str | None = None) -> list[Span]:
    """The spans of a sentence's tags.

    Args:
        tags: of its words.
        scheme: None reads all tags as CoNLL's script does, in doubt as a new span; "IOB1", "IOB2", "IOE2", "IOBES" or
            "BILOU" is strict: what is not a span in that scheme is none.

    Raises:
        ValueError: the scheme is unknown, or a tag is not one of it.
    """
    if scheme not in _SCHEMES:
        raise ValueError(f"scheme is {scheme!r}: it must be one of {', '.join(filter(None, _SCHEMES))}, or None.")
    letters, begin, inside, end = _SCHEMES[scheme]
    found, start, before = [], None, _OUTSIDE
    for place, word in enumerate([*(_parsed(tag, letters, scheme) for tag in tags), _OUTSIDE]):
        step = before[0] + word[0] + ("=" if before[1] == word[1] else "")
        if start is None or not re.match(inside, step):
            if start is not None and re.match(end, step):
                found.append(Span(before[1], start, place))
            start = place if re.match(begin, step) else None
        before = word
    return found


def _parsed(tag, letters, scheme):
    """The letter and the type of a tag."""
    letter, _, kind = tag.partition("-")
    letter = {"L": "E", "U": "S"}.get(letter, letter) if scheme in (None, "BILOU") else letter
    if len(letter) != 1 or letter not in letters or (letter == "O" and kind):
        raise ValueError(f"{tag!r} is no tag of the scheme {scheme or 'of CoNLL'}, such as O or B-PER.")
    return letter, kind or "_"


@dataclass(frozen=True)
class Spans:
    """How often spans of each type were rightly found, found, and true, as a metric state."""

    right: Counter = field(default_factory=Counter)
    guessed: Counter = field(default_factory=Counter)
    true: Counter = field(default_factory=Counter)

    @classmethod
    def empty(cls) -> "Spans":
        return cls()

    def update(
        self, tags: Sequence[Sequence[str]], true_tags: Sequence[Sequence[str]], scheme: str | None = None
    ) -> "Spans":
        """With more sentences; see `spans`.

        Raises:
            ValueError: there are not as many sentences or tags as true ones; and as `spans`.
        """
        if len(tags) != len(true_tags):
            raise ValueError(f"{len(tags)} sentences of tags, and {len(true_tags)} of true ones: as many of each.")
        ours, theirs = [], []
        for number, (guess, truth) in enumerate(zip(tags, true_tags)):
            if len(guess) != len(truth):
                raise ValueError(f"sentence {number} has {len(guess)} tags, and {len(truth)} true ones.")
            ours += [(number, *span) for span in spans(guess, scheme)]
            theirs += [(number, *span) for span in spans(truth, scheme)]
        right = set(ours) & set(theirs)
        return self.merge(Spans(*(Counter(kind for _, kind, *_ in some) for some in (right, ours, theirs))))

    def merge(self, other: "Spans") -> "Spans":
        """The state of both states' sentences together."""
        return Spans(self.right + other.right, self.guessed + other.guessed, self.true + other.true)

    @property
    def types(self) -> list[str]:
        """Of spans that were found or true."""
        return sorted(self.guessed.keys() | self.true.keys())

    def compute(self, average: str | None = "micro") -> Scores:
        """Precision, recall and F1: "micro" of all spans, "macro" or "weighted" means of the types' (see
        `classification.precision_recall_f1`), or None of each of `types`."""
        counts = (self.right, self.guessed, self.true)
        return from_counts(*([some[kind] for kind in self.types] for some in counts), average)
