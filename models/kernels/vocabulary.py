"""Cross-entropy over a large vocabulary in blocks of tokens, without an array of the logits of all tokens.

The gradient is computed together with the loss, from the logits of the same block.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from lineage.models.layers.placement import EXAMPLES, TOKENS, dividing

LOGITS = 2**26  # maximum number of logits of a block
SPARSE_TOKENS = 512  # maximum number of tokens of a block if most weights are zero
MULTIPLE = 8  # divisor of the number of tokens of a block


class Targets(NamedTuple):
    """Labels of a cross-entropy loss.

    Attributes:
        labels: index of the correct token.
        weights: weight of each token in the sum of the losses.
        label_smoothing: probability mass that is spread evenly over the vocabulary (arXiv 1512.00567, section 7).
    """

    labels: Int[Array, "B T"]
    weights: Float[Array, "B T"] | Bool[Array, "B T"]
    label_smoothing: float = 0.0


class TokenLosses(NamedTuple):
    """Losses of tokens.

    Attributes:
        total: weighted sum of the losses, the only field with a gradient.
        loss: cross-entropy in nats; nan where the label is not an index.
        correct: whether the label has the highest logit.
    """

    total: Float[Array, ""]
    loss: Float[Array, "B T"]
    correct: Bool[Array, "B T"]


class Scores(NamedTuple):
    """Statistics of each token's logits, in float32 and without gradient; undefined for tokens that `sparse` skips."""

    loss: Float[Array, "B T"]  # cross-entropy in nats; nan where the label is not an index
    normalizer: Float[Array, "B T"]  # logsumexp of the logits
    highest: Float[Array, "B T"]  # largest of the first `among` logits
    index: Int[Array, "B T"]  # index of the largest logit


class Options(NamedTuple):
    """Static options, see `scored`."""

    label_smoothing: float = 0.0
    sparse: bool = False
    among: int | None = None


def token_losses(
    x: Float[Array, "B T D"], table: Float[Array, "V D"], bias: Float[Array, "V"] | None, targets: Targets
) -> TokenLosses:
    """Return the losses of the logits x table^T + bias."""
    total, scores = scored(x, table, bias, targets)
    correct = (scores.index == targets.labels) & ~jnp.isnan(scores.highest)
    return TokenLosses(total, scores.loss, correct)


def scored(
    x: Float[Array, "B T D"],
    table: Float[Array, "V D"],
    bias: Float[Array, "V"] | None,
    targets: Targets,
    *,
    sparse: bool = False,
    among: int | None = None,
) -> tuple[Float[Array, ""], Scores]:
    """Return the weighted sum of the losses of the logits x table^T + bias, and statistics of each token.

    Matrix products have the dtype of `x`, everything else is float32. On several devices, each computes the losses of
    its examples, and of its part of their tokens if there is a tensor axis.

    Args:
        sparse: skip tokens of weight zero, so that the time is proportional to the number of the others.
        among: number of logits, from the first on, among which the largest is found; None: all.
    """
    options = Options(targets.label_smoothing, sparse, among)
    total, scores = _scored(x, table, bias, targets.labels, targets.weights.astype(jnp.float32), options)
    return total, jax.lax.stop_gradient(scores)


@partial(jax.custom_vjp, nondiff_argnums=(5,))
def _scored(x, table, bias, labels, weights, options):
    return _on_mesh(x, table, bias, labels, weights, options, gradients=False)[:2]


def _forward(x, table, bias, labels, weights, options):
    total, scores, gradients = _on_mesh(x, table, bias, labels, weights, options, gradients=True)
    return (total, scores), gradients


def _backward(options, gradients, cotangents):
    return *jax.tree.map(lambda g: g * cotangents[0].astype(g.dtype), gradients), None, None


_scored.defvjp(_forward, _backward)


def _on_mesh(x, table, bias, labels, weights, options, *, gradients):
    """Run `_on_device` on every device of the mesh, if there is one."""
    compute = partial(_on_device, options=options, gradients=gradients)
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return compute(x, table, bias, labels, weights, ())
    axes = dividing(EXAMPLES, x.shape[0]), dividing(TOKENS, x.shape[1])
    tokens, replicated = PartitionSpec(*axes), PartitionSpec()
    return jax.shard_map(
        partial(compute, axes=sum(axes, ())),
        mesh=mesh,
        in_specs=(tokens, replicated, None if bias is None else replicated, tokens, tokens),
        out_specs=(replicated, tokens, (tokens, replicated, replicated) if gradients else None),
        check_vma=False,
    )(x, table, bias, labels, weights)


