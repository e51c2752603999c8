from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lineage import models
from lineage.models.bart import BART
from tests.tolerance import assert_close

TINY = BART(vocab_size=17, max_length=10, depth=1, decoder_depth=2, width=16, num_heads=2, logits_bias=True)
RNG = np.random.default_rng(0)
INPUTS = jnp.asarray(RNG.integers(0, 17, (2, 7)), jnp.int32)
TOKENS = jnp.asarray(RNG.integers(0, 17, (2, 8)), jnp.int32)
MASK = jnp.arange(7) < jnp.array([[7], [4]])


@pytest.mark.parametrize(("variant", "count"), [("base", 139_420_416), ("large", 406_291_456)])
def test_parameter_counts_match_published_models(variant, count):
    shapes = jax.eval_shape(models.build("bart", variant).init, jax.random.key(0), INPUTS, TOKENS)["params"]
    assert sum(leaf.size for leaf in jax.tree.leaves(shapes)) == count


def test_gradients_are_causal_in_tokens_and_reach_all_real_inputs(variables):
    """Check which logits depend on each row of the position tables, of which the first two are unused."""
    params = variables(TINY, INPUTS, TOKENS)["params"]

    def logits(tables):
        out = TINY.apply({"params": params | tables}, INPUTS[1:], TOKENS[1:], inputs_mask=MASK[1:])
        return out[0].sum(-1)

    tables = {side: params[side] for side in ("encoder_position", "decoder_position")}
    jacobian = jax.jit(jax.jacobian(logits))(tables)
    encoder, decoder = (np.abs(jacobian[side]["table"]).max(-1) > 0 for side in tables)
    np.testing.assert_array_equal(encoder, np.tile(np.pad(MASK[1], (2, 3)), (8, 1)))
    np.testing.assert_array_equal(decoder, np.pad(np.tril(np.ones((8, 8), bool)), ((0, 0), (2, 2))))


def test_cached_equals_uncached_for_different_lengths(variables):
    """Check cached decoding of sequences with 3 and 5 cached tokens, which have their own positions."""
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
    params, apply = variables(TINY, INPUTS, TOKENS), jax.jit(TINY.apply)
    expected = apply(params, INPUTS, TOKENS)
    pad = partial(jnp.pad, pad_width=[(0, 0), (0, 2)])
    masks = {"inputs_mask": pad(jnp.ones(INPUTS.shape, bool)), "mask": pad(jnp.ones(TOKENS.shape, bool))}
    logits = apply(params, pad(INPUTS, constant_values=9), pad(TOKENS, constant_values=9), **masks)
    assert_close(logits[:, :8], expected)


def test_dropout_only_with_its_rng():
    """Check that the program without the rng is that of a model without dropout."""
    params = jax.eval_shape(TINY.init, jax.random.key(0), INPUTS, TOKENS)

    def program(*rngs, **rates):
        model, rngs = TINY.clone(**rates), {"dropout": rngs[0]} if rngs else {}
        return str(jax.make_jaxpr(lambda params: model.apply(params, INPUTS, TOKENS, rngs=rngs))(params))

    assert "shift_right_logical" not in program(jax.random.key(0))
    for rate in ("dropout", "attention_dropout", "activation_dropout"):
        assert program(**{rate: 0.3}) == program()
        assert "shift_right_logical" in program(jax.random.key(0), **{rate: 0.3})


def test_sequence_longer_than_max_length_raises(variables):
    params = variables(TINY, INPUTS, TOKENS)
    long, message = jnp.zeros((2, 11), jnp.int32), "a sequence of 11 tokens is longer than the model's 10"
    for args in ((long, TOKENS), (INPUTS, long)):
        with pytest.raises(ValueError, match=message):
            TINY.apply(params, *args)
    with pytest.raises(ValueError, match=message):
        TINY.apply(params, 1, 11, method="init_cache")
