"""Transformer-XL (arXiv 1901.02860): a language model with segment-level recurrence and relative positions.

Each layer stores its inputs of the last tokens, and the next segment attends to them too, without gradient. Attention
depends on distances instead of positions, which would repeat in every segment. Without a memory, it is the vanilla
model of independent segments (section 3.1).
"""

from functools import partial
from typing import Annotated, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from lineage.configs.registry import Needs
from lineage.models.base import MODELS, ShardingRule
from lineage.models.decoder import DecoderOnly, Hidden
from lineage.models.fields import Activation, Count, Counts, Epsilon, Logits, Natural, Positions, Rate, Size, Tokens
from lineage.models.kernels.vocabulary import Targets, TokenLosses
from lineage.models.layers import ACTIVATIONS, Block, Dropout, Embed, LayerNorm, Linear, Mask, Mlp
from lineage.models.layers.adaptive import AdaptiveEmbed
from lineage.models.layers.attention import Attention, cached
from lineage.models.layers.cache import LayerCache
from lineage.models.layers.placement import EXAMPLES
from lineage.models.layers.position import geometric_frequencies, sinusoidal


class RecurrentAttention(Attention):
    """Causal attention to a segment and to the hidden states before it, by content and distance (section 3.3).

    The score of query i and key j is ((q_i + u) . k_j + (q_i + v) . W_R R_(i-j)) / sqrt(C), with sinusoids R. Each
    layer has its own biases u and v, as in the published models. If the collection "memory" is mutable, the last
    `memory_length` inputs are stored there for the next call. `window` is the number of tokens of a cache that a token
    attends to, including itself; with `same_length` it applies to segments too.
    """

    memory_length: int = 0
    same_length: bool = False
    clamp_length: Natural = 0
    use_bias: bool = False

    @nn.compact
    def __call__(
        self, x: Float[Array, "B T D"], *, cache: LayerCache | None = None, **_
    ) -> tuple[Float[Array, "B T D"], LayerCache | None]:
        """Return the output, and the cache with this call's keys and values appended (None if none was given)."""
        length, width = x.shape[1:]
        context, mask = (x, Mask(window=self.window)) if cache is not None else self._with_memory(x)
        query, key, value = self.project(x, context, context)
        heads, keys, attend = query.shape[2:], key.shape[1], None
        u, v = (self.param(name, self.kernel_init, heads) for name in ("u", "v"))
        to_heads = Linear(heads, use_bias=False, kernel_init=self.kernel_init, name="distance")
        kernel = to_heads(jnp.eye(width, dtype=x.dtype))  # the kernel itself, as the image of the unit vectors
        by_distance = (query + v) * heads[1] ** -0.5
        if cache is None:
            positions = jnp.arange(keys - length, keys)[None]
            scores = segment_scores(by_distance, kernel, keys, self.clamp_length)
        else:
            positions, cache = cache.positions(length), cache.append(key, value)
            scores = distance_scores(by_distance, kernel, positions, cache.max_length, self.clamp_length)
            attend = partial(cached, cache)
        mask = mask.replace(causal=True, positions=positions, bias=scores)
        return self.combine(query + u, key, value, mask, width, attend), cache

    def _with_memory(self, x):
        """Return memory and segment [B, M + T, D] and the mask of the memory's real tokens; update the memory."""
        mask = Mask(window=self.window if self.same_length else None)
        if not self.memory_length or not self.is_mutable_collection("memory"):
            return x, mask
        shape = (len(x), self.memory_length, x.shape[-1])
        hidden = self.variable("memory", "hidden", jnp.zeros, shape)
        count = self.variable("memory", "count", jnp.zeros, (), jnp.int32)
        if hidden.value.shape != shape:
            raise ValueError(f"the batch size is {len(x)}: it must be {hidden.value.shape[0]}, as in the memory.")
        context = jnp.concatenate([hidden.value.astype(x.dtype), x], axis=1)
        real = jnp.arange(context.shape[1]) >= self.memory_length - count.value
        if not self.is_initializing():
            hidden.value = jax.lax.stop_gradient(context[:, -self.memory_length :]).astype(hidden.value.dtype)
            count.value = jnp.minimum(count.value + x.shape[1], self.memory_length)
        return context, mask.replace(keys=real[None])


