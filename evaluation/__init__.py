"""Evaluation of trained models: evaluators, text generation, artifacts of the report and scores of files."""

from lineage.evaluation import images, texts  # each registers evaluators
from lineage.evaluation.base import EVALUATORS, Context, Evaluation, Evaluator, Split
