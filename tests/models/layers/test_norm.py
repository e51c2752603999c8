import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lineage.models.layers.norm import (
    OVERWRITE_WITH_GRADIENT,
    BatchNorm,
    LayerNorm,
    PowerNorm,
    RMSNorm,
    standardize_tokens,
)


def formula(x, epsilon, center, scale, bias=0.0):
    x = np.asarray(x, np.float64)
    x = x - x.mean(axis=-1, keepdims=True) if center else x
    return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + epsilon) * scale + bias


@pytest.mark.parametrize("epsilon", [1e-12, 1e-5, 1.0])
@pytest.mark.parametrize("use_bias", [True, False])
def test_layer_norm_matches_the_formula(epsilon, use_bias, variables, normal):
    x = normal(4, 3, 10)
    module = LayerNorm(epsilon, use_bias)
    params = variables(module, x)["params"]
    assert set(params) == ({"scale", "bias"} if use_bias else {"scale"})
    expected = formula(x, epsilon, True, params["scale"], params.get("bias", 0.0))
    np.testing.assert_allclose(module.apply({"params": params}, x), expected, atol=1e-5)


@pytest.mark.parametrize("epsilon", [1e-6, 1.0])
def test_rms_norm_matches_the_formula(epsilon, variables, normal):
    x = normal(4, 3, 10) + 2
    module = RMSNorm(epsilon)
    params = variables(module, x)
    expected = formula(x, epsilon, False, params["params"]["scale"])
    np.testing.assert_allclose(module.apply(params, x), expected, atol=1e-5)


@pytest.mark.parametrize("name", ["layer_norm", "rms_norm"])
def test_gradients_match_the_reference(name, variables, normal):
    torch = pytest.importorskip("torch")
    x, weights = normal(2, 3, 10), normal(2, 3, 10)
    module = {"layer_norm": LayerNorm, "rms_norm": RMSNorm}[name](1e-5)
    params = variables(module, x)["params"]

    def loss(x, *params):
        names = ("scale", "bias")[: len(params)]
        return (module.apply({"params": dict(zip(names, params))}, x) * weights).sum()

    arguments = (x, params["scale"], params["bias"]) if "bias" in params else (x, params["scale"])
    gradients = jax.grad(loss, argnums=range(len(arguments)))(*arguments)
    theirs = [torch.tensor(np.asarray(value), requires_grad=True) for value in arguments]
    out = getattr(torch.nn.functional, name)(theirs[0], (10,), *theirs[1:], eps=1e-5)
    (out * torch.tensor(np.asarray(weights))).sum().backward()
    for mine, other in zip(gradients, theirs):
        np.testing.assert_allclose(mine, other.grad.numpy(), atol=2e-5)
    tangents = tuple(normal(*value.shape) for value in arguments)
    forward = jax.jvp(loss, arguments, tangents)[1]
    expected = sum((gradient * tangent).sum() for gradient, tangent in zip(gradients, tangents))
    np.testing.assert_allclose(forward, expected, rtol=1e-4)


def test_large_mean_does_not_reduce_precision(normal):
    x = normal(4, 64)
    module = LayerNorm(1e-12)
    params = module.init(jax.random.key(0), x)
    np.testing.assert_allclose(module.apply(params, x + 1000), module.apply(params, x), atol=1e-3)


@pytest.mark.parametrize("module", [LayerNorm(1e-6), RMSNorm(1e-6)])
def test_bfloat16_uses_float32_statistics(module, normal):
    x = (100 * normal(4, 512)).astype(jnp.bfloat16)
    params = module.init(jax.random.key(0), x)
    half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
    out = module.apply(half, x)
    assert out.dtype == jnp.bfloat16
    exact = module.apply(params, x.astype(jnp.float32))
    np.testing.assert_array_equal(out, exact.astype(jnp.bfloat16))


def trained(module, params, state, x, mask=None, weights=1.0):
    """Run a training step; return the output, the gradients of parameters and input, and the new state."""

    def loss(params, overwritten, x):
        out, new = module.apply({"params": params, **state, **overwritten}, x, mask, mutable=["statistics"])
        return (out * weights).sum(), (out, new)

    overwritten = {name: value for name, value in state.items() if name == OVERWRITE_WITH_GRADIENT}
    (grads, after, dx), (out, new) = jax.grad(loss, (0, 1, 2), has_aux=True)(params, overwritten, x)
    return out, grads, dx, {**new, **after}


def test_batch_norm_matches_the_reference(variables, normal):
    """Compare three training steps with gradients and running statistics, and evaluation afterwards."""
    torch = pytest.importorskip("torch")
    module, reference = BatchNorm(1e-3, momentum=0.8), torch.nn.BatchNorm1d(10, eps=1e-3, momentum=0.2)
    params = variables(module, normal(2, 3, 10))["params"]
    reference.load_state_dict(
        reference.state_dict()
        | {theirs: torch.tensor(np.asarray(params[ours])) for theirs, ours in (("weight", "scale"), ("bias", "bias"))}
    )
    state = {"statistics": module.init(jax.random.key(0), normal(2, 3, 10))["statistics"]}
    assert (state["statistics"]["mean"] == 0).all()  # initialization does not count as a step
    for step in range(3):
        x, weights = 2 * normal(2, 3, 10) + step, normal(2, 3, 10)
        out, grads, dx, state = trained(module, params, state, x, weights=weights)
        theirs = torch.tensor(np.asarray(x), requires_grad=True)
        expected = reference(theirs.reshape(6, 10)).reshape(2, 3, 10)
        reference.zero_grad()
        (expected * torch.tensor(np.asarray(weights))).sum().backward()
        pairs = [
            (out, expected.detach()), (dx, theirs.grad), (grads["scale"], reference.weight.grad),
            (grads["bias"], reference.bias.grad), (state["statistics"]["mean"], reference.running_mean),
            (state["statistics"]["variance"], reference.running_var),
        ]  # fmt: skip
        for mine, other in pairs:
            np.testing.assert_allclose(mine, other.numpy(), atol=1e-5)
    x = normal(2, 3, 10)
    expected = reference.eval()(torch.tensor(np.asarray(x)).reshape(6, 10)).reshape(2, 3, 10)
    np.testing.assert_allclose(module.apply({"params": params, **state}, x), expected.detach().numpy(), atol=1e-5)