def distance_scores(
    query: Float[Array, "B T H C"],
    kernel: Float[Array, "D H C"],
    positions: Int[Array, "#B T"],
    keys: int,
    clamp_length: int = 0,
) -> Float[Array, "B H T S"]:
    """Return q . W_R R_(i-j) for queries q at positions i and keys at positions j from 0 to S-1, where j <= i.

    By the addition theorems, the sinusoids R of a distance are sums of products of those of i and of j, so that no
    array is indexed by distance.

    Args:
        kernel: W_R, for interleaved sines and cosines.
        clamp_length: maximum distance, to which larger ones are clipped; 0: none.
    """
    width, heads, size = kernel.shape
    pairs = kernel.reshape(-1, 2, heads, size)
    signs = np.array([-1, 1])[:, None, None]
    angles = positions[:, :, None, None] * np.repeat(geometric_frequencies(width), 2)
    rotated = 0.0
    for rows, factors in ((pairs * signs, jnp.cos(angles)), (pairs[:, ::-1], jnp.sin(angles))):
        rows = rows.reshape(kernel.shape).astype(query.dtype)
        rotated += jnp.einsum("BTHC,DHC->BTHD", query, rows) * factors
    table = sinusoidal(max(keys, clamp_length + 1), width).astype(query.dtype)
    scores = jnp.einsum("BTHD,SD->BHTS", rotated.astype(query.dtype), table[:keys])
    if not clamp_length:
        return scores
    clipped = jnp.einsum("BTHC,HC->BHT", query, jnp.einsum("D,DHC->HC", table[clamp_length], kernel))
    far = positions[:, None, :, None] - jnp.arange(keys) > clamp_length
    return jnp.where(far, clipped[..., None], scores)


def segment_scores(
    query: Float[Array, "B T H C"], kernel: Float[Array, "D H C"], keys: int, clamp_length: int = 0
) -> Float[Array, "B H T S"]:
    """Return the `distance_scores` of queries at the last T of S positions.

    Except on TPUs, queries are multiplied by the vectors W_R R of the distances to each key, which are consecutive rows
    for each query. This needs fewer operations, but on TPUs copying rows is slow, as is shifting scores (appendix B).
    """
    length = query.shape[1]

    def by_rows(query, kernel):
        table = sinusoidal(keys, len(kernel))
        if clamp_length:
            table = table[np.minimum(np.arange(keys), clamp_length)]
        relative = jnp.einsum("SD,DHC->SHC", table.astype(kernel.dtype), kernel)
        # In float32 because the gradients of a vector are summed: in 16 bits, this is inexact, and slow on GPUs.
        rows = jnp.pad(relative[::-1].astype(jnp.float32), [(0, length - 1), (0, 0), (0, 0)])
        starts = length - 1 - np.arange(length)
        vectors = jax.vmap(lambda start: jax.lax.dynamic_slice_in_dim(rows, start, keys))(starts)
        return jnp.einsum("BTHC,TSHC->BHTS", query, vectors.astype(relative.dtype))

    def by_products(query, kernel):
        return distance_scores(query, kernel, jnp.arange(keys - length, keys)[None], keys, clamp_length)

    return jax.lax.platform_dependent(query, kernel, tpu=by_products, default=by_rows)


