"""The project's kernels compute what dense attention computes, with dropout that a function of the position decides."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from lineage.models.kernels import attention as kernels
from lineage.models.kernels import fused_attention, short_attention
from lineage.models.kernels.fused_attention import block_size, fused
from lineage.models.kernels.triton_attention import flash
from lineage.models.layers.attend import DropWeights, Mask, Weighting, dense
from lineage.models.layers.attention import auto
from lineage.train.sharding import make_mesh, on_mesh
from tests.tiers import tiered
from tests.tolerance import assert_close

HEADS = 4
PADDED = jnp.arange(40)[None] < jnp.array([[30], [40]])
SEGMENTS = jnp.arange(40)[None] // jnp.array([[16], [9]])
BIAS = jnp.sin(jnp.arange(HEADS * 40 * 40.0)).reshape(1, HEADS, 40, 40)
DROPOUT = DropWeights(jnp.int32(4), 0.25)
KERNELS = {"tpu": fused, "cuda": flash, "short": short_attention.attend}


@pytest.fixture(params=KERNELS)
def kernel(request):
    """Return a kernel that is emulated."""
    return partial(KERNELS[request.param], interpret=True)


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


def assert_equal_to_dense(kernel, mask, dropout=None, **shapes):
    given = arrays(**shapes)
    found = jax.jit(partial(output_and_gradients, partial(kernel, scale=0.25, dropout=dropout)))(mask, *given)
    wanted = output_and_gradients(partial(dense, weighting=Weighting(transform=dropout)), mask, *given)
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
def test_kernels_match_dense_attention(kernel, mask):
    assert_equal_to_dense(kernel, mask)


@pytest.mark.thorough
@tiered("mask", MASKS, slow=lambda mask: id(mask) not in map(id, MASKS[:3]))
def test_dropout_is_the_same_in_both_passes(kernel, mask):
    assert_equal_to_dense(kernel, mask, DROPOUT)


@pytest.mark.thorough
def test_numbers_of_queries_and_keys_may_differ(kernel):
    assert_equal_to_dense(kernel, Mask(keys=PADDED[:, :33]), DROPOUT, length=21, keys=33)


def test_gradient_of_the_bias_is_summed_over_examples(monkeypatch):
    monkeypatch.setattr(short_attention, "PARTS", 1)
    mask = Mask(segments=SEGMENTS, bias=BIAS)
    assert_equal_to_dense(partial(short_attention.attend, interpret=True), mask, DROPOUT)


@pytest.mark.thorough
@pytest.mark.parametrize("kernel", ["tpu", "cuda"], indirect=True)
@tiered("mask", [Mask(causal=True, segments=jnp.arange(256)[None] // 70), Mask(), Mask(causal=True, window=100)])
def test_several_blocks_of_queries_match_dense_attention(kernel, mask, monkeypatch):
    monkeypatch.setattr(fused_attention, "SCORES", 2**15)
    assert block_size(256, 256, HEADS, 16) == (128, HEADS)
    assert_equal_to_dense(kernel, mask, DROPOUT, length=256, keys=256)


@pytest.mark.thorough
@tiered("keys", [70, 150])
def test_last_blocks_are_filled(keys):
    """Check several blocks of a bias, some of whose keys do not exist."""
    bias = jnp.cos(jnp.arange(HEADS * 100.0 * keys)).reshape(1, HEADS, 100, keys)
    mask = Mask(keys=jnp.arange(keys)[None] < jnp.array([[0], [60]]), bias=bias)
    assert_equal_to_dense(partial(flash, interpret=True), mask, DROPOUT, length=100, keys=keys)


@pytest.mark.thorough
@tiered("axes", [{"fsdp": 2, "tensor": 2}, {"data": 4}, {"fsdp": 2, "context": 2}])
def test_devices_compute_the_same_as_one(kernel, axes):
    """Two examples are not split over four devices."""
    mesh = make_mesh(**{"data": 1} | axes, devices=jax.devices()[:4])
    kernel = partial(kernel, scale=0.25, dropout=DROPOUT)
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
    attend = partial(auto, weighting=Weighting(transform=dropout))
    traced = jax.jit(partial(output_and_gradients, attend, mask)).trace(*given)
    text = traced.lower(lowering_platforms=("tpu",)).as_text()
    assert text.count("tpu_custom_call") == 2
    assert name in text
    assert "exponential" not in text
    assert "tpu_custom_call" not in traced.lower(lowering_platforms=("cpu",)).as_text()


def test_a_program_for_gpus_has_the_kernel_with_dropout(gpu_program):
    given = arrays(length=512, keys=512, size=64, dtype=jnp.bfloat16)
    attend = partial(output_and_gradients, partial(auto, weighting=Weighting(transform=DROPOUT)), Mask(causal=True))
    text = gpu_program(attend, *given)
    assert text.count("@__gpu$xla.gpu.triton(") == 3
    assert "exponential" not in text


@tiered(
    ("mask", "shapes", "dropout", "found"),
    [
        (Mask(keys=jnp.ones((2, 256), bool)), {"size": 64}, DROPOUT, {"tpu", "cuda"}),
        (Mask(bias=BIAS[..., :1, :1]), {"size": 64}, DROPOUT, set()),
        (Mask(), {"size": 48}, DROPOUT, {"tpu"}),
        (Mask(), {"length": 100, "keys": 100, "size": 64}, DROPOUT, {"cuda"}),
        (Mask(), {"length": 100, "keys": 100, "size": 64}, None, set()),
        (Mask(), {"length": 32, "keys": 40, "size": 64}, DROPOUT, set()),
        (Mask(bias=BIAS), {"length": 40, "keys": 40, "size": 32}, DROPOUT, {"cuda"}),
        (Mask(segments=SEGMENTS), {"length": 40, "keys": 40, "size": 32}, None, {"cuda"}),
    ],
    first=8,
)
def test_kernels_are_chosen_by_shapes_and_dropout(mask, shapes, dropout, found):
    given = arrays(**{"length": 256, "keys": 256} | shapes, dtype=jnp.bfloat16)
    assert set(kernels.kernels_for(*given[:3], mask, dropout)) == found


def test_unknown_transforms_of_the_weights_have_no_kernel():
    given = arrays(128, 128, dtype=jnp.bfloat16)
    assert kernels.kernels_for(*given[:3], Mask(), DROPOUT)
    attend = jax.jit(partial(auto, mask=Mask(), weighting=Weighting(transform=jnp.sin)))
    text = attend.trace(*given[:3]).lower(lowering_platforms=("tpu",))
    assert "tpu_custom_call" not in text.as_text()
