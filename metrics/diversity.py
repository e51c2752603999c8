"""How varied texts are: burstiness, distinct n-grams, repetition, and how alike samples are."""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import ArrayLike
from sacrebleu.metrics import BLEU

from lineage.metrics.summary import words

# What ends with a full stop and goes on: abbreviations, and single letters (initials, "e.g.").
_ABBREVIATIONS = re.compile(
    r"(?:\b(?:mr|mrs|ms|dr|prof|sr|jr|st|vs|etc|inc|ltd|co|no|fig|eq|al|gen|col|sgt|capt|dept|approx|cf|bzw|usw|ca|nr|"
    r"jan|feb|mar|apr|jun|jul|aug|sep|sept|oct|nov|dec)|\b\w)\.$",
    re.IGNORECASE,
)
_END = re.compile(
    r"[.!?\u2026]+[\"'\u201d\u2019)\]]*(?=\s|$)|[\u3002\uff01\uff1f\uff61]+[\u300d\u300f\u201d\uff09]*|\n+"
)


def sentences(text: str) -> list[str]:
    """The sentences of a text: they end with . ! ? or an ellipsis before white space, with a full stop of Chinese or
    Japanese, or with the line.

    A full stop in a number, after an abbreviation or an initial ends none, nor does an ellipsis before a lower-case
    letter.
    """
    found, start = [], 0
    for end in _END.finditer(text):
        before, after = text[start : end.end()], text[end.end() :].lstrip()[:1]
        goes_on = end[0] == "." and _ABBREVIATIONS.search(before)
        goes_on = goes_on or (end[0].startswith(("...", "\u2026")) and after.islower())
        if not goes_on or not after:
            found.append(before.strip())
            start = end.end()
    return [sentence for sentence in [*found, text[start:].strip()] if re.search(r"\w", sentence)]


def burstiness(values: ArrayLike) -> float:
    """(s - m) / (s + m) of the standard deviation and the mean of values [N], none of them negative.

    It is -1 of equal ones, 0 of the gaps of a Poisson process, and below 1 (Goh & Barabasi 2008, equation 2).

    Raises:
        ValueError: there is no value, they are all 0, or one is negative or nan.
    """
    values = np.asarray(values, float)
    if not (values >= 0).all():
        raise ValueError(f"burstiness is of values that are not negative, not of {values[~(values >= 0)][0]}.")
    if not values.any():
        raise ValueError("burstiness needs at least one value, and not zeros alone.")
    return float((values.std() - values.mean()) / (values.std() + values.mean()))


def sentence_burstiness(text: str, tokenize: Callable[[str], list[str]] = words) -> float:
    """The burstiness of sentences' lengths in tokens."""
    return burstiness([len(tokenize(sentence)) for sentence in sentences(text)])


def word_burstiness(tokens: Sequence[str], least: int = 3) -> dict[str, float]:
    """The burstiness of the gaps between one occurrence and the next, of each token that has `least` or more."""
    places = defaultdict(list)
    for place, token in enumerate(tokens):
        places[token].append(place)
    return {token: burstiness(np.diff(found)) for token, found in places.items() if len(found) >= max(least, 2)}


def distinct(texts: Iterable[Sequence[str]], n: int) -> float:
    """How many different n-grams there are of all, in lists of tokens together (arXiv 1510.03055); nan without any.

    Raises:
        ValueError: n is below 1.
    """
    if n < 1:
        raise ValueError(f"n is {n}: it must be at least 1.")
    counts = Counter(gram for tokens in texts for gram in zip(*(tokens[start:] for start in range(n))))
    return len(counts) / counts.total() if counts else float("nan")


def repetition(texts: Iterable[Sequence[str]], n: int = 4) -> float:
    """The part of n-grams that were in the same text before, 1 - distinct in each (arXiv 1908.04319, seq-rep-n): their
    mean over the texts that have any; nan where none has."""
    parts = [1 - distinct([tokens], n) for tokens in texts if len(tokens) >= n]
    return float(np.mean(parts)) if parts else float("nan")


def self_bleu(texts: Sequence[str], order: int = 4) -> float:
    """The mean BLEU of each text beside all others, 0 to 100: the higher, the more alike (arXiv 1802.01886).

    Raises:
        ValueError: there are not two texts.
    """
    if len(texts) < 2:
        raise ValueError(f"self-BLEU needs at least 2 texts, not {len(texts)}.")
    metric = BLEU(effective_order=True, max_ngram_order=order)
    scores = [metric.sentence_score(text, [*texts[:i], *texts[i + 1 :]]).score for i, text in enumerate(texts)]
    return float(np.mean(scores))
