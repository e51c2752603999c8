"""The attention module: projections to heads, attention within each, and the projection back (arXiv 1706.03762)."""

from collections.abc import Callable
from functools import partial
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from lineage.models.kernels.attention import kernels_for, on_platform
from lineage.models.layers.attend import (
    SOFTMAX,
    Attend,
    DropWeights,
    Keys,
    Mask,
    Outputs,
    Queries,
    Score,
    Values,
    Weighting,
    dense,
    dense_flat,
    scaled_dot_product,
)
from lineage.models.layers.cache import LayerCache
from lineage.models.layers.dropout import seed_of
from lineage.models.layers.linear import Linear
from lineage.models.layers.placement import by_heads
from lineage.models.layers.sparse import has_windows, windowed


def portable(query: Queries, key: Keys, value: Values, mask: Mask, weighting: Weighting = SOFTMAX) -> Outputs:
    """Attend with `windowed` if the mask allows it and it saves work, otherwise with `dense`."""
    attend = windowed if has_windows(mask, query.shape[1]) else dense
    return attend(query, key, value, mask, weighting)


def auto(query: Queries, key: Keys, value: Values, mask: Mask, weighting: Weighting = SOFTMAX) -> Outputs:
    """Attend with a kernel of the platform that runs the program if there is one, otherwise with `portable`."""
    return on_platform(portable, kernels_for, query, key, value, mask, weighting)


def cached(cache: LayerCache, query: Queries, key: Keys, value: Values, *others: Any) -> Outputs:
    """Attend to the keys and values of a cache."""
    return dense_flat(query, cache.key, cache.value, *others)


IMPLEMENTATIONS: dict[str, Attend] = {"auto": auto, "portable": portable, "dense": dense}


