"""Programs of attention kernels for NVIDIA GPUs in Triton, and the function that launches them.

Each program of a kernel has one block of queries or keys, of one head and one example, and loops over the blocks of the
other kind.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array, Float

from lineage.models.kernels.devices import MASKED, Shape, is_described, keeps_weights, visited_blocks
from lineage.models.layers.attend import Keys, Mask, Queries

BLOCK = 64  # number of queries and of keys in a block
OUTSIDE = -2  # segment id of the keys that pad the last block
LOG2_E = math.log2(math.e)
Arrays = dict[str, Any]
PER_QUERY = ("largest", "total", "delta")  # statistics [B, H, T] of each query


def fits(query: Queries, key: Keys, mask: Mask) -> bool:
    """Return whether the programs support arrays of these shapes with this mask."""
    return query.shape[-1] in (16, 32, 64, 128) and is_described(mask, query.shape[1], key.shape[1])


class Pair(NamedTuple):
    """A block of queries and a block of keys."""

    row: Any
    column: Any
    slot: Any = None  # index of the keys in the list of the queries, see `sparse_attention`


@dataclass(frozen=True)
class Program:
    """One program of a kernel, for a block of queries or keys of one head.

    It visits pairs with blocks of the other kind; subclasses may select these.
    """

    shape: Shape
    refs: Arrays  # references to the parts of the arrays that the program reads
    lengths: dict[str, int]  # number of tokens in each array of queries, keys, values or outputs
    block: Any  # index of the block
    head: Any  # index of the head
    first: Any  # index of the first example; methods take indices relative to it

    @staticmethod
    def num_pairs(shape: Shape, inputs: Arrays) -> int:
        """Return the number of pairs of blocks that the programs of one head and example visit."""
        lengths = inputs["query"].shape[1], inputs["key"].shape[1]
        return visited_blocks(lengths, (BLOCK, BLOCK), shape.causal, shape.window)[0]

    def with_keys(self, index: Any) -> Pair:
        """Return the program's queries with the keys of an index in `visible_keys`."""
        return Pair(self.block, index)

    def with_queries(self, index: Any) -> Pair:
        """Return the program's keys with the queries of an index in `seeing_queries`."""
        return Pair(index, self.block)

    def visible_keys(self) -> tuple[Any, Any]:
        """Return the range of blocks of keys that are visible to the program's queries."""
        window = self.shape.window
        if not self.shape.causal:
            return 0, self.refs["key"].shape[1] // BLOCK
        first = 0 if window is None else jax.lax.div(jnp.maximum(self.block * BLOCK - window + 1, 0), BLOCK)
        return first, self.block + 1

    def seeing_queries(self) -> tuple[Any, Any]:
        """Return the range of blocks of queries to which the program's keys are visible."""
        count, window = self.refs["query"].shape[1] // BLOCK, self.shape.window
        if not self.shape.causal or window is None:
            return self.block if self.shape.causal else 0, count
        return self.block, jnp.minimum(jax.lax.div((self.block + 1) * BLOCK + window - 2, BLOCK) + 1, count)

    def queries(self, row: Any, example: Any = 0) -> dict[str, Array]:
        """Return a block of queries, of the gradients of their outputs, and of their statistics."""
        blocks = {name: self.refs[name][example, tokens(row), :] for name in ("query", "gradient")}
        return blocks | {name: self.refs[name][example, 0, tokens(row)] for name in PER_QUERY}

    def keys(self, column: Any, example: Any = 0) -> dict[str, Array]:
        """Return a block of keys and of values."""
        return {name: self.refs[name][example, tokens(column), :] for name in ("key", "value")}

    def scores(self, pair: Pair, query: Array, key: Array, example: Any = 0) -> Float[Array, "R K"]:
        """Return the scores of a pair in base 2: `MASKED` where a key is not visible, -inf for the padding of keys."""
        shape, refs, row, column = self.shape, self.refs, pair.row, pair.column
        scores = triton.dot(query, key, trans_b=True) * (shape.scale * LOG2_E)
        if "bias" in refs:
            scores = scores + refs["bias"][0, 0, tokens(row), tokens(column)].astype(jnp.float32) * LOG2_E
        if shape.causal:
            distance = jax.lax.broadcasted_iota(jnp.int32, scores.shape, 0) + (row - column) * BLOCK
            distance = distance - jax.lax.broadcasted_iota(jnp.int32, scores.shape, 1)
            visible = distance >= 0 if shape.window is None else (distance >= 0) & (distance < shape.window)
            scores = jnp.where(visible, scores, MASKED)
        if "seen" in refs:
            seen = self._segments("seen", column, example)[None, :]
            visible = self._segments("own", row, example)[:, None] == seen if "own" in refs else seen >= 0
            scores = jnp.where(visible, scores, MASKED)
            scores = jnp.where(seen == OUTSIDE, -jnp.inf, scores)
        return scores

    def _segments(self, name, block, example):
        ref = self.refs[name]
        return ref[0 if ref.shape[0] == 1 else example, tokens(block)]

    def drop(self, pair: Pair, weights: Float[Array, "R K"], example: Any = 0) -> Float[Array, "R K"]:
        """Apply dropout to a pair's weights without scaling, with the same mask in all kernels."""
        if not self.shape.rate:
            return weights
        seed = [self.refs["seed"][i] for i in range(3)]
        example, row, column = self.position(pair, seed[1] + self.first + example)
        kept = keeps_weights(self.shape, seed, example, self.head, row * BLOCK, column * BLOCK, weights.shape)
        return jnp.where(kept, weights, 0)

    def position(self, pair: Pair, example: Any) -> tuple[Any, Any, Any]:
        """Return the example, and the block of rows and of columns, of a pair in the weights that dropout gets."""
        return example, pair.row, pair.column

    def gradients(
        self, pair: Pair, queries: dict[str, Array], keys: dict[str, Array], example: Any = 0
    ) -> tuple[Float[Array, "R K"], Float[Array, "R K"]]:
        """Return the weights of a pair after dropout without scaling, and the gradient of its scores."""
        scores = self.scores(pair, queries["query"], keys["key"], example)
        weights = jnp.exp2(scores - queries["largest"][:, None]) * (1 / queries["total"])[:, None]
        d_weights = self.drop(pair, triton.dot(queries["gradient"], keys["value"], trans_b=True), example)
        d_scores = weights * (d_weights * self.shape.factor - queries["delta"][:, None])
        if self.shape.causal or "seen" in self.refs:  # without a visible key, the weights do not depend on the scores
            d_scores = jnp.where(queries["largest"][:, None] > MASKED, d_scores, 0)
        return self.drop(pair, weights, example).astype(keys["value"].dtype), d_scores


