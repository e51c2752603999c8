"""Caches of sliding windows as ring buffers: the tokens are those of caches of the whole length."""

import itertools
import re
from dataclasses import fields
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lineage.models.decoding.generate import generate
from lineage.models.decoding.speculative import speculate
from lineage.models.layers import cache as caches
from lineage.models.llama import Llama
from tests.tiers import tiered
from tests.tolerance import assert_close

VOCAB = 19
WINDOW = Llama(vocab_size=VOCAB, max_length=64, depth=2, width=16, num_heads=4, num_kv_heads=2, mlp_dim=24, window=4)


class Whole(Llama):
    """Model whose cache always has room for all tokens."""

    def init_cache(self, batch_size, max_length, rewinds=None):
        return super().init_cache(batch_size, max_length)


def whole(model):
    return Whole(**{field.name: getattr(model, field.name) for field in fields(model) if field.name != "parent"})


@pytest.fixture
def params(variables):
    return variables(WINDOW, jnp.zeros((1, 2), jnp.int32), std=0.7)


def shapes_of(model, params, *args):
    cache = jax.eval_shape(lambda: jax.tree.leaves(model.apply(params, *args, method="init_cache")))
    return {leaf.shape for leaf in cache if leaf.ndim == 3}


def test_cache_has_the_size_of_the_window(params):
    assert shapes_of(WINDOW, params, 3, 60, 0) == {(3 * 2, 4, 4)}
    assert shapes_of(WINDOW, params, 3, 60, 5) == {(3 * 2, 9, 4)}
    assert shapes_of(WINDOW, params, 3, 60) == shapes_of(whole(WINDOW), params, 3, 60, 0) == {(3 * 2, 60, 4)}
    assert shapes_of(WINDOW, params, 3, 7, 5) == {(3 * 2, 7, 4)}
    assert shapes_of(WINDOW.clone(window=None), params, 3, 60, 0) == {(3 * 2, 60, 4)}


PROMPTS = np.random.default_rng(0).integers(0, VOCAB, (3, 20))
LENGTHS = [[2, 1, 3], [9, 4, 6], [3, 17, 20]]  # shorter and longer than the window of 4, and both


@pytest.mark.thorough
@tiered("options", [{"temperature": 0.0}, {"temperature": 0.9, "seed": 3}, {"temperature": 0.0, "num_beams": 3}], 3)
def test_generated_tokens_are_those_of_the_whole_cache(options, params):
    options = {"max_new_tokens": 15, "stop_tokens": (5,), **options}
    for lengths in (*LENGTHS, None):
        out, expected = (generate(model, params, PROMPTS, lengths, **options) for model in (WINDOW, whole(WINDOW)))
        jax.tree.map(np.testing.assert_array_equal, out[:2], expected[:2])
        np.testing.assert_allclose(out.scores, expected.scores, rtol=1e-4, atol=1e-4)
        assert len({bytes(row[row > 0]) for row in np.asarray(out.tokens)}) == 3


@tiered("window", [1, 4])
def test_greedy_tokens_are_those_of_the_uncached_model(window, params):
    model = WINDOW.clone(window=window)
    for lengths in LENGTHS:
        tokens = generate(model, params, PROMPTS, lengths, max_new_tokens=15, temperature=0.0).tokens
        best = jax.jit(model.apply)(params, tokens).argmax(axis=-1)
        for row, length in enumerate(lengths):
            np.testing.assert_array_equal(tokens[row, length : length + 15], best[row, length - 1 : length + 14])


