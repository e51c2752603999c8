"""Causal language modelling."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from lineage.data import Documents, Examples, Facts, Loader, Tokenizer
from lineage.metrics.likelihood import bits, perplexity
from lineage.models import Model
from lineage.tasks.base import TASKS, Batch, Request, Result, Spec, check_range
from lineage.tasks.documents import WindowTask, windows_spec
from lineage.tasks.losses import token_loss


@dataclass(frozen=True)
class NextTokenTask(WindowTask):
    """Base class of language models of whole texts.

    Attributes:
        evaluation_stride: tokens from one evaluation window to the next; 0 is the length of a window. Each token counts
            once, given at least the `sequence_length - evaluation_stride` tokens before it, as far as there are any.
    """

    special_tokens: ClassVar[tuple[str, ...]] = ("end_of_text",)
    optional_tokens: ClassVar[tuple[str, ...]] = ("end_of_text",)
    loader_options: ClassVar[tuple[str, ...]] = ("order",)

    evaluation_stride: int = 0

    def __post_init__(self):
        super().__post_init__()
        check_range("evaluation_stride", self.evaluation_stride)

    def check_loader(self, loader: Loader) -> None:
        super().check_loader(loader)
        for name in ("stride", "evaluation_stride"):
            if loader.order and getattr(self, name) not in (0, self.sequence_length):
                raise ValueError(
                    f"task.{name} is {getattr(self, name)}: it must be 0, because loader.order={loader.order!r} needs "
                    "windows that follow each other."
                )

    def examples(self, content: Mapping[str, Documents], tokenizer: Tokenizer | None, seed: int) -> Examples:
        return self.windows(content, tokenizer)

    def batch_spec(self, batch_size: int, model: Model, facts: Callable[[], Facts], length: int | None = None) -> Spec:
        return windows_spec(batch_size, length or self.sequence_length)

    def derived(self, metrics: dict[str, float], facts: Facts, split: str) -> dict[str, float]:
        loss = metrics["loss"]
        return {
            "perplexity": perplexity(loss),
            "bits_per_character": bits(loss, facts.characters_per_token[split]),
            "bits_per_byte": bits(loss, facts.bytes_per_token[split]),
        }


@TASKS.register("causal_lm")
@dataclass(frozen=True)
class CausalLM(NextTokenTask):
    """Predict each token of a text from those before it.

    Attributes:
        label_smoothing: fraction of the target that is spread evenly over the vocabulary, in training only.
    """

    needs: ClassVar[tuple[str, ...]] = ("next_token",)

    label_smoothing: float = 0.0

    def __post_init__(self):
        super().__post_init__()
        check_range("label_smoothing", self.label_smoothing, below=1)

    def loss(self, model: Model, batch: Batch) -> Result:
        """Cross-entropy of `targets` [B, T], given the `tokens` [B, T] up to each, where `mask` [B, T] is True."""
        return token_loss(model, model(batch["tokens"]), batch, self.label_smoothing)

    def request(self, tokens: np.ndarray, tokenizer: Tokenizer, facts: Facts) -> Request:
        return tokens, None
