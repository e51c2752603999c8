"""Properties of all decoders: caches, padding, dropout, dtypes and lengths."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lineage.models.bart import BART
from lineage.models.gpt import GPT
from lineage.models.llama import Llama
from lineage.models.t5 import T5
from lineage.models.transformer import Transformer
from lineage.models.transformer_xl import TransformerXL
from tests.tiers import tiered
from tests.tolerance import assert_close

SIZES = {"vocab_size": 17, "max_length": 14, "depth": 2, "width": 16, "num_heads": 2}
LLAMA = Llama(**SIZES | {"num_heads": 4}, num_kv_heads=2, mlp_dim=24)
DECODERS = {
    "gpt": GPT(**SIZES),
    "llama": LLAMA,
    "window": LLAMA.clone(window=3, rope_scaling="yarn", rope_factor=2.0, rope_length=7),
    "transformer_xl": TransformerXL(**SIZES | {"max_length": 4}, memory_length=6),  # texts of 10 tokens are seen whole
    "bart": BART(**SIZES | {"depth": 1}, decoder_depth=2, logits_bias=True),
    "t5": T5(vocab_size=17, depth=1, decoder_depth=2, width=16, num_heads=2, head_size=4, mlp_dim=24, buckets=8),
    "transformer": Transformer(**SIZES, dropout=0.0),
}
RNG = np.random.default_rng(0)
INPUTS, TOKENS = (jnp.asarray(RNG.integers(0, 17, (2, length)), jnp.int32) for length in (7, 10))
MASK = jnp.arange(7) < jnp.array([[7], [4]])
EITHER = ((5, 0), (0, 5))


def problem(name):
    """Return a model, its inputs, the mask of those of an encoder, and what `encode` takes."""
    encodes = name in ("bart", "t5", "transformer")
    if encodes:
        return DECODERS[name], (INPUTS, TOKENS), {"inputs_mask": MASK}, (INPUTS, MASK)
    return DECODERS[name], (TOKENS,), {}, None


@tiered("name", DECODERS, first=lambda name: name in ("gpt", "window", "t5"))
def test_cached_equals_uncached_for_different_lengths(name, variables):
    """Check cached decoding of sequences with 3 and 7 cached tokens; entries beyond each length are arbitrary."""
    model, args, masks, inputs = problem(name)
    params = variables(model, *args)
    expected = jax.jit(model.apply)(params, *args, **masks)
    memory = jax.jit(partial(model.apply, method="encode"))(params, inputs)
    decode = jax.jit(lambda tokens, cache: model.apply(params, tokens, cache, memory, method="decode"))
    cache = model.apply(params, 2, 14, method="init_cache")
    assert cache.key[0].dtype == jnp.float32
    logits, cache = decode(TOKENS[:, :7], cache)
    assert_close(logits, expected[:, :7])
    lengths = jnp.array([3, 7])
    cache = cache.rewind(lengths)
    for _ in range(3):
        logits, cache = decode(jnp.take_along_axis(TOKENS, lengths[:, None], axis=1), cache)
        assert_close(logits[:, 0], expected[jnp.arange(2), lengths])
        lengths = lengths + 1


@tiered(
    ("name", "sides"),
    [*((name, sides) for name in ("gpt", "llama", "window", "t5") for sides in EITHER), ("bart", (0, 4))],
    first=lambda name, sides: (name, sides) in (("gpt", (5, 0)), ("window", (0, 5)), ("t5", (5, 0)), ("bart", (0, 4))),
)
def test_padded_equals_unpadded(name, sides, variables):
    """Check padding on either side; only distances between positions matter in T5."""
    model, args, masks, _ = problem(name)
    args = *args[:-1], TOKENS[:, :8]
    params, apply, pad = variables(model, *args), jax.jit(model.apply), partial(jnp.pad, pad_width=[(0, 0), sides])
    real = [pad(jnp.ones(x.shape, bool)) for x in args]
    named = {"mask": real[-1]}
    named |= {"inputs_mask": real[0]} if masks else {"positions": jnp.maximum(real[0].cumsum(axis=1) - 1, 0)}
    logits, expected = apply(params, *(pad(x, constant_values=9) for x in args), **named), apply(params, *args)
    assert_close(logits[real[-1]].reshape(expected.shape), expected)


@pytest.mark.parametrize(
    ("name", "rates"),
    [
        *((name, ("dropout",)) for name in DECODERS if name not in ("bart", "transformer_xl")),
        ("bart", ("dropout", "attention_dropout", "activation_dropout")),
        ("transformer_xl", ("dropout", "attention_dropout")),
    ],
)
def test_dropout_only_with_its_rng(name, rates):
    """Check that the program without the rng is that of a model without dropout."""
    model, args, _, _ = problem(name)
    params = jax.eval_shape(model.init, jax.random.key(0), *args)

    def program(*rngs, **rates):
        changed, rngs = model.clone(**rates), {"dropout": rngs[0]} if rngs else {}
        return str(jax.make_jaxpr(lambda params: changed.apply(params, *args, rngs=rngs))(params))

    assert "shift_right_logical" not in program(jax.random.key(0))
    for rate in rates:
        assert program(**{rate: 0.3}) == program()
        assert "shift_right_logical" in program(jax.random.key(0), **{rate: 0.3})


@pytest.mark.thorough
@pytest.mark.parametrize("name", DECODERS)
def test_bfloat16_parameters_give_bfloat16_logits_and_caches(name, variables):
    model, args, _, inputs = problem(name)

    def run(params):
        cache, memory = model.apply(params, 2, 10, method="init_cache"), model.apply(params, inputs, method="encode")
        logits, after = model.apply(params, TOKENS, cache, memory, method="decode")
        return model.apply(params, *args), logits, after.key, after.value, None if memory is None else memory.key

    half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), variables(model, *args))
    assert {leaf.dtype for leaf in jax.tree.leaves(jax.eval_shape(run, half))} == {jnp.dtype(jnp.bfloat16)}


@tiered("name", ["gpt", "window"])
def test_logits_in_bfloat16_are_close(name, variables):
    model, apply = DECODERS[name], jax.jit(DECODERS[name].apply)
    params = variables(model, TOKENS, std=0.1)
    half = apply(jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params), TOKENS)
    np.testing.assert_allclose(half.astype(jnp.float32), apply(params, TOKENS), atol=0.05)


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["gpt", "llama", "bart", "transformer"])
def test_sequence_longer_than_max_length_raises(name, variables):
    model, args, _, _ = problem(name)
    params, long = variables(model, *args), jnp.zeros((2, 15), jnp.int32)
    for place in range(len(args)):
        with pytest.raises(ValueError, match="a sequence of 15 tokens is longer than the model's 14"):
            model.apply(params, *args[:place], long, *args[place + 1 :])
    with pytest.raises(ValueError, match="a sequence of 16 tokens is longer than the model's 14"):
        model.apply(params, 1, 16, method="init_cache")


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "settings", "unused"), [("gpt", {}, 0), ("transformer", {"position": "learned"}, 0), ("bart", {}, 2)]
)
def test_gradients_are_causal_in_tokens_and_reach_all_real_inputs(name, settings, unused, variables):
    """Check which logits depend on each row of the position tables, of which the first ones may be unused."""
    model, args, masks, _ = problem(name)
    model, args, masks = model.clone(**settings), [x[1:] for x in args], {key: mask[1:] for key, mask in masks.items()}
    params = variables(model, *args)["params"]
    sides = {key: params[key] for key in params if key.endswith("position")}
    logits = partial(model.apply, **masks)
    jacobian = jax.jit(jax.jacobian(lambda x: logits({"params": params | x}, *args)[0].sum(-1)))(sides)
    reached = {key: np.abs(jacobian[key]["table"]).max(-1) > 0 for key in sides}
    if masks:
        np.testing.assert_array_equal(reached.pop("encoder_position"), np.tile(np.pad(MASK[1], (unused, 7)), (10, 1)))
    (decoder,) = reached.values()
    np.testing.assert_array_equal(decoder, np.pad(np.tril(np.ones((10, 10), bool)), ((0, 0), (unused, 4))))
