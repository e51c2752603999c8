"""Conditional language modelling: a decoder alone generates a text for an input text."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from lineage.data import Examples, Facts, PairedTexts, Tokenizer
from lineage.data.examples import pairs
from lineage.models import Model
from lineage.tasks.base import TASKS, Batch, Request, Result, Spec, check_range
from lineage.tasks.documents import windows_spec
from lineage.tasks.losses import token_loss
from lineage.tasks.sequence_to_sequence import PairTask


@dataclass(frozen=True)
class ContinuationTask(PairTask):
    """Base class of tasks in which a decoder continues an input with a target.

    Attributes:
        sequence_length: tokens of an input and its target together, with their ends; longer pairs are left out of the
            training, and inputs are cut in evaluation.
    """

    needs: ClassVar[tuple[str, ...]] = ("next_token",)
    kind: ClassVar[type[pairs.EncodedPairs]] = pairs.Continuations

    def examples(self, content: Mapping[str, PairedTexts], tokenizer: Tokenizer | None, seed: int) -> Examples:
        return self.encoded(content, tokenizer)

    def batch_spec(self, batch_size: int, model: Model, facts: Callable[[], Facts], length: int | None = None) -> Spec:
        return windows_spec(batch_size, length or self.sequence_length)

    def request(self, tokens: np.ndarray, tokenizer: Tokenizer, facts: Facts) -> Request:
        return np.append(tokens, tokenizer.end_of_text), None

    def requests(
        self, batch: dict[str, np.ndarray], facts: Facts
    ) -> tuple[np.ndarray, np.ndarray | None, tuple[np.ndarray, np.ndarray] | None]:
        return batch["tokens"], batch["mask"].argmax(axis=1) + 1, None  # up to the first token that is to be predicted


@TASKS.register("conditional_lm")
@dataclass(frozen=True)
class ConditionalLM(ContinuationTask):
    """Predict each token of a target, which follows its input, from all tokens before it.

    Attributes:
        label_smoothing: fraction of the target that is spread evenly over the vocabulary, in training only.
    """

    label_smoothing: float = 0.0

    def __post_init__(self):
        super().__post_init__()
        check_range("label_smoothing", self.label_smoothing, below=1)

    def loss(self, model: Model, batch: Batch) -> Result:
        """Cross-entropy of `targets` [B, T], given the `tokens` [B, T] up to each, where `mask` [B, T] is True."""
        return token_loss(model, model(batch["tokens"]), batch, self.label_smoothing)
