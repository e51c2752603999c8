"""The kernel of block-sparse attention computes what gathered blocks give, also with dropout."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from lineage.models.bigbird import BlockSparseAttention, random_blocks
from lineage.models.kernels.sparse_attention import flash, tables
from lineage.models.layers.attend import DropWeights, Mask, Weighting
from lineage.models.layers.sparse import BlockSparse
from lineage.train.sharding import make_mesh, on_mesh
from tests.tiers import tiered
from tests.tolerance import assert_close

BLOCKS = 8
PATTERNS = {
    "seeded": random_blocks(1, BLOCKS, 2, seed=0)[0],
    "first": np.zeros((BLOCKS - 2, 2), np.int32),  # the same block several times
    "none": np.zeros((BLOCKS - 2, 0), np.int32),
}
DROPOUT = DropWeights(jnp.int32(4), 0.25)


def arrays(length=BLOCKS * 64, dtype=jnp.float32):
    """Return queries, keys, values and a gradient of the output, of three examples and two heads."""
    return [jax.random.normal(jax.random.key(i), (3, length, 2, 16), dtype) for i in range(4)]


def output_and_gradients(attend, query, key, value, gradient):
    out, pull = jax.vjp(attend, query, key, value)
    return out, *pull(gradient)


def kernel(others, mask, dropout=None):
    return lambda *given: flash(*given, mask, 0.25, others=others, dropout=dropout, interpret=True)


@tiered(("others", "padding", "dropout"), [("seeded", 12, 0.25), ("first", 0, 0.25), ("none", 70, 0), ("seeded", 0, 0)])
def test_kernel_matches_gathered_blocks(others, padding, dropout):
    length, others, dropout = BLOCKS * 64 - 3, PATTERNS[others], DROPOUT if dropout else None
    real = jnp.arange(length) < length - jnp.array([[0], [padding], [padding // 2]])
    query, key, value, gradient = arrays(length)
    gradient = gradient * real[:, :, None, None]  # queries of padding may differ

    def plain(query, key, value):
        return BlockSparse(others, 64).gathered(query, key, value, Mask(keys=real), Weighting(transform=dropout))

    actual = jax.jit(partial(output_and_gradients, kernel(others, Mask(keys=real), dropout)))(
        query, key, value, gradient
    )
    wanted = jax.jit(partial(output_and_gradients, plain))(query, key, value, gradient)
    assert_close(actual[0] * real[:, :, None, None], wanted[0] * real[:, :, None, None])
    for one, other in zip(actual[1:], wanted[1:]):
        assert_close(one, other)


def test_patterns_may_be_traced():
    """Check a loop over layers, each with its own pattern."""
    given = arrays()
    others = jnp.stack([PATTERNS["seeded"], PATTERNS["first"]])
    found = jax.lax.map(lambda one: kernel(one, Mask())(*given[:3]), others)
    for one, pattern in zip(found, others):
        assert_close(one, kernel(pattern, Mask())(*given[:3]))


def test_tables_list_every_pair_from_both_sides():
    actual = jax.tree.map(np.asarray, tables(PATTERNS["seeded"]))
    slots = len(actual["columns"]) // (BLOCKS - 2)
    pairs = {(entry // slots, column) for entry, column in enumerate(actual["columns"])}
    for column in range(BLOCKS):
        entries = actual["entries"][actual["starts"][column] : actual["starts"][column + 1]]
        assert {entry // slots for entry in entries} == {row for row, other in pairs if other == column}
    assert actual["starts"][-1] == len(actual["columns"])


@pytest.mark.thorough
@tiered("axes", [{"fsdp": 2, "tensor": 2}, {"data": 4}])
def test_devices_compute_the_same_as_one(axes):
    mesh = make_mesh(**{"data": 1} | axes, devices=jax.devices()[:4])
    real = jnp.arange(BLOCKS * 64) < jnp.array([[500], [512], [470], [512]])
    given = [jnp.concatenate([x, x[:1]]) for x in arrays()]
    attend = partial(output_and_gradients, kernel(PATTERNS["seeded"], Mask(keys=real), DROPOUT))
    placed = jax.device_put(given, NamedSharding(mesh, PartitionSpec("fsdp")))
    found = jax.jit(on_mesh(attend, mesh, (), sequence=False))(*placed)
    for one, other in zip(found, attend(*given)):
        assert_close(one, other)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("size", "dropout", "attend", "expected"),
    [(64, 0.25, "auto", 3), (64, 0.0, "auto", 3), (64, 0.0, "portable", 0), (32, 0.25, "auto", 0)],
)
def test_a_program_for_gpus_has_the_kernel(size, dropout, attend, expected, gpu_program):
    blocks = BLOCKS * 64 // size
    pattern = BlockSparse(random_blocks(1, blocks, 2, seed=0)[0], size)
    attention = BlockSparseAttention(num_heads=2, dropout=dropout, attend=attend)
    x = jnp.ones((3, BLOCKS * 64, 32), jnp.bfloat16)
    params = jax.tree.map(lambda p: p.astype(x.dtype), attention.init(jax.random.key(0), x, pattern=pattern))

    def loss(params, x):
        return attention.apply(params, x, pattern=pattern, rngs={"dropout": jax.random.key(1)})[0].sum()

    text = gpu_program(jax.grad(loss), params, x)
    assert text.count("@__gpu$xla.gpu.triton(") == expected
    assert ("exponential" in text) == (not expected)
