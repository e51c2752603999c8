"""Translation metrics: BLEU, chrF and TER of sacreBLEU (arXiv 1804.08771), and the BLEU of Dive into Deep Learning.

The metrics in `SACREBLEU` are computed by sacreBLEU and take its options, see `options`.
"""

import inspect
import math
from collections.abc import Collection, Mapping, Sequence
from itertools import zip_longest
from typing import Any, Literal, NamedTuple

import numpy as np
from sacrebleu.metrics import BLEU, CHRF, TER
from sacrebleu.metrics.base import Metric
from sacrebleu.significance import PairedTest

from lineage.metrics.summary import check_numbers, grouped, ngrams

SACREBLEU = {"bleu": BLEU, "chrf": CHRF, "ter": TER}
# Smallest value of each option.
LEAST = {"max_ngram_order": 1, "char_order": 1, "word_order": 0, "beta": 0, "smooth_value": 0}
References = Collection[str | Collection[str]]


class Score(NamedTuple):
    """Corpus score, 0 to 100 (TER can exceed 100), and the description of its computation by sacreBLEU.

    With bootstrap samples, `mean` is their mean score and `interval` half the width of its 95% confidence interval.
    """

    score: float
    signature: str
    mean: float | None = None
    interval: float | None = None


class Compared(NamedTuple):
    """Score of a system, and the p-value of its difference from the first system; None for the first."""

    score: float
    p_value: float | None


def options(name: str) -> dict[str, Any]:
    """Return the options of a metric in `SACREBLEU` with their defaults."""
    parameters = inspect.signature(SACREBLEU[name]).parameters.items()
    return {key: parameter.default for key, parameter in parameters if key != "references"}


def corpus_score(
    name: str, outputs: Collection[str], references: References, *, samples: int = 0, **settings: Any
) -> Score:
    """Return the corpus-level score of a metric in `SACREBLEU`.

    Args:
        references: one or several texts per output; their number may vary.
        samples: number of bootstrap samples for a confidence interval; 0: no interval.
        settings: see `options`.
    """
    metric = _metric(name, settings)
    score = metric.corpus_score(list(outputs), _transposed(outputs, references), samples)
    interval = (score._mean, score._ci) if samples > 1 else ()
    return Score(score.score, str(metric.get_signature()), *interval)


def sentence_scores(name: str, outputs: Collection[str], references: References, **settings: Any) -> list[float]:
    """Return the sentence-level scores of a metric in `SACREBLEU`; see `corpus_score`.

    BLEU ignores n-gram orders that a text is too short for, unless `effective_order` is False.
    """
    metric = _metric(name, {"effective_order": True} | settings if name == "bleu" else settings)
    columns = _transposed(outputs, references)
    rows = zip(outputs, zip(*columns))
    return [metric.sentence_score(output, [text for text in row if text is not None]).score for output, row in rows]


def compare(
    name: str,
    systems: Mapping[str, Collection[str]],
    references: References,
    *,
    test: Literal["bs", "ar"] = "bs",
    samples: int = 0,
    **settings: Any,
) -> tuple[dict[str, Compared], str]:
    """Return the scores of several systems, each tested against the first, and the signature.

    Args:
        name, references, settings: see `corpus_score`.
        systems: name -> outputs, at least two.
        test: "bs" for paired bootstrap resampling (Koehn 2004), "ar" for paired approximate randomization (Riezler &
            Maxwell 2005).
        samples: number of samples of the test; 0: 1,000 for "bs" and 10,000 for "ar".
    """
    if len(systems) < 2 or test not in ("bs", "ar"):
        raise ValueError(f"Got {len(systems)} systems and the test {test!r}: at least 2 are needed, and bs or ar.")
    for outputs in systems.values():
        columns = _transposed(outputs, references)  # the same for all systems; it also checks the number of outputs
    named: list[tuple[str, Sequence[str]]] = [(system, list(outputs)) for system, outputs in systems.items()]
    signatures, by_metric = PairedTest(named, {name: _metric(name, settings)}, columns, test, samples)()
    (key,) = signatures
    results: list[Any] = by_metric[key]
    scores = {system: Compared(float(result.score), result.p_value) for system, result in zip(systems, results)}
    return scores, str(signatures[key])


