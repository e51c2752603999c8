"""Speculative decoding: the tokens, or their distribution, are the large model's, whatever the small one proposes."""

from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from models import speculative
from models.choice import top_k, top_p
from models.generate import generate
from models.gpt import GPT
from models.speculative import speculate
from models.transformer import Transformer

VOCAB = 5
TARGET = GPT(vocab_size=VOCAB, max_length=32, depth=2, width=16, num_heads=2)
DRAFT = GPT(vocab_size=VOCAB, max_length=32, depth=1, width=8, num_heads=1)


def weights(model, seed, *args, near=None):
    """Random weights, or what is near others: then a draft is often right."""
    shapes = jax.eval_shape(model.init, jax.random.key(0), *(args or (jnp.zeros((1, 1), jnp.int32),)))
    rng = np.random.default_rng(seed)
    noise = jax.tree.map(lambda x: rng.normal(scale=0.1 if near else 0.6, size=x.shape).astype(np.float32), shapes)
    return noise if near is None else jax.tree.map(jnp.add, near, noise)


@pytest.mark.parametrize("near", [False, True], ids=["any draft", "good draft"])
def test_greedy_tokens_are_the_targets(near):
    """Ragged prompts, one of them a single token, rows that stop and rows that do not."""
    rates, early = [], []
    for seed in range(6):
        rng = np.random.default_rng(seed)
        prompts, lengths = rng.integers(0, VOCAB, (4, 6)), np.array([2, 6, 1, 4])
        target = weights(TARGET, seed)
        draft = (TARGET, weights(TARGET, seed + 100, near=target)) if near else (DRAFT, weights(DRAFT, seed + 100))
        options = {"max_new_tokens": 15, "temperature": 0.0, "stop_tokens": (seed % VOCAB,), "pad_token": VOCAB}
        expected = generate(TARGET, target, prompts, lengths, **options)
        out = speculate(TARGET, target, *draft, prompts, lengths, num_drafted=3, **options)
        jax.tree.map(np.testing.assert_array_equal, out.generation[:2], expected[:2])
        np.testing.assert_allclose(out.generation.scores, expected.scores, rtol=1e-4, atol=1e-5)
        new = expected.lengths - lengths
        assert (out.accepted <= out.checked).all()
        assert (out.checked <= new).all()
        assert new.max() / 4 <= out.calls <= new.max()
        rates.append(out.acceptance_rate)
        early += [*(new < 15)]
    assert 0 < sum(early) < len(early)
    assert np.mean(rates) > 0.6 if near else 0 < np.mean(rates) < 0.6


def test_a_draft_that_is_the_target_is_always_right():
    target = weights(TARGET, 0)
    for temperature in (0.0, 1.0):
        options = {"max_new_tokens": 12, "num_drafted": 3, "temperature": temperature}
        out = speculate(TARGET, target, TARGET, target, np.zeros((2, 3)), **options)
        assert out.acceptance_rate == 1
        assert out.calls == 3
        assert out.checked.tolist() == [9, 9]


@pytest.mark.parametrize(
    "options",
    [
        {"no_repeat_ngram_size": 2, "min_new_tokens": 6, "stop_tokens": (1, 3)},
        {"repetition_penalty": 1.7, "forced_first_token": 2},
    ],
)
def test_processors_are_the_targets_too(options):
    target, draft = weights(TARGET, 1), weights(DRAFT, 2)
    options |= {"max_new_tokens": 10, "temperature": 0.0}
    prompts = np.random.default_rng(0).integers(0, VOCAB, (3, 4))
    expected = generate(TARGET, target, prompts, **options)
    out = speculate(TARGET, target, DRAFT, draft, prompts, **options)
    jax.tree.map(np.testing.assert_array_equal, out.generation[:2], expected[:2])


def test_an_encoder_decoder():
    model = Transformer(vocab_size=17, max_length=20, depth=2, width=16, num_heads=2, norm="rms", placement="pre")
    draft = model.clone(depth=1)
    inputs = np.random.default_rng(0).integers(0, 17, (2, 7)).astype(np.int32), np.arange(7) < np.array([[7], [4]])
    target, drafts = (weights(part, seed, inputs[0], inputs[0]) for seed, part in enumerate((model, draft)))
    options = {"max_new_tokens": 12, "temperature": 0.0, "inputs": inputs}
    expected = generate(model, target, np.zeros((2, 1)), **options)
    out = speculate(model, target, draft, drafts, np.zeros((2, 1)), **options)
    np.testing.assert_array_equal(out.generation.tokens, expected.tokens)


