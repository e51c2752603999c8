"""Masked language modelling."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from lineage.data import Documents, Examples, Facts, Tokenizer
from lineage.data.examples.masking import MaskTokens, count_masked
from lineage.models import Model
from lineage.tasks.base import TASKS, Batch, Result, Spec, check_range, check_rate
from lineage.tasks.documents import WindowTask, masked_spec
from lineage.tasks.losses import token_loss


@dataclass(frozen=True)
class MaskedTask(WindowTask):
    """Base class of tasks of windows with hidden tokens.

    Attributes:
        mask_rate: fraction of the tokens that is hidden.
        whole_words: whether to hide all tokens of a word, or none.
    """

    # A tokenizer gets all the tokens that fine-tuning will need.
    special_tokens: ClassVar[tuple[str, ...]] = ("end_of_text", "cls", "sep", "pad", "mask")
    optional_tokens: ClassVar[tuple[str, ...]] = ("end_of_text",)
    head: ClassVar[str | None] = "masked_lm"
    inputs: ClassVar[tuple[str, ...]] = ("tokens", "tokens_mask")

    mask_rate: float = 0.15
    whole_words: bool = False

    def __post_init__(self):
        super().__post_init__()
        check_rate("mask_rate", self.mask_rate)

    def examples(self, content: Mapping[str, Documents], tokenizer: Tokenizer | None, seed: int) -> Examples:
        hide = MaskTokens(self.mask_rate, tokenizer, self.whole_words)
        return replace(self.windows(content, tokenizer), train_transform=hide, evaluation_transform=hide)

    def batch_spec(self, batch_size: int, model: Model, facts: Callable[[], Facts], length: int | None = None) -> Spec:
        length = length or self.sequence_length
        return masked_spec(batch_size, length, count_masked(self.mask_rate, length))

    def forward(self, model: Model, batch: Batch) -> Any:
        return model(batch["tokens"], mask=batch["tokens_mask"])


@TASKS.register("masked_lm")
@dataclass(frozen=True)
class MaskedLM(MaskedTask):
    """Predict the hidden tokens of a text (BERT, arXiv 1810.04805, section 3.1).

    Attributes:
        label_smoothing: fraction of the target that is spread evenly over the vocabulary, in training only.
    """

    needs: ClassVar[tuple[str, ...]] = ("masked_lm",)

    label_smoothing: float = 0.0

    def __post_init__(self):
        super().__post_init__()
        check_range("label_smoothing", self.label_smoothing, below=1)

    def loss(self, model: Model, batch: Batch) -> Result:
        """Cross-entropy of `targets` [B, M] at the `places` [B, M] of hidden tokens, given all `tokens` [B, T].

        Counted where `mask` [B, M] is True; tokens are seen where `tokens_mask` [B, T] is True, and belong to
        `segments` [B, T] where the batch has them.
        """
        segments = {name: batch[name] for name in ("segments",) if name in batch}
        logits = model(batch["tokens"], mask=batch["tokens_mask"], places=batch["places"], **segments)
        return token_loss(model, logits, batch, self.label_smoothing)
