"""BART (Lewis et al. 2019, arXiv 1910.13461): a post-norm encoder-decoder, pre-trained as a denoising autoencoder."""

from functools import partial
from typing import ClassVar, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from lineage.models.base import MODELS, Layers
from lineage.models.decoder import Decoded, EncoderDecoder
from lineage.models.fields import Count, Implementation, Positions, Rate, Size, Tokens
from lineage.models.layers import ACTIVATIONS, Attention, Block, Dropout, Embed, LayerNorm, Mlp
from lineage.models.layers.position import Learned, sinusoidal
from lineage.models.layers.quantized import take_rows

UNUSED = 2  # unused first rows of the position tables: fairseq counts positions from the id of the padding token


@MODELS.register("bart")
class BART(EncoderDecoder):
    """An encoder-decoder: logits of the next token from the input and the output so far.

    The decoder starts with token 2, the end of the text.

    Attributes:
        scale_embedding: whether token embeddings are multiplied by sqrt(D), as in Marian and mBART.
        position: "learned" positions, or Marian's fixed "sinusoidal" ones.
        embed_norm: whether the embeddings are normalized; Marian's are not.
        logits_bias: whether a bias is added to the logits, as in checkpoints of `transformers`; it is not trained.
        dropout: rate on embeddings and the output of each sublayer.
        attention_dropout: rate on the attention weights.
        activation_dropout: rate on the hidden layers of the MLPs.
    """

    VARIANTS: ClassVar = {
        "base": {"depth": 6, "width": 768, "num_heads": 12},
        "large": {"depth": 12, "width": 1024, "num_heads": 16},
    }

    vocab_size: Count = 50_265
    max_length: Count = 1024
    depth: Count = 12
    decoder_depth: Size = None
    width: Count = 1024
    num_heads: Count = 16
    mlp_dim: Size = None
    scale_embedding: bool = False
    position: Literal["learned", "sinusoidal"] = "learned"
    embed_norm: bool = True
    logits_bias: bool = False
    attention_dropout: Rate = 0.0
    activation_dropout: Rate = 0.0
    attend: Implementation = "auto"

    input_parameters = "^(embed|encoder_(position|norm))/"

    @property
    def layer_groups(self) -> tuple[Layers, ...]:
        encoder, decoder = super().layer_groups
        return encoder._replace(last=""), decoder._replace(first="^decoder_(position|norm)/", last="")

    def setup(self):
        init = nn.initializers.normal(0.02)
        norm = partial(LayerNorm, epsilon=1e-5)
        shared = {"kernel_init": init, "out_init": init}
        attention = partial(Attention, self.num_heads, dropout=self.attention_dropout, attend=self.attend, **shared)
        activation = ACTIVATIONS[self.activation]
        mlp = partial(Mlp, self.mlp_size, activation, dropout=self.activation_dropout, **shared)
        block = partial(Block, attention=attention, mlp=mlp, norm=norm, norm_placement="post", dropout=self.dropout)
        decoder_block = partial(block, attention=partial(attention, causal=True), cross_attention=attention)
        self.embed = Embed(self.vocab_size, self.width, scale=self.scale_embedding)
        if self.position == "learned":
            self.encoder_position = Learned(UNUSED + self.max_length, self.width)
            self.decoder_position = Learned(UNUSED + self.max_length, self.width)
        if self.embed_norm:
            self.encoder_norm, self.decoder_norm = norm(), norm()
        self.encoder_stack = self.new_stack(block, self.depth)
        self.decoder_stack = self.new_stack(decoder_block, self.decoder_layers)
        self.drop = Dropout(self.dropout)
        if self.logits_bias:
            self.bias = self.param("logits_bias", nn.initializers.zeros, (self.vocab_size,))

    def logits(self, tokens: Tokens, positions: Positions, **kwargs) -> Decoded:
        x, cache = self.decoder_stack(self.embedded("decoder", tokens, positions), **kwargs)
        logits = self.embed.logits(x)
        return logits + jax.lax.stop_gradient(self.bias) if self.logits_bias else logits, cache

    def with_positions(self, side, x, positions):
        if self.position == "learned":
            x = x + take_rows(getattr(self, f"{side}_position")(), UNUSED + positions)
        else:
            table = sinusoidal(self.max_length, self.width)
            table = np.concatenate([table[:, 0::2], table[:, 1::2]], axis=1)  # sines before cosines, as Marian's
            x = x + jnp.take(jnp.asarray(table, x.dtype), positions, axis=0)
        if self.embed_norm:
            x = getattr(self, f"{side}_norm")(x)
        return self.drop(x)
