"""Classification of texts and of pairs of texts."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import jax.numpy as jnp
import numpy as np

from lineage.data import Examples, LabeledTexts, Tokenizer
from lineage.data.examples import labeled_texts
from lineage.metrics.states import F1, Matthews
from lineage.models import Model
from lineage.tasks.base import TASKS, Batch, Count, Result, Smoothing
from lineage.tasks.losses import class_loss, probabilities, smoothed, sums
from lineage.tasks.text import EncoderTask


@dataclass(frozen=True)
class LabeledTextTask(EncoderTask):
    """Base class of tasks of labeled texts.

    Attributes:
        long_text: truncation of a text that is too long: keep its first tokens ("head"), its last tokens ("tail"), both
            ("head_tail"), its most central sentences ("key_sentences"), or all, in several windows ("segments").
        stride: with "segments", distance between the starts of consecutive windows, in tokens; 0: no overlap.
    """

    reads = "labeled_texts"
    needs = ("classification",)
    head = "classification"
    arrays = EncoderTask.arrays | {"label": "int32 B", "mask": "bool B"}

    long_text: Literal["head", "tail", "head_tail", "key_sentences", "segments"] = "head"
    stride: Count = 0

    def texts(self, content: Mapping[str, LabeledTexts]) -> dict[str, Iterable[str]]:
        counts = {len(row) for part in content.values() for row in part.texts}
        if len(counts) > 1:
            raise ValueError(f"There are rows of {min(counts)} and of {max(counts)} texts: all must have as many.")
        return {name: [text for row in part.texts for text in row] for name, part in content.items()}

    def labels(self, content: Mapping[str, LabeledTexts]) -> tuple[dict[str, np.ndarray], tuple[str, ...]]:
        """Return the labels of each split, and the names of the classes, which real numbers do not have."""
        raise NotImplementedError

    def examples(self, content: Mapping[str, LabeledTexts], tokenizer: Tokenizer | None, seed: int) -> Examples:
        (labels, names), length = self.labels(content), self.sequence_length
        fit = labeled_texts.Fit(self.long_text, tokenizer, length, self.stride, content["train"])
        splits = {
            name: labeled_texts.encode(part, labels[name], tokenizer, length, fit) for name, part in content.items()
        }
        return Examples(splits, self.facts(tokenizer, num_classes=len(names) or 1, class_names=names), tokenizer)


@TASKS.register("text_classification")
@dataclass(frozen=True)
class TextClassification(LabeledTextTask):
    """Predict the class of a text or a pair of texts.

    Attributes:
        label_smoothing: probability mass of the target that is spread evenly over all classes, in training only.
        binary: whether to use a binary cross-entropy per class (multi-label targets).
    """

    evaluators = ("loss", "pooled_accuracy")

    label_smoothing: Smoothing = 0.0
    binary: bool = False

    def labels(self, content: Mapping[str, LabeledTexts]) -> tuple[dict[str, np.ndarray], tuple[str, ...]]:
        names = labeled_texts.names(content)
        number_of = {name: number for number, name in enumerate(names)}
        labels = {
            name: np.array([number_of[label] for label in part.labels], np.int32) for name, part in content.items()
        }
        return labels, tuple(names)

    def loss(self, model: Model, batch: Batch) -> Result:
        """Return the cross-entropy of `label` [B], or of soft labels [B, V], where `mask` [B] is True."""
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
