"""Attention of short sequences on TPUs, in one kernel that holds all scores of a block of queries in vector memory.

This makes a running softmax unnecessary. The backward pass recomputes the weights and their dropout from queries and
keys; nothing else is saved. Heads are read from [B, T, H x C], the layout of the projections, so that no array is
transposed or padded in main memory.
"""

from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from lineage.models.kernels.devices import MASKED, SAVED, Shape, is_described, keeps_weights, on_devices
from lineage.models.layers.attend import Keys, Mask, Queries
from lineage.models.layers.placement import HEADS, dividing, num_parts

LANES = 128  # width of a vector register
SCORES = 2**18  # maximum number of scores of one head in a block
GROUP = 600_000  # maximum number of scores of all heads in a block
KEYS = 2**18  # maximum number of elements in a block of keys


def fits(query: Queries, key: Keys, mask: Mask) -> bool:
    """Return whether `fused` supports arrays of these shapes with this mask."""
    (queries, heads, channels), keys = query.shape[1:], key.shape[1]
    heads = heads // num_parts(jax.sharding.get_abstract_mesh(), dividing(HEADS, heads))
    size = block_size(queries, keys, heads, channels, whole=mask.bias is not None)
    return is_described(mask, queries, keys) and size is not None


def block_size(queries: int, keys: int, heads: int, channels: int, whole: bool = False) -> tuple[int, int] | None:
    """Return the numbers of queries and heads in a block, which divide all of them; None if no block fits.

    `whole` requires blocks of all queries, so that the gradient of a bias is a sum over blocks.
    """
    groups = [n for n in range(heads, 0, -1) if heads % n == 0 and (n == heads or n * channels % LANES == 0)]
    for rows in (queries,) if whole else (queries, 1024, 512, 256, 128):
        if queries % rows == 0 and rows * keys <= SCORES:
            for group in groups:
                if group * rows * keys <= GROUP and group * channels * keys <= KEYS:
                    return rows, group
    return None