@pytest.mark.parametrize("use_affine", [True, False])
def test_derivative_of_batch_norm_is_that_of_the_definition(use_affine, normal):
    """Check all results and their gradients, with padding and a mean that is large compared with the deviation."""
    x, epsilon = normal(2, 6, 5) + 100, 1e-3
    affine = (normal(5), normal(5)) if use_affine else (None, None)
    weights = jnp.array([[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1]])[..., None] / 10

    def definition(x, scale, bias):
        mean = (x * weights).sum((0, 1))
        variance = (jnp.square(x - mean) * weights).sum((0, 1))
        out = (x - mean) / jnp.sqrt(variance + epsilon)
        return out if scale is None else out * scale + bias, mean, variance

    def tested(x, scale, bias):
        return standardize_tokens(x, scale, bias, weights, epsilon)

    (found, backward), (expected, of_definition) = (jax.vjp(f, x, *affine) for f in (tested, definition))
    cotangents = normal(2, 6, 5), normal(5), normal(5)
    pairs = zip(jax.tree.leaves((found, backward(cotangents))), jax.tree.leaves((expected, of_definition(cotangents))))
    for mine, theirs in pairs:
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-4)


def algorithm_2(x, scale, bias, square, nu, gradient, epsilon, alpha, batch_square=None):
    """Run a step of PowerNorm as in algorithm 2 for tokens [N, D]; return output, gradient of the input, and
    statistics.
    """
    psi = np.sqrt((square if batch_square is None else batch_square) + epsilon)
    hat = x / psi
    of_hat = scale * gradient
    dx = (of_hat - nu * hat) / psi
    gamma, lambda_ = (hat * hat).mean(0), (of_hat * hat).mean(0)
    nu = nu * (1 - (1 - alpha) * gamma) + (1 - alpha) * lambda_
    return scale * hat + bias, dx, alpha * square + (1 - alpha) * (x * x).mean(0), nu, (gradient * hat).sum(0)


@pytest.mark.parametrize("padded", [False, True])
def test_power_norm_matches_the_paper(padded, variables, normal):
    module = PowerNorm(1e-3, momentum=0.8, warmup=2)
    params = variables(module, normal(2, 3, 5))["params"]
    scale, bias = (np.asarray(params[name], np.float64) for name in ("scale", "bias"))
    mask = jnp.array([[True, True, False], [True, True, True]]) if padded else None
    real = np.ones((2, 3), bool) if mask is None else np.asarray(mask)
    state = dict(module.init(jax.random.key(0), normal(2, 3, 5)))
    del state["params"]
    square, nu = np.ones(5), np.zeros(5)
    for step in range(5):
        x, weights = 2 * normal(2, 3, 5) + step, normal(2, 3, 5)
        out, grads, dx, state = trained(module, params, state, x, mask, weights * real[..., None])
        x, weights = (np.asarray(a, np.float64)[real] for a in (x, weights))
        batch = (x * x).mean(0) if step < 2 else None
        expected, gradient, square, nu, d_scale = algorithm_2(x, scale, bias, square, nu, weights, 1e-3, 0.8, batch)
        pairs = [
            (out[real], expected), (dx[real], gradient), (state["statistics"]["square"], square),
            (state[OVERWRITE_WITH_GRADIENT]["nu"], nu), (grads["scale"], d_scale), (grads["bias"], weights.sum(0)),
        ]  # fmt: skip
        for mine, other in pairs:
            np.testing.assert_allclose(mine, other, rtol=1e-4, atol=1e-5)
    assert state["statistics"]["steps"] == 5
    x = normal(2, 3, 5)
    expected = np.asarray(x) / np.sqrt(square + 1e-3) * scale + bias
    np.testing.assert_allclose(module.apply({"params": params, **state}, x), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("module", [BatchNorm(1e-3), PowerNorm(1e-3)])
def test_statistics_exclude_padding(module, normal):
    x, mask = normal(2, 4, 5), jnp.arange(4) < jnp.array([[4], [2]])
    state = dict(module.init(jax.random.key(0), x))
    params = state.pop("params")
    first = trained(module, params, state, x, mask, mask[..., None])
    other = trained(module, params, state, jnp.where(mask[..., None], x, 100.0), mask, mask[..., None])
    for mine, theirs in zip(jax.tree.leaves((first[3], first[0][mask])), jax.tree.leaves((other[3], other[0][mask]))):
        np.testing.assert_allclose(mine, theirs, rtol=1e-6)
    unmasked = trained(module, params, state, x)
    assert not np.allclose(unmasked[0][mask], first[0][mask], atol=1e-3)


@pytest.mark.parametrize("module", [BatchNorm(1e-3), PowerNorm(1e-3)])
def test_batch_of_padding_does_not_change_statistics(module, normal):
    x = normal(2, 4, 5)
    state = dict(module.init(jax.random.key(0), x))
    params = state.pop("params")
    out, *_, after = trained(module, params, state, x, jnp.zeros((2, 4), bool))
    assert np.isfinite(out).all()
    for name in ("mean", "variance", "square"):
        if name in state["statistics"]:
            np.testing.assert_array_equal(after["statistics"][name], state["statistics"][name])
