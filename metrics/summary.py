"""ROUGE: what a text and its references share (Lin 2004), with the numbers of Google's `rouge-score`.

Each score is of a list of tokens; `tokens` is rouge-score's tokenizer, `words` one for other languages too. A kind of
score is named "1", "2", ... (n-grams), "L" (longest common subsequence), "Lsum" (the same, sentence by sentence), "W"
(the same, which favours consecutive matches), "S" and "SU" (skip-bigrams, and with unigrams; "S4" and "SU4" with at
most 4 tokens between).
"""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np

WEIGHT = 1.2  # of ROUGE-W: k tokens in a row count as k ** WEIGHT
_CJK = r"[\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]"


class Score(NamedTuple):
    """Of a text beside a reference, or of a corpus: each 0 to 1."""

    precision: float
    recall: float
    f: float


@cache
def _stemmer():
    from nltk.stem.porter import PorterStemmer

    return cache(PorterStemmer().stem)


def tokens(text: str, stem: bool = False) -> list[str]:
    """Runs of ASCII letters and digits in lower case; `stem` those of more than 3 (Porter's stemmer, nltk's)."""
    found = re.findall("[a-z0-9]+", text.lower())
    if not stem:
        return found
    stemmed = [_stemmer()(token) if len(token) > 3 else token for token in found]
    return [token for token in stemmed if re.fullmatch("[a-z0-9]+", token)]


def words(text: str) -> list[str]:
    """Words of any script in lower case; of Chinese and Japanese each character."""
    return re.findall(rf"{_CJK}|(?:(?!{_CJK})\w)+", text.lower())


def rouge(
    output: str,
    references: str | Sequence[str],
    kinds: Sequence[str] = ("1", "2", "L", "Lsum"),
    *,
    beta: float = 1.0,
    tokenize: Callable[[str], list[str]] = tokens,
) -> dict[str, Score]:
    """The scores of a text, each beside the reference that gives the highest F.

    Args:
        output: the text; of "Lsum", each line is a sentence.
        references: one, or several.
        kinds: of scores, see above.
        beta: how many times as important as precision recall is in F.
        tokenize: makes tokens of a text.

    Raises:
        ValueError: there is no reference, or a kind is unknown.
    """
    references = [references] if isinstance(references, str) else list(references)
    if not references:
        raise ValueError("there is no reference: give at least one.")
    if not beta > 0:
        raise ValueError(f"beta is {beta}: it must be above 0.")
    ours, theirs = _Text(output, tokenize), [_Text(text, tokenize) for text in references]
    found = {}
    for kind in kinds:
        scores = [_scored(*_hits(kind)(ours, text), beta) for text in theirs]
        found[kind] = max(scores, key=lambda score: score.f)
    return found


def corpus_rouge(
    outputs: Sequence[str],
    references: Sequence[str | Sequence[str]],
    kinds: Sequence[str] = ("1", "2", "L", "Lsum"),
    *,
    samples: int = 1000,
    confidence: float = 0.95,
    seed: int = 0,
    **options: Any,
) -> dict[str, dict[str, Score]]:
    """The mean scores of texts, "mean", and the ends of their confidence intervals, "low" and "high".

    Args:
        outputs, references: of each text its reference or references.
        kinds, options: those of `rouge`.
        samples: drawn of the texts with replacement, whose means the intervals are percentiles of (bootstrap).
        confidence: of the intervals.
        seed: of the samples.

    Raises:
        ValueError: there are not as many references as outputs, or none; and as `rouge`.
    """
    if not outputs or len(outputs) != len(references):
        raise ValueError(f"{len(outputs)} outputs and {len(references)} references: as many of each, at least one.")
    each = [rouge(output, some, kinds, **options) for output, some in zip(outputs, references)]
    scores = np.array([[row[kind] for kind in kinds] for row in each])  # [N, kinds, 3]
    drawn = np.random.default_rng(seed).multinomial(len(scores), np.full(len(scores), 1 / len(scores)), samples)
    means = np.tensordot(drawn / len(scores), scores, axes=1)
    low, high = np.quantile(means, [(1 - confidence) / 2, (1 + confidence) / 2], axis=0)
    named = zip(kinds, *(values.tolist() for values in (low, scores.mean(axis=0), high)))
    return {kind: {"low": Score(*a), "mean": Score(*b), "high": Score(*c)} for kind, a, b, c in named}


class _Text:
    """A text's tokens, as a whole and by sentences, which are its lines."""

    def __init__(self, text, tokenize):
        self.sentences = [found for found in map(tokenize, text.split("\n")) if found]
        self.tokens = tokenize(text)


def _scored(hits, ours, theirs, beta):
    """Of what is shared, and of all that the text and the reference have."""
    precision, recall = hits / ours if ours else 0.0, hits / theirs if theirs else 0.0
    whole = recall + beta**2 * precision
    return Score(precision, recall, (1 + beta**2) * precision * recall / whole if whole else 0.0)


