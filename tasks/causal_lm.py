"""Causal language modeling."""

from dataclasses import dataclass

import numpy as np

from lineage.data import Facts, Loader, Tokenizer
from lineage.metrics.likelihood import bits, perplexity
from lineage.models import Model
from lineage.tasks.base import TASKS, Batch, Count, Request, Result, Smoothing
from lineage.tasks.losses import fused_loss, token_loss
from lineage.tasks.text import DocumentTask


@TASKS.register("causal_lm")
@dataclass(frozen=True)
class CausalLM(DocumentTask):
    """Predict each token of a text from those before it.

    Attributes:
        label_smoothing: probability mass of the target that is spread evenly over the vocabulary, in training only.
        evaluation_stride: distance between the starts of consecutive evaluation windows, in tokens; 0: the length of a
            window. Each token is predicted once, from at least `sequence_length - evaluation_stride` tokens before it,
            as far as there are any.
    """

    needs = ("next_token",)
    special_tokens = ("end_of_text",)
    optional_tokens = ("end_of_text",)
    loader_options = ("order",)

    label_smoothing: Smoothing = 0.0
    evaluation_stride: Count = 0

    def check_loader(self, loader: Loader) -> None:
        super().check_loader(loader)
        for name in ("stride", "evaluation_stride"):
            if loader.order and getattr(self, name) not in (0, self.sequence_length):
                raise ValueError(
                    f"task.{name} is {getattr(self, name)}: it must be 0, because loader.order={loader.order!r} needs "
                    "windows that follow each other."
                )

    def loss(self, model: Model, batch: Batch) -> Result:
        """Return the next-token loss of `targets` given `tokens`, both [B, T], where `mask` [B, T] is True."""
        if model.computes_loss:
            return fused_loss(model, batch, self.label_smoothing, batch["tokens"])
        return token_loss(model, model(batch["tokens"]), batch, self.label_smoothing)

    def derived(self, metrics: dict[str, float], facts: Facts, split: str) -> dict[str, float]:
        loss = metrics["loss"]
        return {
            "perplexity": perplexity(loss),
            "bits_per_character": bits(loss, facts.characters_per_token[split]),
            "bits_per_byte": bits(loss, facts.bytes_per_token[split]),
        }

    def request(self, tokens: np.ndarray, tokenizer: Tokenizer, facts: Facts) -> Request:
        return Request(tokens[None])
