"""Accuracy, precision, recall, F1, AUROC and rank correlation."""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int
from numpy.typing import ArrayLike


def check_shapes(**arrays: ArrayLike | None) -> None:
    """Raise ValueError for arrays of different shapes, such as [N, 1] and [N], which would be broadcast to [N, N]."""
    shapes = {name: np.shape(array) for name, array in arrays.items() if array is not None}
    if len({*shapes.values()}) > 1:
        listed = " and ".join(f"{name} have the shape {shape}" for name, shape in shapes.items())
        raise ValueError(f"The {listed}: they must be equal.")


def as_integers(classes: ArrayLike) -> Array:
    """Return classes whose booleans are 0 and 1: as indices, booleans would be a mask."""
    classes = jnp.asarray(classes)
    return classes.astype(jnp.int32) if classes.dtype == bool else classes


def correct(logits: Float[Array, "*N V"], labels: Int[Array, "..."]) -> Bool[Array, "*N"]:
    """Return whether the label has the highest logit, the first one winning ties; False where a logit is nan.

    Raises:
        ValueError: the labels do not have the shape [*N].
    """
    check_shapes(labels=labels, predictions=logits[..., 0])
    logits, size = logits.astype(jnp.float32), logits.shape[-1]  # as in `cross_entropy`, which finds the same maximum
    highest = logits.max(axis=-1, keepdims=True)
    # Unlike an argmax, this needs no pass of its own: XLA's GPU backend fuses it with those of `cross_entropy`.
    first = jnp.where(logits == highest, jnp.arange(size), size).min(axis=-1)
    return (first == labels) & (first < size)


def correct_top_k(
    logits: Float[Array, "*N V"], labels: Int[Array, "*N"] | Bool[Array, "*N"], k: int
) -> Bool[Array, "*N"]:
    """Return whether fewer than `k` other classes have a logit that is nan or at least as high as the label's.

    False where the label is not a class index or its logit is nan. Boolean labels are the classes 0 and 1.
    """
    labels = as_integers(labels)
    label_logits = jnp.take_along_axis(logits, labels[..., None], axis=-1)
    known = (labels >= 0) & (labels < logits.shape[-1]) & ~jnp.isnan(label_logits[..., 0])
    return known & ((~(logits < label_logits)).sum(axis=-1) <= k)


class Scores(NamedTuple):
    """Precision, recall and F1, each 0 to 1; one value per class [V], or an average."""

    precision: Float[np.ndarray, "*V"]
    recall: Float[np.ndarray, "*V"]
    f1: Float[np.ndarray, "*V"]


def precision_recall_f1(counts: Int[np.ndarray, "V V"], average: str | None = None) -> Scores:
    """Return precision, recall and F1 from a confusion matrix (see `metrics.states.Confusion`); 0 / 0 is 0.

    The `average` is None (one score per class [V]), "micro" (pooled counts), "macro" (mean over the classes that occur
    in labels or predictions) or "weighted" (mean weighted by the label counts of the classes).
    """
    return from_counts(counts.diagonal(), counts.sum(axis=0), counts.sum(axis=1), average)


def from_counts(correct: ArrayLike, predicted: ArrayLike, actual: ArrayLike, average: str | None = None) -> Scores:
    """Compute `precision_recall_f1` from true positives, predictions and labels per class, each [V]."""
    if average not in (None, "micro", "macro", "weighted"):
        raise ValueError(f"average is {average!r}: it must be None, micro, macro or weighted.")
    hits, guesses, labels = (np.asarray(x, float) for x in (correct, predicted, actual))
    if average == "micro":
        hits, guesses, labels = hits.sum(), guesses.sum(), labels.sum()
    by_class = Scores(_ratio(hits, guesses), _ratio(hits, labels), _ratio(2 * hits, guesses + labels))
    if average in (None, "micro"):
        return by_class
    weights = labels if average == "weighted" else guesses + labels > 0
    return Scores(*(_ratio((score * weights).sum(), weights.sum()) for score in by_class))


def _ratio(a, b):
    return np.divide(a, b, out=np.zeros_like(np.asarray(a, float)), where=np.asarray(b) != 0)


def auroc(scores: ArrayLike, labels: ArrayLike) -> float:
    """Return the area under the ROC curve of scores [N] and boolean labels [N], 0 to 1; nan if all labels are equal.

    It is the probability that a positive example has a higher score than a negative one; ties count one half.
    """
    scores, labels = _pair(scores, labels)
    if labels.dtype != bool and len(labels):
        raise ValueError(f"The labels have type {labels.dtype}: they must be boolean.")
    positive, negative = int(labels.sum()), int((~labels.astype(bool)).sum())
    if not positive or not negative:
        return float("nan")
    from scipy.stats import rankdata  # imported here because it is slow to import

    return float((rankdata(scores)[labels].sum() - positive * (positive + 1) / 2) / (positive * negative))


def regression(predictions: ArrayLike, labels: ArrayLike) -> dict[str, float]:
    """Return the correlations `pearson` and `spearman` (0 if either variable is constant) and the `mse` of values [N].

    All are computed in float64 from the float32 labels that a regression is trained on.
    """
    x, y = _pair(np.asarray(predictions, np.float64), np.asarray(labels, np.float32).astype(np.float64))
    defined = len(x) > 1 and np.ptp(x) > 0 and np.ptp(y) > 0
    pearson = float(np.corrcoef(x, y)[0, 1]) if defined else 0.0
    return {"pearson": pearson, "spearman": spearman(x, y) if defined else 0.0, "mse": float(np.mean((x - y) ** 2))}


def spearman(x: ArrayLike, y: ArrayLike) -> float:
    """Return Spearman's rank correlation of values [N]; nan for fewer than two values or a constant variable."""
    x, y = _pair(x, y)
    if len(x) < 2 or np.ptp(x) == 0 or np.ptp(y) == 0:
        return float("nan")
    from scipy.stats import spearmanr  # imported here because it is slow to import

    return float(spearmanr(x, y).statistic)


def _pair(x, y):
    """Return two arrays [N] of equal length without nan."""
    x, y = np.asarray(x), np.asarray(y)
    if x.ndim != 1 or x.shape != y.shape:
        raise ValueError(f"The values have shapes {x.shape} and {y.shape}: they must have the same shape [N].")
    if len(wrong := np.flatnonzero(np.isnan(x) | np.isnan(y))):
        raise ValueError(f"Value {wrong[0]} is nan.")
    return x, y
