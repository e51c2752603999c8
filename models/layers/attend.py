"""Attention without parameters, from queries, keys and values to outputs: score functions, masks, dense attention.

An attention implementation is a function `(query, key, value, mask, weighting) -> output`, which returns means of the
values with the weights of a `Weighting`. `dense` is the reference; `layers.sparse` and `models.kernels` have others.

Heads are grouped: each of K key/value heads serves G of the H = K x G query heads. G = 1 is multi-head attention, K = 1
multi-query attention (arXiv 1911.02150), and anything in between grouped-query attention (arXiv 2305.13245).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from lineage.models.kernels.compiler import matmul, matmul_in_8_bits, recomputed
from lineage.models.layers.dropout import keeps
from lineage.models.layers.quantized import Entries, Quantized, vectors

Score = Callable[[Float[Array, "B T K G C"], Float[Array, "B S K C"]], Float[Array, "B K G T S"]]
Queries = Float[Array, "B T H C"]
Keys = Float[Array, "B S K C"]
Values = Float[Array, "B S K E"]
Outputs = Float[Array, "B T H E"]
Attend = Callable[..., Outputs]
Weights = Float[Array, "B H T S"]
Visible = Bool[Array, "#B #H #T #S"] | None


def dot_product(query: Float[Array, "B T K G C"], key: Float[Array, "B S K C"]) -> Float[Array, "B K G T S"]:
    """Return the inner product of every query with every key, whose variance is proportional to C."""
    if query.shape[3] == 1:
        return jnp.einsum("BTHC,BSHC->BHTS", query.squeeze(3), key)[:, :, None]
    return jnp.einsum("BTKGC,BSKC->BKGTS", query, key)


def scaled_dot_product(query: Float[Array, "B T K G C"], key: Float[Array, "B S K C"]) -> Float[Array, "B K G T S"]:
    """Return the inner products divided by sqrt(C), which have unit variance (arXiv 1706.03762, equation 1)."""
    return dot_product(query * query.shape[-1] ** -0.5, key)


class Additive(nn.Module):
    """Bahdanau's score v . tanh(W q + k) (arXiv 1409.0473), for keys that are already projected."""

    @nn.compact
    def __call__(self, query: Float[Array, "B T K G C"], key: Float[Array, "B S K F"]) -> Float[Array, "B K G T S"]:
        query = nn.Dense(key.shape[-1], use_bias=False, name="query")(query)
        hidden = jnp.tanh(query[:, :, None] + key[:, None, :, :, None])
        scores = nn.Dense(1, use_bias=False, name="score")(hidden)
        return jnp.einsum("BTSKG->BKGTS", scores[..., 0])


@struct.dataclass
class Mask:
    """Restrictions on the keys that a query may attend to, and a bias of its scores.

    A key is visible where all restrictions allow it. `dense` materializes them as an array of T x S; other
    implementations use the description.

    Attributes:
        keys: True for real keys, False for padding.
        segments: segment id of each token, for self-attention: tokens attend only within their segment.
        allowed: any other restriction, True where a query may attend to a key.
        causal: whether keys at later positions are masked out.
        window: with `causal`, the number of most recent visible keys, including the one at the query's position.
        positions: positions of the queries among the keys, for `causal` and `window`; None: 0 to T-1.
        key_positions: positions of the keys; None: 0 to S-1.
        bias: added to the scores.
    """

    keys: Bool[Array, "#B S"] | None = None
    segments: Int[Array, "#B S"] | None = None
    allowed: Bool[Array, "#B #H #T #S"] | None = None
    causal: bool = struct.field(pytree_node=False, default=False)
    window: int | None = struct.field(pytree_node=False, default=None)
    positions: Int[Array, "#B T"] | None = None
    key_positions: Int[Array, "#B S"] | None = None
    bias: Float[Array, "#B #H #T #S"] | None = None

    def first(self, count: int) -> "Mask":
        """Return the mask of the first `count` tokens of each sequence, as queries and as keys."""
        keys = None if self.keys is None else self.keys[:, :count]
        bias = None if self.bias is None else self.bias[..., :count]
        allowed = None if self.allowed is None else self.allowed[..., :count]
        return self.replace(keys=keys, bias=bias, allowed=allowed, positions=None)

    def materialize(self, queries: int, keys: int) -> Visible:
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
            key = jnp.arange(keys) if self.key_positions is None else self.key_positions[:, None]
            past = query >= key
            parts.append((past if self.window is None else past & (query - key < self.window))[:, None])
        return reduce(jnp.logical_and, parts) if parts else None


