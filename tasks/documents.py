"""Base classes of tasks of documents: one stream of tokens, seen through windows."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np

from lineage.data import Documents, Examples, Facts, Tokenizer
from lineage.data.examples import windows
from lineage.models import Model
from lineage.tasks.attention import attention_of_texts
from lineage.tasks.base import Pictures, Spec, Task, check_range, specs


@dataclass(frozen=True)
class TextTask(Task):
    """Base class of tasks of texts.

    Attributes:
        sequence_length: tokens in an example.
    """

    sequence_length: int = 0

    def __post_init__(self):
        super().__post_init__()
        check_range("sequence_length", self.sequence_length)

    def pictures(
        self,
        split: str,
        model: Model,
        variables: Mapping[str, Any],
        batches: Iterable[dict[str, np.ndarray]],
        facts: Facts,
        tokenizer: Tokenizer | None,
    ) -> Pictures:
        return attention_of_texts(model, variables, next(iter(batches)), tokenizer)


@dataclass(frozen=True)
class DocumentTask(TextTask):
    """Base class of tasks of documents.

    Attributes:
        sequence_length: tokens in a window.
        cache_dir: folder that keeps token ids from run to run; "" tokenises at each start.
    """

    reads: ClassVar[str] = "documents"

    cache_dir: str = ""

    def texts(self, content: Mapping[str, Documents]) -> dict[str, Iterable[str]]:
        return dict(content)


@dataclass(frozen=True)
class WindowTask(DocumentTask):
    """Base class of tasks of windows of tokens.

    Attributes:
        stride: tokens from one training window to the next; 0 is the length of a window, 1 gives windows at every
            offset.
    """

    evaluation_stride: ClassVar[int] = 0

    stride: int = 0

    def __post_init__(self):
        super().__post_init__()
        check_range("stride", self.stride)

    def windows(self, content: Mapping[str, Documents], tokenizer: Tokenizer, length: int | None = None) -> Examples:
        """Return the windows of each split: of `length` tokens, None for `sequence_length`."""
        length = self.sequence_length if length is None else length
        streams = {name: windows.tokenize(part, tokenizer, self.cache_dir) for name, part in content.items()}
        splits = {
            name: windows.Windows(stream.tokens, length, self.stride)
            if name == "train"
            else windows.Windows(stream.tokens, length, self.evaluation_stride, once=True)
            for name, stream in streams.items()
        }
        facts = Facts(
            vocab_size=tokenizer.vocab_size,
            sequence_length=self.sequence_length,
            tokens={name: len(stream.tokens) for name, stream in streams.items()},
            characters_per_token={name: stream.characters / len(stream.tokens) for name, stream in streams.items()},
            bytes_per_token={name: stream.bytes / len(stream.tokens) for name, stream in streams.items()},
        )
        return Examples(splits, facts, tokenizer, None, None)


def windows_spec(batch_size: int, length: int) -> Spec:
    """Return the spec of `tokens`, `targets` and `mask`, all [B, T]."""
    shape = (batch_size, length)
    return specs(jnp.int32, tokens=shape, targets=shape) | specs(bool, mask=shape)


def masked_spec(batch_size: int, length: int, masked: int) -> Spec:
    """Return the spec of `tokens` and `tokens_mask` [B, T], and of `places`, `targets` and `mask` [B, M]."""
    text, hidden = (batch_size, length), (batch_size, masked)
    return specs(jnp.int32, tokens=text, places=hidden, targets=hidden) | specs(bool, tokens_mask=text, mask=hidden)