def bleu(outputs: Collection[str], references: References) -> tuple[float, str]:
    """Return corpus BLEU, 0 to 100, with sacreBLEU's defaults, and its signature."""
    return corpus_score("bleu", outputs, references)[:2]


def d2l_bleu(outputs: Sequence[Sequence[str]], references: Sequence[Sequence[str]], order: int = 2) -> float:
    """Return the mean BLEU of lists of tokens as in Dive into Deep Learning (section 10.7.6), 0 to 1.

    It is exp(min(0, 1 - len(reference) / len(output))) times the product of p_n^(1 / 2^n) over n from 1 to `order`, or
    to the output's length if that is less, where p_n is the n-gram precision. An empty output scores 0.
    """
    check_numbers(outputs, references)
    if order < 1:
        raise ValueError(f"order is {order}: it must be at least 1.")
    return sum(_d2l_bleu(*pair, order) for pair in zip(outputs, references)) / len(outputs)


def _d2l_bleu(output, reference, order):
    if not len(output):
        return 0.0
    score = math.exp(min(0, 1 - len(reference) / len(output)))
    for n in range(1, min(order, len(output)) + 1):
        counts, expected = (ngrams(tokens, n) for tokens in (output, reference))
        score *= ((counts & expected).total() / counts.total()) ** 0.5**n
    return score


def bleu_by_length(
    outputs: Sequence[str], references: Sequence[str], lengths: Sequence[int], groups: int = 6
) -> list[tuple[int, int, int, float]]:
    """Return BLEU by input length (arXiv 1409.0473, figure 2), in at most `groups` groups of about equal size.

    A group is (shortest length, longest length, number of inputs, BLEU); inputs of equal length are in the same group.
    """
    lengths = np.asarray(lengths)
    edges = np.unique(np.quantile(lengths, np.linspace(0, 1, groups + 1)[1:], method="lower"))
    number = np.searchsorted(edges, lengths)
    rows = []
    for group in np.unique(number):
        chosen = np.flatnonzero(number == group).tolist()
        score, _ = bleu([outputs[i] for i in chosen], [references[i] for i in chosen])
        rows.append((int(lengths[chosen].min()), int(lengths[chosen].max()), len(chosen), score))
    return rows


def _metric(name: str, settings: Mapping[str, Any]) -> Metric:
    if name not in SACREBLEU:
        raise ValueError(f"The metric is {name!r}: it must be one of {', '.join(SACREBLEU)}.")
    if unknown := settings.keys() - options(name):
        raise ValueError(f"{name} has no option {min(unknown)!r}: it has {', '.join(options(name))}.")
    for key, known in (("tokenize", BLEU.TOKENIZERS), ("smooth_method", BLEU.SMOOTH_DEFAULTS)):
        if settings.get(key) not in (None, *known):
            raise ValueError(f"{key} is {settings[key]!r}: it must be one of {', '.join(known)}.")
    for key, least in LEAST.items():
        if not isinstance(value := settings.get(key), int | float | None):
            raise ValueError(f"{key} is {value!r}: it must be a number.")
        if value is not None and not value >= least:
            raise ValueError(f"{key} is {value}: it must be at least {least}.")
    smoothed = [method for method, value in BLEU.SMOOTH_DEFAULTS.items() if value is not None]
    if settings.get("smooth_value") is not None and settings.get("smooth_method") not in smoothed:
        known = " or ".join(smoothed)
        raise ValueError(
            f"smooth_value is {settings['smooth_value']}, which has no effect unless smooth_method is {known}."
        )
    try:
        return SACREBLEU[name](**settings)
    except (ImportError, RuntimeError) as error:  # a tokenizer that needs an optional package
        raise ModuleNotFoundError(f"A tokenizer is not installed: {' '.join(str(error).split())}") from None


def _transposed(outputs: Collection[str], references: References) -> list[tuple[Any, ...]]:
    """Return a column of all first references, one of all second references, ..., padded with None."""
    return list(zip_longest(*grouped(outputs, references)))
