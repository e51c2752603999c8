"""ELECTRA (arXiv 2003.10555): a discriminator detects the tokens that a small generator has replaced.

The generator is the model with the head "masked_lm", the discriminator the one with "replaced".
"""

from typing import ClassVar, Literal

import flax.linen as nn
from jaxtyping import Array, Float, Int

from lineage.models.base import MODELS
from lineage.models.bert import BERT, Classifier
from lineage.models.fields import Size
from lineage.models.layers import ACTIVATIONS, Linear, gelu


@MODELS.register("electra")
class ELECTRA(BERT):
    """BERT with one more head, "replaced": the logit [B, T] of each token being a replaced one.

    Attributes:
        embed_width: E, the size of the embeddings, which are projected to D; None: D, without a projection. The
            generator's embeddings are its discriminator's.
    """

    VARIANTS: ClassVar = {
        "small": {"depth": 12, "width": 256, "num_heads": 4, "embed_width": 128},
        "base": {"depth": 12, "width": 768, "num_heads": 12},
        "large": {"depth": 24, "width": 1024, "num_heads": 16},
        "small_generator": {"depth": 12, "width": 64, "num_heads": 1, "embed_width": 128, "head": "masked_lm"},
        "base_generator": {"depth": 12, "width": 256, "num_heads": 4, "embed_width": 768, "head": "masked_lm"},
        "large_generator": {"depth": 24, "width": 256, "num_heads": 4, "embed_width": 1024, "head": "masked_lm"},
    }

    head: Literal["none", "masked_lm", "replaced", Classifier] = "replaced"
    embed_width: Size = None

    pooler_activation = words_activation = staticmethod(gelu)

    def setup(self):
        super().setup()
        if self.head == "replaced":
            self.detector = Linear((self.width,), kernel_init=nn.initializers.truncated_normal(0.02))

    def apply_head(
        self, x: Float[Array, "*B T D"], masked_positions: Int[Array, "*B M"] | None = None
    ) -> Float[Array, "..."]:
        """Return the output of the head for the last hidden states."""
        if self.head != "replaced":
            return super().apply_head(x, masked_positions)
        return self.classifier(ACTIVATIONS[self.activation](self.detector(x)))[..., 0]
