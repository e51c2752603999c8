"""From queries, keys and values to outputs, without parameters: score functions, masks and dense attention.

An attention implementation is a function `(query, key, value, mask, *, score, transform, sow) -> output`: the
mean of the values, weighted by the softmax of each query's scores over the keys. `dense` is the reference;
`layers.sparse` and `models.kernels` have other implementations.

Queries come in groups: H = K x G heads, where each of K key/value heads serves G query heads. G = 1 is multi-head
attention, K = 1 multi-query (arXiv 1911.02150), anything between grouped-query attention (arXiv 2305.13245).
"""

from collections.abc import Callable
from functools import reduce

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from lineage.models.layers.linear import product

Score = Callable[[Float[Array, "B T K G C"], Float[Array, "B S K C"]], Float[Array, "B K G T S"]]
Attend = Callable[..., Float[Array, "B T H E"]]


def dot_product(query: Float[Array, "B T K G C"], key: Float[Array, "B S K C"]) -> Float[Array, "B K G T S"]:
    """Return the inner product of every query with every key; its variance grows as C."""
    return jnp.einsum("BTKGC,BSKC->BKGTS", query, key)


def scaled_dot_product(query: Float[Array, "B T K G C"], key: Float[Array, "B S K C"]) -> Float[Array, "B K G T S"]:
    """Return the inner product over sqrt(C): unit variance for unit-variance inputs (arXiv 1706.03762, equation 1)."""
    return dot_product(query * query.shape[-1] ** -0.5, key)


