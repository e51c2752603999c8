"""ROUGE (Lin 2004), as in Google's `rouge-score`.

`tokens` is rouge-score's tokenizer; `words` tokenizes any script. The kinds of ROUGE are "1", "2", ... (n-grams), "L"
(longest common subsequence, LCS), "Lsum" (LCS by sentences), "W" (weighted LCS, which favors consecutive matches), "S"
(skip-bigrams) and "SU" (skip-bigrams and unigrams); "S4" and "SU4" allow gaps of at most 4 tokens. W and SU follow the
paper, or with `perl` the program ROUGE 1.5.5, by which the conferences DUC and TAC published their scores.
"""

import re
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np

KINDS = ("1", "2", "L", "Lsum")  # default kinds
WEIGHT = 1.2  # exponent of ROUGE-W: k consecutive matches count as k ** WEIGHT
_CJK = r"[\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]"


class Score(NamedTuple):
    """Precision, recall and F of a text or a corpus, each 0 to 1."""

    precision: float
    recall: float
    f: float


@cache
def _stemmer():
    from nltk.stem.porter import PorterStemmer

    return cache(PorterStemmer().stem)


def tokens(text: str, stem: bool = False) -> list[str]:
    """Split a text into lower-case runs of ASCII letters and digits; `stem` stems those of more than 3 characters."""
    runs = re.findall("[a-z0-9]+", text.lower())
    if not stem:
        return runs
    stemmed = [_stemmer()(token) if len(token) > 3 else token for token in runs]
    return [token for token in stemmed if re.fullmatch("[a-z0-9]+", token)]


def words(text: str) -> list[str]:
    """Split a text of any script into lower-case words, and Chinese and Japanese into characters."""
    return re.findall(rf"{_CJK}|(?:(?!{_CJK})\w)+", text.lower())


def rouge(
    output: str,
    references: str | Collection[str],
    kinds: Sequence[str] = KINDS,
    *,
    beta: float = 1.0,
    tokenize: Callable[[str], list[str]] = tokens,
    perl: bool = False,
) -> dict[str, Score]:
    """Return the scores of a text; with several references, the scores with the highest F for each kind.

    Args:
        output: text; for "Lsum", and for "W" with `perl`, each line is a sentence.
        kinds: kinds of ROUGE, see the module's documentation.
        beta: weight of recall relative to precision in F.
        perl: whether to compute SU and W as ROUGE 1.5.5 does: SU leaves out the last token as a unigram; W takes the
            union of the weighted LCS with each sentence, as Lsum does, and divides for its recall by the sum of
            |sentence| ** 1.2 instead of by the length of the reference.
    """
    references = [references] if isinstance(references, str) else list(references)
    if not references:
        raise ValueError("There is no reference: at least one is needed.")
    if not beta > 0:
        raise ValueError(f"beta is {beta}: it must be above 0.")
    candidate, expected = _Text(output, tokenize), [_Text(text, tokenize) for text in references]
    scores = {kind: [_scored(_hits(kind, perl)(candidate, text), beta) for text in expected] for kind in kinds}
    return {kind: max(group, key=lambda score: score.f) for kind, group in scores.items()}


def corpus_rouge(
    outputs: Collection[str],
    references: Collection[str | Collection[str]],
    kinds: Sequence[str] = KINDS,
    *,
    samples: int = 1000,
    confidence: float = 0.95,
    seed: int = 0,
    **options: Any,
) -> dict[str, dict[str, Score]]:
    """Return the mean scores of texts, "mean", and the bounds of their confidence intervals, "low" and "high".

    The bounds are percentiles of the means of bootstrap samples. The kinds and options are those of `rouge`.
    """
    if samples < 1:
        raise ValueError(f"samples is {samples}: it must be at least 1.")
    if not 0 < confidence < 1:
        raise ValueError(f"confidence is {confidence}: it must be between 0 and 1.")
    check_numbers(outputs, references)
    rows = [rouge(output, group, kinds, **options) for output, group in zip(outputs, references)]
    scores = np.array([[row[kind] for kind in kinds] for row in rows])  # [N, kinds, 3]
    drawn = np.random.default_rng(seed).multinomial(len(scores), np.full(len(scores), 1 / len(scores)), samples)
    means = np.tensordot(drawn / len(scores), scores, axes=1)
    low, high = np.quantile(means, [(1 - confidence) / 2, (1 + confidence) / 2], axis=0)
    named = zip(kinds, *(values.tolist() for values in (low, scores.mean(axis=0), high)))
    return {kind: {"low": Score(*a), "mean": Score(*b), "high": Score(*c)} for kind, a, b, c in named}


