"""Texts beside references: sacreBLEU's BLEU (Post 2018, arXiv 1804.08771), of all of them and by length."""

from collections.abc import Sequence

import numpy as np
from sacrebleu.metrics import BLEU


def bleu(outputs: Sequence[str], references: Sequence[str]) -> tuple[float, str]:
    """BLEU of a corpus, 0 to 100, one reference for each output, and the signature that says how it was computed.

    Raises:
        ValueError: there are not as many references as outputs, or none.
    """
    if not outputs or len(outputs) != len(references):
        raise ValueError(f"{len(outputs)} outputs and {len(references)} references: as many of each, at least one.")
    metric = BLEU()
    return metric.corpus_score(list(outputs), [list(references)]).score, str(metric.get_signature())


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
