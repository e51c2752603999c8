"""The kernel for short sequences computes what dense attention computes, with dropout that a function of the position
decides."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from lineage.models.kernels import attention as kernels
from lineage.models.kernels import fused_attention
from lineage.models.kernels.fused_attention import block_size, fused
from lineage.models.layers.attend import DropWeights, Mask, dense
from lineage.models.layers.attention import auto
from lineage.train.sharding import make_mesh, on_mesh
from tests.tiers import tiered
from tests.tolerance import assert_close

HEADS = 4
PADDED = jnp.arange(40)[None] < jnp.array([[30], [40]])
SEGMENTS = jnp.arange(40)[None] // jnp.array([[16], [9]])
BIAS = jnp.sin(jnp.arange(HEADS * 40 * 40.0)).reshape(1, HEADS, 40, 40)
DROPOUT = DropWeights(jnp.int32(4), 0.25)


def arrays(length=40, keys=40, size=16, dtype=jnp.float32):
    """Return queries, keys, values and a gradient of the output."""
    sizes = (length, keys, keys, length)
    return [jax.random.normal(jax.random.key(i), (2, n, HEADS, size), dtype) for i, n in enumerate(sizes)]


def output_and_gradients(attend, mask, query, key, value, gradient):
    """Return the output, and the gradients of queries, keys, values and the bias."""

    def function(query, key, value, bias):
        return attend(query, key, value, mask.replace(bias=bias))

    out, pull = jax.vjp(function, query, key, value, mask.bias)
    return jax.tree.leaves((out, pull(gradient)))


def assert_equal_to_dense(mask, dropout=None, **shapes):
    given = arrays(**shapes)
    kernel = partial(fused, scale=0.25, dropout=dropout, interpret=True)
    found = jax.jit(partial(output_and_gradients, kernel))(mask, *given)
    wanted = output_and_gradients(partial(dense, transform=dropout), mask, *given)
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted):
        assert_close(one, other)


MASKS = [
    Mask(),
    Mask(keys=PADDED, causal=True, bias=BIAS),
    Mask(causal=True),
    Mask(causal=True, window=7),
    Mask(keys=PADDED),
    Mask(segments=SEGMENTS),
    Mask(segments=SEGMENTS, keys=PADDED, causal=True),
    Mask(keys=jnp.arange(40)[None] < jnp.array([[0], [40]])),  # one example has no visible keys
    Mask(bias=BIAS),
    Mask(bias=BIAS[:, :1]),
]


@tiered("mask", MASKS)
def test_fused_attention_matches_dense_attention(mask):
    assert_equal_to_dense(mask)


@tiered("mask", MASKS)
def test_dropout_is_the_same_in_both_passes(mask):
    assert_equal_to_dense(mask, DROPOUT)


def test_numbers_of_queries_and_keys_may_differ():
    assert_equal_to_dense(Mask(keys=PADDED[:, :33]), DROPOUT, length=21, keys=33)


@tiered("mask", [Mask(causal=True, segments=jnp.arange(256)[None] // 70), Mask(), Mask(causal=True, window=100)])
def test_several_blocks_of_queries_match_dense_attention(mask, monkeypatch):
    monkeypatch.setattr(fused_attention, "SCORES", 2**15)
    assert block_size(256, 256, HEADS, 16) == (128, HEADS)
    assert_equal_to_dense(mask, DROPOUT, length=256, keys=256)


@tiered("axes", [{"fsdp": 2, "tensor": 2}, {"data": 4}, {"fsdp": 2, "context": 2}])
def test_devices_compute_the_same_as_one(axes):
    """Two examples are not split over four devices."""
    mesh = make_mesh(**{"data": 1} | axes, devices=jax.devices()[:4])
    kernel = partial(fused, scale=0.25, dropout=DROPOUT, interpret=True)
    mask, given = Mask(keys=PADDED, causal=True, bias=BIAS), arrays()
    function = on_mesh(partial(output_and_gradients, kernel, mask), mesh, (), sequence=False)
    placed = jax.device_put(given, NamedSharding(mesh, PartitionSpec("fsdp")))
    for one, other in zip(jax.jit(function)(*placed), output_and_gradients(kernel, mask, *given)):
        assert_close(one, other)


@pytest.mark.parametrize(
    ("sizes", "wanted"),
    [
        ((512, 512, 12, 64), (512, 2)),
        ((197, 197, 6, 64), (197, 6)),
        ((197, 197, 16, 64), (197, 8)),
        ((257, 257, 16, 80), (257, 8)),
        ((512, 512, 3, 64), (256, 3)),
        ((1024, 1024, 16, 128), (256, 2)),
        ((2048, 2048, 16, 128), (128, 1)),
        ((600, 600, 12, 64), None),
        ((2048, 2048, 2, 256), None),
    ],
)
def test_blocks_divide_queries_and_heads_and_fill_the_lanes(sizes, wanted):
    assert block_size(*sizes) == wanted
    assert block_size(*sizes, whole=True) == (wanted if wanted and wanted[0] == sizes[0] else None)


@tiered(
    ("mask", "shapes", "dropout", "name"),
    [
        (Mask(keys=jnp.ones((2, 512), bool)), {"length": 512, "keys": 512, "size": 64}, DROPOUT, "fused"),
        (Mask(), {"length": 197, "keys": 197, "size": 64}, None, "fused"),
        (Mask(bias=jnp.zeros((1, HEADS, 512, 512))), {"length": 512, "keys": 512, "size": 64}, None, "fused"),
        (Mask(causal=True), {"length": 1024, "keys": 1024, "size": 64}, DROPOUT, "fused"),
        (Mask(causal=True), {"length": 1024, "keys": 1024, "size": 64}, None, "splash"),
    ],
)
def test_a_program_for_tpus_has_the_kernel_that_fits(mask, shapes, dropout, name):
    given = arrays(**shapes, dtype=jnp.bfloat16)
    traced = jax.jit(partial(output_and_gradients, partial(auto, transform=dropout), mask)).trace(*given)
    text = traced.lower(lowering_platforms=("tpu",)).as_text()
    assert text.count("tpu_custom_call") == 2
    assert name in text
    assert "exponential" not in text
    assert "tpu_custom_call" not in traced.lower(lowering_platforms=("cpu",)).as_text()


def test_unknown_transforms_of_the_weights_have_no_kernel():
    given = arrays(128, 128, dtype=jnp.bfloat16)
    assert kernels.kernels_for(*given[:3], Mask(), DROPOUT)
    text = jax.jit(partial(auto, mask=Mask(), transform=jnp.sin)).trace(*given[:3]).lower(lowering_platforms=("tpu",))
    assert "tpu_custom_call" not in text.as_text()