@MODELS.register("transformer_xl")
class TransformerXL(DecoderOnly):
    """A language model: logits of the next token from a segment and the memory of earlier ones.

    Attributes:
        max_length: length of a segment in training.
        memory_length: M, number of tokens before the segment that each layer attends to; 0: the vanilla model.
        same_length: whether each token attends to `memory_length` tokens, including itself; otherwise it attends to the
            whole memory and all preceding tokens of the segment.
        clamp_length: maximum distance, to which larger ones are clipped; 0: none.
        cutoffs: indices of the first words of the tails of an adaptive softmax (arXiv 1609.04309), for a vocabulary
            that is sorted by frequency; (): an ordinary softmax without biases.
        divisor: with `cutoffs`, the word vectors of tail i have D / divisor^i components (arXiv 1809.10853).
        dropout: rate on embeddings, the output of each sublayer and of the stack.
        attention_dropout: rate on the attention weights.
    """

    VARIANTS: ClassVar = {
        "standard": {"depth": 16, "width": 410, "num_heads": 10, "mlp_dim": 2100},
        "large": {"depth": 18, "width": 1024, "num_heads": 16, "mlp_dim": 4096},
    }

    vocab_size: Count = 267_735
    max_length: Count = 150
    memory_length: Natural = 150
    same_length: bool = False
    clamp_length: Natural = 0
    cutoffs: Counts = ()
    divisor: Annotated[Count, Needs("cutoffs")] = 1
    depth: Count = 16
    width: Count = 410
    num_heads: Count = 10
    mlp_dim: Size = None
    activation: Activation = "relu"
    epsilon: Epsilon = 1e-5
    attention_dropout: Rate = 0.0
    fused_loss: Annotated[bool, Needs("cutoffs", ((),))] = False  # always with an adaptive softmax

    @property
    def computes_loss(self) -> bool:
        return self.fused_loss or bool(self.cutoffs)

    @property
    def sharding_rules(self) -> tuple[ShardingRule, ...]:
        return (("memory/.*hidden", (EXAMPLES, None, None)), *super().sharding_rules)

    def setup(self):
        init = nn.initializers.normal(0.02)
        if self.same_length and not self.memory_length:
            raise ValueError("memory_length is 0: it must be at least 1 if same_length is True.")
        if self.width % 2:
            raise ValueError(f"width is {self.width}: it must be even, for pairs of sines and cosines.")
        window = self.memory_length if self.same_length else self.max_length + self.memory_length
        attention = partial(
            RecurrentAttention,
            num_heads=self.num_heads,
            window=window,
            dropout=self.attention_dropout,
            kernel_init=init,
            out_init=init,
            memory_length=self.memory_length,
            same_length=self.same_length,
            clamp_length=self.clamp_length,
        )
        mlp = partial(Mlp, self.mlp_size, ACTIVATIONS[self.activation], kernel_init=init, out_init=init)
        norm = partial(LayerNorm, epsilon=self.epsilon)
        block = partial(Block, attention=attention, mlp=mlp, norm=norm, norm_placement="post", dropout=self.dropout)
        if self.cutoffs:
            self.embed = AdaptiveEmbed(self.vocab_size, self.width, self.cutoffs, self.divisor)
        else:
            self.embed = Embed(self.vocab_size, self.width, scale=True)
        self.unembed = self.embed
        self.drop = Dropout(self.dropout)
        self.stack = self.new_stack(block, self.depth)

    def __call__(self, tokens: Tokens, *, targets: Targets | None = None) -> Logits | TokenLosses:
        """Return logits of the token after each one of a segment, or the losses of the next tokens, `targets`.

        Each sequence continues that of the last call if the memory is kept: apply(..., mutable=["memory"]).
        """
        x, _ = self.hidden(tokens)
        return self.unembed.logits(x) if targets is None else self.unembed.losses(x, targets)

    def check_length(self, length: int) -> None:
        """Allow caches of any length: each token attends to at most `max_length` + `memory_length` tokens."""

    def hidden(self, tokens: Tokens, positions: Positions | None = None, **kwargs) -> Hidden:
        x = self.drop(self.embed(tokens))
        self.sow("intermediates", "embedding", x)
        x, cache = self.stack(x, **kwargs)
        return self.drop(x), cache
