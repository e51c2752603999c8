"""Metric states that stream: `empty`, `update`, `merge`, `compute`.

A state is a pytree of sums, so merging two is adding them: in any order, over any split of the data, on any host. Only
`Correlation` adds what is left without its means, and `Values` keeps what it is given.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int, Num

Leaf = Any  # an array, of JAX or numpy, or what transformations of pytrees put in its place


class State:
    """What every metric state shares."""

    def merge(self, other: "State") -> "State":
        """The state of both states' data together."""
        return jax.tree.map(lambda a, b: a + b, self, other)

    def to_host(self) -> "State":
        """The state as float64 and int64 numpy arrays, in which long sums keep their digits."""
        wide = {"f": np.float64, "i": np.int64, "u": np.int64}
        return jax.tree.map(lambda a: np.asarray(a).astype(wide[np.asarray(a).dtype.kind]), jax.device_get(self))


@struct.dataclass
class Mean(State):
    """The weighted mean of values."""

    total: Leaf  # []
    weight: Leaf  # []

    @classmethod
    def empty(cls) -> "Mean":
        return cls(jnp.zeros(()), jnp.zeros(()))

    def update(
        self, values: Num[Array, "*N"] | Bool[Array, "*N"], weights: Num[Array, "*N"] | Bool[Array, "*N"]
    ) -> "Mean":
        """With more values; a value of weight 0 does not count, whatever it is."""
        values = jnp.where(weights != 0, values, 0).astype(jnp.float32)
        return Mean(self.total + jnp.sum(values * weights), self.weight + jnp.sum(weights.astype(jnp.float32)))

    def compute(self) -> Float[Array, ""] | Float[np.ndarray, ""]:
        """The mean; nan when nothing has weight."""
        return _only(self.weight != 0, self.total / (self.weight + (self.weight == 0)))


def _only(when, value):
    """The value, or nan."""
    of = jnp if isinstance(when, jax.Array) else np
    return of.where(when, value, of.nan)


@struct.dataclass
class Total(State):
    """A sum of means; one whose weight is below 1 is divided by 1."""

    means: tuple[Mean, ...]

    def compute(self) -> Leaf:
        return sum(mean.total / mean.weight.clip(1) for mean in self.means)


@struct.dataclass
class Confusion(State):
    """How often each class was taken for each: rows are the truth, columns the predictions.

    If a truth or a prediction was no class, there is no such count, and what is made of the counts is nan.
    """

    counts: Leaf  # [V, V]
    outside: Leaf  # []: examples of which the truth or the prediction is no class

    @classmethod
    def empty(cls, num_classes: int) -> "Confusion":
        return cls(jnp.zeros((num_classes, num_classes), jnp.int32), jnp.zeros((), jnp.int32))

    def update(
        self, predictions: Int[Array, "N"], labels: Int[Array, "N"], mask: Bool[Array, "N"] | None = None
    ) -> "Confusion":
        """With more predictions; mask False = does not count."""
        ones, classes = jnp.ones_like(labels) if mask is None else mask.astype(jnp.int32), len(self.counts)
        known = (jnp.minimum(labels, predictions) >= 0) & (jnp.maximum(labels, predictions) < classes)
        outside = self.outside + jnp.where(known, 0, ones).sum()
        return self.replace(counts=self.counts.at[labels, predictions].add(jnp.where(known, ones, 0)), outside=outside)

    def compute(self) -> Leaf:
        """The counts [V, V]; of what is made from them, a number.

        Raises:
            ValueError: a truth or a prediction was no class.
        """
        if self.outside:
            raise ValueError(f"{self.outside} labels or predictions are not from 0 to {len(self.counts) - 1}.")
        return self.counts


@struct.dataclass
class F1(Confusion):
    """F1 of the second of two classes, or the mean of all where there are more; 0 of a class that never comes up."""

    def compute(self) -> Leaf:
        found, total = self.counts.diagonal(), self.counts.sum(0) + self.counts.sum(1)
        scores = 2 * found / total.clip(1)
        return _only(self.outside == 0, scores[1] if len(scores) == 2 else scores.mean())


@struct.dataclass
class Matthews(Confusion):
    """Matthews' correlation of truth and predictions, of any classes (Gorodkin 2004); 0 where one is constant."""

    def compute(self) -> Leaf:
        counts = self.counts / self.counts.sum().clip(1)
        truth, predicted = counts.sum(1), counts.sum(0)
        covariance = counts.trace() - truth @ predicted
        spread = ((1 - truth @ truth) * (1 - predicted @ predicted)).clip(1e-12) ** 0.5
        return _only(self.outside == 0, covariance / spread)


