"""Transformer-XL: what it remembers, and that its cache is that memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lineage import models
from lineage.models.decoding.generate import generate
from lineage.models.transformer_xl import TransformerXL, shifted
from tests.tolerance import assert_close

TINY = TransformerXL(vocab_size=17, max_length=4, memory_length=6, depth=2, width=16, num_heads=2)
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 17, (3, 20)), jnp.int32)


@pytest.fixture
def params(variables):
    return variables(TINY, TOKENS[:, :4])


def read(model, params, tokens, length):
    """The logits of a text that is read in segments of a length."""
    apply = jax.jit(lambda memory, tokens: model.apply({**params, **memory}, tokens, mutable=["memory"]))
    memory, logits = {}, []
    for start in range(0, tokens.shape[1], length):
        out, memory = apply(memory, tokens[:, start : start + length])
        logits.append(out)
    return jnp.concatenate(logits, axis=1)


def test_parameters_are_the_papers():
    """The standard model's 151M are those of all words, which are the output's too, and of the layers."""
    model = models.build("transformer_xl", "standard")
    shapes = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 2), jnp.int32))["params"]
    words, layers = 267_735 * 410, 4 * 410**2 + 410**2 + 2 * 410 + 2 * 410 * 2100 + 410 + 2100 + 4 * 410
    assert sum(leaf.size for leaf in jax.tree.leaves(shapes)) == words + 16 * layers == 150_850_870


def test_scores_by_distance_become_scores_by_key():
    by_distance = jnp.arange(3 * 5.0).reshape(1, 1, 3, 5)
    found = shifted(by_distance)[0, 0]
    for t in range(3):
        for j in range(2 + t + 1):
            assert found[t, j] == by_distance[0, 0, t, 2 + t - j]


def test_a_text_in_segments_is_read_like_a_text_at_once(params):
    """As long as the memory holds all that was before."""
    whole = TINY.clone(memory_length=20)
    expected = jax.jit(whole.apply)(params, TOKENS)
    assert_close(read(whole, params, TOKENS, 4), expected)
    assert_close(read(whole, params, TOKENS, 5), expected)


def test_how_far_back_it_sees(params):
    """Two layers with a memory of 6: the first token of a segment sees 6 inputs, of which the first saw as far."""

    def moved(model, tokens):
        return np.abs(read(model, params, tokens, 4) - read(model, params, TOKENS, 4)).max((0, 2)) > 1e-6

    changed = TOKENS.at[:, 1].add(1) % 17
    np.testing.assert_array_equal(
        moved(TINY.clone(memory_length=0), changed), (np.arange(20) >= 1) & (np.arange(20) < 4)
    )
    # Layer 1 sees token 1 up to segment 1 (4 to 7); what they remember, layer 2 sees up to segment 3 (12 to 13).
    reach = np.flatnonzero(moved(TINY, changed))
    assert reach.min() == 1
    assert 8 <= reach.max() < 20
    assert (np.diff(reach) == 1).all()


def test_a_memory_is_kept_only_where_it_may_change(params):
    _, state = jax.jit(lambda: TINY.apply(params, TOKENS[:, :4], mutable=["memory"]))()
    hidden, count = jax.tree.leaves(state["memory"])[::-1]
    assert (hidden.shape, count.tolist()) == ((2, 3, 6, 16), [4, 4])
    fresh = jax.jit(TINY.apply)(params, TOKENS[:, 4:8])
    np.testing.assert_array_equal(jax.jit(TINY.apply)(params | state, TOKENS[:, 4:8]), fresh)
    after, state = jax.jit(lambda: TINY.apply(params | state, TOKENS[:, 4:8], mutable=["memory"]))()
    assert np.abs(after - fresh).max() > 1e-3
    assert jax.tree.leaves(state["memory"])[0].tolist() == [6, 6]
    with pytest.raises(ValueError, match="the batch size is 1: it must be 3"):
        TINY.apply(params | state, TOKENS[:1, :4], mutable=["memory"])


def test_cached_equals_uncached_in_rows_of_different_lengths(params):
    """Row 0 has 3 tokens in the cache and row 1 has 5 when both go on; what lies beyond them is rubbish."""
    expected = jax.jit(TINY.apply)(params, TOKENS[:2, :9])  # 9 tokens: what 4 and the memory of 6 hold
    decode = jax.jit(lambda tokens, cache: TINY.apply(params, tokens, cache, method="decode"))
    cache = TINY.apply(params, 2, 14, method="init_cache")
    logits, cache = decode(TOKENS[:2, :5], cache)
    assert_close(logits, expected[:, :5])
    lengths = jnp.array([3, 5])
    cache = cache.rewind(lengths)
    for _ in range(4):
        logits, cache = decode(jnp.take_along_axis(TOKENS[:2], lengths[:, None], axis=1), cache)
        assert_close(logits[:, 0], expected[jnp.arange(2), lengths])
        lengths = lengths + 1


def test_cached_equals_segments_of_one_token(params):
    """Far beyond the memory: each token sees the 9 before it, be they cached or remembered."""
    expected = read(TINY.clone(memory_length=9), params, TOKENS, 1)
    decode = jax.jit(lambda tokens, cache: TINY.apply(params, tokens, cache, method="decode"))
    cache = TINY.apply(params, 3, 20, method="init_cache")
    for t in range(20):
        logits, cache = decode(TOKENS[:, t : t + 1], cache)
        assert_close(logits[:, 0], expected[:, t])


def test_generation_whatever_the_memory_of_training(params):
    _, state = TINY.apply(params, TOKENS[:, :4], mutable=["memory"])
    options = {"max_new_tokens": 6, "temperature": 0.0}
    found = generate(TINY, params | state, TOKENS[:1, :5], **options)
    np.testing.assert_array_equal(found.tokens, generate(TINY, params, TOKENS[:1, :5], **options).tokens)


def test_bfloat16_keeps_its_memory_in_float32(params):
    half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
    logits, state = jax.jit(lambda: TINY.apply(half, TOKENS[:, :4], mutable=["memory"]))()
    assert logits.dtype == jnp.bfloat16
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(state)} == {"float32", "int32"}


def test_dropout_only_with_its_rng(params):
    plain = jax.jit(TINY.apply)(params, TOKENS[:, :4])
    for rates in ({"dropout": 0.3}, {"attention_dropout": 0.3}):
        model = TINY.clone(**rates)
        np.testing.assert_array_equal(jax.jit(model.apply)(params, TOKENS[:, :4]), plain)
        dropped = jax.jit(lambda key, model=model: model.apply(params, TOKENS[:, :4], rngs={"dropout": key}))
        assert (dropped(jax.random.key(0)) != plain).any()


def test_heads_must_divide_the_width():
    with pytest.raises(ValueError, match="width 16 and 3 heads do not fit"):
        jax.eval_shape(TINY.clone(num_heads=3).init, jax.random.key(0), TOKENS[:, :4])
