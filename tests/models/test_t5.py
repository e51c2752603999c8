from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lineage import models
from lineage.models.t5 import T5
from tests.tolerance import assert_close

TINY = T5(vocab_size=17, depth=1, decoder_depth=2, width=16, num_heads=2, head_size=4, mlp_dim=24, buckets=8)
RNG = np.random.default_rng(0)
INPUTS = jnp.asarray(RNG.integers(0, 17, (2, 7)), jnp.int32)
TOKENS = jnp.asarray(RNG.integers(0, 17, (2, 8)), jnp.int32)
MASK = jnp.arange(7) < jnp.array([[7], [4]])


@pytest.mark.parametrize(
    ("variant", "count"),
    [
        ("small", 60_506_624),
        ("base", 222_903_552),
        ("large", 737_668_096),
        ("3b", 2_851_598_336),
        ("11b", 11_307_321_344),
        ("v1_1_small", 76_961_152),
        ("v1_1_base", 247_577_856),
        ("v1_1_large", 783_150_080),
        ("v1_1_xl", 2_849_757_184),
        ("v1_1_xxl", 11_135_332_352),
    ],
)
def test_parameter_counts_match_published_models(variant, count):
    shapes = jax.eval_shape(models.build("t5", variant).init, jax.random.key(0), INPUTS, TOKENS)["params"]
    assert sum(leaf.size for leaf in jax.tree.leaves(shapes)) == count


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


def test_cached_equals_uncached_for_different_lengths(variables):
    """Check cached decoding of sequences with 3 and 5 cached tokens, which have their own distances."""
    params = variables(TINY, INPUTS, TOKENS)
    expected = jax.jit(TINY.apply)(params, INPUTS, TOKENS, inputs_mask=MASK)
    memory = jax.jit(partial(TINY.apply, method="encode"))(params, (INPUTS, MASK))
    decode = jax.jit(lambda tokens, cache: TINY.apply(params, tokens, cache, memory, method="decode"))
    cache = TINY.apply(params, 2, 10, method="init_cache")
    logits, cache = decode(TOKENS[:, :5], cache)
    assert_close(logits, expected[:, :5])
    lengths = jnp.array([3, 5])
    cache = cache.rewind(lengths)
    for _ in range(3):
        logits, cache = decode(jnp.take_along_axis(TOKENS, lengths[:, None], axis=1), cache)
        assert_close(logits[:, 0], expected[jnp.arange(2), lengths])
        lengths = lengths + 1


def test_padded_equals_unpadded(variables):
    """Check padding on either side, which does not change distances."""
    params, apply = variables(TINY, INPUTS, TOKENS), jax.jit(TINY.apply)
    expected = apply(params, INPUTS, TOKENS)
    for sides in ((3, 0), (0, 3)):
        pad = partial(jnp.pad, pad_width=[(0, 0), sides])
        masks = {"inputs_mask": pad(jnp.ones(INPUTS.shape, bool)), "mask": pad(jnp.ones(TOKENS.shape, bool))}
        logits = apply(params, pad(INPUTS, constant_values=9), pad(TOKENS, constant_values=9), **masks)
        assert_close(logits[masks["mask"]].reshape(expected.shape), expected)


def test_dropout_only_with_its_rng():
    """Check that the program without the rng is that of a model without dropout."""
    params = jax.eval_shape(TINY.init, jax.random.key(0), INPUTS, TOKENS)

    def program(rate, **rngs):
        model = TINY.clone(dropout=rate)
        return str(jax.make_jaxpr(lambda params: model.apply(params, INPUTS, TOKENS, rngs=rngs))(params))

    assert program(0.3) == program(0.0)
    assert "shift_right_logical" not in program(0.0, dropout=jax.random.key(0))
    assert "shift_right_logical" in program(0.3, dropout=jax.random.key(0))


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


def test_bfloat16_parameters_give_bfloat16_logits(variables):
    def run(params):
        cache, memory = (
            TINY.apply(params, 2, 10, method="init_cache"),
            TINY.apply(params, (INPUTS, MASK), method="encode"),
        )
        logits, after = TINY.apply(params, TOKENS, cache, memory, method="decode")
        return TINY.apply(params, INPUTS, TOKENS), logits, after.key, memory.key

    half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), variables(TINY, INPUTS, TOKENS))
    assert {leaf.dtype for leaf in jax.tree.leaves(jax.eval_shape(run, half))} == {jnp.dtype(jnp.bfloat16)}
