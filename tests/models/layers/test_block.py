import time
from functools import partial
from operator import itemgetter

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lineage.models.layers.attend import Mask
from lineage.models.layers.attention import Attention
from lineage.models.layers.block import Block, Stack
from lineage.models.layers.cache import Cache
from lineage.models.layers.mlp import Mlp
from lineage.models.layers.norm import LayerNorm
from tests.tiers import tiered

BLOCK = partial(
    Block,
    attention=partial(Attention, num_heads=2, causal=True),
    mlp=partial(Mlp, mlp_dim=12),
    norm=partial(LayerNorm, epsilon=1e-5),
)


class AddOne(nn.Module):
    """Replacement of an attention or feed-forward sublayer that returns ones."""

    attention: bool = False

    def __call__(self, x, **kwargs):
        return (jnp.ones_like(x), None) if self.attention else jnp.ones_like(x)


COUNTER = partial(Block, attention=partial(AddOne, True), mlp=AddOne, norm=partial(nn.Dropout, 0.0, deterministic=True))


@pytest.mark.parametrize("placement", ["pre", "post", "branch"])
@tiered("cross", [False, True], first=lambda cross: cross)
def test_norm_placement_matches_the_formula(placement, cross, variables, normal):
    x, context = normal(2, 4, 8), normal(2, 3, 6)
    attend = partial(Attention, num_heads=2)
    block = BLOCK(norm_placement=placement, cross_attention=attend if cross else None)
    params = variables(block, x, context=context)["params"]
    out, _ = block.apply({"params": params}, x, context=context)

    def part(name, x):
        weights = {"params": params[name]}
        if name == "mlp":
            return Mlp(12).apply(weights, x)
        if name == "cross_attention":
            return attend().apply(weights, x, context)[0]
        return Attention(2, causal=True).apply(weights, x)[0]

    for name in ("attention", "cross_attention", "mlp") if cross else ("attention", "mlp"):
        norm = partial(LayerNorm(1e-5).apply, {"params": params[f"{name}_norm"]})
        if placement == "branch":
            x = x + norm(part(name, x))
        else:
            x = x + part(name, norm(x)) if placement == "pre" else norm(x + part(name, x))
    np.testing.assert_allclose(out, x, atol=1e-5)


@pytest.mark.parametrize("unroll", [1, 3])
def test_stack_matches_a_loop_over_blocks(unroll, variables, normal):
    x, mask = normal(2, 4, 8), Mask(keys=jnp.array([[True, True, False, True]]))
    stack = Stack(BLOCK, 3, unroll=unroll)
    params = variables(stack, x)["params"]["layers"]
    (out, _), state = stack.apply({"params": {"layers": params}}, x, mask=mask, mutable=["intermediates"])
    hidden = state["intermediates"]["layers"]["hidden"][0]
    assert state["intermediates"]["layers"]["attention"]["attention"][0].shape == (3, 2, 2, 4, 4)
    for layer in range(3):
        x, _ = BLOCK().apply({"params": jax.tree.map(itemgetter(layer), params)}, x, mask=mask)
        np.testing.assert_allclose(hidden[layer], x, atol=1e-5)
    np.testing.assert_allclose(out, x, atol=1e-5)


def test_shared_layers_have_the_parameters_of_one_layer(variables, normal):
    x = normal(2, 4, 8)
    stack = Stack(BLOCK, 3, share=True)
    params = variables(stack, x)
    one = variables(BLOCK(), x)["params"]
    assert jax.tree.map(jnp.shape, params["params"]["layers"]) == jax.tree.map(jnp.shape, one)
    out, _ = stack.apply(params, x)
    for _ in range(3):
        x, _ = BLOCK().apply({"params": params["params"]["layers"]}, x)
    np.testing.assert_allclose(out, x, atol=1e-5)


def test_layers_are_initialized_differently(normal):
    x = normal(1, 4, 8)
    kernel = Stack(BLOCK, 2).init(jax.random.key(0), x)["params"]["layers"]["mlp"]["up"]["kernel"]
    assert (kernel[0] != kernel[1]).all()


@pytest.mark.thorough
def test_cached_stack_equals_uncached(variables, normal):
    x = normal(2, 6, 8)
    stack = Stack(BLOCK, 2)
    params = variables(stack, x)
    expected, _ = stack.apply(params, x)
    cache = Cache.empty(2, 2, 7, 2, 4)
    first, cache = stack.apply(params, x[:, :4], cache=cache)
    second, cache = stack.apply(params, x[:, 4:], cache=cache)
    np.testing.assert_allclose(jnp.concatenate([first, second], axis=1), expected, atol=1e-5)
    assert cache.length.tolist() == [6]


