"""Evaluators of image tasks: COCO metrics, and probes (classifiers of the frozen features of a model)."""

from dataclasses import dataclass, replace
from math import nan
from typing import Any, ClassVar

import numpy as np
from jaxtyping import Float, Int

from lineage.configs.registry import Count, Positive
from lineage.evaluation.base import EVALUATORS, Context, Evaluator, Split, to_host
from lineage.metrics.detection import Detections, coco
from lineage.tasks.object_detection import objects_of


@EVALUATORS.register("detection")
@dataclass(frozen=True)
class Detection(Evaluator):
    """COCO's average precisions, except those by object size, which need the original image sizes.

    All are nan if an output of the model is not finite.
    """

    returns = ("ap", "ap_50", "ap_75")
    task_specific = True

    def measure(self, context: Context, variables: Any, split: Split) -> dict[str, float]:
        state, step = Detections.empty(split.facts.num_classes), context.step(context.task.forward)
        for batch in split.batches:
            batch = context.to_mesh(batch)
            answer = step(variables, batch)
            del batch["image"]
            batch, answer = to_host((batch, answer))
            if not all(np.isfinite(values[-1, batch["mask"]]).all() for values in answer):
                context.artifacts.pop(f"precision_{split.label}", None)
                return dict.fromkeys(self.returns, nan)
            for true, predicted in zip(*objects_of(batch, *answer, split.facts.num_classes)):
                truth = {f"true_{name}": values for name, values in true.items()}
                state = state.update(len(state.images), **predicted, **truth)
        result = coco(state)
        context.artifacts[f"precision_{split.label}"] = {"precision": result.curves()}
        values = result.summary()
        return {name: values[name] for name in self.returns}


@dataclass(frozen=True)
class Probe(Evaluator):
    """Base class of probes: a classifier of features, fitted to the training set without augmentation.

    The accuracy is nan if a feature is not finite.

    Class attributes:
        metric: prefix of the name of the accuracy.
    """

    metric: ClassVar[str]

    def names(self, context: Context, split: Split) -> tuple[str, ...]:
        return (f"{self.metric}_accuracy",)

    def fit(self, features: Float[np.ndarray, "N D"], labels: Int[np.ndarray, "N"]) -> Any:
        """Return a fitted classifier of scikit-learn."""
        raise NotImplementedError

    def check(self, context: Context) -> None:
        context.task.feature_extractor(context.model)

    def measure(self, context: Context, variables: Any, split: Split) -> dict[str, float]:
        model = context.task.feature_extractor(context.model)

        def features_of(batches):
            return context.rows(context.task.labeled_features, variables, batches, model)

        training_set = replace(split.batches, source=context.train().source)
        training = context.once("training features", lambda: features_of(training_set))
        evaluated = context.once(("features", split.label), lambda: features_of(split.batches))
        if not all(np.isfinite(features).all() for features, _ in (training, evaluated)):
            return {f"{self.metric}_accuracy": nan}
        fitted = context.once(self, lambda: self.fit(*training))
        return {f"{self.metric}_accuracy": float(fitted.score(*evaluated))}


@EVALUATORS.register("knn")
@dataclass(frozen=True)
class Neighbors(Probe):
    """Accuracy of a k-nearest-neighbor classifier with weights exp(cosine similarity / temperature).

    See arXiv 2104.14294, appendix F.1.

    Attributes:
        count: number of neighbors.
        temperature: temperature of the weights.
    """

    metric = "knn"

    count: Count = 20
    temperature: Positive = 0.07

    def fit(self, features: Float[np.ndarray, "N D"], labels: Int[np.ndarray, "N"]) -> Any:
        from sklearn.neighbors import KNeighborsClassifier

        def weights(distance):  # times a constant for each row, so that the weight of the nearest neighbor is 1
            return np.exp((distance.min(axis=1, keepdims=True) - distance) / self.temperature)

        count = min(self.count, len(labels))
        return KNeighborsClassifier(count, metric="cosine", weights=weights).fit(features, labels)


@EVALUATORS.register("linear_probe")
@dataclass(frozen=True)
class LinearProbe(Probe):
    """Accuracy of ridge regression on standardized features, with targets 1 for the class and -1 for all others.

    The regression is solved in closed form (arXiv 2010.11929, section 4.1); the L2 penalty is the power of 4 with the
    smallest leave-one-out error.
    """

    metric = "linear"

    def fit(self, features: Float[np.ndarray, "N D"], labels: Int[np.ndarray, "N"]) -> Any:
        from sklearn.linear_model import RidgeClassifierCV
        from sklearn.pipeline import make_pipeline
        from sklearn.preprocessing import StandardScaler

        return make_pipeline(StandardScaler(), RidgeClassifierCV(4.0 ** np.arange(-4, 9))).fit(features, labels)


@EVALUATORS.register("few_shot")
@dataclass(frozen=True)
class FewShot(LinearProbe):
    """Accuracy of a linear probe fitted to a few examples per class.

    Attributes:
        shots: number of examples per class, the first ones of the training set.
    """

    shots: Count = 10

    @property
    def metric(self) -> str:
        return f"{self.shots}_shot"

    def fit(self, features: Float[np.ndarray, "N D"], labels: Int[np.ndarray, "N"]) -> Any:
        chosen = np.concatenate([np.flatnonzero(labels == label)[: self.shots] for label in np.unique(labels)])
        return super().fit(features[chosen], labels[chosen])
