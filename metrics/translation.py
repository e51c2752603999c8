"""Texts beside references: sacreBLEU's BLEU, chrF and TER (Post 2018, arXiv 1804.08771), and BLEU by length; and the
BLEU of Dive into Deep Learning.

sacreBLEU's metrics are those of `SACREBLEU`, and take its options, see `options`.
"""

import inspect
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any, Literal, NamedTuple

import numpy as np
from sacrebleu.metrics import BLEU, CHRF, TER
from sacrebleu.metrics.base import Metric
from sacrebleu.significance import PairedTest

SACREBLEU = {"bleu": BLEU, "chrf": CHRF, "ter": TER}
References = Sequence[str | Sequence[str]]


class Score(NamedTuple):
    """Of a corpus: 0 to 100, TER's above 100 too.

    `signature` says how it was computed. Of the bootstrap, if there was one: `mean` of the samples' scores, and 95% of
    them are at most about `interval` away.
    """

    score: float
    signature: str
    mean: float | None = None
    interval: float | None = None


class Compared(NamedTuple):
    """A system beside the first: the probability of so large a difference if they were equally good; None of itself."""

    score: float
    p_value: float | None


def options(name: str) -> dict[str, Any]:
    """What a metric of `SACREBLEU` may be given, with what it is given otherwise."""
    parameters = inspect.signature(SACREBLEU[name]).parameters.items()
    return {key: parameter.default for key, parameter in parameters if key != "references"}


def corpus_score(
    name: str, outputs: Sequence[str], references: References, *, samples: int = 0, **settings: Any
) -> Score:
    """A metric of `SACREBLEU` of texts together.

    Args:
        outputs, references: of each text its reference or references, not always as many.
        samples: of the bootstrap, for an interval.
        settings: see `options`.

    Raises:
        ValueError: there are not as many references as outputs, or none; or an option is unknown.
    """
    metric = _metric(name, settings)
    score = metric.corpus_score(list(outputs), _transposed(outputs, references), samples)
    interval = (score._mean, score._ci) if samples > 1 else ()
    return Score(score.score, str(metric.get_signature()), *interval)


def sentence_scores(name: str, outputs: Sequence[str], references: References, **settings: Any) -> list[float]:
    """A metric of `SACREBLEU` of each text by itself; of BLEU, orders that a text is too short for do not count unless
    `effective_order` is False. Raises as `corpus_score`."""
    metric = _metric(name, {"effective_order": True} | settings if name == "bleu" else settings)
    columns = _transposed(outputs, references)
    rows = zip(outputs, zip(*columns))
    return [metric.sentence_score(output, [text for text in row if text is not None]).score for output, row in rows]


def compare(
    name: str,
    systems: Mapping[str, Sequence[str]],
    references: References,
    *,
    test: Literal["bs", "ar"] = "bs",
    samples: int = 0,
    **settings: Any,
) -> tuple[dict[str, Compared], str]:
    """A metric of `SACREBLEU` of several systems' outputs, each tested against the first's, and the signature.

    Args:
        systems: the outputs of each, at least two.
        references: as in `corpus_score`.
        test: paired bootstrap resampling (Koehn 2004), or "ar", paired approximate randomisation (Riezler & Maxwell
            2005).
        samples: of the test; 0 are 1,000 of "bs" and 10,000 of "ar".

    Raises:
        ValueError: there is one system, or the test is unknown; and as `corpus_score`.
    """
    if len(systems) < 2 or test not in ("bs", "ar"):
        raise ValueError(f"{len(systems)} systems, test {test!r}: at least 2 systems, and bs or ar.")
    *_, columns = (_transposed(outputs, references) for outputs in systems.values())
    named = [(system, list(outputs)) for system, outputs in systems.items()]
    signatures, found = PairedTest(named, {name: _metric(name, settings)}, columns, test, samples)()
    (key,) = signatures
    scores = {system: Compared(float(each.score), each.p_value) for system, each in zip(systems, found[key])}
    return scores, str(signatures[key])


