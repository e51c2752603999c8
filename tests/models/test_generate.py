"""Generation: greedy decoding, sampling, beam search and logits processors."""

import itertools
import logging
import re
import time
from collections import Counter
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct
from scipy import stats

from lineage.models.decoding.generate import _generate, best_of, generate, log_likelihood
from lineage.models.decoding.logits_processors import (
    LogitsProcessors,
    no_repeat_ngrams,
    repetition_penalty,
    top_k,
    top_p,
)
from lineage.models.gpt import GPT
from tests.tiers import tiered
from tests.tolerance import assert_close

VOCAB = 11


def random_gpt(model):
    """Return a GPT with scaled-up random weights, so that generated texts are diverse."""
    rng = np.random.default_rng(1)

    def weight(path, shape):
        if path[-1].key in ("scale", "bias"):
            return np.full(shape.shape, path[-1].key == "scale", np.float32)
        return rng.normal(scale=0.7, size=shape.shape).astype(np.float32)

    shapes = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 1), jnp.int32))
    return model, jax.tree_util.tree_map_with_path(weight, shapes)


@partial(jax.jit, static_argnames=("model", "method"))
def apply(model, variables, *args, method="__call__"):
    return model.apply(variables, *args, method=method)


@pytest.fixture(scope="module")
def gpt():
    return random_gpt(GPT(vocab_size=VOCAB, max_length=32, depth=2, width=16, num_heads=2))


@pytest.fixture
def prompts():
    rng = np.random.default_rng(0)
    return rng.integers(0, VOCAB, (4, 6)), np.array([2, 6, 1, 2])


@struct.dataclass
class Last:
    """Minimal cache: the last token."""

    token: jax.Array

    def gather(self, rows):
        return Last(self.token[rows])


@struct.dataclass
class Extra:
    """Memory of `Bigram`: an offset of the logits of each sequence."""

    logits: jax.Array

    def gather(self, rows):
        return Extra(self.logits[rows])


class Bigram(nn.Module):
    """Decoder with a known distribution: the logits after a token are its row of the table, plus the memory."""

    vocab_size: int = VOCAB

    def setup(self):
        self.table = self.param("table", nn.initializers.normal(1.5), (self.vocab_size, self.vocab_size))

    def __call__(self, tokens):
        return self.table[tokens]

    def encode(self, inputs):
        return None if inputs is None else Extra(inputs)

    def init_cache(self, batch_size, max_length, rewinds):
        return Last(jnp.zeros(batch_size, jnp.int32))

    def decode(self, tokens, cache, memory):
        logits = self.table[tokens]
        return logits if memory is None else logits + memory.logits[:, None], Last(tokens[:, -1])


@pytest.fixture(scope="module")
def bigram():
    model = Bigram()
    return model, model.init(jax.random.key(1), jnp.zeros((1, 1), jnp.int32))


def test_cached_and_uncached_logits_agree(gpt):
    model, variables = gpt
    tokens = np.random.default_rng(1).integers(0, VOCAB, (3, 32))
    expected = apply(model, variables, tokens)
    cache = model.apply(variables, 3, 32, method="init_cache")
    start, parts = 0, []
    for count in (5, 1, 1, 9, 1, 15):
        logits, cache = apply(model, variables, tokens[:, start : start + count], cache, method="decode")
        parts.append(logits)
        start += count
    assert_close(jnp.concatenate(parts, axis=1), expected)


def test_greedy_matches_argmax_of_the_uncached_model(gpt, prompts):
    model, variables = gpt
    out = generate(model, variables, *prompts, max_new_tokens=26, temperature=0.0)
    log_probabilities = np.asarray(jax.nn.log_softmax(apply(model, variables, out.tokens)))
    for row, length in enumerate(prompts[1]):
        expected = log_probabilities[row, length - 1 : length + 25]
        np.testing.assert_array_equal(out.tokens[row, length : length + 26], expected.argmax(axis=-1))
        np.testing.assert_allclose(out.scores[row], expected.max(axis=-1).sum(), rtol=1e-5)
        assert len(np.unique(out.tokens[row, length:])) > 2  # the text is not repetitive


