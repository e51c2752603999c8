"""Generation matches `generate` of `transformers`, token by token."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lineage.models.decoding.generate import generate
from lineage.models.decoding.logits_processors import repetition_penalty, top_k, top_p
from lineage.models.gpt import GPT
from tests.tiers import tiered

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

torch.set_num_threads(1)  # synchronizing threads takes longer than such small models

VOCAB = 23


# Depth, heads, width: few shapes, because each is compiled, and many seeds.
SHAPES = {"deep": (3, 2, 24), "wide": (2, 4, 48), "flat": (1, 1, 10)}


def pair(seed, shape):
    """Return a random GPT-2 of `transformers` with peaked predictions, and our model with its weights."""
    depth, heads, width = SHAPES[shape]
    config = transformers.GPT2Config(
        vocab_size=VOCAB, n_positions=32, n_embd=width, n_layer=depth, n_head=heads,
        initializer_range=0.4, attn_implementation="eager", bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(seed)
    theirs = transformers.GPT2LMHeadModel(config).eval()
    ours = GPT(vocab_size=VOCAB, max_length=32, depth=depth, width=width, num_heads=heads)
    return theirs, ours, {"params": weights(theirs.state_dict(), depth, width, heads)}


def weights(state, depth, width, heads):
    state = {name.removeprefix("transformer."): value.numpy() for name, value in state.items()}

    def layers(name):
        return np.stack([state[f"h.{layer}.{name}"] for layer in range(depth)])

    def norm(name):
        return {"scale": layers(f"{name}.weight"), "bias": layers(f"{name}.bias")}

    def dense(name):
        return {"kernel": layers(f"{name}.weight"), "bias": layers(f"{name}.bias")}

    kernels = np.split(layers("attn.c_attn.weight"), 3, axis=-1)
    biases = np.split(layers("attn.c_attn.bias"), 3, axis=-1)
    attention = {
        part: {"kernel": kernel.reshape(depth, width, heads, -1), "bias": bias.reshape(depth, heads, -1)}
        for part, kernel, bias in zip(("query", "key", "value"), kernels, biases)
    }
    out = dense("attn.c_proj")
    attention["out"] = {"kernel": out["kernel"].reshape(depth, heads, -1, width), "bias": out["bias"]}
    mlp = {"up": dense("mlp.c_fc"), "down": dense("mlp.c_proj")}
    block = {"attention": attention, "attention_norm": norm("ln_1"), "mlp": mlp, "mlp_norm": norm("ln_2")}
    tables = {"embed": {"table": state["wte.weight"]}, "position": {"table": state["wpe.weight"]}}
    return tables | {"stack": {"layers": block}, "norm": {"scale": state["ln_f.weight"], "bias": state["ln_f.bias"]}}


def ragged(seed, rows=4, longest=7):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, longest + 1, rows)
    lengths[rng.integers(rows)] = longest
    return rng.integers(0, VOCAB, (rows, longest)), lengths


def reference(model, prompts, lengths, new, stop_tokens=(), **options):
    """Return the reference's continuations of left-padded prompts, up to a stop token, and beam scores."""
    longest = prompts.shape[1]
    padded, mask = np.zeros_like(prompts), np.zeros_like(prompts)
    for row, length in enumerate(lengths):
        padded[row, longest - length :] = prompts[row, :length]
        mask[row, longest - length :] = 1
    with torch.no_grad():
        out = model.generate(
            torch.tensor(padded), attention_mask=torch.tensor(mask), max_new_tokens=new, pad_token_id=VOCAB - 1,
            eos_token_id=list(stop_tokens) or None, do_sample=False, output_scores=True, return_dict_in_generate=True,
            **options,
        )  # fmt: skip
    rows = []
    for row in out.sequences[:, longest:].tolist():
        ends = [place for place, token in enumerate(row) if token in stop_tokens]
        rows.append(row[: ends[0] + 1] if ends else row)
    return rows, getattr(out, "sequences_scores", None)