def bleu(outputs: Sequence[str], references: References) -> tuple[float, str]:
    """BLEU of a corpus with sacreBLEU's defaults, and its signature. Raises as `corpus_score`."""
    return corpus_score("bleu", outputs, references)[:2]


def d2l_bleu(outputs: Sequence[Sequence[str]], references: Sequence[Sequence[str]], order: int = 2) -> float:
    """The mean BLEU of lists of tokens as Dive into Deep Learning has it (section 10.7.6), 0 to 1.

    exp(min(0, 1 - len(reference) / len(output))) times the product of p_n^(1 / 2^n), n from 1 to `order` or to the
    length of the output if that is shorter, where p_n is the part of the output's n-grams that the reference has. 0 of
    an output without tokens.

    Raises:
        ValueError: there are not as many references as outputs, or none; or the order is below 1.
    """
    _check(outputs, references)
    if order < 1:
        raise ValueError(f"order is {order}: it must be at least 1.")
    return sum(_d2l_bleu(*pair, order) for pair in zip(outputs, references)) / len(outputs)


def _d2l_bleu(output, reference, order):
    if not len(output):
        return 0.0
    score = math.exp(min(0, 1 - len(reference) / len(output)))
    for n in range(1, min(order, len(output)) + 1):
        ours, theirs = (Counter(zip(*(tokens[start:] for start in range(n)))) for tokens in (output, reference))
        score *= ((ours & theirs).total() / ours.total()) ** 0.5**n
    return score


def bleu_by_length(
    outputs: Sequence[str], references: Sequence[str], lengths: Sequence[int], groups: int = 6
) -> list[tuple[int, int, int, float]]:
    """BLEU of about evenly filled groups of inputs of like length (arXiv 1409.0473, figure 2).

    Args:
        outputs, references: one of each for an input.
        lengths: of the inputs.
        groups: at most so many; inputs of one length stay together.

    Returns:
        For each group its shortest and longest length, how many inputs it has and its BLEU.
    """
    lengths = np.asarray(lengths)
    edges = np.unique(np.quantile(lengths, np.linspace(0, 1, groups + 1)[1:], method="lower"))
    number = np.searchsorted(edges, lengths)
    rows = []
    for group in np.unique(number):
        chosen = np.flatnonzero(number == group)
        score, _ = bleu([outputs[i] for i in chosen], [references[i] for i in chosen])
        rows.append((int(lengths[chosen].min()), int(lengths[chosen].max()), len(chosen), score))
    return rows


def _metric(name: str, settings: Mapping[str, Any]) -> Metric:
    if name not in SACREBLEU:
        raise ValueError(f"{name!r} is not a metric of sacreBLEU: it is one of {', '.join(SACREBLEU)}.")
    if unknown := settings.keys() - options(name):
        raise ValueError(f"{name} has no option {min(unknown)!r}: it has {', '.join(options(name))}.")
    for key, known in (("tokenize", BLEU.TOKENIZERS), ("smooth_method", BLEU.SMOOTH_DEFAULTS)):
        if settings.get(key) not in (None, *known):
            raise ValueError(f"{key} is {settings[key]!r}: it must be one of {', '.join(known)}.")
    try:
        return SACREBLEU[name](**settings)
    except (ImportError, RuntimeError) as error:  # a tokenizer that needs another package
        raise ModuleNotFoundError(f"a tokenizer is missing: {' '.join(str(error).split())}") from None


def _transposed(outputs: Sequence[str], references: References) -> list[tuple[str | None, ...]]:
    """A column of the first references, one of the second, ...; None where a text has fewer."""
    _check(outputs, references)
    rows = [[row] if isinstance(row, str) else list(row) for row in references]
    if not all(rows):
        raise ValueError(f"output {rows.index([])} has no reference: give at least one.")
    return list(zip_longest(*rows))


def _check(outputs, references):
    if not outputs or len(outputs) != len(references):
        raise ValueError(f"{len(outputs)} outputs and {len(references)} references: as many of each, at least one.")
