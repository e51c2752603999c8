"""The Transformer (arXiv 1706.03762): an encoder-decoder with attention only.

As published it has post-norm, sinusoidal positions, and one table for inputs, outputs and the output projection.
Options: pre-norm (arXiv 2002.04745), RMSNorm, batch norm and PowerNorm (arXiv 2003.07845), and learned, relative (arXiv
1803.02155) or rotary positions (arXiv 2104.09864).
"""

from functools import partial
from typing import ClassVar, Literal

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from lineage.models.base import Activation
from lineage.models.decoder import EncoderDecoder
from lineage.models.layers.attend import Mask
from lineage.models.layers.attention import STRATEGIES, Attention
from lineage.models.layers.block import Block, Stack
from lineage.models.layers.cache import Cache
from lineage.models.layers.embed import Embed
from lineage.models.layers.mlp import ACTIVATIONS, Mlp
from lineage.models.layers.norm import BatchNorm, LayerNorm, PowerNorm, RMSNorm, normalise
from lineage.models.layers.position import Learned, RelativeKeys, rotary, sinusoidal
from lineage.models.registry import MODELS

NORMS = {"layer": LayerNorm, "rms": RMSNorm, "batch": BatchNorm, "power": PowerNorm}


@MODELS.register("transformer")
class Transformer(EncoderDecoder):
    """An encoder-decoder: logits of the next token from the input and the output so far.

    Attributes:
        vocab_size: V, of inputs and outputs together.
        max_length: length of the longest input and of the longest output.
        depth: L, of the encoder and of the decoder.
        width, num_heads, mlp_dim: D, H and F; mlp_dim None is 4 D.
        activation: a name of `ACTIVATIONS`.
        placement: norm after each residual addition ("post"), or before each sublayer and after each stack ("pre").
        norm: "layer", "rms", "batch" or "power"; the last two have statistics over tokens, padding of the output
            included.
        norm_warmup: number of steps in which "power" uses the batch's statistics, see `PowerNorm`.
        epsilon: of every norm.
        position: "sinusoidal", "learned", "relative" or "rotary".
        max_distance: largest distance that relative positions tell apart.
        dropout: rate on embeddings, attention weights and the output of each sublayer.
        remat, unroll: see `Stack`.
        attend: name of the strategy of attention, see `STRATEGIES`.
    """

    VARIANTS: ClassVar = {
        "tiny": {"depth": 4, "width": 128, "num_heads": 4, "mlp_dim": 256},  # arXiv 2105.14462
        "base": {"depth": 6, "width": 512, "num_heads": 8, "mlp_dim": 2048},
        "big": {"depth": 6, "width": 1024, "num_heads": 16, "mlp_dim": 4096},
    }

    vocab_size: int
    max_length: int = 512
    depth: int = 6
    width: int = 512
    num_heads: int = 8
    mlp_dim: int | None = None
    activation: Activation = "relu"
    placement: Literal["post", "pre"] = "post"
    norm: Literal["layer", "rms", "batch", "power"] = "layer"
    norm_warmup: int = 4000
    epsilon: float = 1e-6
    position: Literal["sinusoidal", "learned", "relative", "rotary"] = "sinusoidal"
    max_distance: int = 16
    dropout: float = 0.1
    remat: Literal["dots", "full"] | None = None
    unroll: int = 1
    attend: Literal["auto", "dense", "cudnn"] = "auto"

    @property
    def uses_batch_statistics(self) -> bool:
        return self.norm in ("batch", "power")

    def setup(self):
        norm = partial(NORMS[self.norm], epsilon=self.epsilon)
        norm = partial(norm, warmup=self.norm_warmup) if self.norm == "power" else norm
        cross = partial(Attention, num_heads=self.num_heads, dropout=self.dropout, attend=STRATEGIES[self.attend])
        attention = partial(
            cross,
            rotary=rotary if self.position == "rotary" else None,
            relative=partial(RelativeKeys, self.max_distance) if self.position == "relative" else None,
        )
        block = partial(
            Block,
            attention=attention,
            mlp=partial(Mlp, mlp_dim=self.mlp_dim or 4 * self.width, activation=ACTIVATIONS[self.activation]),
            norm=norm,
            placement=self.placement,
            dropout=self.dropout,
        )
        decoder_block = partial(block, attention=partial(attention, causal=True), cross_attention=cross)
        self.embed = Embed(self.vocab_size, self.width, scale=True, table_init=nn.initializers.normal(self.width**-0.5))
        if self.position == "learned":
            self.encoder_position = Learned(self.max_length, self.width)
            self.decoder_position = Learned(self.max_length, self.width)
        self.embed_dropout = nn.Dropout(self.dropout)
        self.encoder_stack = Stack(block, self.depth, remat=self.remat, unroll=self.unroll)
        self.decoder_stack = Stack(decoder_block, self.depth, remat=self.remat, unroll=self.unroll)
        if self.placement == "pre":
            self.encoder_norm, self.decoder_norm = norm(), norm()

    def encoded(self, tokens: Int[Array, "B S"], mask: Bool[Array, "B S"]) -> Float[Array, "B S D"]:
        x = self._embed(tokens, jnp.arange(tokens.shape[1])[None], "encoder")
        x, _ = self.encoder_stack(x, mask=Mask(keys=mask))
        return normalise(self.encoder_norm, x, mask) if self.placement == "pre" else x

    def logits(
        self, tokens: Int[Array, "B T"], positions: Int[Array, "#B T"], **kwargs
    ) -> tuple[Float[Array, "B T V"], Cache | None]:
        x, cache = self.decoder_stack(self._embed(tokens, positions, "decoder"), positions=positions, **kwargs)
        return self.embed.logits(self.decoder_norm(x) if self.placement == "pre" else x), cache

    def _embed(self, tokens, positions, side):
        self.check_length(tokens.shape[1])
        x = self.embed(tokens)
        if self.position in ("sinusoidal", "learned"):
            learned = self.position == "learned"
            table = getattr(self, f"{side}_position")() if learned else sinusoidal(self.max_length, self.width)
            x = x + jnp.take(jnp.asarray(table, x.dtype), positions, axis=0)
        x = self.embed_dropout(x, deterministic=not self.has_rng("dropout"))
        self.sow("intermediates", f"{side}_embedding", x)
        return x
