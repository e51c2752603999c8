"""Matrices of 8-bit numbers, which can take the place of the parameters of `Linear` and `Embed`."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int


@struct.dataclass
class Quantized:
    """Matrix of 8-bit numbers with a scale for each output.

    Attributes:
        values: integers, or 8-bit floating-point numbers, [*layers, *inputs, *outputs]; in a table [outputs, inputs];
            in a cache [sequences and heads, entries, channels].
        scale: factors of the values, [*layers, *outputs]; in a cache [sequences and heads, entries]; of the dtype of
            computation.
    """

    values: Any
    scale: Any

    @property
    def dtype(self) -> jnp.dtype:
        return self.scale.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    @property
    def T(self) -> "Quantized":
        return self.replace(values=self.values.T)

    def reshape(self, shape: tuple[int, int]) -> "Quantized":
        """Return the matrix with its inputs joined in one axis, and its outputs."""
        return Quantized(self.values.reshape(shape), self.scale.reshape(shape[1]))


def dequantized(matrix: Any) -> Float[Array, "..."]:
    """Return the values of a quantized matrix, whose last axes are the outputs, and any other matrix unchanged."""
    return matrix.values.astype(matrix.dtype) * matrix.scale if isinstance(matrix, Quantized) else matrix


def quantized(vectors: Float[Array, "*B C"]) -> Quantized:
    """Return vectors as int8 numbers with a scale for each vector; its largest magnitude becomes 127."""
    most = jnp.abs(vectors).max(axis=-1).astype(jnp.float32)
    scale = jnp.where(most > 0, most / 127, 1).astype(vectors.dtype)
    values = jnp.round(vectors.astype(jnp.float32) / scale.astype(jnp.float32)[..., None])
    return Quantized(values.clip(-127, 127).astype(jnp.int8), scale)


def vectors(entries: Any) -> Float[Array, "*B C"]:
    """Return the vectors of `quantized` entries of a cache, and any other entries unchanged."""
    if not isinstance(entries, Quantized):
        return entries
    return entries.values.astype(entries.dtype) * entries.scale[..., None]


def rows(table: Any, indices: Int[Array, "*B"]) -> Float[Array, "*B D"]:
    """Return the rows of a table at some indices, as `jnp.take` does."""
    if not isinstance(table, Quantized):
        return jnp.take(table, indices, axis=0)
    flat = indices.reshape(-1)
    if indices.size == 1:  # for one row, XLA would copy the whole table into another layout on TPUs
        flat = jax.lax.optimization_barrier(jnp.tile(flat, 2))
    found = jnp.take(table.values, flat, axis=0).astype(table.dtype) * jnp.take(table.scale, flat)[:, None]
    return found[: indices.size].reshape(*indices.shape, -1)
