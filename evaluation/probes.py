"""Probes: how well a classifier does on a model's frozen features."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from jaxtyping import Float, Int
from sklearn.linear_model import RidgeClassifierCV
from sklearn.neighbors import KNeighborsClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from lineage.evaluation.base import EVALUATORS, Context, Evaluator, Split


@dataclass(frozen=True)
class Probe(Evaluator):
    """Base class of probes: a classifier of features, fitted to the training set as evaluations see it."""

    @property
    def metric(self) -> str:
        """The name of the accuracy, without its ending."""
        raise NotImplementedError

    def fit(self, features: Float[np.ndarray, "N D"], labels: Int[np.ndarray, "N"]) -> Any:
        """Return a classifier with scikit-learn's interface."""
        raise NotImplementedError

    def check(self, context: Context) -> None:
        context.task.feature_extractor(context.model)

    def measure(self, context: Context, variables: Any, split: Split) -> dict[str, float]:
        model, function = context.task.feature_extractor(context.model), _features_of(context.task)

        def seen(batches):
            return context.rows(function, variables, batches, model)

        training = context.once("training features", lambda: seen(context.training_set()))
        fitted = context.once(self, lambda: self.fit(*training))
        own = context.once(("features", split.label), lambda: seen(split.batches))
        return {f"{self.metric}_accuracy": float(fitted.score(*own))}


@lru_cache
def _features_of(task):
    """Return the function of a model and a batch that gives features and labels; one for a task, compiled once."""

    def features(model, batch):
        return task.forward(model, batch).astype(np.float32), batch["label"]

    return features


@EVALUATORS.register("knn")
@dataclass(frozen=True)
class Neighbours(Probe):
    """Accuracy of a vote of the nearest training examples, each with weight exp(cosine / temperature).

    See arXiv 2104.14294, appendix F.1.

    Attributes:
        count: number of neighbours.
        temperature: of the weights.
    """

    count: int = 20
    temperature: float = 0.07

    def __post_init__(self):
        super().__post_init__()
        if self.count < 1 or not self.temperature > 0:
            raise ValueError(
                f"evaluators: knn has count={self.count} and temperature={self.temperature}: the count must be 1 or "
                "more, and the temperature above 0."
            )

    @property
    def metric(self) -> str:
        return "knn"

    def fit(self, features: Float[np.ndarray, "N D"], labels: Int[np.ndarray, "N"]) -> Any:
        return KNeighborsClassifier(
            min(self.count, len(labels)),
            metric="cosine",
            weights=lambda distance: np.exp(-distance / self.temperature),  # times a constant, exp(1 / temperature)
        ).fit(features, labels)


@EVALUATORS.register("linear_probe")
@dataclass(frozen=True)
class LinearProbe(Probe):
    """Accuracy of least squares from standardised features to 1 for the class and -1 for the others.

    It is solved in closed form (arXiv 2010.11929, section 4.1); the l2 penalty is the power of 4 with the least
    leave-one-out error.
    """

    @property
    def metric(self) -> str:
        return "linear"

    def fit(self, features: Float[np.ndarray, "N D"], labels: Int[np.ndarray, "N"]) -> Any:
        return make_pipeline(StandardScaler(), RidgeClassifierCV(4.0 ** np.arange(-4, 9))).fit(features, labels)


@EVALUATORS.register("few_shot")
@dataclass(frozen=True)
class FewShot(LinearProbe):
    """Accuracy of a linear probe that is fitted to a few examples of each class.

    Attributes:
        shots: number of examples of each class, the first of the training set.
    """

    shots: int = 10

    def __post_init__(self):
        super().__post_init__()
        if self.shots < 1:
            raise ValueError(f"evaluators: few_shot has shots={self.shots}: it must be 1 or more.")

    @property
    def metric(self) -> str:
        return f"{self.shots}_shot"

    def fit(self, features: Float[np.ndarray, "N D"], labels: Int[np.ndarray, "N"]) -> Any:
        chosen = np.concatenate([np.flatnonzero(labels == label)[: self.shots] for label in np.unique(labels)])
        return super().fit(features[chosen], labels[chosen])
