"""Masked language modeling with next-sentence prediction (BERT) or sentence-order prediction (ALBERT)."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from lineage.data import Documents, Examples, Tokenizer
from lineage.data.examples import windows
from lineage.data.examples.masking import MaskTokens
from lineage.data.examples.sentence_pairs import Chunks, PairSentences, Sentences
from lineage.metrics.classification import correct
from lineage.metrics.likelihood import cross_entropy
from lineage.metrics.states import Mean
from lineage.models import Model
from lineage.tasks.base import TASKS, Batch, Result
from lineage.tasks.losses import token_loss
from lineage.tasks.masked_lm import MaskedLM


@TASKS.register("sentence_pair_pretraining")
@dataclass(frozen=True)
class SentencePairPretraining(MaskedLM):
    """Masked language modeling of a pair of texts, and classification of the pair.

    Attributes:
        pairing: "next_sentence": whether the second text follows the first (BERT, arXiv 1810.04805, section 3.1);
            "sentence_order": which of two consecutive texts comes first (ALBERT, arXiv 1909.11942, section 3.1).
    """

    needs = ("pretraining",)
    head = "pretraining"
    special_tokens = ("pad", "cls", "sep", "mask", "end_of_text")
    optional_tokens = ()
    inputs = ("tokens", "segments", "tokens_mask")
    arrays = MaskedLM.arrays | {"segments": "int32 B T", "label": "int32 B"}
    stride: ClassVar[int] = 0  # not an option

    pairing: Literal["next_sentence", "sentence_order"] = "next_sentence"

    def texts(self, content: Mapping[str, Documents]) -> dict[str, Iterable[str]]:
        return {name: Sentences(part) for name, part in content.items()}

    def examples(self, content: Mapping[str, Documents], tokenizer: Tokenizer | None, seed: int) -> Examples:
        length, mask = self.sequence_length, MaskTokens(self.mask_rate, tokenizer, self.whole_words)
        if length < 5:
            raise ValueError(
                f"task.sequence_length is {length}: it must be 5 or more, for two texts and 3 special ones."
            )
        documents = self.texts(content)
        streams = {name: windows.tokenize(part, tokenizer, self.cache_dir).tokens for name, part in documents.items()}
        splits = {name: Chunks(tokens, tokenizer.end_of_text, length - 3) for name, tokens in streams.items()}
        order = self.pairing == "sentence_order"
        paired = {name: PairSentences(part, tokenizer, mask, order) for name, part in splits.items()}
        return Examples(splits, self.facts(tokenizer), paired["train"], paired)

    def forward(self, model: Model, batch: Batch) -> Any:
        """Return the logits of all tokens [B, T, V] and of the label [B, 2]."""
        return model(batch["tokens"], segments=batch["segments"], mask=batch["tokens_mask"])

    def loss(self, model: Model, batch: Batch) -> Result:
        """Return the loss of `masked_lm`, plus the cross-entropy of the `label` [B] of the pair.

        The pair loss is weighted by M, so that the total is the sum of both mean losses if every example has M masked
        tokens.
        """
        mask, whole = batch["tokens_mask"], batch["tokens_mask"][:, 0]
        logits, scores = model(
            batch["tokens"], segments=batch["segments"], mask=mask, masked_positions=batch["masked_positions"]
        )
        words, weight, aux = token_loss(model, logits, batch, self.label_smoothing)
        texts = Mean.empty().update(cross_entropy(scores, batch["label"]), whole)
        aux["sentence_accuracy"] = Mean.empty().update(correct(scores, batch["label"]), whole)
        loss = words + batch["masked_positions"].shape[1] * texts.total
        return loss, weight, aux | {"loss": Mean(loss, weight), "masked_lm_loss": aux["loss"], "sentence_loss": texts}
