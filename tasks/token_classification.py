"""Token classification: a tag for each word of a sentence."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np

from lineage.data import Examples, Facts, TaggedSentence, Tokenizer
from lineage.data.examples import tagged_sentences
from lineage.models import Model
from lineage.tasks.base import TASKS, Batch, Result, Spec, check_range, specs
from lineage.tasks.encoded import EncoderTask
from lineage.tasks.losses import token_loss


@TASKS.register("token_classification")
@dataclass(frozen=True)
class TokenClassification(EncoderTask):
    """Predict the tag of each word of a sentence, at the word's first token.

    Attributes:
        sequence_length: tokens of a row, special ones included; longer sentences go on in another row.
        label_smoothing: fraction of the target that is spread evenly over all tags, in training only.
    """

    reads: ClassVar[str] = "tagged_sentences"
    needs: ClassVar[tuple[str, ...]] = ("token_classification",)
    head: ClassVar[str | None] = "token_classification"

    label_smoothing: float = 0.0

    def __post_init__(self):
        super().__post_init__()
        check_range("label_smoothing", self.label_smoothing, below=1)

    def texts(self, content: Mapping[str, list[TaggedSentence]]) -> dict[str, Iterable[str]]:
        return {name: ["".join(sentence.words) for sentence in part] for name, part in content.items()}

    def examples(self, content: Mapping[str, list[TaggedSentence]], tokenizer: Tokenizer | None, seed: int) -> Examples:
        tags, length = tagged_sentences.names(content), self.sequence_length
        splits = {name: tagged_sentences.encode(part, tags, tokenizer, length) for name, part in content.items()}
        facts = Facts(
            vocab_size=tokenizer.vocab_size, sequence_length=length, num_classes=len(tags), class_names=tuple(tags)
        )
        return Examples(splits, facts, tokenizer)

    def target_spec(self, batch_size: int, length: int) -> Spec:
        return specs(jnp.int32, targets=(batch_size, length)) | specs(bool, mask=(batch_size, length))

    def loss(self, model: Model, batch: Batch) -> Result:
        """Cross-entropy of the tags `targets` [B, T], where `mask` [B, T] is True."""
        return token_loss(model, self.forward(model, batch), batch, self.label_smoothing)

    def predict(self, outputs: Any, batch: dict[str, np.ndarray], facts: Facts) -> list[dict[str, Any]]:
        """Return the tags of each row's words, one row after the other."""
        tags, rows = outputs.argmax(axis=-1), np.flatnonzero(batch["mask"].any(axis=1))
        return [{"tags": [facts.class_names[tag] for tag in tags[row][batch["mask"][row]]]} for row in rows]
