"""Attention kernels compute what dense attention computes, and are lowered for their platforms only."""

import importlib.util
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from lineage.models.kernels import attention as kernels
from lineage.models.layers.attend import Mask, dense
from lineage.models.layers.attention import auto
from lineage.models.layers.placement import by_heads
from lineage.train.sharding import make_mesh, on_mesh
from tests.tiers import tiered
from tests.tolerance import assert_close

LENGTHS = jnp.array([[150], [200]])
PADDED = jnp.arange(200)[None] < LENGTHS
SEGMENTS = jnp.arange(200)[None] // jnp.array([[64], [90]])


def arrays(length=200, keys=200, heads=4, kv_heads=2, size=16, dtype=jnp.float32):
    """Return queries, keys, values and a gradient of the output."""
    random = [jax.random.key(seed) for seed in range(4)]
    shapes = [(2, length, heads, size), (2, keys, kv_heads, size), (2, keys, kv_heads, size), (2, length, heads, size)]
    return [jax.random.normal(key, shape, dtype) for key, shape in zip(random, shapes)]


def output_and_gradients(attend, query, key, value, gradient):
    """Return the output, and the gradients of queries, keys and values."""
    out, pull = jax.vjp(attend, query, key, value)
    return out, *pull(gradient)


def assert_equal_to_dense(attend, mask, **shapes):
    query, key, value, gradient = arrays(**shapes)
    wanted = output_and_gradients(partial(dense, mask=mask), query, key, value, gradient)
    found = jax.jit(partial(output_and_gradients, partial(attend, mask=mask, scale=query.shape[-1] ** -0.5)))(
        query, key, value, gradient
    )
    for one, other in zip(found, wanted):
        assert_close(one, other)


@tiered(
    ("mask", "shapes"),
    [
        (Mask(causal=True, segments=SEGMENTS), {}),
        (Mask(), {"kv_heads": 4}),
        (Mask(keys=PADDED), {"length": 130}),
        (Mask(causal=True), {"kv_heads": 1}),
        (Mask(causal=True, window=37), {}),
        (Mask(causal=True, keys=PADDED), {}),
        (Mask(segments=SEGMENTS, keys=jnp.arange(200)[None] % 3 > 0), {}),
        (Mask(causal=True), {"length": 600, "keys": 600}),
    ],
)
def test_splash_matches_dense_attention(mask, shapes):
    assert_equal_to_dense(partial(kernels.splash, interpret=True), mask, **shapes)


@tiered("axes", [{"context": 4}, {"fsdp": 2, "tensor": 2}])
def test_splash_on_several_devices_matches_dense_attention(axes):
    """Check examples and heads over several axes, and tokens over the context axis with repeated key/value heads."""
    mesh = make_mesh(data=1, devices=jax.devices()[:4], **axes)
    mask, given = Mask(causal=True, keys=PADDED), arrays()

    def splash(*arrays):
        return by_heads(partial(kernels.splash, mask=mask, scale=0.25, interpret=True))(*arrays)

    function = on_mesh(partial(output_and_gradients, splash), mesh, (), sequence=False)
    found = jax.jit(function)(*jax.device_put(given, NamedSharding(mesh, PartitionSpec(("data", "fsdp")))))
    for one, other in zip(found, output_and_gradients(partial(dense, mask=mask), *given)):
        assert_close(one, other)


BIAS = jnp.sin(jnp.arange(4 * 200 * 200.0)).reshape(1, 4, 200, 200)
KINDS = Mask(), Mask(causal=True), Mask(causal=True, window=9), Mask(keys=PADDED), Mask(bias=BIAS)


@pytest.mark.parametrize("mask", [*KINDS, Mask(causal=True, segments=SEGMENTS)])
def test_arguments_of_cudnn_mean_the_same_mask(mask, monkeypatch):
    """Compare JAX's own implementation, given the arguments for cuDNN, with dense attention."""
    function = jax.nn.dot_product_attention
    other = {"implementation": "xla"}
    monkeypatch.setattr(jax.nn, "dot_product_attention", lambda *args, **how: function(*args, **how | other))
    assert_equal_to_dense(kernels.cudnn, mask)


