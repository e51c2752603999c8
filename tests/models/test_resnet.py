"""Residual networks: published sizes, resolutions, and dependence between examples."""

import itertools
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lineage.models import budget, build, resnet
from lineage.models.kernels.compiler import convolve, max_pool
from tests.tolerance import assert_close

TINY = {"depths": (1, 1, 1), "widths": (16, 32, 64), "stem_width": 8, "num_classes": 3, "groups": 2}


@pytest.mark.parametrize("dtypes", [("bfloat16", "float32"), ("float16", "float32"), ("float32", "bfloat16")])
def test_dtypes_of_images_and_parameters_are_promoted(dtypes):
    model, image = build("resnet", **TINY), jnp.arange(2 * 16 * 16 * 3).reshape(2, 16, 16, 3) % 256 / 256
    variables = jax.tree.map(lambda leaf: leaf.astype(dtypes[1]), model.init(jax.random.key(0), image))
    expected = model.apply(jax.tree.map(jnp.float32, variables), image)
    assert_close(model.apply(variables, image.astype(dtypes[0])), expected, n=4000)


@pytest.mark.thorough
def test_multiply_adds_match_published_models():
    """Check 4.1 G multiply-adds at 224, which include those with zero padding; the budget excludes these."""
    image = jax.ShapeDtypeStruct((1, 224, 224, 3), jnp.float32)
    model = build("resnet", "50")
    variables = jax.eval_shape(model.init, jax.random.key(0), image)
    total = 2048 * 1000
    eqns = jax.make_jaxpr(model.apply)(variables, image).eqns

    def parts(eqn):
        """Return the equations of a convolution: by default of the platform, and without its custom gradient."""
        inner = eqn.params.get("branches", [eqn.params.get("call_jaxpr")])[-1]
        return inner.eqns if inner else [eqn]

    for eqn in itertools.chain(*map(parts, eqns)):
        if eqn.primitive.name == "conv_general_dilated":
            out, kernel = eqn.outvars[0].aval, eqn.invars[1].aval
            total += out.size * kernel.size // kernel.shape[-1]
    assert total == 4_089_184_256
    assert 0.95 < budget.budget(model, (image,)).flops["forward"]["matmul"] / (2 * total) < 1


@pytest.mark.parametrize(("stem", "sizes"), [("imagenet", (8, 4, 2)), ("small", (31, 16, 8))])
def test_each_stage_halves_the_resolution(stem, sizes):
    model = resnet.ResNet(stem=stem, **TINY)
    image = jnp.zeros((2, 31, 29, 3))
    variables = jax.eval_shape(model.init, jax.random.key(0), image)
    maps = jax.eval_shape(lambda v: model.apply(v, image, method="features"), variables)
    assert [x.shape[1] for x in maps] == list(sizes)
    assert [x.shape[-1] for x in maps] == [16, 32, 64]


@pytest.mark.thorough
@pytest.mark.parametrize("settings", [{}, {"norm": "group"}, {"norm": "group", "preactivation": True}])
def test_examples_interact_by_batch_norm_in_training_only(settings):
    model = resnet.ResNet(**TINY | {"depths": (1,), "widths": (16,)}, **settings)
    image = jax.random.normal(jax.random.key(1), (2, 8, 8, 3))
    variables = jax.jit(model.init)(jax.random.key(0), image)

    def first(image, mutable):
        return jnp.square(model.apply(variables, image, mutable=mutable)[0][0]).sum()

    def seen(mutable):
        gradient = jax.jit(jax.grad(partial(first, mutable=mutable)))(image)
        return [float(np.abs(gradient[i]).max()) > 0 for i in range(2)]

    assert seen([]) == [True, False]
    assert seen(["statistics"]) == [True, model.norm == "batch"]


@pytest.mark.parametrize(("size", "stride", "pads"), [((25, 27), 1, ((1, 1), (1, 1))), ((49, 50), 2, ((0, 1), (1, 1)))])
def test_gradients_of_convolutions_of_large_images(size, stride, pads):
    """Check the products of matrices that CPUs compute instead of a convolution for the gradient of the kernel."""
    x = jax.random.normal(jax.random.key(0), (2, *size, 64))
    kernel = jax.random.normal(jax.random.key(1), (3, 3, 64, 65))
    ours = partial(convolve, stride=stride, pads=pads)
    numbers = ("NHWC", "HWIO", "NHWC")
    plain = partial(
        jax.lax.conv_general_dilated, window_strides=(stride, stride), padding=pads, dimension_numbers=numbers
    )
    weights = jax.random.normal(jax.random.key(2), plain(x, kernel).shape)
    actual, expected = (
        jax.grad(lambda *args, convolution=convolution: (convolution(*args) * weights).sum(), (0, 1))(x, kernel)
        for convolution in (ours, plain)
    )
    assert "custom_vjp" in str(jax.make_jaxpr(ours)(x, kernel))
    jax.tree.map(assert_close, actual, expected)


@pytest.mark.thorough
@pytest.mark.parametrize("shape", [(2, 7, 8, 3), (1, 4, 3, 1)])
def test_max_pool_is_that_of_flax_with_equal_values_and_nan(shape):
    x = jax.random.randint(jax.random.key(0), shape, 0, 3).astype(float)
    expected = partial(nn.max_pool, window_shape=(3, 3), strides=(2, 2))
    weights = jax.random.normal(jax.random.key(1), expected(x).shape)
    gradients = [jax.grad(lambda x, pool=pool: (pool(x) * weights).sum())(x) for pool in (max_pool, expected)]
    np.testing.assert_array_equal(max_pool(x), expected(x))
    np.testing.assert_allclose(*gradients, rtol=1e-6)
    np.testing.assert_array_equal(max_pool(x.at[0, 1].set(jnp.nan)), expected(x.at[0, 1].set(jnp.nan)))


def test_invalid_settings_raise():
    image = jnp.zeros((1, 16, 16, 1))
    with pytest.raises(ValueError, match="image has 1 channels: the model needs 3"):
        resnet.ResNet(**TINY).init(jax.random.key(0), image)
    with pytest.raises(ValueError, match="must have the same length"):
        resnet.ResNet(depths=(1, 1), channels=1).init(jax.random.key(0), image)
