"""Masked language modelling and a judgement about two texts: how BERT and ALBERT are pre-trained."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import jax.numpy as jnp

from lineage.data import Documents, Examples, Facts, Tokenizer
from lineage.data.examples import windows
from lineage.data.examples.masking import MaskTokens, count_masked
from lineage.data.examples.sentence_pairs import Chunks, PairSentences, Sentences
from lineage.metrics.classification import correct
from lineage.metrics.likelihood import cross_entropy
from lineage.metrics.states import Mean
from lineage.models import Model
from lineage.tasks.base import TASKS, Batch, Result, Spec, check_range, check_rate, specs
from lineage.tasks.documents import DocumentTask, masked_spec
from lineage.tasks.losses import token_loss


@TASKS.register("sentence_pair_pretraining")
@dataclass(frozen=True)
class SentencePairPretraining(DocumentTask):
    """Predict the hidden tokens of two texts, and how the texts belong together.

    Attributes:
        sequence_length: tokens of both texts together, three special tokens among them.
        pairing: "next_sentence": whether the second text follows the first (BERT, arXiv 1810.04805, section 3.1);
            "sentence_order": which of two consecutive texts comes first (ALBERT, arXiv 1909.11942, section 3.1).
        mask_rate: fraction of the tokens that is hidden.
        whole_words: whether to hide all tokens of a word, or none.
        label_smoothing: fraction of the tokens' target that is spread evenly over the vocabulary, in training only.
    """

    needs: ClassVar[tuple[str, ...]] = ("pretraining",)
    head: ClassVar[str | None] = "pretraining"
    special_tokens: ClassVar[tuple[str, ...]] = ("pad", "cls", "sep", "mask", "end_of_text")
    inputs: ClassVar[tuple[str, ...]] = ("tokens", "segments", "tokens_mask")

    pairing: Literal["next_sentence", "sentence_order"] = "next_sentence"
    mask_rate: float = 0.15
    whole_words: bool = False
    label_smoothing: float = 0.0

    def __post_init__(self):
        super().__post_init__()
        check_rate("mask_rate", self.mask_rate)
        check_range("label_smoothing", self.label_smoothing, below=1)

    def texts(self, content: Mapping[str, Documents]) -> dict[str, Iterable[str]]:
        return {name: Sentences(part) for name, part in content.items()}

    def examples(self, content: Mapping[str, Documents], tokenizer: Tokenizer | None, seed: int) -> Examples:
        """Return pairs of runs of sentences, some of whose tokens are hidden.

        Raises:
            ValueError: the sequences are too short for two texts.
        """
        length, hide = self.sequence_length, MaskTokens(self.mask_rate, tokenizer, self.whole_words)
        if length < 5:
            raise ValueError(
                f"task.sequence_length is {length}: it must be 5 or more, for two texts and 3 special ones."
            )
        documents = self.texts(content)
        streams = {name: windows.tokenize(part, tokenizer, self.cache_dir).tokens for name, part in documents.items()}
        splits = {name: Chunks(tokens, tokenizer.end_of_text, length - 3) for name, tokens in streams.items()}
        order = self.pairing == "sentence_order"
        paired = {name: PairSentences(part, tokenizer, hide, order) for name, part in splits.items()}
        facts = Facts(vocab_size=tokenizer.vocab_size, sequence_length=length)
        return Examples(splits, facts, tokenizer, paired["train"], paired)

    def batch_spec(self, batch_size: int, model: Model, facts: Callable[[], Facts], length: int | None = None) -> Spec:
        length = length or self.sequence_length
        more = specs(jnp.int32, segments=(batch_size, length), label=(batch_size,))
        return masked_spec(batch_size, length, count_masked(self.mask_rate, length)) | more

    def forward(self, model: Model, batch: Batch) -> Any:
        """Return the logits of all tokens [B, T, V], and those of the label [B, 2]."""
        return model(batch["tokens"], segments=batch["segments"], mask=batch["tokens_mask"])

    def loss(self, model: Model, batch: Batch) -> Result:
        """The loss of `masked_lm`, and the cross-entropy of the `label` [B] of two texts.

        The latter counts as much as M tokens: the mean losses are added where every text has M hidden tokens.
        """
        mask, whole = batch["tokens_mask"], batch["tokens_mask"][:, 0]
        logits, scores = model(batch["tokens"], segments=batch["segments"], mask=mask, places=batch["places"])
        words, weight, aux = token_loss(model, logits, batch, self.label_smoothing)
        texts = Mean.empty().update(cross_entropy(scores, batch["label"]), whole)
        aux["sentence_accuracy"] = Mean.empty().update(correct(scores, batch["label"]), whole)
        loss = words + batch["places"].shape[1] * texts.total
        return loss, weight, aux | {"loss": Mean(loss, weight), "masked_lm_loss": aux["loss"], "sentence_loss": texts}
