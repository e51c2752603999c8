"""Token classification: a tag for each word of a sentence."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from lineage.data import Examples, TaggedSentence, Tokenizer
from lineage.data.examples import tagged_sentences
from lineage.models import Model
from lineage.tasks.base import TASKS, Batch, Result, Smoothing
from lineage.tasks.losses import token_loss
from lineage.tasks.text import EncoderTask


@TASKS.register("token_classification")
@dataclass(frozen=True)
class TokenClassification(EncoderTask):
    """Predict the tag of each word of a sentence, at the first token of the word.

    Attributes:
        sequence_length: number of tokens of a sequence, special tokens included; longer sentences are split.
        label_smoothing: probability mass of the target that is spread evenly over all tags, in training only.
    """

    reads = "tagged_sentences"
    needs = ("token_classification",)
    head = "token_classification"
    evaluators = ("loss", "tagging")
    arrays = EncoderTask.arrays | {"targets": "int32 B T", "mask": "bool B T"}

    label_smoothing: Smoothing = 0.0

    def texts(self, content: Mapping[str, list[TaggedSentence]]) -> dict[str, Iterable[str]]:
        return {name: ["".join(sentence.words) for sentence in part] for name, part in content.items()}

    def examples(self, content: Mapping[str, list[TaggedSentence]], tokenizer: Tokenizer | None, seed: int) -> Examples:
        tags, length = tagged_sentences.names(content), self.sequence_length
        splits = {name: tagged_sentences.encode(part, tags, tokenizer, length) for name, part in content.items()}
        return Examples(splits, self.facts(tokenizer, num_classes=len(tags), class_names=tuple(tags)), tokenizer)

    def loss(self, model: Model, batch: Batch) -> Result:
        """Return the cross-entropy of the tags `targets` [B, T], where `mask` [B, T] is True."""
        return token_loss(model, self.forward(model, batch), batch, self.label_smoothing)
