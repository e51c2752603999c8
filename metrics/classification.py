"""How often the right class is found."""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int
from numpy.typing import ArrayLike
from scipy.stats import rankdata, spearmanr


def correct(logits: Float[Array, "*N V"], labels: Int[Array, "*N"]) -> Bool[Array, "*N"]:
    """Whether the highest logit is the label's; of equal ones the first counts."""
    return logits.argmax(axis=-1) == labels


def correct_top_k(logits: Float[Array, "*N V"], labels: Int[Array, "*N"], k: int) -> Bool[Array, "*N"]:
    """Whether fewer than `k` other classes have a logit at least as high as the label's."""
    own = jnp.take_along_axis(logits, labels[..., None], axis=-1)
    return (logits >= own).sum(axis=-1) <= k


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


def auroc(scores: Float[np.ndarray, "N"], labels: Bool[np.ndarray, "N"]) -> float:
    """The area under the curve of true over false positives: how often a true example has a higher score than a false
    one, where equal scores count half. nan where all are true, or none.

    Raises:
        ValueError: a score is nan.
    """
    if np.isnan(scores).any():
        raise ValueError(f"score {np.isnan(scores).argmax()} is nan: scores must be numbers.")
    true, false = int(labels.sum()), int((~labels).sum())
    if not true or not false:
        return float("nan")
    return float((rankdata(scores)[labels].sum() - true * (true + 1) / 2) / (true * false))


def spearman(x: Float[np.ndarray, "N"], y: Float[np.ndarray, "N"]) -> float:
    """The correlation of ranks, equal values sharing theirs; nan where one is constant or there are not two.

    Raises:
        ValueError: a value is nan.
    """
    if np.isnan(x).any() or np.isnan(y).any():
        raise ValueError("a value is nan: a correlation needs numbers.")
    if len(x) < 2 or np.ptp(x) == 0 or np.ptp(y) == 0:
        return float("nan")
    return float(spearmanr(x, y).statistic)
