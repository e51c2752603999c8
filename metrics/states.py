"""Streaming metric states with `empty`, `update`, `merge` and `compute`.

A state is a pytree of sums, so two states are merged by adding them: in any order, over any split of the data, on any
host.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int, Num

from lineage.metrics.classification import as_integers, check_shapes

Classes = Int[Array, "..."] | Bool[Array, "..."]
Leaf = Any  # a JAX or numpy array, or the placeholder that a pytree transformation puts in its place


class State:
    """Base class of the metric states."""

    def merge(self, other: Any) -> Any:
        """Return the state of the data of both states."""
        return jax.tree.map(lambda a, b: a + b, self, other)

    def to_host(self) -> "State":
        """Convert the state to float64 and int64 numpy arrays, so that long sums keep their precision."""
        wide = {"f": np.float64, "i": np.int64, "u": np.int64}
        return jax.tree.map(lambda a: np.asarray(a).astype(wide[np.asarray(a).dtype.kind]), jax.device_get(self))


@struct.dataclass
class Mean(State):
    """Weighted mean of values."""

    total: Leaf  # []
    weight: Leaf  # []

    @classmethod
    def empty(cls) -> "Mean":
        return cls(jnp.zeros(()), jnp.zeros(()))

    def update(
        self, values: Num[Array, "..."] | Bool[Array, "..."], weights: Num[Array, "..."] | Bool[Array, "..."]
    ) -> "Mean":
        """Add values, or one value for all weights; a value with weight 0 is ignored, even if it is nan.

        Raises:
            ValueError: the shapes differ, such as [B, 1] and [B], which would be broadcast to [B, B].
        """
        if jnp.ndim(values):
            check_shapes(values=values, weights=weights)
        values = jnp.where(weights != 0, values, 0).astype(jnp.float32)
        return Mean(self.total + jnp.sum(values * weights), self.weight + jnp.sum(weights.astype(jnp.float32)))

    def compute(self) -> Float[Array, ""] | Float[np.ndarray, ""]:
        """Return the mean, or nan if the total weight is 0."""
        return _nan_unless(self.weight != 0, self.total / (self.weight + (self.weight == 0)))


def _nan_unless(condition, value):
    xp = jnp if isinstance(condition, jax.Array) else np
    return xp.where(condition, value, xp.nan)


@struct.dataclass
class Total(State):
    """Sum of several means, each of which is a total divided by its weight, or by 1 if the weight is less."""

    means: tuple[Mean, ...]

    def compute(self) -> Leaf:
        return sum(mean.total / mean.weight.clip(1) for mean in self.means)


@struct.dataclass
class Confusion(State):
    """Confusion matrix of V classes: rows are labels, columns are predictions.

    Scores that are computed from the matrix are nan if there are examples `outside`.
    """

    counts: Leaf  # [V, V]
    outside: Leaf  # []: number of examples whose label or prediction is not from 0 to V - 1

    @classmethod
    def empty(cls, num_classes: int) -> "Confusion":
        return cls(jnp.zeros((num_classes, num_classes), jnp.int32), jnp.zeros((), jnp.int32))

    def update(self, predictions: Classes, labels: Classes, mask: Bool[Array, "..."] | None = None) -> "Confusion":
        """Add predictions [N]; examples whose mask is False are ignored. Raise ValueError if the shapes differ.

        Booleans are the classes 0 and 1.
        """
        check_shapes(predictions=predictions, labels=labels, mask=mask)
        predictions, labels = map(as_integers, (predictions, labels))
        ones, classes = jnp.ones_like(labels) if mask is None else mask.astype(jnp.int32), len(self.counts)
        known = (jnp.minimum(labels, predictions) >= 0) & (jnp.maximum(labels, predictions) < classes)
        outside = self.outside + jnp.where(known, 0, ones).sum()
        return type(self)(self.counts.at[labels, predictions].add(jnp.where(known, ones, 0)), outside)

    def compute(self) -> Leaf:
        """Return the counts [V, V]; subclasses return a scalar score instead."""
        if self.outside:
            raise ValueError(f"{self.outside} examples have a class that is not from 0 to {len(self.counts) - 1}.")
        return self.counts


@struct.dataclass
class F1(Confusion):
    """F1 of class 1 if there are two classes, else macro F1: the mean over the classes in labels or predictions.

    This is scikit-learn's `f1_score` with `average="binary"` or "macro"; it is 0 if no class occurs.
    """

    def compute(self) -> Leaf:
        hits, total = self.counts.diagonal(), self.counts.sum(0) + self.counts.sum(1)
        scores = 2 * hits / total.clip(1)
        macro = scores.sum() / (total > 0).sum().clip(1)
        return _nan_unless(self.outside == 0, scores[1] if len(scores) == 2 else macro)


@struct.dataclass
class Matthews(Confusion):
    """Matthews correlation coefficient (Gorodkin 2004); 0 if labels or predictions are constant."""

    def compute(self) -> Leaf:
        found, actual, predicted = self.counts.diagonal(), self.counts.sum(1), self.counts.sum(0)
        total = self.counts.sum()
        # Products of the four counts of each class: differences of fractions close to 1 would lose their digits.
        parts = found, actual - found, predicted - found, total - actual - predicted + found
        hit, missed, wrong, rest = (part / total.clip(1) for part in parts)
        covariance = (hit * rest - missed * wrong).sum()
        spread = ((hit + missed) * (wrong + rest)).sum() * ((hit + wrong) * (missed + rest)).sum()
        return _nan_unless(self.outside == 0, covariance / (spread + (spread == 0)) ** 0.5)


@struct.dataclass
class ExpectedCalibrationError(State):
    """Expected calibration error of the predicted class (arXiv 1706.04599, equation 3).

    Bins of the confidence have equal width and include their upper bound. The error is nan if a label is not a class
    index or a probability is not from 0 to 1.
    """

    sums: Leaf  # [3, bins]: number of predictions, of correct predictions, sum of confidences

    @classmethod
    def empty(cls, bins: int = 15) -> "ExpectedCalibrationError":
        return cls(jnp.zeros((3, bins)))

    def update(
        self, probabilities: Float[Array, "N V"], labels: Int[Array, "..."], mask: Bool[Array, "..."] | None = None
    ) -> "ExpectedCalibrationError":
        """Add predictions; examples whose mask is False are ignored. Raise ValueError if the shapes differ."""
        check_shapes(predictions=probabilities[..., 0], labels=labels, mask=mask)
        confidence, bins = probabilities.max(axis=-1), self.sums.shape[1]
        correct = probabilities.argmax(axis=-1) == labels
        bounds = (np.arange(1, bins) / bins).astype(confidence.dtype)  # a product would be rounded across them
        number = jnp.searchsorted(bounds, confidence)
        known = (labels >= 0) & (labels < probabilities.shape[-1])
        known &= (probabilities.min(axis=-1) >= 0) & (confidence < 1 + 1e-5)
        values = jnp.where(known, jnp.stack([jnp.ones_like(confidence), correct, confidence]), jnp.nan)
        values = values if mask is None else jnp.where(mask, values, 0)
        return ExpectedCalibrationError(self.sums.at[:, number].add(values))

    def compute(self) -> Leaf:
        """Return the error, from 0 to 1; nan if there are no predictions."""
        count, correct, confidence = self.sums
        return _nan_unless(count.sum() != 0, abs(correct - confidence).sum() / (count.sum() + (count.sum() == 0)))
