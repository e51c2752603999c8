"""Directions of metrics: is a higher value better?"""

import re

LOWER = re.compile(r"loss|perplexity|error|bits|distance|\bmse\b|\b[wt]er\b")
HIGHER = re.compile(
    r"accuracy|exact_match|bleu|chrf|rouge|precision|recall|correlation|pearson|spearman|matthews|psnr|auroc|reward|"
    r"(\b|_)f1\b|\bap\b|\bap_\d"
)


def higher_is_better(metric: str) -> bool | None:
    """Return whether a higher value of a metric, such as "test/accuracy", is better; None if its name does not say."""
    if LOWER.search(metric):
        return False
    return True if HIGHER.search(metric) else None


def direction(metric: str, stated: bool | None, key: str) -> bool:
    """Return whether higher is better: as `stated` by the config's `key`, or else by the name of the metric.

    Raises:
        ValueError: neither says it.
    """
    highest = higher_is_better(metric) if stated is None else stated
    if highest is None:
        raise ValueError(f"{key} is not set: it must be True or False, because the name {metric!r} does not say.")
    return highest