@struct.dataclass
class Correlation(State):
    """Pearson's correlation of two values; 0 where one is constant."""

    sums: Leaf  # [6]: how many, mean x, mean y; x x, y y, x y of what is left without the means

    @classmethod
    def empty(cls) -> "Correlation":
        return cls(jnp.zeros(6))

    def update(self, x: Float[Array, "N"], y: Float[Array, "N"], mask: Bool[Array, "N"]) -> "Correlation":
        """With more pairs; mask False = does not count."""
        pairs = jnp.where(mask, jnp.stack([x, y]), 0)
        near = pairs[:, mask.argmax()]  # one of them: no digit is lost to what all have in common
        apart, count = jnp.where(mask, pairs - near[:, None], 0), mask.sum()
        mean = apart.sum(axis=1) / count.clip(1)
        x, y = jnp.where(mask, apart - mean[:, None], 0)
        products = jnp.stack([x * x, y * y, x * y]).sum(axis=1)
        return self.merge(Correlation(jnp.concatenate([count[None], near + mean, products])))

    def merge(self, other: "Correlation") -> "Correlation":
        """The state of both states' pairs together (Chan et al. 1979)."""
        count, means, products = self.sums[0], self.sums[1:3], self.sums[3:]
        share = other.sums[0] / (count + other.sums[0]).clip(1)
        x, y = between = other.sums[1:3] - means
        of = jnp if isinstance(count, jax.Array) else np
        products = products + other.sums[3:] + count * share * of.stack([x * x, y * y, x * y])
        return Correlation(of.concatenate([count[None] + other.sums[:1], means + share * between, products]))

    def compute(self) -> Leaf:
        xx, yy, xy = self.sums[3:]
        spread = xx**0.5 * yy**0.5
        return xy / (spread + (spread == 0))


@struct.dataclass
class Calibration(State):
    """How far the confidence in guesses is from how often they are right (arXiv 1706.04599, equation 3).

    Guesses fall into bins of equal width by the probability of the class that is guessed, a bin's upper end in it.
    It is nan if a label was no class, or a probability not from 0 to 1.
    """

    sums: Leaf  # [3, bins]: how many, how many right, confidence

    @classmethod
    def empty(cls, bins: int = 15) -> "Calibration":
        return cls(jnp.zeros((3, bins)))

    def update(
        self, probabilities: Float[Array, "N V"], labels: Int[Array, "N"], mask: Bool[Array, "N"] | None = None
    ) -> "Calibration":
        """With more guesses; mask False = does not count."""
        confidence, bins = probabilities.max(axis=-1), self.sums.shape[1]
        right = probabilities.argmax(axis=-1) == labels
        number = jnp.clip(jnp.ceil(confidence * bins).astype(int) - 1, 0, bins - 1)
        known = (labels >= 0) & (labels < probabilities.shape[-1])
        known &= (probabilities.min(axis=-1) >= 0) & (confidence < 1 + 1e-5)
        values = jnp.where(known, jnp.stack([jnp.ones_like(confidence), right, confidence]), jnp.nan)
        return Calibration(self.sums.at[:, number].add(values if mask is None else jnp.where(mask, values, 0)))

    def compute(self) -> Leaf:
        """The mean difference over all guesses, 0 to 1; nan without any."""
        count, right, confidence = self.sums
        return _only(count.sum() != 0, abs(right - confidence).sum() / (count.sum() + (count.sum() == 0)))


@struct.dataclass
class Values(State):
    """All values, for what no sums tell: `compute` has them as they came, so that what is made of them must not depend
    on their order."""

    columns: tuple[Leaf, ...]  # each [N]

    @classmethod
    def empty(cls, columns: int) -> "Values":
        return cls((np.zeros(0),) * columns)

    def update(self, *columns: Leaf) -> "Values":
        """With more, one array [N] for each column; ValueError if they are not as long."""
        if len(lengths := {len(column) for column in columns}) > 1:
            raise ValueError(f"the columns have {' and '.join(map(str, sorted(lengths)))} values: as many of each.")
        return self.merge(Values(columns))

    def merge(self, other: "Values") -> "Values":
        """The values of both."""
        return Values(tuple(np.concatenate(pair) for pair in zip(self.columns, other.columns, strict=True)))

    def compute(self) -> tuple[Leaf, ...]:
        """The columns."""
        return self.columns