def test_each_platform_runs_its_kernel():
    """Check that a TPU's program consists of kernels, forward and backward, and that other programs have none."""
    query, key, value, gradient = arrays()
    function = partial(output_and_gradients, partial(auto, mask=Mask(causal=True)))
    traced = jax.jit(function).trace(query, key, value, gradient)
    tpu, cpu = (traced.lower(lowering_platforms=(name,)).as_text() for name in ("tpu", "cpu"))
    assert tpu.count("tpu_custom_call") == 2
    assert "exponential" not in tpu
    assert "tpu_custom_call" not in cpu
    assert "exponential" in cpu
    wanted = output_and_gradients(partial(dense, mask=Mask(causal=True)), query, key, value, gradient)
    for one, other in zip(traced.lower().compile()(query, key, value, gradient), wanted):
        np.testing.assert_allclose(one, other, atol=1e-6)


@pytest.mark.parametrize(
    ("mask", "shapes", "platforms"),
    [
        (Mask(), {}, {"tpu", "cuda"}),
        (Mask(), {"dtype": jnp.float32}, {"tpu"}),
        (Mask(), {"length": 127, "keys": 127}, set()),
        (Mask(), {"size": 12}, {"tpu"}),
        (Mask(keys=PADDED[:, :199]), {"length": 199, "keys": 199}, {"tpu"}),
        (Mask(causal=True), {"length": 199, "keys": 199}, {"tpu", "cuda"}),
        (Mask(bias=jnp.zeros((1, 1, 200, 200))), {}, {"cuda"}),
        (Mask(allowed=jnp.ones((1, 1, 200, 200), bool)), {}, {"cuda"}),
        (Mask(causal=True, positions=jnp.zeros((1, 200), jnp.int32)), {}, set()),
    ],
)
def test_kernels_are_offered_where_they_are_exact(mask, shapes, platforms, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name == "jax_cuda13_plugin")
    query, key, value, _ = arrays(**{"dtype": jnp.bfloat16} | shapes)
    assert set(kernels.kernels_for(query, key, value, mask)) == platforms


@pytest.mark.parametrize(("length", "size"), [(1, 128), (128, 128), (197, 256), (512, 512), (513, 384), (1024, 512)])
def test_blocks_are_large_and_waste_little(length, size):
    assert kernels.block_sizes(length, 1024) == (size, 512, 512)
    assert kernels.block_sizes(1024, length) == (512, size, size)


@pytest.mark.parametrize(("causal", "window"), [(False, None), (True, None), (True, 1), (True, 257), (True, 258)])
@pytest.mark.parametrize("sizes", [(128, 128), (128, 256)])
def test_visited_blocks_are_those_with_a_visible_key(causal, window, sizes):
    seen = Mask(causal=causal, window=window).materialize(768, 768) if causal else np.ones((768, 768), bool)
    blocks = np.reshape(seen, (768 // sizes[0], sizes[0], 768 // sizes[1], sizes[1])).any(axis=(1, 3))
    assert kernels.visited_blocks((768, 768), sizes, causal, window) == (blocks.sum(), blocks.size)


@pytest.mark.thorough
def test_backward_blocks_of_long_sequences_are_larger(monkeypatch):
    """Check sizes, and five blocks of which the backward pass makes three, with padding."""
    assert kernels.block_sizes(4096, 4096) == (512, 512, 512)
    assert kernels.block_sizes(32_768, 32_768) == (512, 512, 4096)
    assert kernels.block_sizes(4200, 4200) == (512, 512, 1024)
    monkeypatch.setattr(kernels, "BLOCK", 128)
    monkeypatch.setattr(kernels, "BACKWARD_BLOCKS", 4)
    assert kernels.block_sizes(600, 600) == (128, 128, 256)
    assert_equal_to_dense(partial(kernels.splash, interpret=True), Mask(causal=True), length=600, keys=600)
    assert_equal_to_dense(partial(kernels.splash, interpret=True), Mask(), length=600, keys=600)