def compare(seed, shape, new=14, stops=0, padded=True, **options):
    """Compare generated tokens; return whether each sequence ended early, to ensure that stop tokens occur."""
    theirs, ours, variables = pair(seed, shape)
    prompts, lengths = ragged(seed)
    lengths = lengths if padded else np.full(len(prompts), prompts.shape[1])
    stop_tokens = tuple(np.random.default_rng(seed).permutation(VOCAB - 1)[:stops].tolist())
    expected, scores = reference(theirs, prompts, lengths, new, stop_tokens, **options)
    out = jax.device_get(
        generate(
            ours, variables, prompts, lengths if padded else None, max_new_tokens=new, temperature=0.0,
            stop_tokens=stop_tokens, pad_token=VOCAB - 1, **options,
        )
    )  # fmt: skip
    for row, tokens in enumerate(expected):
        start, end = lengths[row], out.lengths[row]
        np.testing.assert_array_equal(out.tokens[row, :start], prompts[row, :start])
        assert out.tokens[row, start:end].tolist() == tokens
        assert (out.tokens[row, end:] == VOCAB - 1).all()
    if scores is not None:
        np.testing.assert_allclose(out.scores, scores.numpy(), rtol=1e-4, atol=1e-5)
    return [len(tokens) < new for tokens in expected]


@tiered("shape", SHAPES)
def test_greedy_matches(shape):
    for seed in range(8):
        compare(seed, shape)


@pytest.mark.thorough
def test_greedy_without_padding():
    for seed in range(8):
        compare(seed, "deep", padded=False)


@pytest.mark.thorough
def test_greedy_with_repetition_penalty():
    for seed in range(10):
        compare(seed, "deep", repetition_penalty=1.6 if seed % 2 else 0.7)


def test_greedy_with_stop_tokens():
    early = [row for seed in range(8) for row in compare(seed, "deep", stops=4)]
    assert 0 < sum(early) < len(early)


@tiered(("shape", "num_beams", "stops"), [("deep", 3, 0), ("deep", 4, 1), ("wide", 2, 3)])
def test_beam_search_matches(shape, num_beams, stops):
    early = []
    for seed in range(12):
        length_penalty = (-1.0, 0.0, 1.0, 2.5)[seed % 4]
        early += compare(seed, shape, stops=stops, num_beams=num_beams, length_penalty=length_penalty)
    assert any(early) == (stops > 0)
    assert not all(early)


@pytest.mark.thorough
def test_beam_search_with_repetition_penalty():
    for seed in range(8):
        compare(seed, "deep", stops=2, num_beams=3, repetition_penalty=1.5)


BLOCKS = [{"no_repeat_ngram_size": 1}, {"no_repeat_ngram_size": 3}, {"no_repeat_ngram_size": 2, "min_new_tokens": 6}]


@tiered("options", [*BLOCKS, BLOCKS[2] | {"num_beams": 3}], ids=str, first=lambda options: len(options) > 2)
def test_ngram_blocking_and_minimum_length(options):
    """Check prompts of one length, because the reference also bans repetitions of padding."""
    for seed in range(6):
        compare(seed, "deep", stops=4, padded=False, **options)


def test_processors():
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(5, 40)).astype(np.float32) * 3
    tokens, lengths = rng.integers(0, 40, (5, 12)), rng.integers(1, 13, 5)
    for k in (1, 7, 40, 99):
        theirs = transformers.TopKLogitsWarper(k)(None, torch.tensor(logits))
        np.testing.assert_array_equal(top_k(jnp.array(logits), k), theirs.numpy())
    for p in (0.01, 0.5, 0.9, 0.99):
        theirs = transformers.TopPLogitsWarper(p)(None, torch.tensor(logits))
        np.testing.assert_array_equal(top_p(jnp.array(logits), p), theirs.numpy())
    ours = repetition_penalty(jnp.array(logits), jnp.array(tokens), jnp.array(lengths), 1.3)
    for row, length in enumerate(lengths):
        penalise = transformers.RepetitionPenaltyLogitsProcessor(1.3)
        theirs = penalise(torch.tensor(tokens[row : row + 1, :length]), torch.tensor(logits[row : row + 1]))
        np.testing.assert_allclose(ours[row], theirs[0].numpy(), rtol=1e-6)
