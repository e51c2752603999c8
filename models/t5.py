"""T5 (Raffel et al. 2019, arXiv 1910.10683): an encoder-decoder without biases, with relative positions.

Version 1.1 has a gated MLP and a separate output projection.
"""

from functools import partial
from typing import ClassVar

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float

from lineage.models.base import MODELS
from lineage.models.decoder import Decoded, EncoderDecoder
from lineage.models.fields import (
    Activation,
    Count,
    Epsilon,
    Implementation,
    Inputs,
    InputsMask,
    Positions,
    Size,
    Tokens,
)
from lineage.models.layers import Attention, Block, Cache, Dropout, Embed, Linear, Mask, RMSNorm, dot_product
from lineage.models.layers.mlp import ACTIVATIONS, Mlp
from lineage.models.layers.position import RelativeBuckets

V1_1 = {"activation": "gelu_tanh", "gated": True, "tied": False}


@MODELS.register("t5")
class T5(EncoderDecoder):
    """An encoder-decoder: logits of the next token from the input and the output so far.

    Sequences may have any length. The decoder starts with token 0, the padding token.

    Attributes:
        head_size: channels per head, C; H x C need not be D.
        gated: whether the hidden layer is multiplied by a second projection.
        tied: whether the embedding is also the output projection.
        scale_decoder_outputs: whether the decoder's output is multiplied by 1 / sqrt(D) before the projection; None:
            `tied`.
        buckets: number of ranges of distances between tokens, each with a learned bias of the attention scores:
            of both directions together in the encoder, of preceding tokens in the decoder.
        max_distance: all tokens at this distance or farther share the last bucket.
        dropout: rate on embeddings, attention weights, hidden layers, the output of each sublayer and of each stack.
    """

    VARIANTS: ClassVar = {
        "small": {"depth": 6, "width": 512, "num_heads": 8, "mlp_dim": 2048},
        "base": {"depth": 12, "width": 768, "num_heads": 12, "mlp_dim": 3072},
        "large": {"depth": 24, "width": 1024, "num_heads": 16, "mlp_dim": 4096},
        "3b": {"depth": 24, "width": 1024, "num_heads": 32, "head_size": 128, "mlp_dim": 16_384},
        "11b": {"depth": 24, "width": 1024, "num_heads": 128, "head_size": 128, "mlp_dim": 65_536},
        "v1_1_small": {"depth": 8, "width": 512, "num_heads": 6, "mlp_dim": 1024, **V1_1},
        "v1_1_base": {"depth": 12, "width": 768, "num_heads": 12, "mlp_dim": 2048, **V1_1},
        "v1_1_large": {"depth": 24, "width": 1024, "num_heads": 16, "mlp_dim": 2816, **V1_1},
        "v1_1_xl": {"depth": 24, "width": 2048, "num_heads": 32, "mlp_dim": 5120, **V1_1},
        "v1_1_xxl": {"depth": 24, "width": 4096, "num_heads": 64, "mlp_dim": 10_240, **V1_1},
    }

    vocab_size: Count = 32_128
    depth: Count = 6
    decoder_depth: Size = None
    width: Count = 512
    num_heads: Count = 8
    head_size: Count = 64
    mlp_dim: Count = 2048
    activation: Activation = "relu"
    gated: bool = False
    tied: bool = True
    scale_decoder_outputs: bool | None = None
    buckets: Count = 32
    max_distance: Count = 128
    epsilon: Epsilon = 1e-6
    attend: Implementation = "auto"

    FROM_DATA = ("vocab_size",)

    def setup(self):
        init = nn.initializers.variance_scaling(1.0, "fan_in", "normal")
        norm = partial(RMSNorm, epsilon=self.epsilon)
        shared = {"dropout": self.dropout, "use_bias": False, "kernel_init": init, "out_init": init}
        # Instead of scaling the scores, initialize the queries smaller by sqrt(C).
        query_init = nn.initializers.variance_scaling(1 / self.head_size, "fan_in", "normal")
        heads = {"num_heads": self.num_heads, "head_size": self.head_size, "query_init": query_init}
        attention = partial(Attention, attend=self.attend, score=dot_product, **heads, **shared)
        mlp = partial(Mlp, self.mlp_dim, ACTIVATIONS[self.activation], gated=self.gated, **shared)
        block = partial(Block, attention=attention, mlp=mlp, norm=norm, dropout=self.dropout)
        decoder_block = partial(block, attention=partial(attention, causal=True), cross_attention=attention)
        relative = partial(RelativeBuckets, self.num_heads, self.buckets, self.max_distance, stddev=self.width**-0.5)
        self.embed = Embed(self.vocab_size, self.width, table_init=nn.initializers.normal(1.0))
        self.encoder_relative = relative(bidirectional=True)
        self.encoder_stack = self.new_stack(block, self.depth)
        self.encoder_norm = norm()
        self.decoder_relative = relative(bidirectional=False)
        self.decoder_stack = self.new_stack(decoder_block, self.decoder_layers)
        self.decoder_norm = norm()
        self.drop = Dropout(self.dropout)
        if not self.tied:
            self.head = Linear((self.vocab_size,), use_bias=False, kernel_init=init)

    @property
    def cache_shape(self) -> tuple[int, int, int]:
        return self.decoder_layers, self.num_heads, self.head_size

    def encoded(self, tokens: Inputs, mask: InputsMask) -> Float[Array, "B S D"]:
        positions = jnp.arange(tokens.shape[1])[None]
        bias = self.encoder_relative(positions, tokens.shape[1])
        x, _ = self.encoder_stack(self.embedded("encoder", tokens, positions), mask=Mask(keys=mask, bias=bias))
        return self.drop(self.encoder_norm(x))

    def logits(
        self, tokens: Tokens, positions: Positions, *, mask: Mask | None = None, cache: Cache | None = None, **kwargs
    ) -> Decoded:
        bias = self.decoder_relative(positions, tokens.shape[1] if cache is None else cache.layers[0].max_length)
        mask = (mask or Mask()).replace(bias=bias)
        x, cache = self.decoder_stack(self.embedded("decoder", tokens, positions), mask=mask, cache=cache, **kwargs)
        x = self.drop(self.decoder_norm(x))
        scaled = self.tied if self.scale_decoder_outputs is None else self.scale_decoder_outputs
        x = x * self.width**-0.5 if scaled else x
        return self.embed.logits(x) if self.tied else self.head(x), cache

    def with_positions(self, side, x, positions):
        """Apply dropout only: positions are biases of the attention scores."""
        return self.drop(x)
