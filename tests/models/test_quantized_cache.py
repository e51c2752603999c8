"""Caches of keys and values in 8 bits."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lineage.models.decoding.continuous import Prompt, Slots
from lineage.models.decoding.generate import empty, generate
from lineage.models.decoding.speculative import speculate
from lineage.models.gpt import GPT
from lineage.models.layers.quantized import quantized, vectors
from lineage.models.llama import Llama
from lineage.models.seq2seq import Seq2Seq
from lineage.models.transformer import Transformer
from lineage.models.transformer_xl import TransformerXL
from tests.tiers import tiered

VOCAB = 11
SIZES = {"vocab_size": VOCAB, "max_length": 32, "depth": 2, "width": 16, "num_heads": 4}
MODELS = {
    "grouped": Llama(**SIZES, num_kv_heads=2, mlp_dim=32),
    "window": Llama(**SIZES, num_kv_heads=1, mlp_dim=32, window=5),
    "encoder-decoder": Transformer(**SIZES, norm="rms", norm_placement="pre"),
    "gpt": GPT(**SIZES),
    "transformer_xl": TransformerXL(**SIZES, memory_length=8),
}
INT8 = {"cache_format": "int8", "temperature": 0.0, "stop_tokens": (1,), "repetition_penalty": 1.3}


def problem(name, rows=3):
    """Return a model, its variables, prompts, their lengths and the inputs of an encoder."""
    rng, model = np.random.default_rng(0), MODELS[name]
    both = name == "encoder-decoder"
    shapes = jax.eval_shape(model.init, jax.random.key(0), *[jnp.zeros((1, 1), jnp.int32)] * (1 + both))
    variables = jax.tree.map(lambda x: jnp.asarray(rng.normal(scale=0.4, size=x.shape), x.dtype), shapes)
    inputs = None
    if both:
        inputs = jnp.asarray(rng.integers(0, VOCAB, (rows, 6))), jnp.arange(6) < jnp.array([[6], [3], [1]])
    return model, variables, rng.integers(0, VOCAB, (rows, 9)), np.array([9, 2, 5]), inputs


def test_vectors_are_rounded_to_their_scale(normal):
    x = np.array(normal(3, 5, 8)) * np.array([1e-3, 1.0, 100.0])[:, None, None]
    x[1, 2] = 0
    found = quantized(jnp.asarray(x, jnp.float32))
    assert found.values.dtype == jnp.int8
    most = np.abs(x).max(axis=-1, keepdims=True)
    assert (np.abs(vectors(found) - x) <= most / 254 * 1.001).all()
    assert (np.abs(found.values).max(axis=-1) == np.where(most[..., 0] > 0, 127, 0)).all()


@tiered("name", list(MODELS))
def test_logits_are_close_to_those_of_the_full_cache(name):
    """Check tokens one by one and several at once, after a prompt."""
    model, variables, tokens, _, inputs = problem(name)
    found = []
    for kind in (None, "int8"):
        cache, memory = empty(model, variables, inputs, 3, 32, 3, kind)
        parts, start = [], 0
        for count in (3, 1, 1, 3, 1):
            step = jnp.asarray(tokens)[:, start : start + count]
            logits, cache = model.apply(variables, step, cache, memory, method="decode")
            parts.append(logits)
            start += count
        found.append(np.concatenate(parts, axis=1))
    # Most models attend to the keys of the first call before they are rounded.
    first = 0 if name in ("encoder-decoder", "transformer_xl") else 3
    np.testing.assert_array_equal(found[0][:, :first], found[1][:, :first])
    error = np.abs(found[1] - found[0])[:, first:]
    assert 0 < error.max() < 0.05 * found[0].std()


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["grouped", "encoder-decoder"])
def test_ways_of_decoding_agree(name):
    """Check greedy search alone, in slots and with a draft; beam search runs."""
    model, variables, prompts, lengths, inputs = problem(name)
    options = INT8 | {"inputs": inputs, "max_new_tokens": 10}
    together = generate(model, variables, prompts, lengths, **options)
    texts = [row[:length].tolist() for row, length in zip(np.asarray(together.tokens), together.lengths)]
    drafted = speculate(model, variables, model, variables, prompts, lengths, num_drafted=2, **options)
    np.testing.assert_array_equal(drafted.generation.tokens, together.tokens)
    assert drafted.acceptance_rate > 0.9
    rows = [
        Prompt(prompt[:length].astype(np.int32), 10, jax.tree.map(lambda array, row=row: array[row], inputs))
        for row, (prompt, length) in enumerate(zip(prompts, lengths))
    ]
    slots = Slots(model, variables, 2, **INT8).generate(rows)
    assert [[*row.tokens.tolist(), *each.tokens.tolist()] for row, each in zip(rows, slots)] == texts
    beams = generate(model, variables, prompts, lengths, num_beams=2, **options)
    assert (beams.lengths > lengths).all()
    assert np.isfinite(beams.scores).all()


def test_size():
    """Check the bytes of all keys and values: one of each channel, and a scale."""
    model, variables, _, _, _ = problem("grouped")
    for kind, size in ((None, 4 * 4), ("int8", 4 + 4)):
        cache, _ = empty(model, variables, None, 3, 32, cache_format=kind)
        assert sum(array.nbytes for array in jax.tree.leaves((cache.key, cache.value))) == 2 * 2 * 3 * 2 * 32 * size


@pytest.mark.parametrize("count", [1, 3])
def test_compiled_step_has_no_copy_of_the_cache(count):
    model, variables, prompts, _, _ = problem("grouped")
    cache, _ = empty(model, variables, None, 3, 32, cache_format="int8")
    arrays, kind = jax.tree.flatten(cache.rewind(jnp.full(3, 5)))

    def step(arrays, tokens):
        logits, cache = model.apply(variables, tokens, jax.tree.unflatten(kind, arrays), None, method="decode")
        return logits, jax.tree.leaves(cache)

    tokens = jnp.asarray(prompts[:, :count])
    compiled = jax.jit(step, donate_argnums=0).lower(arrays, tokens).compile().as_text()
    assert "s8[6,32,4]" in compiled
    assert not re.findall(r"f32\[(?:6,32,4|3,2,32,4|6,4,32|192,4)\]", compiled)


@pytest.mark.thorough
def test_invalid_arguments_raise():
    model, variables, _, _, _ = problem("gpt")
    with pytest.raises(ValueError, match="cache_format is 'int4': it must be 'int8', or None"):
        empty(model, variables, None, 1, 8, cache_format="int4")
    recurrent = Seq2Seq(vocab_size=VOCAB, width=4)
    inputs = jnp.zeros((1, 2), jnp.int32), jnp.ones((1, 2), bool)
    variables = recurrent.init(jax.random.key(0), inputs[0], inputs[0])
    with pytest.raises(ValueError, match="cache_format is 'int8': a States has no keys and values"):
        empty(recurrent, variables, inputs, 1, 8, cache_format="int8")
