"""Tasks: what is learned from which content, one file per task.

A task turns a source's content into examples, and says what a batch looks like, which loss is minimised, what a model
is asked for evaluation, prediction and export, and what the report shows. Its fields are the keys of `config.task`.
"""

from lineage.tasks import (
    bidirectional_lm,
    causal_lm,
    conditional_lm,
    denoising,
    distilled_image_classification,
    image_classification,
    masked_autoencoding,
    masked_lm,
    masked_lm_distillation,
    object_detection,
    question_answering,
    reinforcement,
    sentence_pair_pretraining,
    sequence_to_sequence,
    span_corruption,
    text_classification,
    text_regression,
    token_classification,
)
from lineage.tasks.base import TASKS, Batch, Result, Task

__all__ = [
    "TASKS",
    "Batch",
    "Result",
    "Task",
    "bidirectional_lm",
    "causal_lm",
    "conditional_lm",
    "denoising",
    "distilled_image_classification",
    "image_classification",
    "masked_autoencoding",
    "masked_lm",
    "masked_lm_distillation",
    "object_detection",
    "question_answering",
    "reinforcement",
    "sentence_pair_pretraining",
    "sequence_to_sequence",
    "span_corruption",
    "text_classification",
    "text_regression",
    "token_classification",
]
