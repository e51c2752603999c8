"""Transformer-XL (arXiv 1901.02860): a language model with segment-level recurrence and relative positions.

Each layer stores its inputs of the last tokens, and the next segment attends to them too, without gradient. Attention
depends on distances instead of positions, which would repeat in every segment. Without a memory, it is the vanilla
model of independent segments (section 3.1).
"""

from functools import partial
from typing import ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from lineage.models.base import MODELS, ShardingRule
from lineage.models.decoder import DecoderOnly, Hidden
from lineage.models.fields import Activation, Count, Counts, Epsilon, Logits, Natural, Positions, Rate, Size, Tokens
from lineage.models.kernels.vocabulary import Targets, TokenLosses
from lineage.models.layers import ACTIVATIONS, Block, Dropout, Embed, LayerNorm, Linear, Mask, Mlp, Weighting, dense
from lineage.models.layers.adaptive import AdaptiveEmbed
from lineage.models.layers.cache import LayerCache
from lineage.models.layers.placement import EXAMPLES
from lineage.models.layers.position import sinusoidal


class RecurrentAttention(nn.Module):
    """Causal attention to a segment and to the hidden states before it, by content and distance (section 3.3).

    The score of query i and key j is ((q_i + u) . k_j + (q_i + v) . W_R R_(i-j)) / sqrt(C), with sinusoids R. Each
    layer has its own biases u and v, as in the published models. If the collection "memory" is mutable, the last
    `memory_length` inputs are stored there for the next call. `window` is the number of tokens of a cache that a token
    attends to, including itself; with `same_length` it applies to segments too.
    """

    num_heads: Count
    memory_length: int
    window: Count
    same_length: bool = False
    clamp_length: Natural = 0
    dropout: Rate = 0.0
    kernel_init: nn.initializers.Initializer = nn.initializers.normal(0.02)

    @nn.compact
    def __call__(
        self, x: Float[Array, "B T D"], *, cache: LayerCache | None = None, **_
    ) -> tuple[Float[Array, "B T D"], LayerCache | None]:
        """Return the output, and the cache with this call's keys and values appended (None if none was given)."""
        length, width = x.shape[1:]
        if width % self.num_heads:
            raise ValueError(f"width {width} and {self.num_heads} heads do not fit: the heads must divide the width.")
        heads = (self.num_heads, width // self.num_heads)
        project = partial(Linear, heads, use_bias=False, kernel_init=self.kernel_init)
        query = project(name="query")(x)
        if cache is None:
            context, real = self._with_memory(x)
            key, value = project(name="key")(context), project(name="value")(context)
            positions = jnp.arange(key.shape[1])
            window = self.window if self.same_length else None
            mask = Mask(keys=real[None], causal=True, window=window, positions=positions[None, -length:])
        else:
            positions = cache.positions(length)
            cache = cache.append(project(name="key")(x), project(name="value")(x))
            key, value = (array.astype(x.dtype) for array in cache.keys_and_values(len(x)))
            mask = Mask(causal=True, window=self.window, positions=positions)

        distances = sinusoidal(key.shape[1], width)
        if self.clamp_length:
            distances = distances[np.minimum(np.arange(len(distances)), self.clamp_length)]
        relative = project(name="distance")(jnp.asarray(distances, x.dtype))
        u, v = (self.param(name, self.kernel_init, heads) for name in ("u", "v"))
        by_distance = (query + v) * heads[1] ** -0.5
        if cache is None:
            bias = jnp.einsum("BTHC,TSHC->BHTS", by_distance, by_key(relative, length))
        else:
            distance = positions[:, None, :, None] - jnp.arange(cache.max_length)
            scores = jnp.einsum("BTHC,SHC->BHTS", by_distance, relative)
            bias = jnp.take_along_axis(scores, jnp.maximum(distance, 0), axis=-1)
        out = dense(query + u, key, value, mask.replace(bias=bias), Weighting(transform=self._weights))
        return Linear((width,), axes=2, use_bias=False, kernel_init=self.kernel_init, name="out")(out), cache

    def _with_memory(self, x):
        """Return memory and segment [B, M + T, D], and the mask [M + T] of real tokens; update the memory."""
        if not self.memory_length or not self.is_mutable_collection("memory"):
            return x, jnp.ones(x.shape[1], bool)
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
        return context, real

    def _weights(self, weights: Float[Array, "B H T S"]) -> Float[Array, "B H T S"]:
        self.sow("intermediates", "attention", weights)
        return Dropout(self.dropout)(weights)


def by_key(relative: Float[Array, "S H C"], length: int) -> Float[Array, "T S H C"]:
    """Return the vectors of the distances of the last T of S tokens to each token; zero for later tokens.

    Those of one token are consecutive rows of the reversed vectors. Shifting the scores instead (appendix B) would move
    more data and is slow on TPUs.
    """
    keys = len(relative)
    # In float32 because the gradients of a vector are summed: in 16 bits, this is inexact, and slow on GPUs.
    rows = jnp.pad(relative[::-1].astype(jnp.float32), [(0, length - 1), (0, 0), (0, 0)])
    found = jax.vmap(lambda start: jax.lax.dynamic_slice_in_dim(rows, start, keys))(length - 1 - jnp.arange(length))
    return found.astype(relative.dtype)


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
    divisor: Count = 1
    depth: Count = 16
    width: Count = 410
    num_heads: Count = 10
    mlp_dim: Size = None
    activation: Activation = "relu"
    epsilon: Epsilon = 1e-5
    attention_dropout: Rate = 0.0

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
        window = self.memory_length if self.same_length else self.max_length + self.memory_length
        sizes = {"num_heads": self.num_heads, "memory_length": self.memory_length, "window": window}
        distances = {"same_length": self.same_length, "clamp_length": self.clamp_length}
        attention = partial(RecurrentAttention, **sizes, **distances, dropout=self.attention_dropout, kernel_init=init)
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