NEW, ROWS = 3, 6000


def exact(variables, process):
    """The target's probabilities of all continuations of the prompt 0, from its uncached logits."""
    texts = np.array([(0, *text) for text in product(range(VOCAB), repeat=NEW)])
    logits = TARGET.apply(variables, texts[:, :-1])
    logs = jax.nn.log_softmax(process(logits.reshape(-1, VOCAB))).reshape(logits.shape)
    return np.exp(np.take_along_axis(np.asarray(logs, np.float64), texts[:, 1:, None], axis=-1).sum(axis=(1, 2)))


def p_value(tokens, probabilities):
    """Of the continuations; rare ones are counted together."""
    counts = np.bincount(np.asarray(tokens[:, 1:]) @ VOCAB ** np.arange(NEW)[::-1], minlength=VOCAB**NEW)
    assert (counts[probabilities == 0] == 0).all()
    rare = probabilities * ROWS < 5
    counts, expected = (np.append(x[~rare], x[rare].sum()) for x in (counts, probabilities * ROWS))
    return stats.chisquare(counts[expected > 0], expected[expected > 0]).pvalue


@pytest.fixture(scope="module")
def sampled():
    target, draft = weights(TARGET, 3), weights(DRAFT, 4)
    return lambda **options: speculate(
        TARGET, target, DRAFT, draft, np.zeros((ROWS, 1)), max_new_tokens=NEW, **options
    ), target


@pytest.mark.parametrize(
    ("options", "process"),
    [
        ({}, lambda x: x),
        (
            {"temperature": 0.7, "top_k": 4, "top_p": 0.9, "num_drafted": 2},
            lambda x: top_p(top_k(x / 0.7, 4), 0.9),
        ),
    ],
    ids=["plain", "truncated"],
)
def test_samples_have_the_targets_distribution(sampled, options, process):
    speculated, target = sampled
    out = speculated(**options)
    assert 0.1 < out.acceptance_rate < 0.9
    probabilities = exact(target, process)
    np.testing.assert_allclose(probabilities.sum(), 1, atol=1e-5)
    assert p_value(out.generation.tokens, probabilities) > 0.01


def always(key, p, q, drafted):
    return jnp.int32(len(drafted)), jax.random.categorical(key, jnp.log(p[-1]))


def not_the_rest(key, p, q, drafted):
    """A rejected token is replaced by one of the target's, as if none had been looked at."""
    accepted, _ = speculative_verify(key, p, q, drafted)
    return accepted, jax.random.categorical(jax.random.fold_in(key, 1), jnp.log(p[accepted]))


speculative_verify = speculative.verify


@pytest.mark.parametrize("wrong", [always, not_the_rest])
def test_a_wrong_rule_would_be_seen(sampled, wrong, monkeypatch):
    speculated, target = sampled
    monkeypatch.setattr(speculative, "verify", wrong)
    speculative._speculate.clear_cache()
    out = speculated()
    speculative._speculate.clear_cache()
    assert p_value(out.generation.tokens, exact(target, lambda x: x)) < 1e-4


def test_rows_do_not_depend_on_each_other(sampled):
    target, draft = weights(TARGET, 3), weights(DRAFT, 4)
    prompts = np.random.default_rng(0).integers(0, VOCAB, (4, 5))
    options = {"max_new_tokens": 8, "seed": 7}
    whole = speculate(TARGET, target, DRAFT, draft, prompts, **options)
    fewer = speculate(TARGET, target, DRAFT, draft, prompts[:2], **options)
    np.testing.assert_array_equal(whole.generation.tokens[:2], fewer.generation.tokens)
    np.testing.assert_array_equal(whole.checked[:2], fewer.checked)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_drafted": 0}, "num_drafted must be at least 1, not 0"),
        ({"temperature": -1}, "temperature must be 0"),
        ({"max_new_tokens": 40}, "a sequence of 41 tokens is longer than the model's 32"),
        ({"draft": DRAFT.clone(vocab_size=9)}, "the model has 5 tokens and the draft 9"),
    ],
)
def test_errors(options, message):
    arguments = {"draft": DRAFT, "max_new_tokens": 3} | options
    with pytest.raises(ValueError, match=message):
        speculate(TARGET, weights(TARGET, 0), arguments.pop("draft"), weights(DRAFT, 0), [[0]], **arguments)