@pytest.mark.parametrize(
    "options",
    [{"no_repeat_ngram_size": 2, "min_new_tokens": 5}, {"num_beams": 3, "length_penalty": 0.5}],
    ids=["greedy", "beams"],
)
def test_ragged_batch_equals_single_prompts(gpt, prompts, options):
    options = options | {"max_new_tokens": 12, "stop_tokens": (1, 4), "temperature": 0.0}
    garbage = np.where(np.arange(6) < prompts[1][:, None], prompts[0], 10**6)  # arbitrary tokens after the prompts
    together = generate(*gpt, garbage, prompts[1], pad_token=VOCAB, **options)
    for row, length in enumerate(prompts[1]):
        alone = generate(*gpt, prompts[0][row : row + 1, :length], **options)
        assert alone.lengths[0] == together.lengths[row]
        end = together.lengths[row]
        np.testing.assert_array_equal(alone.tokens[0, :end], together.tokens[row, :end])
        np.testing.assert_allclose(alone.scores[0], together.scores[row], rtol=1e-5)
        assert (together.tokens[row, together.lengths[row] :] == VOCAB).all()


def test_samples_depend_on_seed_prompt_and_index_only(gpt, prompts):
    tokens, lengths = prompts
    options = {"max_new_tokens": 12, "top_p": 0.95, "repetition_penalty": 1.2}
    whole = generate(*gpt, tokens, lengths, seed=5, **options)
    again = generate(*gpt, tokens, lengths, seed=5, **options)
    np.testing.assert_array_equal(whole.tokens, again.tokens)
    assert (whole.tokens != generate(*gpt, tokens, lengths, seed=6, **options).tokens).any()

    fewer = generate(*gpt, tokens[:2], lengths[:2], seed=5, **options)
    np.testing.assert_array_equal(whole.tokens[:2], fewer.tokens)
    others = generate(*gpt, np.concatenate([tokens[:2], tokens[:2] * 0]), lengths, seed=5, **options)
    np.testing.assert_array_equal(whole.tokens[:2], others.tokens[:2])
    same = generate(*gpt, np.repeat(tokens[1:2], 4, axis=0), np.full(4, 6), seed=5, **options)
    assert len(np.unique(same.tokens, axis=0)) == 4


def compilations(caplog):
    names = [record.getMessage() for record in caplog.records if "Finished XLA compilation" in record.getMessage()]
    caplog.clear()
    return len(names)


@pytest.mark.parametrize("num_beams", [1, 2])
def test_other_sampling_options_do_not_recompile(gpt, prompts, caplog, num_beams):
    tokens, lengths = prompts
    options = {"max_new_tokens": 26 - num_beams, "num_beams": num_beams}  # a shape that no other test uses
    if num_beams > 1:
        options |= {"temperature": 0.0}
        others = {"length_penalty": 2.0}
    else:
        options |= {"top_p": 0.9, "top_k": 4, "temperature": 0.9}
        others = {"top_p": 0.5, "temperature": 1.5, "seed": 3}
    with caplog.at_level(logging.DEBUG, logger="jax"), jax.log_compiles():
        generate(*gpt, tokens, lengths, **options)
        assert compilations(caplog) == 1
        generate(*gpt, tokens[::-1], lengths[::-1], **options | others)
        assert compilations(caplog) == 0


def test_time_per_token_does_not_grow_with_the_position():
    times = []

    class Timed(GPT):
        def decode(self, tokens, cache, memory):
            jax.debug.callback(lambda: times.append(time.perf_counter()))
            return super().decode(tokens, cache, memory)

    model, variables = random_gpt(Timed(vocab_size=VOCAB, max_length=1024, depth=2, width=16, num_heads=2))
    generate(model, variables, [[0]], max_new_tokens=1000)
    jax.effects_barrier()
    steps = np.diff(times)
    assert len(steps) == 999  # one decoding step per token
    early, late = (np.percentile(part, 5) for part in (steps[:250], steps[-250:]))  # the fastest steps
    assert late < 2 * early