class Attention(nn.Module):
    """Multi-head attention to the input itself (self-attention) or to a context (cross-attention).

    The weights [B, H, T, S] are sown as `intermediates/attention`; those of `windowed` are sown by block.

    Attributes:
        num_heads: number of query heads, H.
        num_kv_heads: number of key/value heads, K, a divisor of H; None: H.
        head_size: C; None: width / H.
        causal: whether later keys are masked out (self-attention only).
        window: with `causal`, attend only to the last `window` keys, including the token's own (arXiv 2310.06825,
            section 2); None: all.
        attend: attention implementation, see `layers.attend`, or its name in `IMPLEMENTATIONS`.
        score: score function or module, see `Score`.
        rotary: function that rotates queries or keys [B, T, H, C] by their positions [B, T]; None disables it.
        relative: constructor of a module that maps (queries [B, T, H, C], positions [B, T], number of keys S) to a bias
            [B, H, T, S], such as `partial(RelativeKeys, max_distance=8)`; None disables it.
        qk_norm: constructor of the norms of queries and keys of a head (arXiv 2302.05442, section 2.1), or None.
        dropout: rate on the attention weights.
        use_bias: whether the projections have biases.
        kernel_init, out_init: initializers of the input projections and of the output projection.
        query_init: initializer of the query projection; None: `kernel_init`.
        key_bias: whether the key projection has a bias, if `use_bias`.
    """

    num_heads: int
    num_kv_heads: int | None = None
    head_size: int | None = None
    causal: bool = False
    window: int | None = None
    attend: str | Attend = "auto"
    score: Score = scaled_dot_product
    rotary: Callable | None = None
    relative: Callable[..., nn.Module] | None = None
    qk_norm: Callable[..., nn.Module] | None = None
    dropout: float = 0.0
    use_bias: bool = True
    kernel_init: Callable = nn.initializers.xavier_uniform()
    out_init: Callable = nn.initializers.xavier_uniform()
    query_init: Callable | None = None
    key_bias: bool = True

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "B T D"],
        context: Float[Array, "B S E"] | LayerCache | None = None,
        *,
        mask: Mask | None = None,
        positions: Int[Array, "#B T"] | None = None,
        cache: LayerCache | None = None,
    ) -> tuple[Float[Array, "B T D"], LayerCache | None]:
        """Return the output, and the cache with the new keys and values appended (None if none was given).

        Args:
            x: input of the queries.
            context: input of the keys and values, or a `LayerCache` of projected keys and values; None: x.
            mask: restrictions in addition to `causal` and `window`. With a cache, `mask.keys` and `mask.bias` cover all
                of its entries, and a query attends to those up to its own.
            positions: positions of the queries; None: 0 to T-1, or the next T entries of the cache.
            cache: keys and values of the preceding tokens.

        Raises:
            ValueError: the heads do not divide the width, or the implementation or a ring buffer does not support the
                arguments.
        """
        if self.causal and context is not None:
            raise ValueError("attention to a context cannot be causal: its positions are not those of the queries.")
        mask = mask or Mask()
        source = x if context is None else context
        query, key, value = self.project(x, source, source)  # [B, T, H, C], [B, S, K, C], [B, S, K, C]

        if self.qk_norm is not None:
            query, key = self.qk_norm(name="query_norm")(query), self.qk_norm(name="key_norm")(key)
        indices = None if cache is None else cache.positions(x.shape[1])
        if positions is None:
            positions = jnp.arange(x.shape[1])[None] if cache is None else indices
        if self.rotary is not None:
            query, key = self.rotary(query, positions), self.rotary(key, positions)

        if self.causal or cache is not None:
            # The index of a query in the cache need not be its position.
            mask = mask.replace(causal=True, window=self.window, positions=indices)
        memory = context if isinstance(context, LayerCache) else None
        if cache is not None:
            empty, cache = cache.is_empty, cache.append(key, value)
            if empty:
                mask = mask.first(x.shape[1])
            else:
                self._check_entries(cache, x.shape[1])
                mask, memory = mask.replace(key_positions=cache.entry_positions), cache
        if self.relative is not None:
            keys = key.shape[1] if memory is None else memory.max_length
            if mask.segments is not None:  # the module counts keys from the start of the row, not of their segment
                positions = jnp.arange(x.shape[1])[None]
            relative = self.relative(name="relative")(query, positions, keys)
            mask = mask.replace(bias=relative if mask.bias is None else mask.bias + relative)
        attend = None if memory is None else partial(cached, memory)
        return self.combine(query, key, value, mask, x.shape[-1], attend), cache

    def project(
        self,
        queries: Float[Array, "B T D"],
        keys: Float[Array, "B S E"] | LayerCache,
        values: Float[Array, "B S E"] | LayerCache,
    ) -> tuple[Queries, Keys, Keys]:
        """Project the inputs to queries, keys and values of each head; a `LayerCache` has projected keys and values."""
        kv_heads, head_size = self._sizes(queries.shape[-1])
        init, shape = self.query_init or self.kernel_init, (self.num_heads, head_size)
        query = Linear(shape, use_bias=self.use_bias, kernel_init=init, name="query")(queries)
        if isinstance(keys, LayerCache):
            return query, *keys.keys_and_values(len(queries))
        linear = partial(Linear, (kv_heads, head_size), kernel_init=self.kernel_init)
        key = linear(use_bias=self.use_bias and self.key_bias, name="key")(keys)
        return query, key, linear(use_bias=self.use_bias, name="value")(values)

    def combine(
        self, query: Queries, key: Keys, value: Keys, mask: Mask, width: int, attend: Attend | None = None
    ) -> Float[Array, "B T D"]:
        """Attend within each head and project the outputs back to the width D; `attend` overrides the attribute."""
        attend = attend or by_heads(IMPLEMENTATIONS.get(self.attend, self.attend))
        transform = None
        if self.dropout > 0 and self.has_rng("dropout"):
            transform = DropWeights(seed_of(self.make_rng("dropout")), self.dropout)
        recorded = self.is_mutable_collection("intermediates")
        sow = partial(self.sow, "intermediates", "attention") if recorded else None
        heads = attend(query, key, value, mask, Weighting(self.score, transform, sow))
        return Linear((width,), axes=2, use_bias=self.use_bias, kernel_init=self.out_init, name="out")(heads)

    def _check_entries(self, cache, count):
        """Raise ValueError if a ring buffer has lost keys that are visible to the first of the last `count` queries."""
        if cache.rolling and (self.relative or cache.max_length < (self.window or np.inf) + count - 1):
            raise ValueError(
                f"a ring buffer of {cache.max_length} entries does not suffice for {count} tokens at once and window "
                f"{self.window}: window + tokens - 1 entries are required, and there may be no relative positions."
            )

    def _sizes(self, width: int) -> tuple[int, int]:
        """Return the number of key/value heads and the size of a head."""
        kv_heads = self.num_kv_heads or self.num_heads
        if (self.head_size is None and width % self.num_heads) or self.num_heads % kv_heads:
            given = f"width {width}, {self.num_heads} heads and {kv_heads} key/value heads do not fit"
            raise ValueError(f"{given}: heads must divide the width, and key/value heads the heads.")
        if self.window is not None and self.window < 1:
            raise ValueError(f"the attention window is {self.window} tokens: it must be at least 1.")
        return kv_heads, self.head_size or width // self.num_heads
