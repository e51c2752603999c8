"""How often the right class is found."""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int
from numpy.typing import ArrayLike
from scipy.stats import rankdata, spearmanr


def correct(logits: Float[Array, "*N V"], labels: Int[Array, "*N"]) -> Bool[Array, "*N"]:
    """Whether the highest logit is the label's; of equal ones the first counts. Never where a logit is nan."""
    return (logits.argmax(axis=-1) == labels) & ~jnp.isnan(logits.max(axis=-1))


def correct_top_k(logits: Float[Array, "*N V"], labels: Int[Array, "*N"], k: int) -> Bool[Array, "*N"]:
    """Whether fewer than `k` other classes have a logit at least as high as the label's. Never where the label is no
    class or its logit is nan; another's that is nan is higher."""
    own = jnp.take_along_axis(logits, labels[..., None], axis=-1)
    known = (labels >= 0) & (labels < logits.shape[-1]) & ~jnp.isnan(own[..., 0])
    return known & ((~(logits < own)).sum(axis=-1) <= k)


class Scores(NamedTuple):
    """Of one class each, or of all: each 0 to 1."""

    precision: Float[np.ndarray, "*V"]
    recall: Float[np.ndarray, "*V"]
    f1: Float[np.ndarray, "*V"]


def precision_recall_f1(counts: Int[np.ndarray, "V V"], average: str | None = None) -> Scores:
    """How often a class is right where it is guessed, how often it is found, and their harmonic mean.

    Args:
        counts: rows are the truth, columns the guesses, see `metrics.states.Confusion`.
        average: None is of each class [V]; "micro" of all counts together; "macro" the mean of all classes that come
            up, "weighted" by how often they are true. What is 0 / 0 is 0.

    Raises:
        ValueError: the average is unknown.
    """
    return from_counts(counts.diagonal(), counts.sum(axis=0), counts.sum(axis=1), average)


def from_counts(right: ArrayLike, guessed: ArrayLike, true: ArrayLike, average: str | None = None) -> Scores:
    """As `precision_recall_f1`, of how often each class [V] was rightly guessed, guessed, and true."""
    if average not in (None, "micro", "macro", "weighted"):
        raise ValueError(f"average is {average!r}: it must be None, micro, macro or weighted.")
    right, guessed, true = (np.asarray(x, float) for x in (right, guessed, true))
    if average == "micro":
        right, guessed, true = right.sum(), guessed.sum(), true.sum()
    each = Scores(_ratio(right, guessed), _ratio(right, true), _ratio(2 * right, guessed + true))
    if average in (None, "micro"):
        return each
    weights = true if average == "weighted" else guessed + true > 0
    return Scores(*(_ratio((score * weights).sum(), weights.sum()) for score in each))


def _ratio(a, b):
    return np.divide(a, b, out=np.zeros_like(np.asarray(a, float)), where=np.asarray(b) != 0)


def auroc(scores: ArrayLike, labels: ArrayLike) -> float:
    """The area under the curve of true over false positives: how often a true example has a higher score than a false
    one, where equal scores count half. nan where all are true, or none.

    Args:
        scores, labels: [N] numbers, and True or False.

    Raises:
        ValueError: a score is nan, the labels are other than True and False, or there are not as many.
    """
    scores, labels = _pair(scores, labels)
    if labels.dtype != bool and len(labels):
        raise ValueError(f"labels are {labels.dtype}: they must be True or False.")
    true, false = int(labels.sum()), int((~labels.astype(bool)).sum())
    if not true or not false:
        return float("nan")
    return float((rankdata(scores)[labels].sum() - true * (true + 1) / 2) / (true * false))


def spearman(x: ArrayLike, y: ArrayLike) -> float:
    """The correlation of the ranks of values [N], equal ones sharing theirs; nan of fewer than two, or where one is
    constant.

    Raises:
        ValueError: a value is nan, or there are not as many of each.
    """
    x, y = _pair(x, y)
    if len(x) < 2 or np.ptp(x) == 0 or np.ptp(y) == 0:
        return float("nan")
    return float(spearmanr(x, y).statistic)


def _pair(x, y):
    """Two arrays [N] without nan."""
    x, y = np.asarray(x), np.asarray(y)
    if x.ndim != 1 or x.shape != y.shape:
        raise ValueError(
            f"values of the shapes {x.shape} and {y.shape}: there must be as many of each, in one dimension."
        )
    if len(wrong := np.flatnonzero(np.isnan(x) | np.isnan(y))):
        raise ValueError(f"value {wrong[0]} is nan: it must be a number.")
    return x, y
