"""Continuous batching: sequences that leave and enter the slots match those of one batch."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lineage.models.decoding.continuous import Prompt, Slots
from lineage.models.decoding.generate import generate
from lineage.models.gpt import GPT
from lineage.models.llama import Llama
from lineage.models.seq2seq import Seq2Seq
from lineage.models.transformer import Transformer
from tests.tiers import tiered

VOCAB = 11
SIZES = {"vocab_size": VOCAB, "depth": 2, "width": 16}
HEADS = SIZES | {"max_length": 40, "num_heads": 2}
MODELS = {
    "gpt": GPT(**HEADS),
    "window": Llama(**HEADS, num_kv_heads=1, mlp_dim=32, window=5),
    "transformer": Transformer(**HEADS, norm="rms", norm_placement="pre"),
    "recurrent": Seq2Seq(**SIZES),
}
OPTIONS = {"greedy": {"temperature": 0.0}, "sampling": {"top_p": 0.95}}
STOPS = {"stop_tokens": (1, 4, 8), "no_repeat_ngram_size": 2}


def weights(model, inputs=None, scale=0.6):
    arguments = [jnp.zeros((1, 1), jnp.int32)] * (1 if inputs is None else 2)
    shapes = jax.eval_shape(model.init, jax.random.key(0), *arguments)
    rng = np.random.default_rng(1)
    return jax.tree.map(lambda x: jnp.asarray(rng.normal(scale=scale, size=x.shape), x.dtype), shapes)


def problem(name, count):
    """Return a model, its variables, prompts, their lengths and the inputs of an encoder."""
    rng, model = np.random.default_rng(0), MODELS[name]
    prompts, lengths, inputs = rng.integers(0, VOCAB, (count, 18)), rng.integers(1, 19, count), None
    if name in ("transformer", "recurrent"):
        inputs = rng.integers(0, VOCAB, (count, 6)), np.arange(6) < rng.integers(1, 7, (count, 1))
    return model, weights(model, inputs), prompts, lengths, inputs


def cut(prompts, lengths, inputs, limits):
    """Yield the rows of a batch as `Prompt`s."""
    for row, (prompt, length, limit) in enumerate(zip(prompts, lengths, limits)):
        own = jax.tree.map(lambda array, row=row: array[row], inputs)
        yield Prompt(prompt[:length].astype(np.int32), int(limit), own)


@tiered(
    ("kind", "name"),
    itertools.product(OPTIONS, MODELS),
    first=lambda kind, name: name == ("window" if kind == "greedy" else "gpt"),
    slow=lambda kind, name: (kind == "greedy") == (name == "transformer"),
)
def test_continuations_match_one_batch(kind, name):
    """Check prompts of two padded widths in more or fewer slots than there are prompts."""
    model, variables, prompts, lengths, inputs = problem(name, 9)
    options = OPTIONS[kind] | STOPS | {"seed": 3}
    expected = generate(model, variables, prompts, lengths, max_new_tokens=12, inputs=inputs, **options)
    rows = zip(np.asarray(expected.tokens), lengths, np.asarray(expected.lengths))
    texts = [row[start:end].tolist() for row, start, end in rows]
    assert len(set(map(len, texts))) > 2
    for slots, refill in ((3, 1), (4, 2)):
        state = Slots(model, variables, slots, refill, **options)
        actual = list(state.generate(cut(prompts, lengths, inputs, [12] * 9)))
        assert [each.tokens.tolist() for each in actual] == texts
        np.testing.assert_allclose([each.score for each in actual], expected.scores, rtol=1e-4)
        assert sum(map(len, texts)) / slots <= state.steps < sum(map(len, texts))


@pytest.mark.thorough
def test_steps_are_those_of_the_schedule():
    """Check limits of single prompts, and steps and rounds of two slots, also as a static batch and for a long prompt.

    The last prompt waits until the slots are free, and then takes longer ones.
    """
    model, variables, prompts, _, _ = problem("gpt", 4)
    limits = [2, 6, 3, 1]
    for last, refill, steps, rounds in ((9, 1, 6, 3), (9, 2, 9, 2), (18, 1, 7, 3)):
        state = Slots(model, variables, 2, refill, temperature=0.0)
        actual = list(state.generate(cut(prompts, [9, 9, 9, last], None, limits)))
        assert [len(each.tokens) for each in actual] == limits
        assert (state.steps, state.rounds) == (steps, rounds)


@pytest.mark.thorough
def test_prompts_are_read_when_they_are_needed():
    model, variables, prompts, lengths, _ = problem("gpt", 8)
    read = []

    def rows():
        for number, prompt in enumerate(cut(prompts, lengths, None, [3] * 8)):
            read.append(number)
            yield prompt

    actual = Slots(model, variables, 2, temperature=0.0).generate(rows())
    next(actual)
    assert len(read) == 4  # two in the slots, two in advance
    assert len(list(actual)) == 7


def test_samples_depend_on_the_index():
    """Check that the samples of later prompts do not depend on those that were left out."""
    model, variables, prompts, lengths, _ = problem("gpt", 6)
    rows = list(cut(np.repeat(prompts[:1], 6, axis=0), lengths * 0 + 3, None, [8] * 6))
    state = Slots(model, variables, 2)
    whole = [each.tokens.tolist() for each in state.generate(rows)]
    assert [each.tokens.tolist() for each in state.generate(rows[4:], first=4)] == whole[4:]
    assert len(set(map(tuple, whole))) > 3


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("slots", "prompt", "message"),
    [
        ((0,), Prompt(np.ones(2, np.int32), 1), "slots must be at least 1, not 0"),
        ((2, 3), Prompt(np.ones(2, np.int32), 1), "refill must be from 1 to the number of slots, 2, not 3"),
        ((2,), Prompt(np.zeros(0, np.int32), 1), "prompt 0 is empty"),
        ((2,), Prompt(np.full(2, VOCAB, np.int32), 1), "prompts contain tokens 11 to 11"),
        ((2,), Prompt(np.ones(2, np.int32), 0), "max_new_tokens must be at least 1, not 0"),
        ((2,), Prompt(np.ones(30, np.int32), 11), "a sequence of 41 tokens is longer than the model's 40"),
    ],
)
def test_invalid_arguments_raise(slots, prompt, message):
    with pytest.raises(ValueError, match=message):
        list(Slots(MODELS["gpt"], weights(MODELS["gpt"]), *slots, **STOPS).generate([prompt]))
