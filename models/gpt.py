"""GPT-2 (Radford et al. 2019): a causal, pre-norm Transformer decoder with learned positions and tied embeddings."""

from functools import partial
from typing import ClassVar

import flax.linen as nn
from jaxtyping import Array, Float

from lineage.models.base import MODELS
from lineage.models.decoder import DecoderOnly
from lineage.models.fields import Activation, Count, Epsilon, Implementation, Positions, Size, Tokens
from lineage.models.layers import ACTIVATIONS, Attention, Block, Dropout, Embed, LayerNorm, Mlp
from lineage.models.layers.position import Learned
from lineage.models.layers.quantized import take_rows


@MODELS.register("gpt")
class GPT(DecoderOnly):
    """A language model: logits of the next token from the tokens so far.

    Attributes:
        use_bias: whether projections and norms have biases, as in GPT-2; nanoGPT's recipes omit them.
    """

    VARIANTS: ClassVar = {
        "small": {"depth": 12, "width": 768, "num_heads": 12},
        "medium": {"depth": 24, "width": 1024, "num_heads": 16},
        "large": {"depth": 36, "width": 1280, "num_heads": 20},
        "xl": {"depth": 48, "width": 1600, "num_heads": 25},
    }

    vocab_size: Count = 50_257
    max_length: Count = 1024
    depth: Count = 12
    width: Count = 768
    num_heads: Count = 12
    mlp_dim: Size = None
    activation: Activation = "gelu_tanh"
    epsilon: Epsilon = 1e-5
    use_bias: bool = True
    attend: Implementation = "auto"

    def setup(self):
        init = nn.initializers.normal(0.02)
        # The 2 L additions to the residual stream start smaller, so that their sum does not grow with the depth.
        out_init = nn.initializers.normal(0.02 / (2 * self.depth) ** 0.5)
        norm = partial(LayerNorm, epsilon=self.epsilon, use_bias=self.use_bias)
        shared = {"use_bias": self.use_bias, "kernel_init": init, "out_init": out_init}
        attention = partial(Attention, self.num_heads, causal=True, dropout=self.dropout, attend=self.attend, **shared)
        mlp = partial(Mlp, self.mlp_size, ACTIVATIONS[self.activation], **shared)
        block = partial(Block, attention=attention, mlp=mlp, norm=norm, dropout=self.dropout)
        self.embed = Embed(self.vocab_size, self.width)
        self.position = Learned(self.max_length, self.width)
        self.embed_dropout = Dropout(self.dropout)
        self.stack = self.new_stack(block, self.depth)
        self.norm = norm()
        self.unembed = self.embed

    def embedded(self, tokens: Tokens, positions: Positions) -> Float[Array, "B T D"]:
        return self.embed(tokens) + take_rows(self.position(), positions)
