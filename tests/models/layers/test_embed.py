import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lineage.models.layers.embed import Embed, PatchEmbed
from lineage.models.layers.quantized import take_rows


def test_embed_looks_up_and_scales_rows(variables):
    tokens = jnp.array([[3, 0], [1, 3]])
    params = variables(Embed(5, 16), tokens)
    table = np.asarray(params["params"]["table"])
    np.testing.assert_array_equal(Embed(5, 16).apply(params, tokens), table[np.asarray(tokens)])
    np.testing.assert_allclose(Embed(5, 16, scale=True).apply(params, tokens), 4 * table[np.asarray(tokens)])


@pytest.mark.parametrize("rows", [2, 100])
def test_gradients_of_a_repeated_row_are_summed_exactly(rows):
    table, indices = jnp.zeros((rows, 4), jnp.bfloat16), jnp.ones((2, 2048), jnp.int32)
    gradient = jax.jit(jax.grad(lambda table: take_rows(table, indices).astype(jnp.float32).sum()))(table)
    assert gradient.dtype == jnp.bfloat16
    np.testing.assert_array_equal(gradient[1], 4096.0)  # a sum in bfloat16 would stop at 256
    np.testing.assert_array_equal(np.delete(gradient, 1, axis=0), 0.0)


def test_tied_logits_are_products_with_the_table(variables, normal):
    x = normal(2, 3, 4)
    params = variables(Embed(5, 4), jnp.array([1]))
    expected = np.einsum("btd,vd->btv", x, params["params"]["table"])
    np.testing.assert_allclose(Embed(5, 4, scale=True).apply(params, x, method="logits"), expected, atol=1e-6)


def test_patch_embedding_matches_a_strided_convolution(variables, normal):
    torch = pytest.importorskip("torch")
    image = normal(2, 6, 9, 2)
    module = PatchEmbed(3, 5)
    params = variables(module, image)
    kernel = np.asarray(params["params"]["projection"]["kernel"]).reshape(3, 3, 2, 5)
    expected = torch.nn.functional.conv2d(
        torch.tensor(np.asarray(image).transpose(0, 3, 1, 2)),
        torch.tensor(kernel.transpose(3, 2, 0, 1)),
        torch.tensor(np.asarray(params["params"]["projection"]["bias"])),
        stride=3,
    ).numpy()
    out = module.apply(params, image)
    assert out.shape == (2, 2, 3, 5)
    np.testing.assert_allclose(out, expected.transpose(0, 2, 3, 1), atol=1e-5)


def test_image_not_divisible_into_patches_raises(normal):
    with pytest.raises(ValueError, match="image 6x8 cannot be divided into patches of 3x3 pixels"):
        PatchEmbed(3, 5).init(jax.random.key(0), normal(1, 6, 8, 1))
