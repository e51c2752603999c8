"""Directions of metrics: whether higher or lower values are better."""

import re

LOWER = re.compile(r"loss|perplexity|error|bits|distance|\br?mse\b|\bmae\b|\bnll\b|\b[cwt]er\b")
HIGHER = re.compile(
    r"accuracy|exact_match|bleu|chrf|rouge|precision|recall|correlation|pearson|spearman|matthews|psnr|auroc|reward|"
    r"(\b|_)f1\b|\bap\b|\bap_\d"
)


def higher_is_better(metric: str) -> bool | None:
    """Return whether higher values of a metric, such as "test/accuracy", are better; None if its name is ambiguous."""
    name = metric.partition("/")[2] or metric  # a split, such as an evaluator called "errors", has no direction
    if LOWER.search(name):
        return False
    return True if HIGHER.search(name) else None


def direction(metric: str, stated: bool | None, key: str) -> bool:
    """Return whether higher is better: `stated`, the value of the config's `key`, or else by the metric's name.

    Raises:
        ValueError: neither determines the direction.
    """
    highest = higher_is_better(metric) if stated is None else stated
    if highest is None:
        raise ValueError(f"{key} is not set: it must be True or False, because the direction of {metric!r} is unknown.")
    return highest