class Additive(nn.Module):
    """Bahdanau's score v . tanh(W q + U k) (arXiv 1409.0473); query and key may differ in size.

    Attributes:
        hidden: width of the hidden layer.
        keys_projected: the keys are U k already, which saves their projection where queries come one by one.
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


@struct.dataclass
class Mask:
    """Restrictions on the keys that a query may attend to, and a bias of its scores.

    A key is visible where all restrictions allow it. `dense` turns the description into an array of T x S; other
    implementations use it as it is.

    Attributes:
        keys: True for real keys, False for padding.
        segments: number of the segment of each token: in self-attention, tokens attend within their segment only.
        allowed: any other restriction, True where a query may attend to a key.
        causal: mask out keys at later positions.
        window: with `causal`, the number of last keys that are visible, the one at the own position included.
        positions: positions of the queries among the keys, for `causal` and `window`; None: 0 to T-1.
        bias: added to the scores.
    """

    keys: Bool[Array, "#B S"] | None = None
    segments: Int[Array, "#B S"] | None = None
    allowed: Bool[Array, "#B #H #T #S"] | None = None
    causal: bool = struct.field(pytree_node=False, default=False)
    window: int | None = struct.field(pytree_node=False, default=None)
    positions: Int[Array, "#B T"] | None = None
    bias: Float[Array, "#B #H #T #S"] | None = None

    def first(self, count: int) -> "Mask":
        """Return the mask of the first `count` tokens of each sequence, as queries and as keys."""
        keys = None if self.keys is None else self.keys[:, :count]
        bias = None if self.bias is None else self.bias[..., :count]
        allowed = None if self.allowed is None else self.allowed[..., :count]
        return self.replace(keys=keys, bias=bias, allowed=allowed, positions=None)

    def materialize(self, queries: int, keys: int) -> Bool[Array, "#B #H #T #S"] | None:
        """Return True where a query may attend to a key, or None if nothing is masked."""
        parts = []
        if self.keys is not None:
            parts.append(self.keys[:, None, None, :])
        if self.segments is not None:
            parts.append((self.segments[:, :, None] == self.segments[:, None, :])[:, None])
        if self.allowed is not None:
            parts.append(self.allowed)
        if self.causal:
            query = (jnp.arange(queries)[None] if self.positions is None else self.positions)[:, :, None]
            key = jnp.arange(keys)
            seen = query >= key
            parts.append((seen if self.window is None else seen & (query - key < self.window))[:, None])
        return reduce(jnp.logical_and, parts) if parts else None


@jax.custom_jvp
def masked_softmax(scores: Float[Array, "B H T S"], mask: Bool[Array, "#B #H #T #S"] | None) -> Float[Array, "B H T S"]:
    """Return the softmax over the keys where the mask is True; its derivative needs only the result and the mask."""
    return jax.nn.softmax(scores if mask is None else jnp.where(mask, scores, jnp.finfo(scores.dtype).min))


@masked_softmax.defjvp
def _(primals, tangents):
    weights, mask = masked_softmax(*primals), primals[1]
    # In this order: XLA's CPU backend (jaxlib 0.10.2) sums `weights * tangent` wrongly where only the tangents are
    # batched, as under jax.jacrev.
    tangent = tangents[0] * weights
    tangent = tangent - tangent.sum(axis=-1, keepdims=True) * weights
    # In a row without any visible key, the weights are equal, whatever its scores.
    return weights, tangent if mask is None else jnp.where(mask.any(axis=-1, keepdims=True), tangent, 0)


def dense(
    query: Float[Array, "B T H Q"],
    key: Float[Array, "B S K C"],
    value: Float[Array, "B S K E"],
    mask: Mask | None = None,
    *,
    score: Score = scaled_dot_product,
    transform: Callable[[Array], Array] | None = None,
    sow: Callable[[Array], object] | None = None,
) -> Float[Array, "B T H E"]:
    """Attend with all T x S weights in memory.

    H must be a multiple of K: query head h uses key/value head h // (H / K). A query without any visible key gets the
    mean of all values.

    Args:
        transform: applied to the weights [B, H, T, S] before they are used, such as dropout.
        sow: called with the weights [B, H, T, S] to record them.
    """
    mask = mask or Mask()
    batch, length, heads, _ = query.shape
    kv_heads = key.shape[2]
    grouped = query.reshape(batch, length, kv_heads, heads // kv_heads, -1)
    scores = score(grouped, key).reshape(batch, heads, length, -1)
    weights = _weights(scores, mask, value.dtype, transform, sow)
    weights = weights.reshape(batch, kv_heads, heads // kv_heads, length, -1)
    return jnp.einsum("BKGTS,BSKE->BTKGE", weights, value).reshape(batch, length, heads, -1)


def _weights(scores, mask, dtype, transform, sow):
    """Return the attention weights [B, H, T, S] of scores, recorded and transformed."""
    scores = scores.astype(jnp.float32)
    if mask.bias is not None:
        scores = scores + mask.bias
    weights = masked_softmax(scores, mask.materialize(*scores.shape[2:])).astype(dtype)
    if sow is not None:
        sow(weights)
    return weights if transform is None else transform(weights)


def dense_flat(
    query: Float[Array, "B T H Q"],
    key: Float[Array, "N S C"],
    value: Float[Array, "N S E"],
    mask: Mask,
    *,
    score: Score = scaled_dot_product,
    transform: Callable[[Array], Array] | None = None,
    sow: Callable[[Array], object] | None = None,
) -> Float[Array, "B T H E"]:
    """Attend as `dense` does to keys and values whose batch and heads are one axis, N = B x K.

    With an inner product as the score, they are read in place even where there are few queries.
    """
    batch, length, heads, size = query.shape
    if score not in (dot_product, scaled_dot_product):
        key, value = (x.reshape(batch, -1, *x.shape[1:]).swapaxes(1, 2) for x in (key, value))
        return dense(query, key, value, mask, score=score, transform=transform, sow=sow)
    groups = heads * batch // len(key)
    rows = query if score is dot_product else query * size**-0.5
    rows = rows.reshape(batch, length, -1, groups, size).transpose(0, 2, 3, 1, 4).reshape(len(key), -1, size)
    scores = product(rows, key.swapaxes(1, 2)).reshape(batch, heads, length, -1)
    weights = _weights(scores, mask, value.dtype, transform, sow)
    out = product(weights.reshape(len(key), -1, key.shape[1]), value)
    return (
        out.reshape(batch, -1, groups, length, value.shape[-1])
        .transpose(0, 3, 1, 2, 4)
        .reshape(batch, length, heads, -1)
    )
