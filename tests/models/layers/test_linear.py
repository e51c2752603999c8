import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lineage.models.layers.linear import Linear, product


@pytest.mark.parametrize("use_bias", [True, False])
def test_linear_contracts_and_creates_axes(use_bias, variables, normal):
    x = normal(2, 3, 4, 5)
    split, join = Linear((6, 7), use_bias=use_bias), Linear((6,), axes=2, use_bias=use_bias)
    for module, formula in ((split, "btij,jhc->btihc"), (join, "btij,ijh->bth")):
        params = variables(module, x)["params"]
        expected = np.einsum(formula, x, params["kernel"]) + params.get("bias", 0.0)
        np.testing.assert_allclose(module.apply({"params": params}, x), expected, atol=1e-5)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("platform", ["tpu", "cuda"])
def test_padded_rows_do_not_change_the_product(platform, rows, monkeypatch, normal):
    """Compute the forms for TPUs and GPUs on the CPU."""
    x, kernel, bias = normal(rows, 5), normal(5, 7), normal(7)
    expected = x @ kernel
    chosen = []

    def dependent(*args, default, **methods):
        chosen.append(platform in methods)
        return methods.get(platform, default)(*args)

    monkeypatch.setattr(jax.lax, "platform_dependent", dependent)
    np.testing.assert_allclose(product(x, kernel), expected, atol=1e-6)
    np.testing.assert_allclose(product(x, kernel, bias), expected + bias, atol=1e-6)
    assert chosen == [platform == "tpu" or rows == 1] * 2


def test_kernels_are_initialized_as_matrices():
    """Check that the variance depends on the total numbers of inputs and outputs, not on their grouping into axes."""
    init = jax.nn.initializers.xavier_uniform()
    split = Linear((4, 50), kernel_init=init).init(jax.random.key(0), jnp.zeros((1, 100)))
    join = Linear((100,), axes=2, kernel_init=init).init(jax.random.key(0), jnp.zeros((1, 4, 50)))
    for params in (split, join):
        assert params["params"]["kernel"].var() == pytest.approx(2 / 300, rel=0.03)


def test_few_rows_are_padded_on_a_tpu_only(normal):
    x, kernel = normal(3, 8), normal(8, 5)
    np.testing.assert_allclose(product(x, kernel), x @ kernel, rtol=1e-6)
    traced = jax.jit(product).trace(x, kernel)
    texts = {name: traced.lower(lowering_platforms=(name,)).as_text() for name in ("cpu", "tpu")}
    assert ["tensor<8x8xf32>" in texts[platform] for platform in texts] == [False, True]