def test_stop_tokens_end_sequences_independently(gpt, prompts):
    free = generate(*gpt, *prompts, max_new_tokens=12, temperature=0.0, stop_tokens=(VOCAB, VOCAB))
    stops = (1, 4)
    out = generate(*gpt, *prompts, max_new_tokens=12, temperature=0.0, stop_tokens=stops, pad_token=VOCAB)
    for row, length in enumerate(prompts[1]):
        expected = free.tokens[row, : length + 12].tolist()
        places = [place for place in range(length, length + 12) if expected[place] in stops]
        end = places[0] + 1 if places else length + 12
        assert out.lengths[row] == end
        assert out.tokens[row].tolist() == expected[:end] + [VOCAB] * (18 - end)
    assert len(set((out.lengths - prompts[1]).tolist())) > 1


def test_loop_ends_with_the_last_sequence(bigram):
    calls = []

    class Counted(Bigram):
        def decode(self, tokens, cache, memory):
            jax.debug.callback(lambda: calls.append(1))
            return super().decode(tokens, cache, memory)

    always = np.full((2, VOCAB), 0.0)
    always[0, 3] = always[1, 4] = 1e6
    out = generate(Counted(), bigram[1], [[0], [0]], max_new_tokens=20, inputs=always, stop_tokens=(3, 4))
    jax.effects_barrier()
    assert (out.lengths == 2).all()
    assert len(calls) == 1


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


@tiered("length_penalty", [0.0, 1.0, 2.0])
def test_wide_beam_matches_exhaustive_search(length_penalty):
    model = Bigram(4)
    variables = model.init(jax.random.key(3), jnp.zeros((1, 1), jnp.int32))
    table = np.asarray(jax.nn.log_softmax(variables["params"]["table"]))
    for start in range(4):
        options = {"max_new_tokens": 4, "num_beams": 64, "length_penalty": length_penalty, "stop_tokens": (3,)}
        out = generate(model, variables, [[start]], temperature=0.0, **options)
        found, open_ = [], [([start], 0.0)]
        for step in range(1, 5):
            grown = [([*path, token], score + table[path[-1], token]) for path, score in open_ for token in range(4)]
            ended = [step == 4 or path[-1] == 3 for path, _ in grown]
            found += [(score / step**length_penalty, path) for (path, score), end in zip(grown, ended) if end]
            open_ = [one for one, end in zip(grown, ended) if not end]
        score, path = max(found)
        assert out.tokens[0, : out.lengths[0]].tolist() == path
        np.testing.assert_allclose(out.scores[0], score, rtol=1e-5)


def test_memory_is_shared_by_beams_of_a_prompt(bigram):
    """Check that `inputs` are encoded once, and that the beams of a prompt share its memory."""
    rng = np.random.default_rng(0)
    inputs = rng.normal(size=(3, VOCAB)).astype(np.float32) * 3
    for beams in (1, 3):
        options = {"max_new_tokens": 5, "temperature": 0.0, "num_beams": beams}
        together = generate(*bigram, np.full((3, 1), 2), inputs=inputs, **options)
        for row in range(3):
            alone = generate(*bigram, np.full((1, 1), 2), inputs=inputs[row : row + 1], **options)
            np.testing.assert_array_equal(alone.tokens[0], together.tokens[row])
        assert len(np.unique(together.tokens, axis=0)) > 1