@tiered(
    ("windows", "temperature"),
    [((4, 3), 0.0), ((4, None), 0.0), ((None, 3), 0.0), ((4, 3), 0.8)],
    first=0,
    slow=lambda windows, temperature: None in windows,
)
def test_speculation_rewinds_the_ring(windows, temperature, params):
    """Check rejected drafts: their entries have replaced those of tokens before the window."""
    model, draft = (WINDOW.clone(window=window) for window in windows)
    options = {"max_new_tokens": 21, "temperature": temperature}
    for lengths in LENGTHS:
        out, expected = (
            speculate(one, params, two, params, PROMPTS, lengths, **options)
            for one, two in ((model, draft), (whole(model), whole(draft)))
        )
        jax.tree.map(np.testing.assert_array_equal, out.generation[:2], expected.generation[:2])
        jax.tree.map(np.testing.assert_array_equal, out[1:], expected[1:])
        assert 0.05 < out.acceptance_rate < 0.95
        if not temperature:
            tokens = generate(whole(model), params, PROMPTS, lengths, **options).tokens
            np.testing.assert_array_equal(out.generation.tokens, tokens)


@pytest.mark.thorough
@pytest.mark.parametrize(("first", "separate"), [(1, 16), (3, 0), (4, 16), (11, 0), (11, 16)])
def test_tokens_one_by_one_equal_several_at_once(first, separate, params, monkeypatch):
    """Check the logits of a first call with an empty cache, then those of 1 to 3 tokens at a time, with rewinding.

    They are written one by one or by a scatter.
    """
    monkeypatch.setattr(caches, "SEPARATE", separate)
    tokens = jnp.asarray(np.random.default_rng(1).integers(0, VOCAB, (2, 29)), jnp.int32)
    expected = jax.jit(WINDOW.apply)(params, tokens)
    decode = jax.jit(partial(WINDOW.apply, method="decode"))
    cache = WINDOW.apply(params, 2, 64, 2, method="init_cache")
    ends = jnp.array([first, max(first - 2, 0)], jnp.int32)
    logits, cache = jax.jit(lambda: WINDOW.apply(params, tokens[:, :first], cache.until(ends), method="decode"))()
    assert cache.length.tolist() == ends.tolist()
    assert_close(logits[0], expected[0, :first])
    for count in itertools.islice(itertools.cycle([1, 3, 2, 1]), 8):
        places = ends[:, None] + jnp.arange(count)
        logits, cache = decode(params, jnp.take_along_axis(tokens, places, axis=1), cache)
        assert_close(logits, expected[jnp.arange(2)[:, None], places])
        ends += jnp.array([count, max(count - 2, 1)], jnp.int32)  # the second sequence goes back by up to 2 tokens
        cache = cache.rewind(ends)


def test_decoding_step_reads_only_the_window(params):
    """Check that no array of a step, in a sequence of 1,024 tokens with a window of 64, has an axis of that length."""
    model = WINDOW.clone(window=64, max_length=1024)
    longest = {}
    for kind in (model, whole(model)):
        cache = kind.apply(params, 2, 1024, 0, method="init_cache")
        step = partial(kind.apply, method="decode")
        program = str(jax.make_jaxpr(step)(params, jnp.zeros((2, 1), jnp.int32), cache))
        sizes = {int(size) for size in re.findall(r"(?<=[\[,])\d+(?=[\],])", program)}
        longest[kind] = max(sizes)
    assert longest == {model: 64, whole(model): 1024}


@pytest.mark.thorough
def test_calls_for_which_the_ring_is_too_small_raise(params):
    cache = WINDOW.apply(params, 1, 64, 2, method="init_cache").rewind(jnp.array([9]))
    assert cache.rewind(jnp.array([7])).length.tolist() == [7]
    with pytest.raises(ValueError, match="a ring buffer for rewinding by at most 2 tokens is rewound by 3"):
        cache.rewind(jnp.array([6]))
    message = "a ring buffer of 6 entries does not suffice for 4 tokens at once and window 4"
    with pytest.raises(ValueError, match=message):
        WINDOW.apply(params, jnp.zeros((1, 4), jnp.int32), cache, method="decode")
    with pytest.raises(ValueError, match="for 1 tokens at once and window None"):
        WINDOW.clone(window=None).apply(params, jnp.zeros((1, 1), jnp.int32), cache, method="decode")