@struct.dataclass
class DropWeights:
    """Dropout on attention weights as a function of their positions, so that every kernel drops the same weights."""

    seed: Int[Array, ""]  # 32 random bits
    rate: float = struct.field(pytree_node=False)  # probability of dropping a weight, above 0

    def __call__(self, weights: Weights) -> Weights:
        iota = partial(jax.lax.broadcasted_iota, jnp.int32, weights.shape)
        example, head, row, column = map(iota, range(weights.ndim))
        kept = keeps(self.rate, self.seed, example * weights.shape[1] + head, row * 2**16 + column)
        return jnp.where(kept, weights / (1 - self.rate), 0)


@jax.custom_jvp
def masked_softmax(scores: Weights, mask: Visible) -> Weights:
    """Return the softmax over the keys where the mask is True; its derivative needs only the result and the mask."""
    return jax.nn.softmax(scores if mask is None else jnp.where(mask, scores, jnp.finfo(scores.dtype).min))


@masked_softmax.defjvp
def _(primals, tangents):
    weights, mask = masked_softmax(*primals), primals[1]
    # In this order: XLA's CPU backend (jaxlib 0.10.2) sums `weights * tangent` wrongly where only the tangents are
    # batched, as under jax.jacrev.
    tangent = tangents[0] * weights
    tangent = tangent - tangent.sum(axis=-1, keepdims=True) * weights
    # In a row without any visible key, the weights are equal and do not depend on the scores.
    return weights, tangent if mask is None else tangent * mask.any(axis=-1, keepdims=True)


@dataclass(frozen=True)
class Weighting:
    """Computation of the weights of attention: the softmax of scores, which is recorded and then transformed.

    Attributes:
        score: function or module that computes the scores.
        transform: function of the weights [B, H, T, S] whose result replaces them, such as `DropWeights`, or None.
        sow: function that records the weights before `transform`, or None.
    """

    score: Score = scaled_dot_product
    transform: Callable[[Weights], Weights] | None = None
    sow: Callable[[Weights], object] | None = None

    def __call__(self, scores: Weights, visible: Visible, dtype: Any) -> Weights:
        """Return the weights of scores."""
        weights = masked_softmax(scores, visible).astype(dtype)
        if self.sow is not None:
            self.sow(weights)
        return weights if self.transform is None else self.transform(weights)


SOFTMAX = Weighting()  # of scaled inner products


