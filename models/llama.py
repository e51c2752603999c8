"""Llama (Touvron et al. 2023, arXiv 2302.13971, 2307.09288, 2407.21783) and Mistral (arXiv 2310.06825).

GPT's decoder with four changes: RMSNorm, rotary positions, a gated MLP and no biases. Heads may share keys and values
in groups (grouped-query attention), and `window` limits attention to the last tokens (sliding-window attention).
"""

import math
from functools import partial
from typing import Annotated, ClassVar, Literal

import flax.linen as nn

from lineage.configs.registry import Needs, Range
from lineage.models.base import MODELS
from lineage.models.decoder import DecoderOnly
from lineage.models.fields import Activation, Count, Epsilon, Implementation, Size
from lineage.models.layers import ACTIVATIONS, Attention, Block, Dropout, Embed, Mlp, RMSNorm
from lineage.models.layers.position import rotary, stretched, yarn_magnitude

LLAMA2 = {"vocab_size": 32_000, "max_length": 4096}
LLAMA3 = {"vocab_size": 128_256, "max_length": 8192, "rope_base": 500_000.0}


@MODELS.register("llama")
class Llama(DecoderOnly):
    """A language model: logits of the next token from the tokens so far.

    Attributes:
        num_kv_heads: number of key/value heads, K; None: H. The cache is H / K times smaller.
        head_size: channels per head, C; None: D / H.
        mlp_dim: width of the hidden layer of the MLPs, F; None: 8/3 D, rounded up to a multiple of 256, with which the
            MLPs are as large as those of GPT.
        window: number of most recent tokens that a token attends to, including itself; None: all.
        tied: whether the embedding is also the output projection.
        rope_base: the slowest rotary frequency is about 1 / base.
        rope_scaling: change of the rotary frequencies for sequences longer than those of the pre-training: "linear"
            divides all by `rope_factor` (arXiv 2306.15595), "llama3" and "yarn" the lower ones (arXiv 2309.00071),
            "default" none.
        rope_factor: ratio of the length of the longest sequences to `rope_length`.
        rope_length: length of the sequences of the pre-training, in tokens; None: `max_length`.
        rope_turns: with "llama3" and "yarn", two numbers of turns within `rope_length`: frequencies with fewer turns
            than the first are divided by `rope_factor`, those with more than the second are kept, and those in between
            are interpolated.
    """

    VARIANTS: ClassVar = {
        "llama2-7b": LLAMA2 | {"depth": 32, "width": 4096, "num_heads": 32},
        "llama2-13b": LLAMA2 | {"depth": 40, "width": 5120, "num_heads": 40},
        "llama2-70b": LLAMA2 | {"depth": 80, "width": 8192, "num_heads": 64, "num_kv_heads": 8, "mlp_dim": 28_672},
        "llama3-8b": LLAMA3 | {"depth": 32, "width": 4096, "num_heads": 32, "num_kv_heads": 8, "mlp_dim": 14_336},
        "llama3.2-1b": LLAMA3
        | {"depth": 16, "width": 2048, "num_heads": 32, "num_kv_heads": 8, "mlp_dim": 8192, "tied": True}
        | {"max_length": 131_072, "rope_scaling": "llama3", "rope_factor": 32.0, "rope_length": 8192},
        "mistral-7b": {"vocab_size": 32_000, "max_length": 32_768, "window": 4096}
        | {"depth": 32, "width": 4096, "num_heads": 32, "num_kv_heads": 8, "mlp_dim": 14_336},
    }

    vocab_size: Count = 32_000
    max_length: Count = 4096
    depth: Count = 32
    width: Count = 4096
    num_heads: Count = 32
    num_kv_heads: Size = None
    head_size: Size = None
    mlp_dim: Size = None
    window: Size = None
    tied: bool = False
    rope_base: Annotated[float, Range(above=1)] = 10_000.0
    rope_scaling: Annotated[Literal["default", "linear", "llama3", "yarn"], Needs("rope_factor")] = "default"
    rope_factor: Annotated[float, Range(1), Needs("rope_scaling")] = 1.0
    rope_length: Annotated[Size, Needs("rope_scaling", ("llama3", "yarn"))] = None
    rope_turns: Annotated[tuple[float, float], Range(above=0), Needs("rope_scaling", ("llama3", "yarn"))] = (1.0, 4.0)
    activation: Activation = "silu"
    epsilon: Epsilon = 1e-5
    attend: Implementation = "auto"

    @property
    def kv_heads(self) -> int:
        return self.num_kv_heads or self.num_heads

    @property
    def mlp_size(self) -> int:
        return self.mlp_dim or 256 * math.ceil(self.width / 96)

    def setup(self):
        init = nn.initializers.normal(0.02)
        out_init = nn.initializers.normal(0.02 / (2 * self.depth) ** 0.5)  # as in GPT; the papers do not give it
        norm = partial(RMSNorm, epsilon=self.epsilon)
        shared = {"use_bias": False, "kernel_init": init, "out_init": out_init}
        heads = {"num_heads": self.num_heads, "num_kv_heads": self.kv_heads, "head_size": self.head_size}
        options = {"window": self.window, "rotary": self._rotary(), "dropout": self.dropout, "attend": self.attend}
        attention = partial(Attention, causal=True, **heads, **options, **shared)
        mlp = partial(Mlp, self.mlp_size, ACTIVATIONS[self.activation], gated=True, **shared)
        block = partial(Block, attention=attention, mlp=mlp, norm=norm, dropout=self.dropout)
        self.embed = Embed(self.vocab_size, self.width)
        self.embed_dropout = Dropout(self.dropout)
        self.stack = self.new_stack(block, self.depth)
        self.norm = norm()
        self.unembed = self.embed if self.tied else Embed(self.vocab_size, self.width)

    @property
    def cache_shape(self) -> tuple[int, int, int]:
        return self.depth, self.kv_heads, self.head_size or self.width // self.num_heads

    def _rotary(self):
        if self.rope_scaling == "default":
            return partial(rotary, base=self.rope_base)
        first, second = self.rope_turns
        if first >= second:
            raise ValueError(f"rope_turns is {self.rope_turns}: the second number must be greater than the first.")
        settings = {"kind": self.rope_scaling, "factor": self.rope_factor, "turns": tuple(self.rope_turns)}
        scaling = partial(stretched, length=self.rope_length or self.max_length, **settings)
        magnitude = yarn_magnitude(self.rope_factor) if self.rope_scaling == "yarn" else 1.0
        return partial(rotary, base=self.rope_base, scaling=scaling, magnitude=magnitude)
