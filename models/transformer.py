"""The Transformer (arXiv 1706.03762): an encoder-decoder with attention only.

As published it has post-norm, sinusoidal positions, and one table for inputs, outputs and the output projection.
Options: pre-norm (arXiv 2002.04745), RMSNorm, batch norm and PowerNorm (arXiv 2003.07845), and learned, relative (arXiv
1803.02155) or rotary positions (arXiv 2104.09864).
"""

from functools import partial
from typing import Annotated, ClassVar, Literal

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float

from lineage.configs.registry import Needs
from lineage.models.base import MODELS
from lineage.models.decoder import Decoded, EncoderDecoder
from lineage.models.fields import (
    Activation,
    Count,
    Epsilon,
    Implementation,
    Inputs,
    InputsMask,
    Natural,
    Positions,
    Rate,
    Size,
    Tokens,
)
from lineage.models.layers import ACTIVATIONS, Attention, Block, Dropout, Embed, Mask, Mlp
from lineage.models.layers.norm import BatchNorm, LayerNorm, PowerNorm, RMSNorm, normalize
from lineage.models.layers.position import Learned, RelativeKeys, rotary, sinusoidal

NORMS = {"layer": LayerNorm, "rms": RMSNorm, "batch": BatchNorm, "power": PowerNorm}


@MODELS.register("transformer")
class Transformer(EncoderDecoder):
    """An encoder-decoder: logits of the next token from the input and the output so far.

    Attributes:
        norm_placement: norm after each residual addition ("post"), or before each sublayer and after each stack
            ("pre").
        norm: kind of the norms: "layer", "rms", "batch" or "power"; the statistics of the last two are over the tokens
            that are not padding.
        norm_warmup: number of steps in which "power" uses the batch's statistics, see `PowerNorm`.
        position: representation of positions: "sinusoidal", "learned", "relative" or "rotary".
        max_distance: maximum distance of relative positions, to which larger distances are clipped.
    """

    VARIANTS: ClassVar = {
        "tiny": {"depth": 4, "width": 128, "num_heads": 4, "mlp_dim": 256},  # arXiv 2105.14462
        "base": {"depth": 6, "width": 512, "num_heads": 8, "mlp_dim": 2048},
        "big": {"depth": 6, "width": 1024, "num_heads": 16, "mlp_dim": 4096},
    }

    vocab_size: Count
    max_length: Count = 512
    depth: Count = 6
    width: Count = 512
    num_heads: Count = 8
    mlp_dim: Size = None
    activation: Activation = "relu"
    norm_placement: Literal["post", "pre"] = "post"
    norm: Literal[*NORMS] = "layer"
    norm_warmup: Annotated[Natural, Needs("norm", ("power",))] = 4000
    epsilon: Epsilon = 1e-6
    position: Literal["sinusoidal", "learned", "relative", "rotary"] = "sinusoidal"
    max_distance: Annotated[Count, Needs("position", ("relative",))] = 16
    dropout: Rate = 0.1
    attend: Implementation = "auto"

    @property
    def uses_batch_statistics(self) -> bool:
        return self.norm in ("batch", "power")

    def setup(self):
        norm = partial(NORMS[self.norm], epsilon=self.epsilon)
        norm = partial(norm, warmup=self.norm_warmup) if self.norm == "power" else norm
        cross = partial(Attention, num_heads=self.num_heads, dropout=self.dropout, attend=self.attend)
        relative = partial(RelativeKeys, self.max_distance) if self.position == "relative" else None
        attention = partial(cross, rotary=rotary if self.position == "rotary" else None, relative=relative)
        mlp = partial(Mlp, mlp_dim=self.mlp_size, activation=ACTIVATIONS[self.activation])
        block = partial(
            Block, attention=attention, mlp=mlp, norm=norm, norm_placement=self.norm_placement, dropout=self.dropout
        )
        decoder_block = partial(block, attention=partial(attention, causal=True), cross_attention=cross)
        self.embed = Embed(self.vocab_size, self.width, scale=True, table_init=nn.initializers.normal(self.width**-0.5))
        if self.position == "learned":
            self.encoder_position = Learned(self.max_length, self.width)
            self.decoder_position = Learned(self.max_length, self.width)
        self.embed_dropout = Dropout(self.dropout)
        self.encoder_stack = self.new_stack(block, self.depth)
        self.decoder_stack = self.new_stack(decoder_block, self.depth)
        if self.norm_placement == "pre":
            self.encoder_norm, self.decoder_norm = norm(), norm()

    def encoded(self, tokens: Inputs, mask: InputsMask) -> Float[Array, "B S D"]:
        x = super().encoded(tokens, mask)
        return normalize(self.encoder_norm, x, mask) if self.norm_placement == "pre" else x

    def logits(self, tokens: Tokens, positions: Positions, *, mask: Mask | None = None, **kwargs) -> Decoded:
        x = self.embedded("decoder", tokens, positions)
        x, cache = self.decoder_stack(x, positions=positions, mask=mask, **kwargs)
        if self.norm_placement == "pre":
            x = normalize(self.decoder_norm, x, None if mask is None else mask.keys)
        return self.embed.logits(x), cache

    def with_positions(self, side, x, positions):
        if self.position in ("sinusoidal", "learned"):
            learned = self.position == "learned"
            table = getattr(self, f"{side}_position")() if learned else sinusoidal(self.max_length, self.width)
            x = x + jnp.take(jnp.asarray(table, x.dtype), positions, axis=0)
        return self.embed_dropout(x)