def grouped(outputs: Collection[Any], references: Collection[str | Collection[str]]) -> list[list[str]]:
    """Return the references of each output; raise ValueError as `check_numbers`, or if an output has none."""
    check_numbers(outputs, references)
    groups = [[group] if isinstance(group, str) else list(group) for group in references]
    if not all(groups):
        raise ValueError(f"Output {groups.index([])} has no reference: at least one is needed.")
    return groups


def check_numbers(outputs: Collection[Any], references: Collection[Any]) -> None:
    """Raise ValueError unless there are as many outputs as references, and at least one."""
    if not len(outputs) or len(outputs) != len(references):
        counts = f"Got {len(outputs)} outputs and {len(references)} references"
        raise ValueError(f"{counts}: the numbers must be equal and not 0.")


class _Text:
    """Tokens of a text and of each of its sentences (lines)."""

    def __init__(self, text, tokenize):
        self.sentences = [sentence for sentence in map(tokenize, text.split("\n")) if sentence]
        self.tokens = tokenize(text)


def _scored(counts, beta):
    """Compute precision, recall and F from the numbers of matches, output units and reference units."""
    hits, predicted, expected = counts
    precision, recall = hits / predicted if predicted else 0.0, hits / expected if expected else 0.0
    denominator = recall + beta**2 * precision
    return Score(precision, recall, (1 + beta**2) * precision * recall / denominator if denominator else 0.0)


@cache
def _hits(kind, perl):
    """Return the function (output, reference) -> (matches, units of the output, units of the reference)."""
    known = {"L": _longest, "Lsum": _longest_of_sentences, "W": _weighted_of_sentences if perl else _weighted}
    if kind in known:
        return known[kind]
    if re.fullmatch("[1-9][0-9]*", kind):
        size = int(kind)
        return lambda *texts: _shared(*(ngrams(text.tokens, size) for text in texts))
    if match := re.fullmatch("(SU?)([0-9]*)", kind):
        limit = int(match[2]) if match[2] else None
        singles = slice(0) if match[1] == "S" else slice(-1 if perl else None)
        return lambda *texts: _shared(*(_skip_bigrams(text.tokens, limit, singles) for text in texts))
    raise ValueError(f"The kind of ROUGE is {kind!r}: it must be 1, 2, ..., L, Lsum, W, S, SU, S4, SU4, ...")


def _shared(output, reference):
    hits = sum(min(count, reference[key]) for key, count in output.items() if key in reference)
    return hits, output.total(), reference.total()


def ngrams(tokens: Sequence[Any], size: int) -> Counter[tuple[Any, ...]]:
    """Count the n-grams of n = `size`; raise ValueError for a text, whose n-grams would be of characters."""
    if isinstance(tokens, str):
        raise ValueError(f"{tokens[:60]!r} is a text: it must be a list of tokens.")
    return Counter(zip(*(tokens[start:] for start in range(size))))


def _skip_bigrams(tokens, limit, singles):
    """Count the ordered pairs of tokens with at most `limit` tokens between them, and the tokens of a slice."""
    limit = len(tokens) if limit is None else limit
    pairs = Counter(pair for skip in range(1, min(limit + 2, len(tokens))) for pair in zip(tokens, tokens[skip:]))
    return pairs + Counter(tokens[singles])


def _longest(output, reference):
    """Return the length of the longest common subsequence, and the lengths of both texts."""
    hits = _growths(_positions(reference.tokens), output.tokens)[-1][1].bit_count()
    return hits, len(output.tokens), len(reference.tokens)


