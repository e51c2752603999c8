"""Matrices of 8-bit numbers, which can replace the parameters of `Linear` and `Embed`."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Float, Int

from lineage.models.kernels.compiler import take

FEW_ROWS = 32  # maximum number of rows of a table whose rows are selected by a matrix product


@struct.dataclass
class Quantized:
    """Matrix of 8-bit numbers with a scale for each output.

    Attributes:
        values: 8-bit integers or floating-point numbers, [*layers, *inputs, *outputs]; [outputs, inputs] in a table;
            [sequences and heads, entries, channels] in a cache.
        scale: factors of the values, in the dtype of computation, [*layers, *outputs]; [sequences and heads, entries]
            in a cache.
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
        """Return the matrix with one axis of inputs and one of outputs."""
        return Quantized(self.values.reshape(shape), self.scale.reshape(shape[1]))


Entries = Float[Array, "N S C"] | Quantized  # keys or values of a cache


def dequantized(matrix: Any) -> Float[Array, "..."]:
    """Return a quantized matrix, whose last axes are the outputs, as an array; return an array unchanged."""
    return matrix.values.astype(matrix.dtype) * matrix.scale if isinstance(matrix, Quantized) else matrix


def quantized(vectors: Float[Array, "*B C"]) -> Quantized:
    """Quantize vectors to int8, with a scale for each vector that maps its largest magnitude to 127."""
    largest = jnp.abs(vectors).max(axis=-1).astype(jnp.float32)
    scale = jnp.where(largest > 0, largest / 127, 1).astype(vectors.dtype)
    values = jnp.round(vectors.astype(jnp.float32) / scale.astype(jnp.float32)[..., None])
    return Quantized(values.clip(-127, 127).astype(jnp.int8), scale)


def vectors(entries: Any) -> Float[Array, "*B C"]:
    """Return `quantized` entries of a cache as an array; return an array unchanged."""
    if not isinstance(entries, Quantized):
        return entries
    return entries.values.astype(entries.dtype) * entries.scale[..., None]


def take_rows(table: Any, indices: Int[Array | np.ndarray, "*B"]) -> Float[Array, "*B D"]:
    """Return the rows of a table at these indices."""
    if not isinstance(table, Quantized):
        # The gradient of a gather adds the gradients of repeated rows: in 16 bits, this is inexact, and slow on GPUs.
        wide = table.astype(jnp.promote_types(table.dtype, jnp.float32))
        if len(table) <= FEW_ROWS:
            chosen = jnp.matmul(jax.nn.one_hot(indices, len(table), dtype=wide.dtype), wide, precision="highest")
        else:
            chosen = jnp.take(wide, indices, axis=0)
        return chosen.astype(table.dtype)
    flat = indices.reshape(-1)
    taken = take(table.values, flat).astype(table.dtype) * take(table.scale, flat)[:, None]
    return taken.reshape(*indices.shape, -1)
