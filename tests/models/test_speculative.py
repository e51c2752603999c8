"""Speculative decoding: the tokens, or their distribution, are the large model's, whatever the small one proposes."""

from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from lineage.models.decoding.generate import generate
from lineage.models.decoding.logits_processors import top_k, top_p
from lineage.models.decoding.speculative import speculate, verify
from lineage.models.gpt import GPT
from lineage.models.transformer import Transformer
from tests.tiers import tiered

VOCAB = 5
TARGET = GPT(vocab_size=VOCAB, max_length=32, depth=2, width=16, num_heads=2)
DRAFT = GPT(vocab_size=VOCAB, max_length=32, depth=1, width=8, num_heads=1)


def weights(model, seed, *args, scale=0.6):
    shapes = jax.eval_shape(model.init, jax.random.key(0), *(args or (jnp.zeros((1, 1), jnp.int32),)))
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: jnp.asarray(rng.normal(scale=scale, size=x.shape), x.dtype), shapes)


@tiered("noise", [None, 0.1], ids=["any draft", "good draft"])
def test_greedy_tokens_are_the_targets(noise):
    """Ragged prompts, one of them a single token, rows that stop and rows that do not; good drafts are the target's
    weights with noise, or without: those are always right.
    """
    rates, early = [], []
    for seed in range(8):
        rng = np.random.default_rng(seed)
        prompts, lengths = rng.integers(0, VOCAB, (4, 6)), np.array([2, 6, 1, 4])
        target, exact = weights(TARGET, seed), noise and seed < 2
        draft = (DRAFT, weights(DRAFT, seed + 100))
        if noise:
            other = weights(TARGET, seed + 100, scale=0 if exact else noise)
            draft = TARGET, jax.tree.map(jnp.add, target, other)
        options = {"max_new_tokens": 15, "temperature": 0.0, "stop_tokens": (seed % VOCAB,), "pad_token": VOCAB}
        expected = generate(TARGET, target, prompts, lengths, **options)
        out = speculate(TARGET, target, *draft, prompts, lengths, num_drafted=3, **options)
        jax.tree.map(np.testing.assert_array_equal, out.generation[:2], expected[:2])
        np.testing.assert_allclose(out.generation.scores, expected.scores, rtol=1e-4, atol=1e-5)
        new = expected.lengths - lengths
        assert (out.accepted <= out.checked).all()
        assert (out.checked <= new).all()
        assert new.max() / 4 <= out.calls <= new.max()
        if exact:
            assert out.acceptance_rate == 1
            assert out.calls == -(-new.max() // 4)
            np.testing.assert_array_equal(out.checked, new - new // 4)  # every fourth token is the target's own
        rates.append(out.acceptance_rate)
        early += [*(new < 15)]
    assert 0 < sum(early) < len(early)
    assert np.mean(rates) > 0.6 if noise else 0 < np.mean(rates) < 0.6


def test_processors_are_the_targets_too():
    target, draft = weights(TARGET, 1), weights(DRAFT, 2)
    options = {"no_repeat_ngram_size": 2, "min_new_tokens": 6, "stop_tokens": (1, 3), "repetition_penalty": 1.7}
    options |= {"forced_first_token": 2, "max_new_tokens": 10, "temperature": 0.0}
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


def p_value(outcomes, probabilities):
    """Of a chi-square test; rare outcomes are counted together."""
    probabilities = np.asarray(probabilities, np.float64) / np.sum(probabilities, dtype=np.float64)
    counts, expected = np.bincount(np.asarray(outcomes), minlength=len(probabilities)), probabilities * len(outcomes)
    assert (counts[probabilities == 0] == 0).all()
    rare = expected < 5
    counts, expected = (np.append(x[~rare], x[rare].sum()) for x in (counts, expected))
    return stats.chisquare(counts[expected > 0], expected[expected > 0]).pvalue


def test_samples_have_the_targets_distribution():
    """Of three tokens together, with all that truncates; the draft's own distribution would be seen."""
    target = weights(TARGET, 3, scale=0.35)
    draft = jax.tree.map(jnp.add, target, weights(TARGET, 4, scale=0.1))
    options = {"temperature": 0.7, "top_k": 4, "top_p": 0.95, "num_drafted": 2, "max_new_tokens": 3}
    texts = jnp.array([(0, *text) for text in product(range(VOCAB), repeat=3)])

    def exact(model, variables):
        logits = model.apply(variables, texts[:, :-1])
        logits = top_p(top_k(logits.reshape(-1, VOCAB) / 0.7, 4), 0.95).reshape(logits.shape)
        logs = np.asarray(jax.nn.log_softmax(logits), np.float64)
        return np.exp(np.take_along_axis(logs, texts[:, 1:, None], axis=-1).sum(axis=(1, 2)))

    out = speculate(TARGET, target, TARGET, draft, np.zeros((4000, 1)), **options)
    assert 0.3 < out.acceptance_rate < 0.95
    written = np.asarray(out.generation.tokens)[:, 1:] @ VOCAB ** np.arange(3)[::-1]
    assert p_value(written, exact(TARGET, target)) > 0.01
    drafts = np.random.default_rng(0).choice(len(texts), 4000, p=exact(TARGET, draft) / exact(TARGET, draft).sum())
    possible = exact(TARGET, target)[drafts] > 0
    assert p_value(drafts[possible], exact(TARGET, target)) < 1e-6


def always(key, p, q, drafted):
    """Every draft is good."""
    return len(drafted), jax.random.categorical(key, jnp.log(p[-1]))


def not_the_rest(key, p, q, drafted):
    """A rejected token is replaced by any of the target's, as if nothing had been looked at."""
    accepted, _ = verify(key, p, q, drafted)
    return accepted, jax.random.categorical(jax.random.fold_in(key, 1), jnp.log(p[accepted]))


def by_the_likelier(key, p, q, drafted):
    """Tokens are accepted when the target finds them at least as likely, and never else."""
    accepted = jnp.cumprod(p[jnp.arange(len(drafted)), drafted] >= q[jnp.arange(len(drafted)), drafted]).sum()
    return accepted, jax.random.categorical(key, jnp.log(p[accepted]))


@tiered(("rule", "right"), [(verify, True), (always, False), (not_the_rest, False), (by_the_likelier, False)], first=2)
def test_the_rule_gives_the_targets_distribution_and_wrong_ones_are_seen(rule, right):
    """Two tokens are drafted; the first two that come out are counted."""
    rng = np.random.default_rng(0)
    p, q = rng.dirichlet(np.ones(6), 3).astype(np.float32), rng.dirichlet(np.ones(6), 2).astype(np.float32)
    rows = 20_000
    drafted = np.stack([rng.choice(6, rows, p=part / part.sum()) for part in q.astype(np.float64)], axis=1)
    keys = jax.random.split(jax.random.key(0), rows)
    accepted, token = map(np.asarray, jax.vmap(rule, (0, None, None, 0))(keys, *map(jnp.asarray, (p, q, drafted))))
    first = np.where(accepted > 0, drafted[:, 0], token)
    assert (p_value(first, p[0]) > 0.01) == right
    second = np.where(accepted > 1, drafted[:, 1], token)[accepted > 0]
    third = token[accepted > 1]
    if right:
        assert p_value(second, p[1]) > 0.01
        assert p_value(third, p[2]) > 0.01


def test_rows_do_not_depend_on_each_other():
    target, draft = weights(TARGET, 3, scale=0.35), weights(DRAFT, 4, scale=0.35)
    prompts = np.random.default_rng(0).integers(0, VOCAB, (4, 5))
    others = np.concatenate([prompts[:2], prompts[2:] * 0])
    first, second = (
        speculate(TARGET, target, DRAFT, draft, rows, max_new_tokens=8, seed=7) for rows in (prompts, others)
    )
    np.testing.assert_array_equal(first.generation.tokens[:2], second.generation.tokens[:2])
    np.testing.assert_array_equal(first.checked[:2], second.checked[:2])


class Forward(GPT):
    """A model whose cache cannot go back."""

    def init_cache(self, batch_size, max_length):
        return {}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_drafted": 0}, "num_drafted must be at least 1, not 0"),
        ({"temperature": -1.0}, "temperature must be 0"),
        ({"max_new_tokens": 40}, "a sequence of 41 tokens is longer than the model's 32"),
        ({"draft": DRAFT.clone(vocab_size=9)}, "the model has 5 tokens and the draft 9"),
        ({"draft": Forward(vocab_size=VOCAB)}, "a dict cannot be rewound"),
    ],
)
def test_errors(options, message):
    arguments = {"draft": DRAFT, "max_new_tokens": 3} | options
    with pytest.raises(ValueError, match=message):
        speculate(TARGET, weights(TARGET, 0), arguments.pop("draft"), weights(DRAFT, 0), [[0]], **arguments)
