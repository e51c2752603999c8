"""Sampling: frequencies of the tokens, logits processors, and the best of several samples."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from lineage.models.decoding.generate import best_of, generate, log_likelihood
from lineage.models.decoding.logits_processors import (
    no_repeat_ngrams,
    repetition_penalty,
    top_k,
    top_p,
)
from tests.models.toy_decoders import VOCAB
from tests.tiers import tiered


def first_tokens(bigram, count=4000, **options):
    out = generate(*bigram, np.full((count, 1), 2), max_new_tokens=1, **options)
    return np.bincount(np.asarray(out.tokens[:, 1]), minlength=VOCAB)


def chi_square(counts, probabilities):
    probabilities = np.asarray(probabilities, np.float64)
    expected = probabilities / probabilities.sum() * counts.sum()
    assert (counts[expected == 0] == 0).all()
    return stats.chisquare(counts[expected > 0], expected[expected > 0]).pvalue


@tiered("temperature", [0.5, 1.0, 2.0])
def test_sampling_frequencies_match_the_temperature(bigram, temperature):
    logits = np.asarray(bigram[1]["params"]["table"][2])
    counts = first_tokens(bigram, temperature=temperature)
    assert chi_square(counts, jax.nn.softmax(logits / temperature)) > 0.01
    assert chi_square(counts, jax.nn.softmax(logits / temperature / 1.3)) < 0.01  # the test has enough power


@tiered("k", [1, 3, 11, 50], first=2)
def test_top_k_frequencies_match_the_truncated_distribution(bigram, k):
    probabilities = np.array(jax.nn.softmax(bigram[1]["params"]["table"][2]))
    probabilities[np.argsort(-probabilities)[k:]] = 0
    assert not chi_square(first_tokens(bigram, top_k=k), probabilities) < 0.01  # NaN if only one token is left


@tiered("p", [1e-6, 0.5, 0.8, 1.0], first=2)
def test_top_p_frequencies_match_the_truncated_distribution(bigram, p):
    probabilities = np.array(jax.nn.softmax(bigram[1]["params"]["table"][2]))
    order = np.argsort(-probabilities)
    kept = order[: 1 + np.searchsorted(probabilities[order].cumsum(), p)]
    probabilities[np.setdiff1d(order, kept)] = 0
    assert not chi_square(first_tokens(bigram, top_p=p), probabilities) < 0.01


def test_successive_tokens_are_independent(bigram):
    """Check that neighboring tokens drawn from the uniform distribution are uncorrelated."""
    table = {"params": {"table": jnp.zeros((VOCAB, VOCAB))}}
    tokens = np.asarray(generate(bigram[0], table, np.zeros((400, 1)), max_new_tokens=20).tokens)[:, 1:]
    pairs = np.zeros((VOCAB, VOCAB))
    np.add.at(pairs, (tokens[:, :-1], tokens[:, 1:]), 1)
    assert stats.chi2_contingency(pairs).pvalue > 0.01
    assert stats.chi2_contingency(np.stack([np.bincount(row, minlength=VOCAB) for row in tokens])).pvalue > 0.01


def test_top_k_and_top_p_keep_the_smallest_set():
    logits = jnp.log(jnp.array([[0.1, 0.4, 0.2, 0.3], [0.25, 0.25, 0.25, 0.25]]))
    assert jnp.isfinite(top_k(logits, 2)[0]).tolist() == [False, True, False, True]
    assert jnp.isfinite(top_p(logits, 0.39)).sum(axis=-1).tolist() == [1, 2]
    assert jnp.isfinite(top_p(logits, 0.41)).sum(axis=-1).tolist() == [2, 2]
    assert jnp.isfinite(top_p(logits, 0.99)).sum(axis=-1).tolist() == [4, 4]


def test_repetition_penalty_applies_to_tokens_of_the_sequence():
    logits = jnp.array([[2.0, -2.0, 3.0, 4.0], [2.0, -2.0, 3.0, 4.0]])
    out = repetition_penalty(logits, jnp.array([[0, 1, 3], [2, 0, 0]]), jnp.array([2, 1]), 2.0)
    assert out.tolist() == [[1.0, -4.0, 3.0, 4.0], [2.0, -2.0, 1.5, 4.0]]


def test_banned_ngrams_depend_on_the_sequence_only():
    """Check that tokens beyond the length are ignored, and that nothing is banned for sequences shorter than n."""
    tokens = jnp.array([[0, 1, 2, 0, 1, 2], [0, 1, 2, 0, 1, 2], [3, 3, 3, 3, 3, 3], [1, 2, 1, 2, 1, 2]])
    lengths = jnp.array([5, 4, 1, 3])
    banned = {size: ~jnp.isfinite(no_repeat_ngrams(jnp.zeros((4, 4)), tokens, lengths, size)) for size in (1, 2, 3)}
    assert [np.flatnonzero(row).tolist() for row in banned[1]] == [[0, 1, 2], [0, 1, 2], [3], [1, 2]]
    assert [np.flatnonzero(row).tolist() for row in banned[2]] == [[2], [1], [], [2]]
    assert [np.flatnonzero(row).tolist() for row in banned[3]] == [[2], [], [], []]


@tiered("num_beams", [1, 3])
def test_no_token_is_banned_if_all_would_be(gpt, num_beams):
    options = {"temperature": 0.0, "no_repeat_ngram_size": 1, "num_beams": num_beams}
    out = generate(*gpt, np.array([[1]]), max_new_tokens=14, **options)
    (row,) = np.asarray(out.tokens)
    vocab_size = gpt[0].vocab_size
    assert sorted(row[:vocab_size].tolist()) == list(range(vocab_size))
    assert np.isfinite(out.scores).all()


def test_samples_satisfy_the_processors(gpt, prompts):
    options = {"max_new_tokens": 14, "no_repeat_ngram_size": 2, "min_new_tokens": 4, "forced_first_token": 3}
    out = generate(*gpt, *prompts, stop_tokens=(1, 4, 7), **options)
    new = np.asarray(out.lengths) - prompts[1]
    assert (new >= 5).all()
    assert (new < 14).any()
    for row, start, end in zip(np.asarray(out.tokens), prompts[1], out.lengths):
        assert row[start] == 3
        assert not np.isin(row[start : start + 4], (1, 4, 7)).any()
        pairs = list(itertools.pairwise(row[:end]))
        assert len(set(pairs[start - 1 :])) == len(pairs[start - 1 :])
        assert not set(pairs[: start - 1]) & set(pairs[start:])  # the first token is forced


def test_best_of_selects_the_sample_with_the_highest_score(bigram):
    """Compare with the sample of largest mean log-probability, optionally minus that of a weaker model."""
    model, variables = bigram
    other = model.init(jax.random.key(9), jnp.zeros((1, 1), jnp.int32))
    options = {"max_new_tokens": 6, "stop_tokens": (3,), "seed": 4, "pad_token": VOCAB}
    prompts, lengths = np.array([[2, 0], [5, 1], [7, 8]]), np.array([2, 2, 2])
    every = generate(model, variables, np.repeat(prompts, 4, axis=0), **options)
    own, weaker = (np.asarray(jax.nn.log_softmax(v["params"]["table"])) for v in (variables, other))
    for contrast in (None, (model, other)):
        table = own if contrast is None else own - weaker
        out = best_of(4, model, variables, prompts, contrast=contrast, **options)
        for row, start in enumerate(lengths):
            own_rows = (np.asarray(x)[4 * row : 4 * row + 4] for x in every[:2])
            samples = [tokens[start - 1 : end] for tokens, end in zip(*own_rows)]
            best = max(samples, key=lambda sample: table[sample[:-1], sample[1:]].mean())
            assert out.tokens[row, start - 1 : out.lengths[row]].tolist() == best.tolist()
    np.testing.assert_allclose(log_likelihood(model, variables, every, np.repeat(lengths, 4)), every.scores, rtol=1e-5)


def test_contrast_with_another_vocabulary_raises(bigram):
    """Check a model with fewer tokens, under which the likelihoods of the others would be nan."""
    model, variables = bigram
    smaller = model.clone(vocab_size=VOCAB - 1)
    contrast = smaller, smaller.init(jax.random.key(0), jnp.zeros((1, 1), jnp.int32))
    with pytest.raises(ValueError, match="the model has 11 tokens and the contrast model 10: they must be equal"):
        best_of(2, model, variables, np.zeros((1, 1)), max_new_tokens=1, contrast=contrast)