def tokens(block: Any) -> Any:
    """Return the slice of the tokens of a block."""
    return pl.ds(block * BLOCK, BLOCK)


def with_padded_masks(arrays: Arrays) -> Arrays:
    """Return arrays whose segment ids and bias fill the last blocks of queries and keys."""
    rows, columns = ((0, -arrays[name].shape[1] % BLOCK) for name in ("query", "key"))
    if columns[1]:
        seen = arrays.get("seen", jnp.zeros((1, arrays["key"].shape[1]), jnp.int32))
        arrays = arrays | {"seen": jnp.pad(seen, ((0, 0), columns), constant_values=OUTSIDE)}
    widths = {"own": ((0, 0), rows), "bias": ((0, 0), (0, 0), rows, columns)}
    return arrays | {name: jnp.pad(arrays[name], width) for name, width in widths.items() if name in arrays}


def call(
    program: type[Program], shape: Shape, kernel: Callable, products: int, inputs: Arrays, outputs: Arrays,
    tokens: int, examples: int = 1,
) -> Arrays:  # fmt: skip
    """Run a kernel for all heads and all blocks of `tokens` queries or keys.

    `products` is the number of matrix products for each pair of blocks, `examples` the number of examples per program.
    """
    batch, _, width = inputs["query"].shape
    flops = 2 * products * batch * width * program.num_pairs(shape, inputs) * BLOCK**2
    lengths = {name: x.shape[1] for name, x in (inputs | outputs).items() if x.ndim == 3 and name not in PER_QUERY}

    def run(*refs):
        block, head, part = (pl.program_id(axis) for axis in range(3))
        instance = program(shape, dict(zip(inputs, refs)), lengths, block, head, part * examples)
        kernel(instance, dict(zip(outputs, refs[len(inputs) :])))

    attend = pl.pallas_call(
        run,
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in outputs.values()],
        grid=(tokens // BLOCK, width // shape.channels, batch // examples),
        in_specs=[_part(shape, name, x.shape, examples) for name, x in inputs.items()],
        out_specs=[_part(shape, name, x.shape, examples) for name, x in outputs.items()],
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=3),
        interpret=shape.interpret,
        name=f"flash_attention{kernel.__name__}",
    )
    with jax.named_scope(f"attention_of_{flops}_flops"):  # for `lineage compile`
        return dict(zip(outputs, attend(*inputs.values())))


def _part(shape: Shape, name: str, size: tuple[int, ...], examples: int) -> Any:
    """Return the specification of the part of an array that a program accesses: that of its head and its examples."""
    if len(size) == 1:  # the seed, and tables of the pattern
        return pl.BlockSpec(size, lambda block, head, example: (0,))
    varies = int(size[0] > 1)  # all examples may share a mask or a bias
    if name == "bias":
        return pl.BlockSpec((1, 1, *size[2:]), lambda block, head, example: (example * varies, head, 0, 0))
    if name in ("own", "seen"):
        return pl.BlockSpec((examples if varies else 1, size[1]), lambda block, head, example: (example * varies, 0))
    if name in PER_QUERY:
        return pl.BlockSpec((examples, 1, size[2]), lambda block, head, example: (example, head, 0))
    padded = -(-size[1] // BLOCK) * BLOCK
    return pl.BlockSpec((examples, padded, shape.channels), lambda block, head, example: (example, 0, head))