@pytest.mark.thorough
@pytest.mark.parametrize("use_bias", [True, False])
def test_precomputed_memory_matches_the_context(use_bias, variables, normal):
    x, context, mask = normal(2, 3, 8), normal(2, 5, 12), jnp.arange(5) < jnp.array([[5], [2]])
    cross = partial(Attention, num_heads=4, num_kv_heads=2, use_bias=use_bias)
    stack = Stack(partial(BLOCK, cross_attention=cross), 3)
    inputs = {"context_mask": Mask(keys=mask)}
    params = variables(stack, x, context=context, **inputs)
    expected, _ = stack.apply(params, x, context=context, **inputs)
    memory = stack.apply(params, context, mask, method="memory")
    assert [key.shape for key in memory.key] == [(4, 5, 2)] * 3
    actual, _ = stack.apply(params, x, context=memory, **inputs)
    np.testing.assert_allclose(actual, expected, atol=1e-5)
    rows = jnp.array([1, 0, 1])
    actual, _ = stack.apply(params, x[rows], context=memory.gather(rows), context_mask=Mask(keys=mask[rows]))
    np.testing.assert_allclose(actual, expected[rows], atol=1e-5)


@pytest.mark.thorough
def test_remat_reduces_memory_without_changing_results(variables, normal):
    x = normal(2, 16, 8)
    stacks = {remat: Stack(BLOCK, 2, remat=remat) for remat in (None, "dots", "full")}
    params = variables(stacks[None], x)

    def loss(remat, params):
        return jnp.square(stacks[remat].apply(params, x)[0]).sum()

    def saved(remat):
        """Return the number of values that the backward pass keeps from the forward pass."""
        backward = jax.eval_shape(lambda params: jax.vjp(partial(loss, remat), params)[1], params)
        return sum(leaf.size for leaf in jax.tree.leaves(backward))

    assert saved("full") < saved("dots") < 0.7 * saved(None)
    expected, *others = (jax.jit(jax.value_and_grad(partial(loss, remat)))(params) for remat in stacks)
    for found in others:
        jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4), found, expected)


def test_stochastic_depth_skips_sublayers_per_example():
    """Check that each sublayer adds 1 / (1 - p) or nothing, which preserves the mean."""
    x = jnp.zeros((20_000, 1, 1))
    rate = 0.3
    out, _ = COUNTER().apply({}, x, drop_path=jnp.array(rate), rngs={"dropout": jax.random.key(0)})
    added = np.rint(out * (1 - rate)).astype(int)
    np.testing.assert_allclose(out, added / (1 - rate), rtol=1e-5)
    frequencies = np.bincount(added.ravel()) / added.size
    np.testing.assert_allclose(frequencies, [0.09, 0.42, 0.49], atol=0.015)
    np.testing.assert_array_equal(COUNTER().apply({}, x, drop_path=jnp.array(rate))[0], 2)


def test_stochastic_depth_rate_increases_with_depth():
    x = jnp.zeros((20_000, 1, 1))
    stack = Stack(COUNTER, 3, stochastic_depth=0.5)
    _, state = stack.apply({}, x, rngs={"dropout": jax.random.key(0)}, mutable=["intermediates"])
    hidden = np.asarray(state["intermediates"]["layers"]["hidden"][0])[..., 0, 0]
    added = np.diff(hidden, axis=0, prepend=0)
    np.testing.assert_array_equal(added[0], 2)
    skipped = [(layer == 0).mean() for layer in added]
    np.testing.assert_allclose(skipped, [0, 0.25**2, 0.5**2], atol=0.015)
    np.testing.assert_allclose(added.mean(axis=1), 2, atol=0.03)
    assert abs(np.corrcoef(added[1], added[2])[0, 1]) < 0.03
    np.testing.assert_array_equal(stack.apply({}, x)[0], 6)


def test_dropout_needs_its_rng_and_differs_between_layers():
    x = jnp.zeros((1, 40, 50))
    stack = Stack(partial(COUNTER, dropout=0.5), 2)
    np.testing.assert_array_equal(stack.apply({}, x)[0], 4)
    (out, _), state = stack.apply({}, x, rngs={"dropout": jax.random.key(0)}, mutable=["intermediates"])
    assert out.mean() == pytest.approx(4, abs=0.2)
    hidden = np.asarray(state["intermediates"]["layers"]["hidden"][0])
    assert abs(np.corrcoef(hidden[0].ravel(), (hidden[1] - hidden[0]).ravel())[0, 1]) < 0.1


@pytest.mark.thorough
def test_program_size_does_not_depend_on_depth(normal):
    x = normal(1, 4, 8)

    def program(depth):
        stack = Stack(BLOCK, depth)
        params = jax.eval_shape(stack.init, jax.random.key(0), x)
        jaxpr = jax.make_jaxpr(jax.grad(lambda params: stack.apply(params, x)[0].sum()))(params)
        return str(jaxpr).count(" = ")

    assert program(24) == program(2)


@pytest.mark.slow
def test_compilation_time_does_not_depend_on_depth(normal):
    x = normal(2, 16, 64)

    def seconds(depth):
        stack = Stack(BLOCK, depth)
        params = jax.eval_shape(stack.init, jax.random.key(0), x)
        start = time.perf_counter()
        jax.jit(jax.grad(lambda params: stack.apply(params, x)[0].sum())).lower(params).compile()
        return time.perf_counter() - start

    seconds(3)  # warm-up
    assert min(seconds(24) for _ in range(2)) < 1.5 * max(seconds(2) for _ in range(2))
