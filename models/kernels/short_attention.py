"""Attention with 33 to 64 queries and keys for NVIDIA GPUs, in Triton, as within the windows of Swin.

Each program computes the attention of one head, in one example after the other. The weights are not stored, and the
gradients of the bias are summed over these examples.
"""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.pallas import triton
from jaxtyping import Array, Bool, Float

from lineage.models.kernels import triton_programs
from lineage.models.kernels.devices import MASKED, SAVED, Shape, on_devices
from lineage.models.kernels.triton_programs import BLOCK, Arrays, Pair, Program, call, with_padded_masks
from lineage.models.layers.attend import Keys, Mask, Queries

PARTS = 256  # maximum number of parts of a batch, each of which has a sum of the gradients of the bias
ALL = Pair(0, 0)


def fits(query: Queries, key: Keys, mask: Mask) -> bool:
    """Return whether `attend` supports arrays of these shapes with this mask, and little of its block is padding."""
    sizes = query.shape[1], key.shape[1]
    return min(sizes) > BLOCK // 2 and max(sizes) <= BLOCK and triton_programs.fits(query, key, mask)


def _attend_padded(arrays: Arrays, **settings: Any) -> Float[Array, "B T D"]:
    return _attend(Shape(heads=1, rows=BLOCK, **settings), with_padded_masks(arrays))


attend = partial(on_devices, _attend_padded)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(shape: Shape, arrays: Arrays) -> Float[Array, "B T D"]:
    """Attend on one device, see `on_devices`; masks and biases have `BLOCK` queries and keys."""
    return _attend_forward(shape, arrays)[0]


def _attend_forward(shape, arrays):
    out = call(ShortProgram, shape, _forward, 2, arrays, {"out": arrays["query"]}, BLOCK)["out"]
    return checkpoint_name(out, SAVED), arrays


def _attend_backward(shape, arrays, gradient):
    outputs, batch = {name: arrays[name] for name in ("query", "key", "value")}, len(gradient)
    examples = 1
    if "bias" in arrays:
        parts = math.gcd(batch, PARTS)
        outputs["bias"] = jax.ShapeDtypeStruct((parts, *arrays["bias"].shape[1:]), jnp.float32)
        examples = batch // parts
    inputs = arrays | {"gradient": gradient}
    gradients = call(ShortProgram, shape, _backward, 5, inputs, outputs, BLOCK, examples)
    if "bias" in arrays:
        gradients["bias"] = gradients["bias"].sum(axis=0, keepdims=True)
    return ({name: gradients[name].astype(x.dtype) if name in gradients else None for name, x in arrays.items()},)


_attend.defvjp(_attend_forward, _attend_backward)


class ShortProgram(Program):
    """A program with a single block of queries and of keys, whose last tokens may be missing."""

    def load(self, name: str, example: Any) -> Float[Array, "R C"]:
        """Return the tokens of an example, with zeros for those that are missing."""
        mask = self.exists(name, self.refs[name])
        return triton.load(self.refs[name].at[example, :, :], mask=mask, other=0)

    def store(self, outputs: dict[str, Any], name: str, example: Any, value: Float[Array, "R C"]) -> None:
        """Write the tokens of an example that exist."""
        ref = outputs[name]
        triton.store(ref.at[example, :, :], value.astype(ref.dtype), mask=self.exists(name, ref))

    def exists(self, name: str, ref: Any) -> Bool[Array, "R C"]:
        """Return which elements of the block of an array exist."""
        return jax.lax.broadcasted_iota(jnp.int32, ref.shape[1:], 0) < self.lengths[name]

    def weights(self, example: Any, query: Array, key: Array) -> tuple[Float[Array, "R K"], Any]:
        """Return the weights before dropout, and whether each query sees a key."""
        scores = self.scores(ALL, query, key, example)
        largest = scores.max(axis=1)
        powers = jnp.exp2(scores - largest[:, None])
        return powers * (1 / powers.sum(axis=1))[:, None], largest > MASKED


def _forward(program: ShortProgram, outputs: dict[str, Any]) -> None:
    """Write the outputs of an example."""
    example = jnp.int32(0)
    query, key, value = (program.load(name, example) for name in ("query", "key", "value"))
    weights = program.drop(ALL, program.weights(example, query, key)[0] * program.shape.factor)
    program.store(outputs, "out", example, triton.dot(weights.astype(value.dtype), value))


def _backward(program: ShortProgram, outputs: dict[str, Any]) -> None:
    """Write the gradients of queries, keys and values of each example, and the sum of those of the bias."""
    factor, scale = program.shape.factor, program.shape.scale

    def visit(example, d_bias):
        query, key, value, gradient = (program.load(name, example) for name in ("query", "key", "value", "gradient"))
        weights, sees = program.weights(example, query, key)
        dropped = program.drop(ALL, weights * factor, example).astype(value.dtype)
        d_weights = program.drop(ALL, triton.dot(gradient, value, trans_b=True) * factor, example)
        d_scores = weights * (d_weights - (weights * d_weights).sum(axis=1)[:, None])
        d_scores = jnp.where(sees[:, None], d_scores, 0)
        program.store(outputs, "query", example, triton.dot(d_scores.astype(key.dtype), key) * scale)
        program.store(outputs, "key", example, triton.dot(d_scores.astype(query.dtype), query, trans_a=True) * scale)
        program.store(outputs, "value", example, triton.dot(dropped, gradient, trans_a=True))
        return d_bias + d_scores

    start = jnp.zeros((BLOCK, BLOCK), jnp.float32)
    d_bias = jax.lax.fori_loop(0, program.refs["query"].shape[0], visit, start)
    if "bias" in outputs:
        outputs["bias"][0, 0, :, :] = d_bias