@cache
def _hits(kind):
    """The function of a text and a reference that counts what they share, and what each has."""
    known = {"L": _longest, "Lsum": _longest_of_sentences, "W": _weighted}
    if kind in known:
        return known[kind]
    if re.fullmatch("[1-9][0-9]*", kind):
        size = int(kind)
        return lambda ours, theirs: _shared(*(_ngrams(text.tokens, size) for text in (ours, theirs)))
    if match := re.fullmatch("(SU?)([0-9]*)", kind):
        limit = int(match[2]) if match[2] else None
        skipped = lambda text: _skip_bigrams(text.tokens, limit, match[1] == "SU")  # noqa: E731
        return lambda ours, theirs: _shared(skipped(ours), skipped(theirs))
    raise ValueError(f"unknown kind of ROUGE {kind!r}: it is 1, 2, ..., L, Lsum, W, S, SU, S4, SU4 or alike.")


def _shared(ours, theirs):
    hits = sum(min(count, theirs[key]) for key, count in ours.items() if key in theirs)
    return hits, ours.total(), theirs.total()


def _ngrams(tokens, size):
    return Counter(zip(*(tokens[start:] for start in range(size))))


def _skip_bigrams(tokens, limit, unigrams):
    """Pairs of tokens in their order, with at most `limit` others between; and, if asked for, each token."""
    limit = len(tokens) if limit is None else limit
    pairs = Counter(pair for skip in range(1, min(limit + 2, len(tokens))) for pair in zip(tokens, tokens[skip:]))
    return pairs + Counter(tokens) if unigrams else pairs


def _longest(ours, theirs):
    """The length of the longest common subsequence."""
    return _growths(_places(theirs.tokens), ours.tokens)[-1][1].bit_count(), len(ours.tokens), len(theirs.tokens)


def _places(rows):
    """Of each token the rows where it stands, as the bits of a number."""
    places: dict[str, int] = {}
    for row, token in enumerate(rows):
        places[token] = places.get(token, 0) | 1 << row
    return places


def _growths(places, columns):
    """Of columns the rows that match, and those at which the longest common subsequence grows, as bits; of several
    columns in a row that match none, the first.

    So its length for the first i rows and the columns up to this one is the number of the lowest i bits that are set. A
    column takes a few operations on numbers of as many bits as there are rows (Hyyro 2004).
    """
    same, found = -1, [(0, 0)]  # endless ones: the bits beyond the last row never change
    for token in columns:
        if match := places.get(token, 0):
            common = same & match
            same = (same + common) | (same - common)
            found.append((match, ~same))
        elif found[-1][0]:
            found.append((0, ~same))
    return found


def _longest_of_sentences(ours, theirs):
    """Of each sentence of the reference, what is in its longest common subsequence with any sentence of the text; a
    token counts as often as it is in both texts."""
    left, hits = Counter(ours.tokens) & Counter(theirs.tokens), 0
    for sentence in theirs.sentences:
        places, common = _places(sentence), 0
        for other in ours.sentences:
            common |= _common(places, other)
        for row, token in enumerate(sentence):
            if common >> row & 1:
                hits += left[token] > 0
                left[token] -= 1
    return hits, len(ours.tokens), len(theirs.tokens)


def _common(places, columns):
    """Which rows are in the longest common subsequence, as bits: of several the one that rouge-score finds.

    From the last row and column on, it takes a match, else leaves out rows that add nothing, else the column.
    """
    found, below = 0, -1
    for match, growth in reversed(_growths(places, columns)):
        row = ((match | growth) & below).bit_length()
        if match & (last := 1 << row >> 1):
            found, row = found | last, row - 1
        below = (1 << row) - 1
    return found


def _weighted(ours, theirs):
    """The length of the weighted longest common subsequence, as if all matches stood in a row."""
    rows, columns = np.array(theirs.tokens, object), np.array(ours.tokens, object)
    if not len(rows) or not len(columns):
        return 0.0, len(columns), len(rows)
    # By diagonals, from the last two: place i has row i and column d - i. `run` is how many matches end there in a row.
    size = len(rows) + 1
    before, last = np.zeros((2, 2, size))  # (score, run) each
    for diagonal in range(2, len(rows) + len(columns) + 1):
        i = np.arange(max(1, diagonal - len(columns)), min(len(rows), diagonal - 1) + 1)
        same = rows[i - 1] == columns[diagonal - i - 1]
        score, run = before[:, i - 1]
        now = np.zeros((2, size))
        gain = (run + 1) ** WEIGHT - run**WEIGHT
        now[0, i] = np.where(same, score + gain, np.maximum(last[0, i - 1], last[0, i]))
        now[1, i] = np.where(same, run + 1, 0)
        before, last = last, now
    return float(last[0, len(rows)] ** (1 / WEIGHT)), len(columns), len(rows)
