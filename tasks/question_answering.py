"""Question answering: the answer is a span of a text."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import jax.numpy as jnp

from lineage.data import Examples, Facts, Question, Tokenizer
from lineage.data.examples import questions
from lineage.metrics.classification import correct
from lineage.metrics.likelihood import cross_entropy
from lineage.models import Model
from lineage.tasks.base import TASKS, Batch, Result, Spec, check_range, specs
from lineage.tasks.encoded import EncoderTask
from lineage.tasks.losses import sums

NEVER = -1e9  # the logit of padding


@TASKS.register("question_answering")
@dataclass(frozen=True)
class QuestionAnswering(EncoderTask):
    """Find the answer to a question in a text (SQuAD; BERT, arXiv 1810.04805, sections 4.2 and 4.3).

    Attributes:
        sequence_length: tokens of a question and a part of its text, special ones included.
        stride: tokens from one part of a text to the next; 0 is without overlap.
    """

    reads: ClassVar[str] = "questions"
    needs: ClassVar[tuple[str, ...]] = ("question_answering",)
    head: ClassVar[str | None] = "question_answering"

    stride: int = 0

    def __post_init__(self):
        super().__post_init__()
        check_range("stride", self.stride)

    def texts(self, content: Mapping[str, list[Question]]) -> dict[str, Iterable[str]]:
        return {name: [text for item in part for text in (item.text, item.context)] for name, part in content.items()}

    def examples(self, content: Mapping[str, list[Question]], tokenizer: Tokenizer | None, seed: int) -> Examples:
        length = self.sequence_length
        splits = {name: questions.encode(part, tokenizer, length, self.stride) for name, part in content.items()}
        return Examples(splits, Facts(vocab_size=tokenizer.vocab_size, sequence_length=length), tokenizer)

    def target_spec(self, batch_size: int, length: int) -> Spec:
        return specs(jnp.int32, start=(batch_size,), end=(batch_size,)) | specs(bool, mask=(batch_size,))

    def loss(self, model: Model, batch: Batch) -> Result:
        """Mean cross-entropy of an answer's first and last token, `start` and `end` [B], among all tokens of its text.

        Accuracy is of both together. Counted are the examples whose `mask` [B] is True.
        """
        logits = self.forward(model, batch).astype(jnp.float32)
        logits = jnp.where(batch["tokens_mask"][..., None], logits, NEVER)
        first, last = logits[..., 0], logits[..., 1]
        loss = (cross_entropy(first, batch["start"]) + cross_entropy(last, batch["end"])) / 2
        both = correct(first, batch["start"]) & correct(last, batch["end"])
        return sums(loss, batch["mask"], {"accuracy": both})

    def evaluators(self) -> dict[str, dict[str, Any]]:
        return super().evaluators() | {"question_answering": {"name": "question_answering"}}