def _on_device(x, table, bias, labels, weights, axes, *, options, gradients):
    """Return the sum of the losses, the scores, and the gradients of x, table and bias, computed in blocks of tokens.

    The sum and the gradients of table and bias are totals over the mesh axes `axes`.
    """
    shape, count = labels.shape, labels.size
    rows = rows_of_block(count, len(table), options.sparse)
    blocks = -(-count // rows)
    rank, order = _nonzero_first(weights.reshape(count)) if options.sparse else (None, None)

    def split(array):
        array = array.reshape(count, *array.shape[2:])
        array = array if order is None else array[order]
        padding = [(0, blocks * rows - count)] + [(0, 0)] * (array.ndim - 1)
        return jnp.pad(array, padding).reshape(blocks, rows, *array.shape[1:])

    def join(array):
        array = array.reshape(blocks * rows, *array.shape[2:])[:count]
        array = array if rank is None else array[rank]
        return array.reshape(*shape, *array.shape[1:])

    parts = split(x), split(labels), split(weights)
    dtypes = (jnp.float32, jnp.float32, jnp.float32, jnp.int32)
    zeros = [jnp.zeros((blocks, rows), dtype) for dtype in dtypes]
    empty = None
    if gradients:
        sums = (None if a is None else jnp.zeros(a.shape, jnp.float32) for a in (table, bias))
        empty = (jnp.zeros_like(parts[0]), *sums)

    def step(i, carry):
        total, scores, sums = carry
        hidden, label, weight = (part[i] for part in parts)
        block, d_logits = _block(hidden, table, bias, label, weight, options)
        total += jnp.where(weight != 0, block.loss * weight, 0).sum()
        scores = [array.at[i].set(new) for array, new in zip(scores, block)]
        if gradients:
            dx, dtable, dbias = sums
            dtable += jnp.einsum("NV,ND->VD", d_logits.astype(x.dtype), hidden, preferred_element_type=jnp.float32)
            dbias = None if bias is None else dbias + d_logits.sum(axis=0)
            sums = dx.at[i].set(d_logits.astype(x.dtype) @ table), dtable, dbias
        return total, scores, sums

    needed = -(-(weights != 0).sum() // rows) if options.sparse else blocks
    total, scores, sums = jax.lax.fori_loop(0, needed, step, (jnp.zeros(()), zeros, empty))
    if gradients:
        dx, *others = sums
        dtable, dbias = (None if g is None else jax.lax.psum(g, axes).astype(table.dtype) for g in others)
        sums = join(dx), dtable, dbias
    return jax.lax.psum(total, axes), Scores(*map(join, scores)), sums


def _nonzero_first(weights: Float[Array, "N"]) -> tuple[Int[Array, "N"], Int[Array, "N"]]:
    """Return the rank of each token in an order with the tokens of weight zero last, and the token of each rank.

    Ranks are counted, because TPUs compile and run sorts slowly.
    """
    real = weights != 0
    count = jnp.cumsum(real)
    rank = jnp.where(real, count - 1, count[-1] + jnp.cumsum(~real) - 1)
    tokens = jnp.arange(len(weights))
    return rank, jnp.zeros_like(tokens).at[rank].set(tokens, unique_indices=True)


def _block(x, table, bias, labels, weights, options) -> tuple[Scores, Any]:
    """Return the scores of a block of tokens, and the gradient of their weighted losses with respect to the logits."""
    size, smoothing = len(table), options.label_smoothing
    logits = jnp.einsum("ND,VD->NV", x, table, preferred_element_type=jnp.float32)
    logits = logits if bias is None else logits + bias.astype(jnp.float32)
    normalizer = jax.nn.logsumexp(logits, axis=-1)
    chosen = jnp.arange(size) == labels[:, None]
    loss = normalizer - jnp.where(chosen, logits, 0).sum(axis=-1)
    if smoothing:
        loss = (1 - smoothing) * loss + smoothing * (normalizer - logits.mean(axis=-1))
    loss = jnp.where((labels >= 0) & (labels < size), loss, jnp.nan)
    target = jnp.where(chosen, 1 - smoothing, 0) + smoothing / size
    d_logits = (jnp.exp(logits - normalizer[:, None]) - target) * weights[:, None]
    first = logits[:, : options.among]
    return Scores(loss, normalizer, first.max(axis=-1), first.argmax(axis=-1).astype(jnp.int32)), d_logits


def rows_of_block(tokens: int, vocabulary: int, sparse: bool) -> int:
    """Return the number of tokens of a block, for as few blocks as `LOGITS` allows and little padding."""
    limit = max(MULTIPLE, LOGITS // vocabulary)
    if sparse:
        limit = min(limit, SPARSE_TOKENS)
    blocks = -(-tokens // limit)
    return min(-(-tokens // (blocks * MULTIPLE)) * MULTIPLE, tokens)
