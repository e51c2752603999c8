from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict

from lineage import models
from lineage.models.gpt import GPT
from tests.tolerance import assert_close

TINY = GPT(vocab_size=17, max_length=10, depth=2, width=16, num_heads=2)
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 17, (2, 8)), jnp.int32)


@pytest.mark.parametrize(
    ("variant", "count"),
    [("small", 124_439_808), ("medium", 354_823_168), ("large", 774_030_080), ("xl", 1_557_611_200)],
)
def test_parameter_counts_match_published_models(variant, count):
    model = models.build("gpt", variant)
    shapes = jax.eval_shape(model.init, jax.random.key(0), TOKENS)["params"]
    assert sum(leaf.size for leaf in jax.tree.leaves(shapes)) == count


def test_parameter_count_without_biases_matches_nanogpt():
    """Check nanoGPT's CPU recipe: 802,944 parameters in matrices and 1,152 in scales of the norms."""
    model = GPT(vocab_size=65, max_length=64, depth=4, width=128, num_heads=4, use_bias=False)
    shapes = flatten_dict(jax.eval_shape(model.init, jax.random.key(0), TOKENS)["params"], sep="/")
    assert not [path for path in shapes if path.endswith("bias")]
    assert sum(leaf.size for leaf in shapes.values()) == 802_944 + 1_152


def test_gradients_are_causal(variables):
    """Check that each row of the position table affects only its own logits and later ones."""
    params = variables(TINY, TOKENS)["params"]

    def logits(table):
        return TINY.apply({"params": params | {"position": {"table": table}}}, TOKENS[:1])[0].sum(-1)

    jacobian = jax.jit(jax.jacobian(logits))(params["position"]["table"])
    reached = np.abs(jacobian).max(-1) > 0
    np.testing.assert_array_equal(reached, np.tril(np.ones((8, 10), bool)))


def test_cached_equals_uncached_for_different_lengths(variables):
    """Check cached decoding of sequences with 3 and 5 cached tokens; entries beyond each length are arbitrary."""
    params = variables(TINY, TOKENS)
    expected = jax.jit(TINY.apply)(params, TOKENS)
    decode = jax.jit(lambda tokens, cache: TINY.apply(params, tokens, cache, method="decode"))
    cache = TINY.apply(params, 2, 10, method="init_cache")
    assert cache.key[0].dtype == jnp.float32
    logits, cache = decode(TOKENS[:, :5], cache)
    assert_close(logits, expected[:, :5])
    lengths = jnp.array([3, 5])
    cache = cache.rewind(lengths)
    for _ in range(3):
        logits, cache = decode(jnp.take_along_axis(TOKENS, lengths[:, None], axis=1), cache)
        assert_close(logits[:, 0], expected[jnp.arange(2), lengths])
        lengths = lengths + 1


def test_padded_equals_unpadded(variables):
    params, apply = variables(TINY, TOKENS), jax.jit(TINY.apply)
    expected = apply(params, TOKENS[:, :5])
    for padding in ((3, 0), (0, 3)):
        mask = jnp.pad(jnp.ones((2, 5), bool), [(0, 0), padding])
        positions = jnp.maximum(jnp.cumsum(mask, axis=1) - 1, 0)
        padded = jnp.pad(TOKENS[:, :5], [(0, 0), padding], constant_values=9)
        logits = apply(params, padded, mask=mask, positions=positions)
        assert_close(logits[mask].reshape(expected.shape), expected)


def test_bfloat16_parameters_give_bfloat16_logits(variables):
    params = variables(TINY, TOKENS, std=0.1)
    half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
    logits = jax.jit(TINY.apply)(half, TOKENS)
    assert logits.dtype == jnp.bfloat16
    np.testing.assert_allclose(logits.astype(jnp.float32), jax.jit(TINY.apply)(params, TOKENS), atol=0.05)
    cache = TINY.apply(half, 2, 10, method="init_cache")
    logits, cache = jax.jit(partial(TINY.apply, method="decode"))(half, TOKENS, cache)
    assert (logits.dtype, cache.key[0].dtype) == (jnp.bfloat16, jnp.bfloat16)


def test_dropout_only_with_its_rng(variables):
    params = variables(TINY, TOKENS)
    model = TINY.clone(dropout=0.3)
    plain = jax.jit(TINY.apply)(params, TOKENS)
    np.testing.assert_array_equal(jax.jit(model.apply)(params, TOKENS), plain)
    dropped = jax.jit(lambda key: model.apply(params, TOKENS, rngs={"dropout": key}))(jax.random.key(0))
    assert (dropped != plain).any()


def test_initialization_matches_the_paper():
    """Check that output projections of the 2 L sublayers are scaled by 1 / sqrt(2 L), and that logits are near zero."""
    model = TINY.clone(depth=8, width=64)
    logits, variables = jax.jit(model.init_with_output)(jax.random.key(0), TOKENS)
    assert logits.std() < 0.3
    params = variables["params"]
    layers = params["stack"]["layers"]
    for leaf in (params["embed"]["table"], layers["attention"]["query"]["kernel"], layers["mlp"]["up"]["kernel"]):
        assert leaf.std() == pytest.approx(0.02, rel=0.1)
    for leaf in (layers["attention"]["out"]["kernel"], layers["mlp"]["down"]["kernel"]):
        assert leaf.std() == pytest.approx(0.02 / 4, rel=0.1)


def test_sequence_longer_than_max_length_raises(variables):
    params = variables(TINY, TOKENS)
    with pytest.raises(ValueError, match="a sequence of 11 tokens is longer than the model's 10"):
        TINY.apply(params, jnp.zeros((1, 11), jnp.int32))
    with pytest.raises(ValueError, match="a sequence of 12 tokens is longer than the model's 10"):
        TINY.apply(params, 1, 12, method="init_cache")


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        (("gtp",), {}, "Unknown model 'gtp'. Did you mean 'gpt'?"),
        (("detr",), {}, "detr needs backbone: give it, or a variant of r50, r101."),
        (("gpt", "smal"), {}, "Unknown variant of gpt 'smal'. Did you mean 'small'?"),
        (("gpt",), {"num_head": 3}, "Unknown setting of gpt 'num_head'. Did you mean 'num_heads'?"),
    ],
)
def test_build_suggests_similar_names(args, kwargs, message):
    with pytest.raises(ValueError, match=message):
        models.build(*args, **kwargs)


def test_build_settings_override_the_variant():
    model = models.build("gpt", "small", depth=3, mlp_dim=None)
    assert (model.depth, model.width, model.mlp_dim) == (3, 768, None)
