"""Position encodings: fixed and learned tables, rotations, relative keys and biases."""

import math
from collections.abc import Callable
from typing import Literal

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from lineage.models.kernels.compiler import rotate
from lineage.models.layers.attend import Queries
from lineage.models.layers.quantized import take_rows


def geometric_frequencies(width: int, base: float = 10_000.0) -> Float[np.ndarray, "C"]:
    """Return the geometric frequencies of `width` sines and cosines, from 1 to nearly 1 / `base`."""
    return base ** -(np.arange(0, width, 2) / width)


def sinusoidal(length: int, width: int) -> Float[np.ndarray, "T D"]:
    """Return interleaved sines and cosines of positions at geometric frequencies (arXiv 1706.03762, section 3.5)."""
    angles = np.arange(length)[:, None] * geometric_frequencies(width)
    table = np.stack([np.sin(angles), np.cos(angles)], axis=-1).reshape(length, -1)
    return table[:, :width].astype(np.float32)


def sincos_2d(rows: int, columns: int, width: int, endpoint: bool = False) -> Float[np.ndarray, "P D"]:
    """Return 2-D position encodings: sin and cos of the column, then of the row, a quarter of the width each.

    Patches are in row order. Frequencies decrease from 1 to 1e-4, which is excluded, as in MAE (arXiv 2111.06377),
    or included (`endpoint`), as in MoCo v3 and arXiv 2205.01580. Raise ValueError if the width is not a multiple of 4.
    """
    if width % 4:
        raise ValueError(f"2-D sine-cosine positions need a width that is a multiple of 4, not {width}.")
    frequencies = 10_000.0 ** -np.linspace(0, 1, width // 4, endpoint=endpoint)
    row, column = np.mgrid[:rows, :columns].reshape(2, -1, 1) * frequencies
    table = np.concatenate([np.sin(column), np.cos(column), np.sin(row), np.cos(row)], axis=-1)
    return table.astype(np.float32)


def rotary(
    x: Queries,
    positions: Int[Array, "#B T"],
    base: float = 10_000.0,
    scaling: Callable[[np.ndarray, float], np.ndarray] | None = None,
    magnitude: float = 1.0,
) -> Queries:
    """Rotate each pair (i, i + C/2) of a head by its position times its frequency (RoPE, arXiv 2104.09864).

    The inner product of two rotated vectors depends only on the difference of their positions.

    Args:
        x: queries or keys.
        base: inverse of the lower limit of the frequencies, which decrease from 1.
        scaling: function (frequencies, base) -> frequencies, such as `partial(stretched, kind="linear", factor=2.0)`.
        magnitude: factor of the vectors, `yarn_magnitude` for YaRN.
    """
    if x.shape[-1] % 2:
        raise ValueError(f"rotary positions need heads of an even size, not {x.shape[-1]}.")
    frequencies = geometric_frequencies(x.shape[-1], base)
    if scaling is not None:
        frequencies = scaling(frequencies, base)
    angles = positions[:, :, None, None] * frequencies
    sin, cos = jnp.sin(angles) * magnitude, jnp.cos(angles) * magnitude
    return rotate(x, sin, cos)


def stretched(
    frequencies: Float[np.ndarray, "C"],
    base: float,
    kind: Literal["linear", "llama3", "yarn"],
    factor: float,
    length: int = 0,
    turns: tuple[float, float] = (1.0, 4.0),
) -> Float[np.ndarray, "C"]:
    """Return rotary frequencies for sequences up to `factor` times as long as those of training, of `length` tokens.

    "linear" divides all frequencies by the factor (arXiv 2306.15595). The other kinds divide those with fewer than
    `turns[0]` turns within `length` tokens, and keep those with more than `turns[1]` turns, which distinguish close
    tokens. In between they interpolate: "llama3" linearly in the number of turns (arXiv 2309.00071, section 3.2; Llama
    3.1's reference code), "yarn" linearly in the index of the frequency (YaRN's reference code).
    """
    if kind == "linear":
        return frequencies / factor
    if kind == "llama3":
        kept = (length * frequencies / (2 * math.pi) - turns[0]) / (turns[1] - turns[0])
    else:
        size = len(frequencies)
        last, first = (size * math.log(length / (2 * math.pi * turn), base) for turn in turns)
        # Integers between 0 and the size of the head, as in the reference code.
        last, first = min(math.ceil(last), 2 * size - 1), max(math.floor(first), 0)
        kept = 1 - (np.arange(size) - first) / (last - first or 1e-3)
    kept = np.clip(kept, 0, 1)
    return frequencies * (kept + (1 - kept) / factor)


def yarn_magnitude(factor: float) -> float:
    """Return the factor by which YaRN multiplies queries and keys (arXiv 2309.00071, equation 22)."""
    return 0.1 * math.log(factor) + 1 if factor > 1 else 1.0


class Learned(nn.Module):
    """Learned vector of each position; `stddev` is the standard deviation of the initial values."""

    length: int
    width: int
    stddev: float = 0.02

    @nn.compact
    def __call__(self) -> Float[Array, "T D"]:
        return self.param("table", nn.initializers.normal(self.stddev), (self.length, self.width))


class Learned2D(nn.Module):
    """Concatenation of learned vectors of each row and each column (arXiv 2010.11929, appendix D.4)."""

    rows: int
    columns: int
    width: int

    @nn.compact
    def __call__(self) -> Float[Array, "P D"]:
        init, half = nn.initializers.normal(0.02), self.width // 2
        row = self.param("row", init, (self.rows, half))
        column = self.param("column", init, (self.columns, self.width - half))
        row, column = jnp.repeat(row, self.columns, axis=0), jnp.tile(column, (self.rows, 1))
        return jnp.concatenate([row, column], axis=-1)


class RelativeKeys(nn.Module):
    """Bias by the product of the query and a learned key for each distance (arXiv 1803.02155; 2010.11929, D.4).

    Distances above `max_distance` share one key.
    """

    max_distance: int

    @nn.compact
    def __call__(self, query: Queries, positions: Int[Array, "#B T"], keys: int) -> Float[Array, "B H T {keys}"]:
        """Return the bias of each query, at `positions`, to keys at the positions 0 to keys - 1."""
        size = query.shape[-1]
        table = self.param("table", nn.initializers.normal(0.02), (2 * self.max_distance + 1, size))
        distance = positions[:, :, None] - jnp.arange(keys)
        distance = jnp.clip(distance, -self.max_distance, self.max_distance) + self.max_distance
        scores = jnp.einsum("BTHC,RC->BHTR", query * size**-0.5, table)
        return jnp.take_along_axis(scores, distance[:, None], axis=-1)


class RelativeBuckets(nn.Module):
    """Learned bias of each head for each bucket of distances (T5, arXiv 1910.10683, section 2.1).

    Half of the buckets of a direction have one distance each, the other half increasing ranges up to `max_distance`.
    The last one also has all larger distances. All layers share the bias.

    Attributes:
        buckets: number of buckets.
        max_distance: the last bucket is used for this distance and all larger ones.
        bidirectional: whether half of the buckets are for keys after the query; otherwise such keys are in the bucket
            of distance 0.
    """

    num_heads: int
    buckets: int = 32
    max_distance: int = 128
    bidirectional: bool = True
    stddev: float = 0.02

    @nn.compact
    def __call__(self, positions: Int[Array, "#B T"], keys: int) -> Float[Array, "#B H T {keys}"]:
        """Return the bias of queries at `positions` to keys at the positions 0 to keys - 1."""
        table = self.param("table", nn.initializers.normal(self.stddev), (self.buckets, self.num_heads))
        count = self.buckets // 2 if self.bidirectional else self.buckets
        single = count // 2
        if not 0 < single < self.max_distance:
            given = f"with {self.buckets} buckets, {single} distances have a bucket each"
            raise ValueError(f"{given}: it must be at least 1 and below max_distance, which is {self.max_distance}.")
        far = np.arange(single, self.max_distance + 1)
        far = single + np.log(far / single) / np.log(self.max_distance / single) * (count - single)
        bucket = jnp.asarray([*range(single), *np.minimum(far.astype(int), count - 1)])

        before = positions[:, :, None] - jnp.arange(keys)
        distance = jnp.abs(before) if self.bidirectional else jnp.maximum(before, 0)
        index = bucket[jnp.minimum(distance, self.max_distance)]
        if self.bidirectional:
            index = jnp.where(before < 0, index + count, index)
        return jnp.moveaxis(take_rows(table, index), -1, 1)


def resample(table: Float[Array, "P D"], old: tuple[int, int], new: tuple[int, int]) -> Float[Array, "Q D"]:
    """Interpolate a table of positions on a grid of `old` (rows, columns) to a `new` grid, bicubically.

    This is PyTorch's bicubic mode (Keys' kernel with a = -0.75), with which ViT checkpoints are resampled. Raise
    ValueError if the table does not have the size of the old grid.
    """
    if table.shape[0] != old[0] * old[1]:
        raise ValueError(f"a table of {table.shape[0]} positions is not one of a {old[0]}x{old[1]} grid.")
    row, column = (_bicubic(before, after) for before, after in zip(old, new))
    grid = table.reshape(*old, -1)
    grid = jnp.einsum("rR,cC,RCD->rcD", row, column, grid.astype(jnp.float32), precision="highest")
    return grid.reshape(-1, table.shape[-1]).astype(table.dtype)


def _bicubic(before: int, after: int) -> Float[np.ndarray, "{after} {before}"]:
    """Return the matrix that interpolates `before` samples to `after`, with pixel centers at half-integers."""
    a = -0.75
    center = (np.arange(after) + 0.5) * before / after - 0.5
    taps = np.floor(center).astype(int)[:, None] + np.arange(-3, 4)
    x = np.abs(taps - center[:, None])
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = ((a * x - 5 * a) * x + 8 * a) * x - 4 * a
    weights = np.where(x <= 1, near, np.where(x < 2, far, 0.0))
    matrix = np.zeros((after, before))  # beyond the border, its samples are repeated
    np.add.at(matrix, (np.arange(after)[:, None], np.clip(taps, 0, before - 1)), weights)
    return matrix.astype(np.float32)
