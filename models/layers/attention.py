"""Attention: one module for every kind of it (arXiv 1706.03762), made of score functions and a weighted mean.

Queries come in groups: H = K x G heads, where each of K key/value heads serves G query heads. G = 1 is multi-head
attention, K = 1 multi-query (arXiv 1911.02150), anything between grouped-query attention (arXiv 2305.13245).
"""

import math
from collections.abc import Callable
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from lineage.models.layers.cache import Cache, Memory
from lineage.models.layers.linear import Linear

Score = Callable[[Float[Array, "B T K G C"], Float[Array, "B S K C"]], Float[Array, "B K G T S"]]


def dot_product(query: Float[Array, "B T K G C"], key: Float[Array, "B S K C"]) -> Float[Array, "B K G T S"]:
    """The inner product of every query with every key; its variance grows as C."""
    return jnp.einsum("BTKGC,BSKC->BKGTS", query, key)


def scaled_dot_product(query: Float[Array, "B T K G C"], key: Float[Array, "B S K C"]) -> Float[Array, "B K G T S"]:
    """The inner product over sqrt(C), whose variance is 1 for unit-variance inputs (arXiv 1706.03762, equation 1)."""
    return dot_product(query * query.shape[-1] ** -0.5, key)


def gaussian(query: Float[Array, "B T K G C"], key: Float[Array, "B S K C"]) -> Float[Array, "B K G T S"]:
    """-|q - k|^2 / 2: attention becomes Nadaraya-Watson regression with a Gaussian kernel of unit width."""
    difference = query[:, :, None] - key[:, None, :, :, None]
    return jnp.einsum("BTSKGC,BTSKGC->BKGTS", difference, difference) * -0.5


class Additive(nn.Module):
    """v . tanh(W q + U k), Bahdanau's score (arXiv 1409.0473): query and key may differ in size.

    Attributes:
        hidden: width of the hidden layer.
        keys_projected: the keys are U k already, which serves many queries that come one by one.
    """

    hidden: int
    keys_projected: bool = False

    @nn.compact
    def __call__(self, query: Float[Array, "B T K G Q"], key: Float[Array, "B S K C"]) -> Float[Array, "B K G T S"]:
        query = nn.Dense(self.hidden, use_bias=False, name="query")(query)
        if not self.keys_projected:
            key = nn.Dense(self.hidden, use_bias=False, name="key")(key)
        hidden = jnp.tanh(query[:, :, None] + key[:, None, :, :, None])
        scores = nn.Dense(1, use_bias=False, name="score")(hidden)
        return jnp.einsum("BTSKG->BKGTS", scores[..., 0])


class Cosine(nn.Module):
    """The cosine of the angle of query and key, times a learned scale of each head (arXiv 2111.09883, section 3.3)."""

    @nn.compact
    def __call__(self, query: Float[Array, "B T K G C"], key: Float[Array, "B S K C"]) -> Float[Array, "B K G T S"]:
        def unit(x):
            x = x.astype(jnp.float32)
            return x * jax.lax.rsqrt(jnp.maximum(jnp.square(x).sum(axis=-1, keepdims=True), 1e-24))

        scale = self.param("scale", nn.initializers.constant(math.log(10)), query.shape[2:4])
        return dot_product(unit(query) * jnp.exp(jnp.minimum(scale, math.log(100)))[..., None], unit(key))


def causal_mask(query_positions: Int[Array, "*B T"], key_positions: Int[Array, "S"]) -> Bool[Array, "*B 1 T S"]:
    """True where a query may see a key: at its own position or before it."""
    return (query_positions[..., :, None] >= key_positions)[..., None, :, :]


def window_mask(
    query_positions: Int[Array, "*B T"], key_positions: Int[Array, "S"], window: int
) -> Bool[Array, "*B 1 T S"]:
    """True where a query may see a key: among the last `window` positions, its own the last of them."""
    distance = query_positions[..., :, None] - key_positions
    return ((distance >= 0) & (distance < window))[..., None, :, :]


