"""Evaluation of trained models: evaluators, text generation, predictions and the artifacts of a report."""

from lineage.evaluation import detection, generation, loss, probes, texts
from lineage.evaluation.base import EVALUATORS, Context, Evaluator, Split
from lineage.evaluation.run import Evaluation

__all__ = ["EVALUATORS", "Context", "Evaluation", "Evaluator", "Split"]
