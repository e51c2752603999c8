"""BigBird's block-sparse attention (arXiv 2007.14062) for NVIDIA GPUs, in Triton; see `layers.sparse.BlockSparse`.

The end blocks of queries visit all blocks of keys. Each of the N blocks between them visits a list of slots: both ends,
the preceding block, itself, the following block, and R others.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from lineage.models.kernels.devices import MASKED, Shape, on_devices
from lineage.models.kernels.triton_attention import attend_padded
from lineage.models.kernels.triton_programs import BLOCK, Arrays, Pair, Program
from lineage.models.layers.attend import Keys, Mask, Queries

Others = Int[Array | np.ndarray, "N R"]


def flash(
    query: Queries, key: Keys, value: Keys, mask: Mask, scale: float, *, others: Others, **options: Any
) -> Queries:
    """Attend as `BlockSparse` does with these other blocks; `options` are those of `on_devices`."""
    attend = partial(attend_padded, program=SparseProgram)
    return on_devices(attend, query, key, value, mask, scale, tables=tables(others), **options)


def tables(others: Others) -> dict[str, Int[Array, "..."]]:
    """Return the pattern as seen from the queries and from the keys.

    "columns" [N x slots] has the block of keys in each slot. "entries" are the indices in "columns", ordered by the
    block of keys; those of block c start at "starts"[c].
    """
    count = len(others)
    block = np.arange(1, count + 1)
    first, last = np.zeros_like(block), np.full_like(block, count + 1)
    fixed = np.stack([first, last, block - 1, block, block + 1], axis=1)
    columns = jnp.concatenate([fixed, others], axis=1).astype(jnp.int32).reshape(-1)
    entries = jnp.argsort(columns, stable=True).astype(jnp.int32)
    starts = jnp.searchsorted(columns[entries], jnp.arange(count + 3)).astype(jnp.int32)
    return {"columns": columns, "entries": entries, "starts": starts}


class SparseProgram(Program):
    """A program that visits the pairs of the pattern."""

    @property
    def last(self) -> int:
        """Index of the last block."""
        return self.refs["key"].shape[1] // BLOCK - 1

    @property
    def slots(self) -> int:
        """Number of slots of a block of queries."""
        return self.refs["columns"].shape[0] // (self.last - 1)

    @staticmethod
    def num_pairs(shape: Shape, inputs: Arrays) -> int:
        return inputs["columns"].shape[0] + 2 * (inputs["key"].shape[1] // BLOCK)

    def is_end(self, row: Any) -> Any:
        """Return whether a block of queries is the first or the last one."""
        return (row == 0) | (row == self.last)

    def visible_keys(self) -> tuple[Any, Any]:
        more = self.is_end(self.block).astype(jnp.int32) * (self.last + 1 - self.slots)
        return 0, self.slots + more

    def with_keys(self, index: Any) -> Pair:
        slot = jnp.minimum(index, self.slots - 1)  # of an end, which has no slots, any
        entry = jnp.clip(self.block - 1, 0, self.last - 2) * self.slots + slot
        column = jnp.where(self.is_end(self.block), index, self.refs["columns"][entry])
        return Pair(self.block, column, slot)

    def seeing_queries(self) -> tuple[Any, Any]:
        return 0, self.refs["starts"][self.block + 1] - self.refs["starts"][self.block] + 2

    def with_queries(self, index: Any) -> Pair:
        entry = self.refs["entries"][self.refs["starts"][self.block] + jnp.maximum(index - 2, 0)]
        row = jnp.where(index == 0, 0, jnp.where(index == 1, self.last, jax.lax.div(entry, self.slots) + 1))
        return Pair(row, self.block, jax.lax.rem(entry, self.slots))

    def scores(self, pair: Pair, query: Array, key: Array, example: Any = 0) -> Float[Array, "R K"]:
        """Return the scores of a pair; those of a neighbor that is also an end count only once."""
        repeated = ((pair.row == 1) & (pair.slot == 2)) | ((pair.row == self.last - 1) & (pair.slot == 4))
        return jnp.where(repeated, MASKED, super().scores(pair, query, key, example))

    def position(self, pair: Pair, example: Any) -> tuple[Any, Any, Any]:
        """Return the place of a pair in the weights of both ends, or in those of all other blocks and their slots."""
        end, between = self.is_end(pair.row), example * (self.last - 1) + pair.row - 1
        column = jnp.where(end, pair.column, pair.slot)
        return jnp.where(end, example, between), jax.lax.div(pair.row, self.last), column