def _positions(rows):
    """Map each token to its positions, as the bits of an integer."""
    positions = {}
    for row, token in enumerate(rows):
        positions[token] = positions.get(token, 0) | 1 << row
    return positions


def _growths(positions, columns):
    """Return, for each column, the matching rows and the rows at which the LCS grows, as the bits of integers.

    The LCS length of the first i rows and the columns up to this one is the number of set bits among the lowest i. Each
    column takes a few operations on integers with one bit per row (Hyyro 2004). Of consecutive columns without a match,
    only the first is returned.
    """
    same, growths = -1, [(0, 0)]  # infinitely many ones: the bits beyond the last row never change
    for token in columns:
        if match := positions.get(token, 0):
            common = same & match
            same = (same + common) | (same - common)
            growths.append((match, ~same))
        elif growths[-1][0]:
            growths.append((0, ~same))
    return growths


def _longest_of_sentences(output, reference):
    """Return the number of reference tokens in the union of the LCS with each output sentence, and both lengths."""
    left, hits = Counter(output.tokens) & Counter(reference.tokens), 0
    for sentence in reference.sentences:
        positions, common = _positions(sentence), 0
        for candidate in output.sentences:
            common |= _common(positions, candidate)
        for row, token in enumerate(sentence):
            if common >> row & 1:  # a token counts at most as often as it occurs in both texts
                hits += left[token] > 0
                left[token] -= 1
    return hits, len(output.tokens), len(reference.tokens)


def _common(positions, columns):
    """Return the rows of the longest common subsequence as bits, choosing the same one as rouge-score.

    Starting from the last row and column, take a match, else skip rows that add nothing, else skip the column.
    """
    common, below = 0, -1
    for match, growth in reversed(_growths(positions, columns)):
        row = ((match | growth) & below).bit_length()
        last = 1 << row >> 1  # the bit of the last row; 0 if there is none
        if match & last:
            common, row = common | last, row - 1
        below = (1 << row) - 1
    return common


def _weighted(output, reference):
    """Return the weighted LCS score as an equivalent number of consecutive matches, and both lengths."""
    score, _ = _weighted_table(reference.tokens, output.tokens)[-1][-1]
    return score ** (1 / WEIGHT), len(output.tokens), len(reference.tokens)


def _weighted_table(rows, columns):
    """Return the score of the weighted LCS of each pair of prefixes, and the consecutive matches at its end."""
    table = [[(0.0, 0)] * (len(columns) + 1)]
    for token in rows:
        last, row = table[-1], [(0.0, 0)]
        for column, other in enumerate(columns):
            score, run = last[column]
            gain = (run + 1) ** WEIGHT - run**WEIGHT
            row.append((score + gain, run + 1) if token == other else (max(last[column + 1][0], row[-1][0]), 0))
        table.append(row)
    return table


def _weighted_of_sentences(output, reference):
    """Return the counts of ROUGE 1.5.5: runs of matches in the union of the weighted LCS with each sentence."""
    left, hits, size = Counter(output.tokens) & Counter(reference.tokens), 0.0, 0.0
    for sentence in reference.sentences:
        matched, run = set().union(*(_weighted_common(sentence, candidate) for candidate in output.sentences)), 0
        for row in sorted(matched):
            if left[sentence[row]] > 0:  # else a run goes on after this token, as it does in ROUGE 1.5.5
                left[sentence[row]] -= 1
                run += 1
                if row + 1 not in matched:
                    hits, run = hits + run**WEIGHT, 0
        size += len(sentence) ** WEIGHT
    return hits ** (1 / WEIGHT), len(output.tokens), size


def _weighted_common(rows, columns):
    """Return the rows of the weighted LCS, choosing the same one as ROUGE 1.5.5."""
    table, matched, row, column = _weighted_table(rows, columns), set(), len(rows), len(columns)
    while row and column:
        if rows[row - 1] == columns[column - 1]:
            row, column = row - 1, column - 1
            matched.add(row)
        elif table[row - 1][column][0] >= table[row][column - 1][0]:
            row -= 1
        else:
            column -= 1
    return matched