def _attend_in_blocks(arrays: dict[str, Array], **settings: Any) -> Float[Array, "B T D"]:
    """Choose the size of the blocks, and attend."""
    (length, width), keys, channels = arrays["query"].shape[1:], arrays["key"].shape[1], settings["channels"]
    rows, group = block_size(length, keys, width // channels, channels, whole="bias" in arrays)
    columns = {"own": (slice(None), slice(None), None), "seen": (slice(None), None)}  # segments as [T, 1] and [1, S]
    arrays = {name: x[columns[name]] if name in columns else x for name, x in arrays.items()}
    return _attend(Shape(heads=group, rows=rows, **settings), arrays)


fused = partial(on_devices, _attend_in_blocks)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(shape: Shape, arrays: dict[str, Array]) -> Float[Array, "B T D"]:
    """Attend on one device, see `on_devices`; "own" is [#B, T, 1] and "seen" [#B, 1, S]."""
    return _call(shape, _forward, arrays, {"out": arrays["query"]})["out"]


def _attend_forward(shape, arrays):
    return checkpoint_name(_attend(shape, arrays), SAVED), arrays


def _attend_backward(shape, arrays, gradient):
    outputs = {f"d_{name}": arrays[name] for name in ("query", "key", "value", "bias") if name in arrays}
    sums = ["d_bias"] if shape.rows == gradient.shape[1] else ["d_bias", "d_key", "d_value"]  # accumulated over blocks
    wide = {name: jax.ShapeDtypeStruct(outputs[name].shape, jnp.float32) for name in sums if name in outputs}
    grads = _call(shape, _backward, arrays | {"gradient": gradient}, outputs | wide)
    return ({name: grads[f"d_{name}"].astype(x.dtype) if f"d_{name}" in grads else None for name, x in arrays.items()},)


_attend.defvjp(_attend_forward, _attend_backward)


def _call(shape: Shape, kernel: Any, inputs: dict[str, Any], outputs: dict[str, Any]) -> dict[str, Array]:
    """Run a kernel over a grid of groups of heads, examples, and blocks of queries.

    Blocks that do not depend on the innermost axes stay in vector memory, where gradients accumulate.
    """
    batch, length, width = inputs["query"].shape
    blocks = [[_block(shape, name, x.shape) for name, x in arrays.items()] for arrays in (inputs, outputs)]

    def run(*refs):
        kernel(shape, dict(zip((*inputs, *outputs), refs)))

    lanes, columns = (-(-n // LANES) * LANES for n in (shape.channels, inputs["key"].shape[1]))
    scores = batch * width // shape.channels * length * columns
    results = pl.pallas_call(
        run,
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in outputs.values()],
        grid=(width // (shape.heads * shape.channels), batch, length // shape.rows),
        in_specs=blocks[0],
        out_specs=blocks[1],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary", "arbitrary")),
        cost_estimate=pl.CostEstimate(
            flops=(10 if kernel is _backward else 4) * scores * lanes,
            transcendentals=scores,
            bytes_accessed=sum(prod(x.shape) * x.dtype.itemsize for x in (*inputs.values(), *outputs.values())),
        ),
        interpret=shape.interpret,
        name=f"fused_attention{kernel.__name__}",
    )(*inputs.values())
    return dict(zip(outputs, results))


def _block(shape: Shape, name: str, size: tuple[int, ...]) -> Any:
    """Return the specification of an array's block, given the group of heads, the example and the block of queries."""
    lanes, varies = shape.heads * shape.channels, int(size[0] > 1)  # all examples may share a mask
    if name == "seed":
        return pl.BlockSpec(memory_space=pltpu.SMEM)
    if name in ("key", "value", "d_key", "d_value"):
        return pl.BlockSpec((1, size[1], lanes), lambda group, example, rows: (example, 0, group))
    if name == "own":
        return pl.BlockSpec((1, shape.rows, 1), lambda group, example, rows: (example * varies, rows, 0))
    if name == "seen":
        return pl.BlockSpec((1, *size[1:]), lambda group, example, rows: (example * varies, 0, 0))
    if name in ("bias", "d_bias"):
        return pl.BlockSpec((1, shape.heads, *size[2:]), lambda group, example, rows: (0, group, 0, 0))
    return pl.BlockSpec((1, shape.rows, lanes), lambda group, example, rows: (example, rows, group))


def _forward(shape: Shape, refs: dict[str, Any]) -> None:
    """Write the outputs of a block of queries."""
    for head in range(shape.heads):
        query, key, value = (refs[name][0, :, _lanes(shape, head)] for name in ("query", "key", "value"))
        weights, _ = _weights(shape, refs, head, query, key)
        weights = _drop(shape, refs, head, weights)
        refs["out"][0, :, _lanes(shape, head)] = _product(weights.astype(value.dtype), value).astype(query.dtype)


def _backward(shape: Shape, refs: dict[str, Any]) -> None:
    """Write the gradients of a block of queries, and accumulate those of the keys, the values and the bias."""
    for head in range(shape.heads):
        lanes = _lanes(shape, head)
        query, key, value, gradient = (refs[name][0, :, lanes] for name in ("query", "key", "value", "gradient"))
        weights, visible = _weights(shape, refs, head, query, key)
        dropped = _drop(shape, refs, head, weights).astype(value.dtype)
        d_value = _product(dropped, gradient, (0, 0))
        d_weights = _drop(shape, refs, head, _product(gradient, value, (1, 1)))
        d_scores = weights * (d_weights - (d_weights * weights).sum(axis=1, keepdims=True))
        if visible is not None:
            d_scores = jnp.where(visible, d_scores, 0)
        rounded = d_scores.astype(query.dtype)
        refs["d_query"][0, :, lanes] = (_product(rounded, key) * shape.scale).astype(query.dtype)
        d_key = _product(rounded, query, (0, 0)) * shape.scale
        _add(refs["d_key"], (0, slice(None), lanes), d_key, pl.program_id(2))
        _add(refs["d_value"], (0, slice(None), lanes), d_value, pl.program_id(2))
        if "d_bias" in refs:
            _add(refs["d_bias"], (0, head), d_scores, pl.program_id(1))


def _lanes(shape: Shape, head: int) -> slice:
    """Return the channels of a head of the block."""
    return slice(head * shape.channels, (head + 1) * shape.channels)


def _product(a: Array, b: Array, contracted: tuple[int, int] = (1, 0)) -> Array:
    """Return a matrix product in float32."""
    axes = (((contracted[0],), (contracted[1],)), ((), ()))
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jax.lax.dot_general(a, b, axes, precision=precision, preferred_element_type=jnp.float32)


def _add(ref: Any, index: tuple, x: Array, step: Array) -> None:
    """Accumulate the blocks that share an output: write the first one, and add the others."""

    @pl.when(step == 0)
    def _():
        ref[index] = x.astype(ref.dtype)

    @pl.when(step > 0)
    def _():
        ref[index] += x.astype(ref.dtype)


def _weights(shape: Shape, refs: dict[str, Any], head: int, query: Array, key: Array) -> tuple[Array, Array | None]:
    """Return the weights [rows, S] of a head, and whether each query has a visible key [rows, 1]; None: all have."""
    scores = _product(query, key, (1, 1)) * shape.scale
    if "bias" in refs:
        scores = scores + refs["bias"][0, head].astype(jnp.float32)
    parts = []
    if "own" in refs:
        parts.append(refs["own"][0] == refs["seen"][0])
    elif "seen" in refs:
        parts.append(jnp.broadcast_to(refs["seen"][0] >= 0, scores.shape))
    if shape.causal:
        row = jax.lax.broadcasted_iota(jnp.int32, scores.shape, 0) + pl.program_id(2) * shape.rows
        column = jax.lax.broadcasted_iota(jnp.int32, scores.shape, 1)
        parts.append(row >= column)
        if shape.window is not None:
            parts.append(row - column < shape.window)
    for part in parts:
        scores = jnp.where(part, scores, MASKED)
    largest = scores.max(axis=1, keepdims=True)
    powers = jnp.exp(scores - largest)
    return powers * (1 / powers.sum(axis=1, keepdims=True)), largest > MASKED if parts else None


def _drop(shape: Shape, refs: dict[str, Any], head: int, weights: Array) -> Array:
    """Apply dropout to [rows, S], with the same mask in the forward and the backward pass."""
    if not shape.rate:
        return weights
    group, example, block = map(pl.program_id, range(3))
    seed, head = refs["seed"], group * shape.heads + head
    kept = keeps_weights(shape, seed, seed[1] + example, head, block * shape.rows, 0, weights.shape)
    return jnp.where(kept, weights * shape.factor, 0)