@jax.custom_jvp
def masked_softmax(scores: Float[Array, "B H T S"], mask: Bool[Array, "#B #H #T #S"] | None) -> Float[Array, "B H T S"]:
    """The softmax over the keys where the mask is True. Its derivative needs the result and the mask alone."""
    return jax.nn.softmax(scores if mask is None else jnp.where(mask, scores, jnp.finfo(scores.dtype).min))


@masked_softmax.defjvp
def _(primals, tangents):
    weights, mask = masked_softmax(*primals), primals[1]
    # In this order: XLA's CPU backend (jaxlib 0.10.2) sums `weights * tangent` wrongly where the tangents alone are
    # batched, as under jax.jacrev.
    tangent = tangents[0] * weights
    tangent = tangent - tangent.sum(axis=-1, keepdims=True) * weights
    # The weights of a row without any key are all alike, whatever its scores.
    return weights, tangent if mask is None else jnp.where(mask.any(axis=-1, keepdims=True), tangent, 0)


def attend(
    query: Float[Array, "B T H Q"],
    key: Float[Array, "B S K C"],
    value: Float[Array, "B S K E"],
    *,
    score: Score = scaled_dot_product,
    mask: Bool[Array, "#B #H #T #S"] | None = None,
    bias: Float[Array, "#B #H #T #S"] | None = None,
    transform: Callable[[Array], Array] = lambda weights: weights,
) -> Float[Array, "B T H E"]:
    """The mean of the values, weighted by the softmax of each query's scores over the keys.

    Args:
        query, key, value: H must be a multiple of K: query head h uses key/value head h // (H / K).
        score: how well a query fits a key.
        mask: True = may attend. A query that may attend to nothing gets the plain mean of all values.
        bias: added to the scores.
        transform: what happens to the weights [B, H, T, S] before they are used (dropout, a look at them).
    """
    batch, length, heads, _ = query.shape
    kv_heads = key.shape[2]
    grouped = query.reshape(batch, length, kv_heads, heads // kv_heads, -1)
    scores = score(grouped, key).reshape(batch, heads, length, -1).astype(jnp.float32)
    if bias is not None:
        scores = scores + bias
    weights = transform(masked_softmax(scores, mask).astype(value.dtype))
    weights = weights.reshape(batch, kv_heads, heads // kv_heads, length, -1)
    return jnp.einsum("BKGTS,BSKE->BTKGE", weights, value).reshape(batch, length, heads, -1)


def attend_in_window(
    query: Float[Array, "B T H C"],
    key: Float[Array, "B T K C"],
    value: Float[Array, "B T K E"],
    window: int,
    *,
    mask: Bool[Array, "#B #H 1 T"] | None = None,
    **options,
) -> Float[Array, "B T H E"]:
    """`attend` where each query sees the last `window` keys, its own the last of them: 2 T x window scores, not T x T.

    The queries are cut into blocks as long as the window. What a block sees lies in it and in the one before.
    """
    batch, length = query.shape[:2]
    blocks = -(-length // window)
    rest = blocks * window - length

    def block(x, before=0):  # [B, T, ...] -> [B x blocks, window (or 2 windows), ...]
        x = jnp.pad(x, [(0, 0), (before, rest)] + [(0, 0)] * (x.ndim - 2))
        x = x.reshape(batch, -1, window, *x.shape[2:])
        x = jnp.concatenate([x[:, :-1], x[:, 1:]], axis=2) if before else x
        return x.reshape(batch * blocks, -1, *x.shape[3:])

    real = jnp.ones((1, 1, 1, length), bool) if mask is None else mask
    real = jnp.broadcast_to(real, (batch, *real.shape[1:])).transpose(0, 3, 1, 2)
    mask = block(real, window).transpose(0, 2, 3, 1) & window_mask(
        window + jnp.arange(window)[None], jnp.arange(2 * window), window
    )
    out = attend(block(query), block(key, window), block(value, window), mask=mask, **options)
    return out.reshape(batch, blocks * window, *out.shape[2:])[:, :length]


class Attention(nn.Module):
    """Projections to heads, attention within each, projection back to the width.

    Keys and values come from the input (self-attention) or from `context` (cross-attention): vectors, which are
    projected, or a layer's `Memory`, which has been.

    Attributes:
        num_heads: query heads, H.
        num_kv_heads: key/value heads, K, a divisor of H; None is H.
        head_size: C; None is width / H.
        causal: a query sees no later key (self-attention only).
        window: a query of causal attention sees no more than the last `window` keys, its own among them
            (arXiv 2310.06825, section 2); None is all.
        score: a function or a Module, see `Score`.
        rotary: turns (queries or keys [B, T, H, C], positions [B, T]) by their positions; None leaves them.
        relative: makes a Module that maps (queries [B, T, H, C], positions [B, T], number of keys S) to a bias
            [B, H, T, S], such as `partial(RelativeKeys, max_distance=8)`; None adds none.
        qk_norm: makes a norm of each head's queries and of its keys (arXiv 2302.05442, section 2.1); None makes none.
        dropout: rate on the attention weights.
        implementation: "xla" works everywhere; "cudnn" is flash attention on an NVIDIA GPU in bfloat16 or float16, for
            the scaled dot product without dropout.
        use_bias, kernel_init, out_init: of the projections; `out_init` is the output's.
        query_init: of the queries' projection; None is `kernel_init`.
        key_bias: without it, the keys' projection has no bias even if the others have.

    The weights [B, H, T, S] are sown as `intermediates/attention` ("xla" only). Inputs longer than two windows are
    computed, and sown, in blocks of a window, unless there is a bias or a mask that is not the same for all queries.
    """

    num_heads: int
    num_kv_heads: int | None = None
    head_size: int | None = None
    causal: bool = False
    window: int | None = None
    score: Score = scaled_dot_product
    rotary: Callable | None = None
    relative: Callable[..., nn.Module] | None = None
    qk_norm: Callable[..., nn.Module] | None = None
    dropout: float = 0.0
    implementation: str = "xla"
    use_bias: bool = True
    kernel_init: Callable = nn.initializers.xavier_uniform()
    out_init: Callable = nn.initializers.xavier_uniform()
    query_init: Callable | None = None
    key_bias: bool = True

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "B T D"],
        context: Float[Array, "B S E"] | Memory | None = None,
        *,
        mask: Bool[Array, "#B #H #T #S"] | None = None,
        bias: Float[Array, "#B #H #T #S"] | None = None,
        positions: Int[Array, "#B T"] | None = None,
        cache: Cache | None = None,
        pattern: Callable | None = None,
        added: Float[Array, "#B T D"] | None = None,
        context_added: Float[Array, "#B S E"] | None = None,
    ) -> tuple[Float[Array, "B T D"], Cache | None]:
        """Returns the output and the cache with this call's keys and values appended (None when none was given).

        With a cache, `mask` and `bias` are over all of its positions, and a query sees those up to its own. A `pattern`
        computes what is to be seen in the place of `attend`, such as `BlockSparse`. What queries are made of is x with
        what is `added`, and so are keys, or the context with what is added to it, but not values.

        Raises:
            ValueError: heads do not divide, or the implementation cannot do what is asked of it.
        """
        if self.causal and context is not None:
            raise ValueError("attention to a context is not causal: its positions are not the queries'.")
        kv_heads, head_size = self._heads(width := x.shape[-1])

        def project(name, heads, inputs, init=self.kernel_init):
            use_bias = self.use_bias and (name != "key" or self.key_bias)
            return Linear((heads, head_size), use_bias=use_bias, kernel_init=init, name=name)(inputs)

        placed = x if added is None else x + added
        query = project("query", self.num_heads, placed, self.query_init or self.kernel_init)
        if isinstance(context, Memory):
            key, value = context.keys_and_values()
        else:
            source = x if context is None else context
            if context is not None:
                placed = context if context_added is None else context + context_added
            key, value = project("key", kv_heads, placed), project("value", kv_heads, source)

        if self.qk_norm is not None:
            query, key = self.qk_norm(name="query_norm")(query), self.qk_norm(name="key_norm")(key)
        if positions is None:
            positions = jnp.arange(x.shape[1])[None] if cache is None else cache.positions(x.shape[1])
        if self.rotary is not None:
            query, key = self.rotary(query, positions), self.rotary(key, positions)
        causal = self.causal
        if cache is not None:
            # Rows are causal by their places in the cache, which need not be their positions.
            allowed = self._allowed(cache.positions(x.shape[1]), jnp.arange(cache.max_length))
            mask = allowed if mask is None else mask & allowed
            causal = False
            cache = cache.append(key, value)
            key, value = (kept.astype(query.dtype) for kept in cache.keys_and_values())
        if self.relative is not None:
            relative = self.relative(name="relative")(query, positions, key.shape[1])
            bias = relative if bias is None else bias + relative

        out = self._attend(query, key, value, mask, bias, causal, pattern)
        out = Linear((width,), axes=2, use_bias=self.use_bias, kernel_init=self.out_init, name="out")(out)
        return out, cache

    def _heads(self, width):
        """How many key/value heads there are, and how large a head is."""
        kv_heads = self.num_kv_heads or self.num_heads
        if (self.head_size is None and width % self.num_heads) or self.num_heads % kv_heads:
            raise ValueError(
                f"width {width}, {self.num_heads} heads and {kv_heads} key/value heads do not fit: "
                "heads must divide the width, and key/value heads the heads."
            )
        if self.window is not None and self.window < 1:
            raise ValueError(f"an attention window of {self.window} tokens is none: it must be at least 1.")
        return kv_heads, self.head_size or width // self.num_heads

    def _attend(self, query, key, value, mask, bias, causal, pattern):
        """The heads' outputs [B, T, H, C], by the implementation that is asked for."""
        if self.implementation == "cudnn":
            if pattern is not None:
                raise ValueError("cuDNN attention has no patterns of blocks: set implementation to 'xla'.")
            return self._flash(query, key, value, mask, bias, causal)
        if self.implementation != "xla":
            raise ValueError(f"attention implementation {self.implementation!r} is unknown: it is 'xla' or 'cudnn'.")
        attention = pattern or attend
        if causal and self._in_blocks(query.shape[1], mask, bias):
            attention = partial(attend_in_window, window=self.window)
        elif causal:
            allowed = self._allowed(jnp.arange(query.shape[1])[None], jnp.arange(key.shape[1]))
            mask = allowed if mask is None else mask & allowed
        return attention(query, key, value, score=self.score, mask=mask, bias=bias, transform=self._weights)

    def _allowed(self, query_positions, key_positions):
        if self.window is None:
            return causal_mask(query_positions, key_positions)
        return window_mask(query_positions, key_positions, self.window)

    def _in_blocks(self, length, mask, bias):
        by_key = mask is None or mask.shape[2] == 1
        return self.window is not None and length > 2 * self.window and by_key and bias is None

    def _weights(self, weights: Float[Array, "B H T S"]) -> Float[Array, "B H T S"]:
        self.sow("intermediates", "attention", weights)
        return nn.Dropout(self.dropout, deterministic=not self.has_rng("dropout"))(weights)

    def _flash(self, query, key, value, mask, bias, causal):
        if self.score is not scaled_dot_product or (self.dropout and self.has_rng("dropout")):
            raise ValueError(
                "cuDNN attention computes the scaled dot product without dropout on the weights: "
                "set attention dropout to 0 or implementation to 'xla'."
            )
        window = (self.window - 1, 0) if causal and self.window else None
        return jax.nn.dot_product_attention(
            query,
            key,
            value,
            bias=bias,
            mask=mask,
            is_causal=causal,
            local_window_size=window,
            implementation="cudnn",
        )
