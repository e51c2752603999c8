"""The base class of tasks of encoders of texts."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import jax.numpy as jnp

from lineage.data import Facts
from lineage.data.examples import encoded
from lineage.models import Model
from lineage.tasks.base import Batch, Spec, specs
from lineage.tasks.documents import TextTask


@dataclass(frozen=True)
class EncoderTask(TextTask):
    """Base class of tasks of rows `[CLS] first [SEP]` or `[CLS] first [SEP] second [SEP]`."""

    special_tokens: ClassVar[tuple[str, ...]] = encoded.ROLES
    inputs: ClassVar[tuple[str, ...]] = ("tokens", "segments", "tokens_mask")
    loader_options: ClassVar[tuple[str, ...]] = ("buckets",)

    def batch_spec(self, batch_size: int, model: Model, facts: Callable[[], Facts], length: int | None = None) -> Spec:
        length = length or self.sequence_length
        shape = (batch_size, length)
        texts = specs(jnp.int32, tokens=shape, segments=shape) | specs(bool, tokens_mask=shape)
        return texts | self.target_spec(batch_size, length)

    def target_spec(self, batch_size: int, length: int) -> Spec:
        """Return the spec of what is to be predicted, and of its mask."""
        return specs(jnp.int32, label=(batch_size,)) | specs(bool, mask=(batch_size,))

    def forward(self, model: Model, batch: Batch) -> Any:
        return model(batch["tokens"], segments=batch["segments"], mask=batch["tokens_mask"])
