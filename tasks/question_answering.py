"""Extractive question answering: the answer is a span of a text."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import jax.numpy as jnp

from lineage.data import Examples, Question, Tokenizer
from lineage.data.examples import questions
from lineage.metrics.classification import correct
from lineage.metrics.likelihood import cross_entropy
from lineage.models import Model
from lineage.tasks.base import TASKS, Batch, Count, Result
from lineage.tasks.losses import sums
from lineage.tasks.text import EncoderTask

NEVER = -1e9  # logit of padding


@TASKS.register("question_answering")
@dataclass(frozen=True)
class QuestionAnswering(EncoderTask):
    """Find the answer to a question in a text (SQuAD; BERT, arXiv 1810.04805, sections 4.2 and 4.3).

    Attributes:
        stride: distance between the starts of consecutive windows of a long text, in tokens; 0: no overlap.
    """

    reads = "questions"
    needs = ("question_answering",)
    head = "question_answering"
    evaluators = ("loss", "question_answering")
    arrays = EncoderTask.arrays | {"start": "int32 B", "end": "int32 B", "mask": "bool B"}

    label_smoothing: ClassVar[float] = 0.0  # not an option

    stride: Count = 0

    def texts(self, content: Mapping[str, list[Question]]) -> dict[str, Iterable[str]]:
        return {name: [text for item in part for text in (item.text, item.context)] for name, part in content.items()}

    def examples(self, content: Mapping[str, list[Question]], tokenizer: Tokenizer | None, seed: int) -> Examples:
        sizes = self.sequence_length, self.stride
        splits = {name: questions.encode(part, tokenizer, *sizes) for name, part in content.items()}
        return Examples(splits, self.facts(tokenizer), tokenizer)

    def loss(self, model: Model, batch: Batch) -> Result:
        """Return the mean cross-entropy of the positions `start` and `end` [B] of answers, where `mask` [B] is True.

        An answer is correct if both positions are correct.
        """
        logits = self.forward(model, batch).astype(jnp.float32)
        logits = jnp.where(batch["tokens_mask"][..., None], logits, NEVER)
        first, last = logits[..., 0], logits[..., 1]
        loss = (cross_entropy(first, batch["start"]) + cross_entropy(last, batch["end"])) / 2
        both = correct(first, batch["start"]) & correct(last, batch["end"])
        return sums(loss, batch["mask"], {"accuracy": both})
