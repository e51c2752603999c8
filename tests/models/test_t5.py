import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lineage.models.t5 import T5

TINY = T5(vocab_size=17, depth=1, decoder_depth=2, width=16, num_heads=2, head_size=4, mlp_dim=24, buckets=8)
RNG = np.random.default_rng(0)
INPUTS = jnp.asarray(RNG.integers(0, 17, (2, 7)), jnp.int32)
TOKENS = jnp.asarray(RNG.integers(0, 17, (2, 8)), jnp.int32)
MASK = jnp.arange(7) < jnp.array([[7], [4]])


@pytest.mark.thorough
def test_gradients_are_causal_in_tokens_and_reach_all_real_inputs(variables):
    """Check that the embedding of a token that occurs once affects only the logits at its position and later ones."""
    inputs, tokens = jnp.arange(1, 6)[None], jnp.arange(6, 12)[None]
    mask = (inputs != 3).astype(bool)
    model = TINY.clone(tied=False)
    params = variables(model, inputs, tokens)["params"]

    def logits(table):
        out = model.apply({"params": params | {"embed": {"table": table}}}, inputs, tokens, inputs_mask=mask)
        return out[0].sum(-1)

    reached = np.abs(jax.jit(jax.jacobian(logits))(params["embed"]["table"])).max(-1) > 0
    np.testing.assert_array_equal(reached[:, 6:12], np.tril(np.ones((6, 6), bool)))
    np.testing.assert_array_equal(reached[:, 1:6], np.tile(mask, (6, 1)))


@pytest.mark.thorough
def test_initialization_matches_the_paper():
    """Check that unscaled scores have unit variance, because queries have a smaller initialization."""
    model = TINY.clone(width=64, head_size=16, num_heads=8, mlp_dim=100)
    params = jax.jit(model.init)(jax.random.key(0), INPUTS, TOKENS)["params"]
    layer = params["decoder_stack"]["layers"]
    for leaf, std in [
        (params["embed"]["table"], 1),
        (params["decoder_relative"]["table"], 64**-0.5),
        (layer["attention"]["query"]["kernel"], (64 * 16) ** -0.5),
        (layer["cross_attention"]["key"]["kernel"], 64**-0.5),
        (layer["attention"]["value"]["kernel"], 64**-0.5),
        (layer["attention"]["out"]["kernel"], (8 * 16) ** -0.5),
        (layer["mlp"]["up"]["kernel"], 64**-0.5),
        (layer["mlp"]["down"]["kernel"], 100**-0.5),
    ]:
        assert leaf.std() == pytest.approx(std, rel=0.25 if leaf.size < 100 else 0.05)
