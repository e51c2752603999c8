from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lineage import models
from lineage.models.jaxpr_costs import flops
from lineage.models.layers.attention import Attention
from lineage.models.swin import ContinuousBias, Swin, WindowAttention
from tests.tiers import tiered
from tests.tolerance import assert_close

jit = partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})  # compilation dominates
TINY = Swin(num_classes=5, image_size=8, patch_size=1, channels=1, depths=(2, 1), width=8, num_heads=(2, 2), window=4)


def shapes(model, image):
    return jax.eval_shape(model.init, jax.random.key(0), image)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("variant", "size", "parameters", "multiply_adds"),
    [
        ("T", 224, 28_288_354, 4.5),
        ("S", 224, 49_606_258, 8.7),
        ("B", 224, 87_768_224, 15.4),
        ("L", 224, 196_532_476, 34.5),
        ("V2-T", 256, 28_347_154, 5.9),
    ],
)
def test_parameters_and_flops_match_the_papers(variant, size, parameters, multiply_adds):
    model, image = models.build("swin", variant, image_size=size), jax.ShapeDtypeStruct((1, size, size, 3), jnp.float32)
    variables = shapes(model, image)
    assert sum(leaf.size for leaf in jax.tree.leaves(variables)) == parameters
    assert round(flops(model.apply, variables, image)["model"] / 2e9, 1) == multiply_adds


@pytest.mark.thorough
@tiered("version", ["v1", "v2"])
def test_work_is_proportional_to_the_area(version):
    model = TINY.clone(version=version, image_size=16)
    costs = []
    for side in (16, 32, 64):
        image = jax.ShapeDtypeStruct((1, side, side, 1), jnp.float32)
        classifier = 2 * 16 * 5
        costs.append(flops(model.apply, shapes(model, image), image)["matmul"] - classifier)
    if version == "v2":  # the network of the biases runs once for any image size
        bias = sum(depth * 7**2 * 2 * 512 * (2 + 2) for depth in model.depths)
        costs = [cost - bias for cost in costs]
    assert costs == [costs[0], 4 * costs[0], 16 * costs[0]]


@tiered("shift", [None, 0, 1, 2], first=2)
def test_gradients_are_limited_to_the_window(shift, variables, normal):
    """Check that tokens shifted in from the opposite edge and padding are excluded."""
    rows, columns, window = 5, 7, 3
    module = WindowAttention(partial(Attention, num_heads=2))
    how = {"grid": (rows, columns), "window": window, "shift": None if shift is None else jnp.array(shift)}
    x = normal(1, rows * columns, 8)
    params = variables(module, x, **how)
    seen = jit(jax.jacfwd(lambda x: module.apply(params, x, **how)[0][0].sum(axis=-1)))(x)[:, 0]
    row, column = (np.mgrid[:rows, :columns].reshape(2, -1) - (shift or 0)) // window
    together = (row[:, None] == row) & (column[:, None] == column)
    np.testing.assert_array_equal((seen != 0).any(axis=-1), together)


@pytest.mark.thorough
def test_shifted_blocks_connect_windows(variables, normal):
    image = normal(1, 8, 8, 1)
    params = variables(TINY, image)

    corner = jit(jax.grad(lambda image: TINY.apply(params, image, method="features")[0][0, 0, 0].sum()))
    seen = np.asarray(corner(image))[0, ..., 0] != 0
    # The window of the second block has the first two rows and columns, which depend on one window of the first block.
    assert seen[:4, :4].all()
    assert not seen[4:].any()
    assert not seen[:, 4:].any()
    last = jit(jax.grad(lambda image: TINY.apply(params, image, method="encode")[0, 0, 0].sum()))(image)
    assert (last != 0).all()


def test_biases_of_version_2_extrapolate_to_larger_windows(variables, normal):
    inputs = normal(1, 1, 3, 4), jnp.zeros((1, 1), jnp.int32)
    small, large = ContinuousBias(), ContinuousBias(trained_window=3)
    params = variables(small, *inputs, keys=9)
    bias = small.apply(params, *inputs, keys=9)
    inside = [0, 1, 2, 5, 6, 7, 10, 11, 12]  # 3x3 of 5x5
    assert_close(large.apply(params, *inputs, keys=25)[..., inside, :][..., inside], bias)
    assert (small.apply(params, *inputs, keys=25)[..., inside, :][..., inside] != bias).any()


def test_stochastic_depth_rate_increases_over_the_stages(variables, normal):
    model = TINY.clone(depths=(1, 1), stochastic_depth=1 - 1e-6)
    image = normal(2, 8, 8, 1)
    params = variables(model, image)
    look = partial(model.apply, method="features")
    plain = jit(look)(params, image)
    actual = jit(partial(look, rngs={"dropout": jax.random.key(0)}))(params, image)
    np.testing.assert_array_equal(actual[0], plain[0])
    without = jax.tree.map(jnp.zeros_like, params["params"]["stacks_1"])  # a block that adds nothing
    skipped = jit(look)({"params": params["params"] | {"stacks_1": without}}, image)
    np.testing.assert_allclose(actual[1], skipped[1], atol=1e-6)
    assert (actual[1] != plain[1]).any()


@pytest.mark.thorough
def test_dropout_needs_its_rng_and_initial_logits_are_zero(variables, normal):
    image = normal(2, 8, 8, 1)
    np.testing.assert_array_equal(jit(TINY.init_with_output)(jax.random.key(0), image)[0], 0)
    params, model = variables(TINY, image), TINY.clone(dropout=0.3)
    plain = jit(TINY.apply)(params, image)
    np.testing.assert_array_equal(jit(model.apply)(params, image), plain)
    assert (jit(partial(model.apply, rngs={"dropout": jax.random.key(0)}))(params, image) != plain).any()


@tiered("version", ["v1", "v2"])
def test_bfloat16_parameters_and_images_give_bfloat16_logits(version, variables, normal):
    image, model = normal(2, 8, 8, 1), TINY.clone(version=version)
    params = variables(model, image, std=0.1)
    logits = jit(model.apply)(*jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), (params, image)))
    assert logits.dtype == jnp.bfloat16
    np.testing.assert_allclose(logits.astype(jnp.float32), jit(model.apply)(params, image), atol=0.05)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"channels": 3}, "the image has 1 channels: the model needs 3"),
        ({"depths": (2, 1, 1)}, r"depths \(2, 1, 1\), num_heads \(2, 2\) and .* must have one value for each stage"),
        ({"trained_windows": (3,)}, r"trained_windows \(3,\) must have one value for each stage"),
    ],
)
def test_invalid_settings_raise(settings, message, normal):
    with pytest.raises(ValueError, match=message):
        TINY.clone(**settings).init(jax.random.key(0), normal(1, 8, 8, 1))
