"""Base classes of text tasks."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Float

from lineage.configs.registry import Natural, Rate
from lineage.configs.storage import is_remote
from lineage.data import Documents, Examples, ExampleSource, Facts, Tokenizer
from lineage.data.content import Transform
from lineage.data.examples import encoded, windows
from lineage.data.tokens import Stream, tokenize
from lineage.models import Model
from lineage.tasks.attention import attention_of_texts
from lineage.tasks.base import Batch, Pictures, Result, Sizes, Task
from lineage.tasks.losses import fused_loss, token_loss


@dataclass(frozen=True)
class TextTask(Task):
    """Base class of text tasks.

    Attributes:
        sequence_length: number of tokens of an example, special tokens included.
        label_smoothing: probability mass spread evenly over the vocabulary, or over all classes, in training.
    """

    arrays: ClassVar = {"tokens": "int32 B T", "targets": "int32 B T", "mask": "bool B T"}
    begins: ClassVar[bool] = False  # whether the model reads the token that a tokenizer adds before each text

    sequence_length: Natural = 0
    label_smoothing: Rate = 0.0

    def loss(self, model: Model, batch: Batch) -> Result:
        """Return the cross-entropy of `targets`, given the outputs of `forward`, where `mask` is True, both [B, T]."""
        if model.computes_loss:
            return fused_loss(model, batch, self.label_smoothing, batch["tokens"], **packed(batch))
        return token_loss(model, self.forward(model, batch), batch, self.label_smoothing)

    def axes(self, sizes: Sizes) -> dict[str, int]:
        length = sizes.length or self.sequence_length
        return {"B": sizes.batch_size, "T": length, "S": length}

    def known_facts(self, model: Model, tokenizer: Callable[[], Tokenizer]) -> dict[str, Any]:
        loaded, limit = tokenizer(), model.data_options["vocab_size"]
        if limit and loaded.vocab_size > limit:
            raise ValueError(f"The tokenizer has {loaded.vocab_size:,} tokens, more than the model's {limit:,}.")
        if missing := [role for role in self.ends if role not in ("", *self.optional_tokens) and not loaded.has(role)]:
            raise ValueError(f"The tokenizer does not have the special tokens {', '.join(missing)}.")
        return self._token_facts(loaded) | {"sequence_length": self.sequence_length}

    def begin_token(self, tokenizer: Tokenizer) -> int | None:
        """Return the token that a language model or an encoder-decoder reads before each text; None if there is none.

        It is the one that the tokenizer adds, or for a trained model the one in its training data.
        """
        if self.known:
            return self.known.begin_token
        return tokenizer.begin_of_text if self.begins else None

    def first_token(self, tokenizer: Tokenizer) -> int | None:
        """Return the first token of an encoder-decoder's target; None for other models."""
        return None

    def facts(self, tokenizer: Tokenizer, **others: Any) -> Facts:
        """Return the metadata common to text tasks, and `others`."""
        sizes = {"vocab_size": tokenizer.vocab_size, "pad_id": tokenizer.pad, "sequence_length": self.sequence_length}
        return Facts(**sizes, **self._token_facts(tokenizer), **others)

    def _token_facts(self, tokenizer):
        return {"start_token": self.first_token(tokenizer), "begin_token": self.begin_token(tokenizer)}

    def predict(self, outputs: Any, inputs: ExampleSource, facts: Facts) -> list[dict[str, Any]]:
        return [{"prediction": text} for text in outputs] if self.generates else super().predict(outputs, inputs, facts)

    def pictures(self, context: Any, variables: Any, split: Any) -> Pictures:
        return attention_of_texts(context.model, variables, split.batches[0], context.tokenizer)


def packed(batch: Batch) -> Batch:
    """Return the arrays of packed batches that a model takes besides the tokens."""
    return {name: batch[name] for name in ("segments", "positions") if name in batch}


@dataclass(frozen=True)
class DocumentTask(TextTask):
    """Base class of tasks on windows of one token stream of documents.

    Attributes:
        cache_dir: folder that keeps token ids and trained tokenizers between runs, filled by the command `prepare`;
            "": the user's cache, `$LINEAGE_CACHE` or ~/.cache/lineage.
        stride: distance between the starts of consecutive training windows, in tokens; 0: the length of a window.
    """

    reads = "documents"
    evaluation_stride = 0

    cache_dir: str = ""
    stride: Natural = 0

    def __post_init__(self):
        super().__post_init__()
        if is_remote(self.cache_dir):
            raise ValueError(f"task.cache_dir is {self.cache_dir!r}: it must be a local folder.")

    def texts(self, content: Mapping[str, Documents]) -> dict[str, Iterable[str]]:
        return dict(content)

    def examples(self, content: Mapping[str, Documents], tokenizer: Tokenizer | None, seed: int) -> Examples:
        return self.windows(content, tokenizer, self.sequence_length)

    def windows(
        self, content: Mapping[str, Documents], tokenizer: Tokenizer, length: int, transform: Transform | None = None
    ) -> Examples:
        """Return examples of `length` tokens."""
        streams = {name: self.encode(part, tokenizer) for name, part in content.items()}
        splits = {name: self.part(stream, length, name != "train") for name, stream in streams.items()}
        tokens = {name: len(stream.tokens) for name, stream in streams.items()}
        predicted = {name: self.num_predicted(stream, tokenizer) for name, stream in streams.items()}
        characters = {name: stream.characters / predicted[name] for name, stream in streams.items()}
        size = {name: stream.bytes / predicted[name] for name, stream in streams.items()}
        facts = self.facts(tokenizer, tokens=tokens, characters_per_token=characters, bytes_per_token=size)
        return Examples(splits, facts, transform, transform)

    def encode(self, documents: Documents, tokenizer: Tokenizer, workers: int = 0) -> Stream:
        """Return the tokens of documents; see `lineage.data.tokens.tokenize`."""
        return tokenize(documents, tokenizer, self.cache_dir, workers)

    def num_predicted(self, stream: Stream, tokenizer: Tokenizer) -> int:
        """Return the number of tokens over which a mean loss stands for all characters of a stream."""
        return len(stream.tokens)

    def part(self, stream: Stream, length: int, evaluation: bool) -> ExampleSource:
        """Return the examples of a split for training or evaluation."""
        stride = self.evaluation_stride if evaluation else self.stride
        return windows.Windows(stream.tokens, length, stride, once=evaluation)


@dataclass(frozen=True)
class EncoderTask(TextTask):
    """Base class of tasks on sequences `[CLS] first [SEP]` or `[CLS] first [SEP] second [SEP]`."""

    arrays: ClassVar = {"tokens": "int32 B T", "segments": "int32 B T", "tokens_mask": "bool B T"}
    special_tokens = encoded.ROLES
    ends = ("cls", "sep")
    inputs = ("tokens", "segments", "tokens_mask")
    loader_options = ("buckets",)

    def forward(self, model: Model, batch: Batch) -> Any:
        return model(batch["tokens"], segments=batch["segments"], mask=batch["tokens_mask"])

    def features(self, model: Model, batch: Batch) -> Any:
        return mean_hidden(model, batch)


def mean_hidden(model: Model, batch: Batch) -> Float[Array, "B D"]:
    """Return the mean of an encoder's last hidden states over the tokens of each sequence."""
    real = batch["tokens_mask"]
    hidden = model.encode(batch["tokens"], segments=batch["segments"], mask=real)
    return jnp.where(real[..., None], hidden, 0).sum(axis=1) / jnp.maximum(real.sum(axis=1), 1)[:, None]
