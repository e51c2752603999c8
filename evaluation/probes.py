"""What a model's features are worth, without training it: the nearest neighbours' classes, and linear regression."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from jaxtyping import Float, Int
from sklearn.linear_model import RidgeClassifierCV
from sklearn.neighbors import KNeighborsClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

Seen = tuple[Float[np.ndarray, "_ D"], Int[np.ndarray, "_"]]  # features [N D] and labels [N]


@dataclass(frozen=True)
class Neighbours:
    """The class that the nearest ones of the training set vote for, each with exp(cosine / temperature)
    (arXiv 2104.14294, appendix F.1)."""

    count: int = 20
    temperature: float = 0.07
    name = "knn"

    def __post_init__(self):
        if not isinstance(self.count, int) or self.count < 1 or not self.temperature > 0:
            raise ValueError(f"knn needs 1 neighbour or more and a temperature above 0, not {self}")

    def fit(self, features: Float[np.ndarray, "N D"], labels: Int[np.ndarray, "N"]) -> Any:
        return KNeighborsClassifier(
            min(self.count, len(labels)),
            metric="cosine",
            weights=lambda distance: np.exp(-distance / self.temperature),  # times a constant, exp(1 / temperature)
        ).fit(features, labels)


@dataclass(frozen=True)
class Regression:
    """Least squares from standardised features to 1 for the class and -1 for the others (arXiv 2010.11929, section
    4.1), in closed form; the l2 penalty is the power of 4 with the least leave-one-out error.

    Attributes:
        shots: the first so many examples of each class are learned from; 0 = all.
    """

    shots: int = 0

    @property
    def name(self) -> str:
        return f"{self.shots}_shot" if self.shots else "linear"

    def fit(self, features: Float[np.ndarray, "N D"], labels: Int[np.ndarray, "N"]) -> Any:
        if self.shots:
            chosen = np.concatenate([np.flatnonzero(labels == label)[: self.shots] for label in np.unique(labels)])
            features, labels = features[chosen], labels[chosen]
        return make_pipeline(StandardScaler(), RidgeClassifierCV(4.0 ** np.arange(-4, 9))).fit(features, labels)


def few_shot(shots: int = 10) -> Regression:
    """Of a few examples of each class."""
    if not isinstance(shots, int) or shots < 1:
        raise ValueError(f"few_shot needs 1 example or more, not {shots!r}")
    return Regression(shots)


PROBES = {"knn": Neighbours, "few_shot": few_shot, "linear": partial(Regression, 0)}


def accuracies(
    probes: Sequence[Neighbours | Regression], training: Seen, splits: Mapping[str, Seen]
) -> dict[str, float]:
    """How often each probe, fitted to the training set, is right on each split, as "split/name_accuracy"."""
    fitted = {probe.name: probe.fit(*training) for probe in probes}
    return {
        f"{split}/{name}_accuracy": float(model.score(*seen))
        for split, seen in splits.items()
        for name, model in fitted.items()
    }
