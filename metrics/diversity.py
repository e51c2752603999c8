"""Diversity of texts: burstiness, distinct n-grams, repetition and self-BLEU."""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import ArrayLike
from sacrebleu.metrics import BLEU

from lineage.metrics.summary import ngrams, words

# Full stops that do not end a sentence: those of abbreviations and of single letters (initials, "e.g.").
_ABBREVIATIONS = re.compile(
    r"(?:\b(?:mr|mrs|ms|dr|prof|sr|jr|st|vs|etc|inc|ltd|co|no|fig|eq|al|gen|col|sgt|capt|dept|approx|cf|bzw|usw|ca|nr|"
    r"jan|feb|mar|apr|jun|jul|aug|sep|sept|oct|nov|dec)|\b\w)\.$",
    re.IGNORECASE,
)
_END = re.compile(
    r"[.!?\u2026]+[\"'\u201d\u2019)\]]*(?=\s|$)|[\u3002\uff01\uff1f\uff61]+[\u300d\u300f\u201d\uff09]*|\n+"
)


def sentences(text: str) -> list[str]:
    """Split a text into sentences.

    A sentence ends at . ! ? or an ellipsis before white space, at Chinese or Japanese sentence punctuation, and at the
    end of a line, but not at abbreviations, initials or an ellipsis before a lower-case letter.
    """
    parts, start = [], 0
    for end in _END.finditer(text):
        before, after = text[start : end.end()], text[end.end() :].lstrip()[:1]
        abbreviated = end[0] == "." and _ABBREVIATIONS.search(before)
        paused = end[0].startswith(("...", "\u2026")) and after.islower()
        if not (abbreviated or paused) or not after:
            parts.append(before.strip())
            start = end.end()
    return [sentence for sentence in [*parts, text[start:].strip()] if re.search(r"\w", sentence)]


def burstiness(values: ArrayLike) -> float:
    """Return (s - m) / (s + m) for the standard deviation s and mean m of non-negative values [N].

    It is -1 for equal values, 0 for the gaps of a Poisson process, and below 1 (Goh & Barabasi 2008, equation 2).
    """
    values = np.asarray(values, float)
    if not (values >= 0).all():
        raise ValueError(f"A value is {values[~(values >= 0)][0]}: burstiness needs non-negative values.")
    if not values.any():
        raise ValueError("Burstiness needs at least one value that is not 0.")
    return float((values.std() - values.mean()) / (values.std() + values.mean()))


def sentence_burstiness(text: str, tokenize: Callable[[str], list[str]] = words) -> float:
    """Return the burstiness of the sentence lengths in tokens."""
    return burstiness([len(tokenize(sentence)) for sentence in sentences(text)])


def word_burstiness(tokens: Sequence[str], least: int = 3) -> dict[str, float]:
    """Return the burstiness of the gaps between occurrences, for tokens that occur at least `least` times."""
    positions = defaultdict(list)
    for position, token in enumerate(tokens):
        positions[token].append(position)
    return {token: burstiness(np.diff(places)) for token, places in positions.items() if len(places) >= max(least, 2)}


def distinct(texts: Iterable[Sequence[str]], n: int) -> float:
    """Return distinct-n: the fraction of different n-grams in all texts (arXiv 1510.03055); nan without n-grams."""
    if n < 1:
        raise ValueError(f"n is {n}: it must be at least 1.")
    counts: Counter[tuple[str, ...]] = Counter()
    for tokens in texts:
        counts.update(ngrams(tokens, n))
    return len(counts) / counts.total() if counts else float("nan")


def repetition(texts: Iterable[Sequence[str]], n: int = 4) -> float:
    """Return seq-rep-n: the mean of 1 - distinct-n over texts of n tokens or more, or nan (arXiv 1908.04319, 4.2)."""
    rates = [1 - distinct([tokens], n) for tokens in texts if len(tokens) >= n]
    return float(np.mean(rates)) if rates else float("nan")


def self_bleu(texts: Sequence[str], order: int = 4) -> float:
    """Return the mean BLEU of each text against all others, 0 to 100; higher means less diverse (arXiv 1802.01886)."""
    if len(texts) < 2:
        raise ValueError(f"There are {len(texts)} texts: self-BLEU needs at least 2.")
    if order < 1:
        raise ValueError(f"order is {order}: it must be at least 1.")
    metric = BLEU(effective_order=True, max_ngram_order=order)
    scores = [metric.sentence_score(text, [*texts[:i], *texts[i + 1 :]]).score for i, text in enumerate(texts)]
    return float(np.mean(scores))
