"""Transformer-XL: memory across segments, and its equivalence to the cache."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lineage.models.decoding.generate import generate
from lineage.models.layers.position import sinusoidal
from lineage.models.transformer_xl import TransformerXL, distance_scores, segment_scores
from tests.tolerance import assert_close

TINY = TransformerXL(vocab_size=17, max_length=4, memory_length=6, depth=2, width=16, num_heads=2)
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 17, (3, 20)), jnp.int32)


@pytest.fixture
def params(variables):
    return variables(TINY, TOKENS[:, :4])


def read(model, params, tokens, length):
    """Return the logits of a text processed in segments of the given length."""
    apply = jax.jit(lambda memory, tokens: model.apply({**params, **memory}, tokens, mutable=["memory"]))
    memory, logits = {}, []
    for start in range(0, tokens.shape[1], length):
        out, memory = apply(memory, tokens[:, start : start + length])
        logits.append(out)
    return jnp.concatenate(logits, axis=1)


@pytest.mark.parametrize("clamp_length", [0, 2])
def test_distance_scores_match_their_definition(clamp_length):
    rng = np.random.default_rng(0)
    query, kernel = rng.normal(size=(2, 3, 2, 4)), rng.normal(size=(8, 2, 4))
    arrays = [jnp.float32(x) for x in (query, kernel)]
    table = sinusoidal(7, 8)

    def check(found, positions):
        for example, t, head, j in np.ndindex(found.shape[0], 3, 2, 7):
            distance = positions[example][t] - j
            if distance >= 0:
                relative = table[min(distance, clamp_length or distance)] @ kernel[:, head]
                assert_close(found[example, head, t, j], query[example, t, head] @ relative)

    positions = [[4, 5, 6], [6, 2, 0]]
    check(distance_scores(*arrays, jnp.asarray(positions), 7, clamp_length), positions)
    check(segment_scores(*arrays, 7, clamp_length), [[4, 5, 6]] * 2)


def test_gradients_of_distances_are_summed_exactly():
    query, kernel = jnp.ones((1, 300, 1, 1), jnp.bfloat16), jnp.zeros((2, 1, 1), jnp.bfloat16)

    def total(kernel):
        return segment_scores(query, kernel, 300).astype(jnp.float32).sum()

    distances = np.arange(300)
    expected = ((300 - distances) * np.stack([np.sin(distances), np.cos(distances)])).sum(axis=1)
    np.testing.assert_allclose(jax.grad(total)(kernel)[:, 0, 0].astype(np.float32), expected, rtol=0.02)


def test_segments_match_the_whole_text_if_memory_is_long_enough(params):
    """Check a memory that holds all previous tokens."""
    whole = TINY.clone(memory_length=20)
    expected = jax.jit(whole.apply)(params, TOKENS)
    assert_close(read(whole, params, TOKENS, 4), expected)
    assert_close(read(whole, params, TOKENS, 5), expected)


def test_receptive_field(params):
    """Check two layers with a memory of 6, each of which extends the receptive field by 6 tokens."""

    def moved(model, tokens):
        return np.abs(read(model, params, tokens, 4) - read(model, params, TOKENS, 4)).max((0, 2)) > 1e-6

    changed = TOKENS.at[:, 1].add(1) % 17
    np.testing.assert_array_equal(np.flatnonzero(moved(TINY.clone(memory_length=0), changed)), [1, 2, 3])
    # Layer 1 attends to token 1 up to segment 1 (4 to 7); by its memory, layer 2 depends on it up to segment 3 (12 to
    # 13).
    reach = np.flatnonzero(moved(TINY, changed))
    assert reach.min() == 1
    assert 8 <= reach.max() < 20
    assert (np.diff(reach) == 1).all()


def test_memory_is_updated_only_if_mutable(params):
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


def test_cached_equals_segments_of_one_token(params):
    """Check a text much longer than the memory: each token attends to the 9 previous ones, from the cache or
    the memory.
    """
    expected = read(TINY.clone(memory_length=9), params, TOKENS, 1)
    decode = jax.jit(lambda tokens, cache: TINY.apply(params, tokens, cache, method="decode"))
    cache = TINY.apply(params, 3, 20, method="init_cache")
    for t in range(20):
        logits, cache = decode(TOKENS[:, t : t + 1], cache)
        assert_close(logits[:, 0], expected[:, t])


def test_generation_does_not_depend_on_the_training_memory(params):
    _, state = TINY.apply(params, TOKENS[:, :4], mutable=["memory"])
    options = {"max_new_tokens": 6, "temperature": 0.0}
    actual = generate(TINY, params | state, TOKENS[:1, :5], **options)
    np.testing.assert_array_equal(actual.tokens, generate(TINY, params, TOKENS[:1, :5], **options).tokens)


def test_bfloat16_keeps_memory_in_float32(params):
    half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
    logits, state = jax.jit(lambda: TINY.apply(half, TOKENS[:, :4], mutable=["memory"]))()
    assert logits.dtype == jnp.bfloat16
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(state)} == {"float32", "int32"}


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"num_heads": 3}, "width 16, 3 heads .* do not fit"),
        ({"width": 15, "num_heads": 3}, "width is 15: it must be even"),
    ],
)
def test_width_that_does_not_fit_raises(sizes, message):
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(TINY.clone(**sizes).init, jax.random.key(0), TOKENS[:, :4])
