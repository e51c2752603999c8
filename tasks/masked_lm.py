"""Masked language modeling."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from lineage.data import Documents, Examples, Tokenizer
from lineage.data.examples.masking import MaskTokens, count_masked
from lineage.models import Model
from lineage.tasks.base import TASKS, Batch, Rate, Result, Sizes
from lineage.tasks.losses import token_loss
from lineage.tasks.text import DocumentTask


@TASKS.register("masked_lm")
@dataclass(frozen=True)
class MaskedLM(DocumentTask):
    """Predict the masked tokens of a text (BERT, arXiv 1810.04805, section 3.1).

    Attributes:
        mask_rate: fraction of the tokens that is masked.
        whole_words: whether to mask all tokens of a word, or none.
    """

    needs = ("masked_lm",)
    head = "masked_lm"
    # All tokens that fine-tuning needs too.
    special_tokens = ("end_of_text", "cls", "sep", "pad", "mask")
    optional_tokens = ("end_of_text",)
    inputs = ("tokens", "tokens_mask")
    arrays: ClassVar = {
        "tokens": "int32 B T",
        "tokens_mask": "bool B T",
        "masked_positions": "int32 B M",
        "targets": "int32 B M",
        "mask": "bool B M",
    }

    mask_rate: Rate = 0.15
    whole_words: bool = False

    def examples(self, content: Mapping[str, Documents], tokenizer: Tokenizer | None, seed: int) -> Examples:
        mask = MaskTokens(self.mask_rate, tokenizer, self.whole_words)
        return self.windows(content, tokenizer, self.sequence_length, mask)

    def axes(self, sizes: Sizes) -> dict[str, int]:
        axes = super().axes(sizes)
        return axes | {"M": count_masked(self.mask_rate, axes["T"])}

    def forward(self, model: Model, batch: Batch) -> Any:
        return model(batch["tokens"], mask=batch["tokens_mask"])

    def loss(self, model: Model, batch: Batch) -> Result:
        """Return the cross-entropy of `targets` at `masked_positions`, where `mask` is True, each [B, M].

        The model attends to `tokens` [B, T] where `tokens_mask` [B, T] is True; batches may have `segments` [B, T].
        """
        segments = {name: batch[name] for name in ("segments",) if name in batch}
        logits = model(
            batch["tokens"], mask=batch["tokens_mask"], masked_positions=batch["masked_positions"], **segments
        )
        return token_loss(model, logits, batch, self.label_smoothing)
