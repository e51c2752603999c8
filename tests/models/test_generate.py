"""Generation: greedy decoding, batches of prompts, beam search and the cache."""

import logging
import re
import time
from collections import Counter
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lineage.models.decoding.generate import _generate, best_of, generate
from lineage.models.decoding.logits_processors import (
    LogitsProcessors,
)
from lineage.models.gpt import GPT
from tests.models.toy_decoders import VOCAB, Bigram, random_gpt
from tests.tiers import tiered
from tests.tolerance import assert_close


@partial(jax.jit, static_argnames=("model", "method"))
def apply(model, variables, *args, method="__call__"):
    return model.apply(variables, *args, method=method)


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


@pytest.mark.parametrize("options", [{"temperature": 0.0, "num_beams": 2}, {"temperature": 0.0}, {}])
def test_generation_with_64_bits(gpt, prompts, options):
    model, variables = gpt
    expected = generate(model, variables, *prompts, max_new_tokens=4, **options)
    with jax.enable_x64(True):
        out = generate(model, variables, *prompts, max_new_tokens=4, **options)
    np.testing.assert_array_equal(out.tokens, expected.tokens)


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


@pytest.mark.thorough
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
    last = generate(*gpt, tokens[1:], lengths[1:], seed=5, first_index=1, **options)
    np.testing.assert_array_equal(whole.tokens[1:], last.tokens)
    whole, last = (best_of(2, *gpt, tokens[i:], lengths[i:], seed=5, first_index=i, **options) for i in (0, 1))
    np.testing.assert_array_equal(whole.tokens[1:], last.tokens)


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
        others = {"length_penalty": 2.0, "length_offset": 5}
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


@tiered(("length_penalty", "length_offset"), [(0.0, 0), (1.0, 0), (2.0, 0), (0.6, 5)])
def test_wide_beam_matches_exhaustive_search(length_penalty, length_offset):
    model = Bigram(vocab_size=4)
    variables = model.init(jax.random.key(3), jnp.zeros((1, 1), jnp.int32))
    table = np.asarray(jax.nn.log_softmax(variables["params"]["table"]))
    for start in range(4):
        options = {"max_new_tokens": 4, "num_beams": 64, "length_penalty": length_penalty, "stop_tokens": (3,)}
        options["length_offset"] = length_offset
        out = generate(model, variables, [[start]], temperature=0.0, **options)
        found, open_ = [], [([start], 0.0)]
        for step in range(1, 5):
            grown = [([*path, token], score + table[path[-1], token]) for path, score in open_ for token in range(4)]
            ended = [step == 4 or path[-1] == 3 for path, _ in grown]
            penalty = (length_offset + step) ** length_penalty / (length_offset + 1) ** length_penalty
            found += [(score / penalty, path) for (path, score), end in zip(grown, ended) if end]
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
    scalars = np.uint32(0), np.int32(0), 1.0
    arguments = model, variables, prompts, None, None, np.arange(2, dtype=np.uint32), processors, *scalars
    lowered = _generate.lower(*arguments, num_beams=1, max_new_tokens=32)
    options = {"xla_cpu_use_fusion_emitters": True} if jax.__version_info__ < (0, 11) else {}  # see tests/conftest.py
    text = lowered.compile(options).as_text()
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
        ({"temperature": -0.5}, r"temperature must be finite and at least 0 \(greedy\), not -0.5"),
        ({"temperature": float("inf")}, "temperature must be finite .*, not inf"),
        ({"repetition_penalty": float("inf")}, "repetition_penalty must be finite and above 0 .*, not inf"),
        ({"length_penalty": float("nan")}, "length_penalty must be finite, not nan"),
        ({"length_offset": -1}, "length_offset must be finite and at least 0, not -1"),
        ({"temperature": float("nan")}, "temperature must be"),
        ({"top_k": 0}, "top_k must be at least 1"),
        ({"top_p": 0.0}, "top_p must be above 0 and at most 1, not 0.0"),
        ({"top_p": 1.5}, "top_p must be above 0 and at most 1, not 1.5"),
        ({"repetition_penalty": 0.0}, "repetition_penalty must be finite and above 0"),
        ({"no_repeat_ngram_size": 0}, "no_repeat_ngram_size must be at least 1, or None, not 0"),
        ({"min_new_tokens": -1}, "min_new_tokens must be at least 0, not -1"),
        (
            {"excluded_tokens": [1, VOCAB]},
            rf"excluded_tokens has \[{VOCAB}\]: its tokens must be from 0 to {VOCAB - 1}",
        ),
        ({"forced_first_token": VOCAB}, f"forced_first_token is {VOCAB}: it must be from 0 to {VOCAB - 1}"),
        ({"num_beams": 0}, "num_beams must be at least 1"),
        ({"num_beams": 2}, "beam search does not sample: set temperature to 0, not 1.0"),
    ],
)
def test_invalid_arguments_raise(gpt, prompts, options, message):
    arguments = {"prompts": prompts[0], "max_new_tokens": 4} | options
    with pytest.raises(ValueError, match=message):
        generate(*gpt, **arguments)
