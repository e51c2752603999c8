import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.layers.norm import LayerNorm, RMSNorm


def formula(x, epsilon, centre, scale, bias=0.0):
    x = np.asarray(x, np.float64)
    x = x - x.mean(axis=-1, keepdims=True) if centre else x
    return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + epsilon) * scale + bias


@pytest.mark.parametrize("epsilon", [1e-12, 1e-5, 1.0])
@pytest.mark.parametrize("use_bias", [True, False])
def test_layer_norm_is_the_formula(epsilon, use_bias, variables, normal):
    x = normal(4, 3, 10)
    module = LayerNorm(epsilon, use_bias)
    params = variables(module, x)["params"]
    assert set(params) == ({"scale", "bias"} if use_bias else {"scale"})
    expected = formula(x, epsilon, True, params["scale"], params.get("bias", 0.0))
    np.testing.assert_allclose(module.apply({"params": params}, x), expected, atol=1e-5)


@pytest.mark.parametrize("epsilon", [1e-6, 1.0])
def test_rms_norm_is_the_formula(epsilon, variables, normal):
    x = normal(4, 3, 10) + 2
    module = RMSNorm(epsilon)
    params = variables(module, x)
    expected = formula(x, epsilon, False, params["params"]["scale"])
    np.testing.assert_allclose(module.apply(params, x), expected, atol=1e-5)


def test_gradients_are_those_of_the_reference(variables, normal):
    torch = pytest.importorskip("torch")
    x, weights = normal(2, 3, 10), normal(2, 3, 10)
    module = LayerNorm(1e-5)
    params = variables(module, x)["params"]
    grads = jax.grad(lambda p, x: (module.apply({"params": p}, x) * weights).sum(), argnums=(0, 1))(params, x)
    theirs = [torch.tensor(np.asarray(v), requires_grad=True) for v in (x, params["scale"], params["bias"])]
    out = torch.nn.functional.layer_norm(theirs[0], (10,), theirs[1], theirs[2], eps=1e-5)
    (out * torch.tensor(np.asarray(weights))).sum().backward()
    for mine, other in zip((grads[1], grads[0]["scale"], grads[0]["bias"]), theirs):
        np.testing.assert_allclose(mine, other.grad.numpy(), atol=2e-5)


def test_a_large_mean_loses_nothing(normal):
    x = normal(4, 64)
    module = LayerNorm(1e-12)
    params = module.init(jax.random.key(0), x)
    np.testing.assert_allclose(module.apply(params, x + 1000), module.apply(params, x), atol=1e-3)


@pytest.mark.parametrize("module", [LayerNorm(1e-6), RMSNorm(1e-6)])
def test_bfloat16_has_float32_statistics(module, normal):
    x = (100 * normal(4, 512)).astype(jnp.bfloat16)
    params = module.init(jax.random.key(0), x)
    half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
    out = module.apply(half, x)
    assert out.dtype == jnp.bfloat16
    exact = module.apply(params, x.astype(jnp.float32))
    np.testing.assert_array_equal(out, exact.astype(jnp.bfloat16))
