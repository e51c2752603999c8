"""Evaluators of encoders of texts."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float
from scipy.special import softmax

from lineage.data.examples.encoded import Encoded
from lineage.evaluation.base import EVALUATORS, Context, Evaluator, Split
from lineage.metrics import classification
from lineage.metrics.answers import exact_match, f1


@EVALUATORS.register("question_answering")
@dataclass(frozen=True)
class QuestionAnswering(Evaluator):
    """Exact match and F1 of the answers to a split's questions (SQuAD, arXiv 1606.05250)."""

    def measure(self, context: Context, variables: Any, split: Split) -> dict[str, float]:
        source = split.batches.source
        answers = source.answers(*np.moveaxis(logits(context, variables, split), -1, 0))
        references = [question.references for question in source.questions]
        return {score.__name__: float(np.mean(list(map(score, answers, references)))) for score in (exact_match, f1)}


@EVALUATORS.register("pooled_accuracy")
@dataclass(frozen=True)
class PooledAccuracy(Evaluator):
    """Accuracy of the classes of long texts, by the mean and by the maximum of the probabilities of their rows.

    Splits without texts of several rows are left out.
    """

    def measure(self, context: Context, variables: Any, split: Split) -> dict[str, float]:
        source = split.batches.source
        return pooled_accuracy(logits(context, variables, split), source) if source.is_cut else {}


@EVALUATORS.register("spearman")
@dataclass(frozen=True)
class Spearman(Evaluator):
    """Spearman's rank correlation of predicted and true numbers; 0 where one of them is constant."""

    def measure(self, context: Context, variables: Any, split: Split) -> dict[str, float]:
        values, labels = logits(context, variables, split)[:, 0], split.batches.source.per_row["label"]
        return {"spearman": np.nan_to_num(classification.spearman(values, labels)).item()}


def logits(context: Context, variables: Any, split: Split) -> Float[np.ndarray, "N ..."]:
    """Return the model's outputs for the rows of a split, on the host."""
    return context.rows(context.task.forward, variables, split.batches).astype(np.float32)


def pooled_accuracy(logits: Float[np.ndarray, "N V"], source: Encoded) -> dict[str, float]:
    """Return the accuracies of whole texts, see `PooledAccuracy`."""
    probabilities = softmax(logits, axis=-1)
    first = np.flatnonzero(np.diff(source.origins, prepend=-1))
    pools = {"mean": np.add, "max": np.maximum}
    pooled = {name: pool.reduceat(probabilities, first).argmax(axis=-1) for name, pool in pools.items()}
    return {f"{k}_pooled_accuracy": float((v == source.per_row["label"][first]).mean()) for k, v in pooled.items()}