def test_no_weight_and_no_cache_is_copied_for_a_token():
    """Check the compiled loop over tokens: kernels are only read, and each cache is written in place."""
    model = GPT(vocab_size=101, max_length=40, depth=2, width=48, num_heads=4)
    variables = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 1), jnp.int32))
    processors, prompts = LogitsProcessors.create(model, temperature=0.0), jnp.zeros((2, 8), jnp.int32)
    arguments = model, variables, prompts, None, None, processors, np.uint32(0), np.int32(0), 1.0
    lowered = _generate.lower(*arguments, num_beams=1, max_new_tokens=32)
    text = lowered.compile({"xla_cpu_use_fusion_emitters": True}).as_text()
    (body,) = re.findall(r" while\(.* body=%([\w.-]+)", text)
    lines = re.search(rf"^%{re.escape(body)} .*?^}}", text, re.MULTILINE | re.DOTALL).group().splitlines()[1:]
    found = re.findall(r" = (f32\[[\d,]+\])\S* (\w[\w-]*)\(", "\n".join(lines))
    made = Counter(shape for shape, kind in found if kind not in ("get-tuple-element", "parameter", "bitcast"))
    assert not made.keys() & {f"f32[{shape}]" for shape in ("48,48", "48,192", "192,48", "101,48", "48,101")}
    assert made["f32[8,40,12]"] == 2 * model.depth


def test_cache_rewinds_and_gathers(gpt):
    model, variables = gpt
    tokens = np.random.default_rng(2).integers(0, VOCAB, (2, 8))
    cache = model.apply(variables, 2, 12, method="init_cache")
    _, cache = apply(model, variables, tokens, cache, method="decode")
    rows, kept = np.array([1, 0, 1]), np.array([3, 8, 5])
    cache = cache.gather(jnp.array(rows)).rewind(jnp.array(kept))
    logits, _ = apply(model, variables, np.full((3, 1), 7), cache, method="decode")
    texts = np.pad(tokens[rows], ((0, 0), (0, 1)))
    texts[np.arange(3), kept] = 7
    expected = apply(model, variables, texts)[np.arange(3), kept]
    assert_close(logits[:, 0], expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_new_tokens": 27}, "a sequence of 33 tokens is longer than the model's 32"),
        ({"prompts": [[1, 99]]}, "tokens 1 to 99: they must be from 0 to"),
        ({"prompts": [[1, -3]]}, "tokens -3 to 1: they must be from 0 to"),
        ({"prompts": [[1.5, 2]]}, "prompts must be whole numbers"),
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1, not 0"),
        ({"lengths": [3, 0, 1, 2]}, "prompt 1 is empty"),
        ({"lengths": [3, 7, 1, 2]}, "lengths contains 7: it must be at most 6"),
        ({"lengths": [3, 2]}, r"lengths has shape \(2,\): it must be \(4,\)"),
        ({"prompts": np.zeros((4, 0))}, "not empty"),
        ({"temperature": -0.5}, "temperature must be 0 .* or more, not -0.5"),
        ({"temperature": float("nan")}, "temperature must be"),
        ({"top_k": 0}, "top_k must be at least 1"),
        ({"top_p": 0.0}, "top_p must be above 0 and at most 1, not 0.0"),
        ({"top_p": 1.5}, "top_p must be above 0 and at most 1, not 1.5"),
        ({"repetition_penalty": 0.0}, "repetition_penalty must be above 0"),
        ({"no_repeat_ngram_size": 0}, "no_repeat_ngram_size must be at least 1, or None, not 0"),
        ({"min_new_tokens": -1}, "min_new_tokens must be at least 0, not -1"),
        ({"forced_first_token": VOCAB}, f"forced_first_token is {VOCAB}: the model has 0 to {VOCAB - 1}"),
        ({"num_beams": 0}, "num_beams must be at least 1"),
        ({"num_beams": 2}, "beam search does not sample: set temperature to 0, not 1.0"),
    ],
)
def test_invalid_arguments_raise(gpt, prompts, options, message):
    arguments = {"prompts": prompts[0], "max_new_tokens": 4} | options
    with pytest.raises(ValueError, match=message):
        generate(*gpt, **arguments)
