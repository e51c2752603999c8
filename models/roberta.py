"""RoBERTa (arXiv 1907.11692) and XLM-R (arXiv 1911.02116): BERT trained longer, without next-sentence prediction."""

from typing import ClassVar, Literal

import jax.numpy as jnp
from jaxtyping import Array, Int

from lineage.models.base import MODELS
from lineage.models.bert import BERT, Classifier
from lineage.models.fields import Count, Epsilon, Natural
from lineage.models.layers.mlp import gelu


@MODELS.register("roberta")
class RoBERTa(BERT):
    """BERT with one segment; positions count real tokens only.

    Attributes:
        pad_id: id of the padding token, and its row of the position table; the first real token has the next row.
    """

    VARIANTS: ClassVar = {name: BERT.VARIANTS[name] for name in ("base", "large")}
    FROM_DATA = (*BERT.FROM_DATA, "pad_id")

    vocab_size: Count = 50_265
    num_segments: Natural = 1
    head: Literal["none", "pooler", "masked_lm", Classifier] = "masked_lm"
    epsilon: Epsilon = 1e-5
    pad_id: Natural = 1

    space_first = True
    words_activation = staticmethod(gelu)

    @property
    def first_position(self) -> int:
        return self.pad_id + 1

    def positions(self, tokens: Int[Array, "*B T"]) -> Int[Array, "*B T"]:
        """Return the number of real tokens before each one, and -1 for padding."""
        real = tokens != self.pad_id
        return jnp.where(real, jnp.cumsum(real, axis=-1) - 1, -1)


@MODELS.register("xlmr")
class XLMR(RoBERTa):
    """RoBERTa with a vocabulary for 100 languages."""

    vocab_size: Count = 250_002

    space_first = False
