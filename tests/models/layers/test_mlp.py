from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lineage.models.layers.mlp import ACTIVATIONS, Mlp


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_and_gradients_match_pytorch(name):
    torch = pytest.importorskip("torch")
    functional = torch.nn.functional
    options = {"approximate": "tanh"} if name == "gelu_tanh" else {}
    theirs = partial(getattr(functional, name.removesuffix("_tanh")), **options)
    x = np.linspace(-8, 8, 402, dtype=np.float32)
    tensor = torch.tensor(x, dtype=torch.float64, requires_grad=True)  # its own float32 slopes cancel too
    out = theirs(tensor)
    out.sum().backward()
    np.testing.assert_allclose(ACTIVATIONS[name](jnp.asarray(x)), out.detach().numpy(), atol=1e-6)
    slope = jax.grad(lambda x: ACTIVATIONS[name](x).sum())(jnp.asarray(x))
    np.testing.assert_allclose(slope, tensor.grad.numpy(), atol=5e-6)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_keep_bfloat16(name):
    x = jnp.linspace(-4, 4, 33)
    out = ACTIVATIONS[name](x.astype(jnp.bfloat16))
    assert out.dtype == jnp.bfloat16
    np.testing.assert_allclose(out.astype(jnp.float32), ACTIVATIONS[name](x), atol=0.02)


def test_gelu_of_negative_bfloat16_is_not_rounded_to_zero():
    x = jnp.linspace(-4, -1, 25).astype(jnp.bfloat16)
    for function in (ACTIVATIONS["gelu"], jax.grad(lambda x: ACTIVATIONS["gelu"](x).sum())):
        np.testing.assert_allclose(function(x).astype(jnp.float32), function(x.astype(jnp.float32)), rtol=0.004)


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("use_bias", [True, False])
def test_mlp_matches_the_formula(gated, use_bias, variables, normal):
    x = normal(2, 3, 5)
    module = Mlp(7, activation=jnp.tanh, gated=gated, use_bias=use_bias)
    params = variables(module, x)["params"]

    def dense(part, x):
        return np.asarray(x) @ params[part]["kernel"] + params[part].get("bias", 0.0)

    hidden = np.tanh(dense("gate", x)) * dense("up", x) if gated else np.tanh(dense("up", x))
    np.testing.assert_allclose(module.apply({"params": params}, x), dense("down", hidden), atol=1e-5)


def test_dropout_only_with_its_rng(variables, normal):
    x = normal(2, 3, 5)
    params = variables(Mlp(7), x)
    plain = Mlp(7).apply(params, x)
    module = Mlp(7, dropout=0.5)
    np.testing.assert_array_equal(module.apply(params, x), plain)
    keys = jax.random.split(jax.random.key(0), 4000)
    outs = jax.jit(jax.vmap(lambda key: module.apply(params, x, rngs={"dropout": key})))(keys)
    assert (outs[0] != outs[1]).any()
    np.testing.assert_allclose(outs.mean(axis=0), plain, atol=0.1)
