"""Classification of texts and of pairs of texts."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import jax.numpy as jnp
import numpy as np

from lineage.data import Examples, Facts, LabelledTexts, Tokenizer
from lineage.data.examples import labelled_texts
from lineage.metrics.states import F1, Matthews
from lineage.models import Model
from lineage.tasks.base import TASKS, Batch, Result, check_range
from lineage.tasks.encoded import EncoderTask
from lineage.tasks.images import class_predictions
from lineage.tasks.losses import class_loss, probabilities, smoothed, sums


@dataclass(frozen=True)
class LabelledTextTask(EncoderTask):
    """Base class of tasks of labelled texts.

    Attributes:
        sequence_length: tokens of a row, special ones included.
        long_text: what becomes of a text that is too long: its first tokens ("head"), its last ("tail"), both
            ("head_tail"), its most central sentences ("key_sentences"), or several rows ("segments").
        stride: with "segments", tokens from one row of a text to the next; 0 is without overlap.
    """

    reads: ClassVar[str] = "labelled_texts"
    needs: ClassVar[tuple[str, ...]] = ("classification",)
    head: ClassVar[str | None] = "classification"

    long_text: Literal["head", "tail", "head_tail", "key_sentences", "segments"] = "head"
    stride: int = 0

    def __post_init__(self):
        super().__post_init__()
        check_range("stride", self.stride)

    def texts(self, content: Mapping[str, LabelledTexts]) -> dict[str, Iterable[str]]:
        counts = {len(row) for part in content.values() for row in part.texts}
        if len(counts) > 1:
            raise ValueError(f"There are rows of {min(counts)} and of {max(counts)} texts: all must have as many.")
        return {name: [text for row in part.texts for text in row] for name, part in content.items()}

    def encoded(
        self,
        content: Mapping[str, LabelledTexts],
        labels: Mapping[str, np.ndarray],
        tokenizer: Tokenizer,
        class_names: tuple[str, ...],
        num_classes: int,
    ) -> Examples:
        """Return rows of token ids with the label of each."""
        length = self.sequence_length
        fit = labelled_texts.Fit(self.long_text, tokenizer, length, self.stride, content["train"])
        splits = {
            name: labelled_texts.encode(part, labels[name], tokenizer, length, fit) for name, part in content.items()
        }
        facts = Facts(
            vocab_size=tokenizer.vocab_size,
            sequence_length=length,
            num_classes=num_classes,
            class_names=class_names,
        )
        return Examples(splits, facts, tokenizer)


@TASKS.register("text_classification")
@dataclass(frozen=True)
class TextClassification(LabelledTextTask):
    """Predict the class of a text or of a pair of texts, by the cross-entropy of its label.

    Attributes:
        label_smoothing: fraction of the target that is spread evenly over all classes, in training only.
        binary: whether each class is there or not by itself.
    """

    label_smoothing: float = 0.0
    binary: bool = False

    def __post_init__(self):
        super().__post_init__()
        check_range("label_smoothing", self.label_smoothing, below=1)

    def examples(self, content: Mapping[str, LabelledTexts], tokenizer: Tokenizer | None, seed: int) -> Examples:
        names = labelled_texts.names(content)
        number_of = {name: number for number, name in enumerate(names)}
        labels = {
            name: np.array([number_of[label] for label in part.labels], np.int32) for name, part in content.items()
        }
        return self.encoded(content, labels, tokenizer, tuple(names), len(names))

    def loss(self, model: Model, batch: Batch) -> Result:
        """Cross-entropy of `label` [B], or of soft labels [B, V], over the examples whose `mask` [B] is True."""
        label, mask = batch["label"], batch["mask"]
        logits = self.forward(model, batch).astype(jnp.float32)
        target = probabilities(label, logits.shape[-1])
        label = target.argmax(axis=-1)
        loss, means = class_loss(logits, smoothed(model, target, self.label_smoothing), label, self.binary)
        states = {
            name: state.empty(logits.shape[-1]).update(logits.argmax(axis=-1), label, mask)
            for name, state in (("f1", F1), ("matthews", Matthews))
        }
        return sums(loss, mask, means, **states)

    def evaluators(self) -> dict[str, dict[str, Any]]:
        return super().evaluators() | {"pooled_accuracy": {"name": "pooled_accuracy"}}

    def predict(self, outputs: Any, batch: dict[str, np.ndarray], facts: Facts) -> list[dict[str, Any]]:
        return class_predictions(outputs, batch["mask"], facts)