def dense(
    query: Float[Array, "B T H Q"],
    key: Keys,
    value: Values,
    mask: Mask | None = None,
    weighting: Weighting = SOFTMAX,
) -> Outputs:
    """Attend with all T x S weights in memory.

    H must be a multiple of K: query head h uses key/value head h // (H / K). The output of a query without any visible
    key is the mean of all values.
    """
    mask = mask or Mask()
    batch, length, heads, _ = query.shape
    kv_heads = key.shape[2]
    grouped = query.reshape(batch, length, kv_heads, heads // kv_heads, query.shape[-1])
    scores = _add_bias(weighting.score(grouped, key).reshape(batch, heads, length, key.shape[1]), mask)
    visible = mask.materialize(*scores.shape[2:])
    if isinstance(dropout := weighting.transform, DropWeights) and weighting.sow is None:
        return dropped_mean(dropout.rate, scores, value, visible, dropout.seed)
    return _mean(weighting(scores, visible, value.dtype), value)


def _add_bias(scores, mask):
    scores = scores.astype(jnp.float32)
    return scores if mask.bias is None else scores + mask.bias


def _mean(weights: Weights, value: Values) -> Outputs:
    """Return the weighted sums of the values of each head's group."""
    batch, heads, length, keys = weights.shape
    if heads == value.shape[2]:
        return jnp.einsum("BHTS,BSHE->BTHE", weights, value)
    weights = weights.reshape(batch, value.shape[2], heads // value.shape[2], length, keys)
    return jnp.einsum("BKGTS,BSKE->BTKGE", weights, value).reshape(batch, length, heads, value.shape[-1])


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def dropped_mean(rate: float, scores: Weights, value: Values, visible: Visible, seed: Int[Array, ""]) -> Outputs:
    """Return the mean of the values, weighted by the softmax of the scores after dropout.

    As in FlashAttention (arXiv 2205.14135, appendix B), the gradient of the scores takes the sum over the keys from the
    output and recomputes the weights from the scores, so that the weights need not be stored.
    """
    return _mean(DropWeights(seed, rate)(masked_softmax(scores, visible).astype(value.dtype)), value)


@dropped_mean.defjvp
def _(rate, primals, tangents):
    scores, value, visible, seed = primals
    t_scores, t_value = tangents[:2]
    masked = scores if visible is None else jnp.where(visible, scores, jnp.finfo(scores.dtype).min)
    largest = masked.max(axis=-1, keepdims=True)
    total = jnp.exp(masked - largest).sum(axis=-1, keepdims=True)
    dropped = DropWeights(seed, rate)((jnp.exp(masked - largest) / total).astype(value.dtype))
    out = _mean(dropped, value)
    largest, total, seed = recomputed((largest, total, seed))
    weighted = jnp.exp(masked - largest) / total * t_scores
    if visible is not None:  # without a visible key, the weights do not depend on the scores
        weighted = weighted * visible.any(axis=-1, keepdims=True)
    t_total = weighted.sum(axis=-1).swapaxes(1, 2)[..., None]
    tangent = _mean(DropWeights(seed, rate)(weighted.astype(value.dtype)), value) - t_total * out
    return out, (tangent + _mean(dropped, t_value)).astype(out.dtype)


def dense_flat(
    query: Float[Array, "B T H Q"],
    key: Entries,
    value: Entries,
    mask: Mask,
    weighting: Weighting = SOFTMAX,
) -> Outputs:
    """Attend as `dense` does to keys and values whose batch and heads are one axis, N = B x K.

    With an inner product as the score, keys and values are read in place even for few queries, and 8-bit ones are never
    all converted at once.
    """
    batch, length, heads, size = query.shape
    if weighting.score not in (dot_product, scaled_dot_product):
        pair = (vectors(x) for x in (key, value))
        key, value = (x.reshape(batch, -1, *x.shape[1:]).swapaxes(1, 2) for x in pair)
        return dense(query, key, value, mask, weighting)
    groups = heads * batch // key.shape[0]
    rows = query if weighting.score is dot_product else query * size**-0.5
    rows = rows.reshape(batch, length, -1, groups, size).transpose(0, 2, 3, 1, 4).reshape(key.shape[0], -1, size)
    scores = _add_bias(_scores(rows, key).reshape(batch, heads, length, -1), mask)
    weights = weighting(scores, mask.materialize(*scores.shape[2:]), value.dtype)
    out = _weighted_sums(weights.reshape(-1, rows.shape[1], key.shape[1]), value)
    out = out.reshape(batch, -1, groups, length, value.shape[-1]).transpose(0, 3, 1, 2, 4)
    return out.reshape(batch, length, heads, -1)


def _scores(rows, key):
    """Return the inner products [N, R, S] of R rows with each key."""
    if not isinstance(key, Quantized):
        return matmul(rows, key.swapaxes(1, 2))
    return matmul_in_8_bits(rows, key.values.swapaxes(1, 2)) * key.scale[:, None].astype(rows.dtype)


def _weighted_sums(weights, value):
    """Return the sums [N, R, E] of the values, weighted by R rows."""
    if not isinstance(value, Quantized):
        return matmul(weights, value)
    return matmul_in_8_bits(weights * value.scale[:, None].astype(weights.dtype), value.values)
