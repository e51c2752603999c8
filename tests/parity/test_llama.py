"""Llama and Mistral match `transformers`."""

import json
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file, save_file

from lineage.models import convert
from lineage.models.decoding.generate import generate
from lineage.models.layers.position import rotary, stretched, yarn_magnitude
from lineage.models.llama import Llama
from tests.tiers import tiered
from tests.tolerance import assert_close

LENGTH = 14
ROPE = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 3.0},
    "llama3": {
        "rope_type": "llama3", "factor": 4.0, "low_freq_factor": 0.3, "high_freq_factor": 2.0,
        "original_max_position_embeddings": 40,
    },
    "yarn": {"rope_type": "yarn", "factor": 2.5, "original_max_position_embeddings": 64, "beta_fast": 16.0},
}  # fmt: skip
# Heads and key/value heads, RoPE, window: Llama with every RoPE type, Mistral with windows computed in blocks (inputs
# longer than two windows) and by a mask.
CASES = {
    "multi-head": (2, 2, "default", None),
    "grouped": (4, 2, "llama3", None),
    "multi-query": (3, 1, "linear", None),
    "tied": (4, 2, "yarn", None),
    "blocks": (4, 2, "default", 3),
    "self": (2, 1, "default", 1),
    "masked": (2, 2, "yarn", 8),
}


def reference_of(case, randomize, scale=0.15):
    seed = list(CASES).index(case)
    heads, kv_heads, rope, window = CASES[case]
    settings = {
        "vocab_size": 23 + seed,
        "hidden_size": heads * 8,
        "intermediate_size": 11 + 2 * seed,
        "num_hidden_layers": 1 + seed % 3,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": [8, 6][seed % 2],
        "hidden_act": ["silu", "gelu"][seed % 2],
        "max_position_embeddings": 64,
        "rms_norm_eps": [1e-6, 1e-5, 1e-2][seed % 3],
        "rope_parameters": {"rope_theta": [10_000.0, 500.0][seed % 2]} | ROPE[rope],
        "tie_word_embeddings": case == "tied",
        "attn_implementation": "eager",
        "bos_token_id": None,
        "eos_token_id": None,
    }
    if window is None:
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**settings))
    else:
        model = transformers.MistralForCausalLM(transformers.MistralConfig(**settings, sliding_window=window))
    return randomize(model, seed, scale)


def tokens_of(reference, rows=3):
    return np.random.default_rng(7).integers(0, reference.config.vocab_size, (rows, LENGTH))


@tiered("case", CASES, first=lambda case: case in ("grouped", "blocks"))
def test_logits_hidden_states_and_gradients_match(case, randomize, assert_same_decoder):
    reference = reference_of(case, randomize)
    model = assert_same_decoder(reference, reference.model.layers, reference.model.norm, LENGTH, 0)
    assert (model.depth, model.epsilon) == (reference.config.num_hidden_layers, reference.config.rms_norm_eps)
    assert (model.num_heads, model.num_kv_heads, model.rope_scaling, model.window) == CASES[case]


@tiered("case", ["grouped", "blocks"])
def test_plain_tokens_have_default_positions(case, randomize, ours):
    reference = reference_of(case, randomize)
    tokens = tokens_of(reference)
    model, variables = ours(reference)
    expected = reference(torch.tensor(tokens)).logits.detach().numpy()
    assert_close(jax.jit(model.apply)(variables, jnp.asarray(tokens)), expected)


YARN = {"rope_scaling": "yarn", "rope_factor": 4.0, "rope_length": 32, "rope_turns": (0.5, 9.0)}
EXPORTED = Llama(
    vocab_size=31, max_length=64, depth=2, width=24, num_heads=4, num_kv_heads=2, head_size=8, mlp_dim=20, epsilon=1e-3
)


@tiered(
    ("name", "model"),
    [
        ("Llama", EXPORTED),
        ("Llama", EXPORTED.clone(tied=True, rope_base=700.0, rope_scaling="linear", rope_factor=2.0)),
        ("Llama", EXPORTED.clone(rope_scaling="llama3", rope_factor=4.0, rope_length=32, rope_turns=(0.5, 3.0))),
        ("Mistral", EXPORTED.clone(window=3)),
        ("Mistral", EXPORTED.clone(window=3, **YARN)),
        ("Mistral", EXPORTED.clone(width=26)),  # no multiple of the heads, which `LlamaConfig` refuses
    ],
)  # fmt: skip
def test_export_round_trip(name, model, round_trip):
    tokens = np.random.default_rng(0).integers(0, 31, (2, 12)).astype(np.int32)
    assert convert.config_of(model)["model_type"] == name.lower()
    actual, expected = round_trip(model, transformers.AutoModelForCausalLM, input_ids=tokens)
    assert_close(actual, expected.logits)


def test_old_config_formats(randomize, tmp_path):
    """Check separate `rope_scaling` and `rope_theta`, a Mistral without a window, and saved rotation tables."""
    theirs = reference_of("masked", randomize)
    theirs.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    rope = config.pop("rope_parameters")
    config |= {"rope_theta": rope.pop("rope_theta"), "sliding_window": None}
    rope["type"] = rope.pop("rope_type")
    (tmp_path / "config.json").write_text(json.dumps(config | {"rope_scaling": rope}))
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(4, np.float32)
    save_file(tensors, tmp_path / "model.safetensors")
    tokens = tokens_of(theirs)
    reference = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    expected = reference.eval()(torch.tensor(tokens)).logits.detach().numpy()
    model, variables = convert.load(tmp_path)
    assert (model.window, model.rope_scaling, model.rope_base) == (None, "yarn", 10_000.0)
    assert_close(jax.jit(model.apply)(variables, jnp.asarray(tokens)), expected)


def test_original_length_outside_of_the_rope_parameters(randomize, tmp_path):
    theirs = reference_of("masked", randomize)
    theirs.save_pretrained(tmp_path)
    config = json.loads((path := tmp_path / "config.json").read_text())
    length = config["rope_parameters"]["original_max_position_embeddings"]
    path.write_text(json.dumps(config | {"original_max_position_embeddings": length // 8}))
    tokens = tokens_of(theirs)
    reference = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    expected = reference.eval()(torch.tensor(tokens)).logits.detach().numpy()
    model, variables = convert.load(tmp_path)
    assert model.rope_length == length // 8
    assert_close(jax.jit(model.apply)(variables, jnp.asarray(tokens)), expected)


@pytest.mark.parametrize("length", [4096, 5])
def test_yarn_frequencies_match(length):
    """Check Llama 2 with 16 times its length, and a length so short that the interpolated range is empty."""
    config = transformers.LlamaConfig(
        hidden_size=128, num_attention_heads=1, max_position_embeddings=65_536,
        rope_parameters={
            "rope_type": "yarn", "rope_theta": 10_000.0, "factor": 16.0, "original_max_position_embeddings": length
        },
    )  # fmt: skip
    theirs = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(config)
    scaling = partial(stretched, kind="yarn", factor=16.0, length=length, turns=(1.0, 32.0))
    frequencies = scaling(10_000.0 ** -(np.arange(64) / 64), 10_000.0)
    np.testing.assert_allclose(frequencies, theirs.inv_freq.numpy(), rtol=1e-6)
    assert yarn_magnitude(16.0) == pytest.approx(theirs.attention_scaling)
    unit = jnp.concatenate([jnp.ones((1, 9, 1, 64)), jnp.zeros((1, 9, 1, 64))], axis=-1)
    turned = rotary(unit, jnp.arange(9)[None], scaling=scaling, magnitude=yarn_magnitude(16.0))[0, :, 0]
    cos, sin = (part[0].numpy() for part in theirs(torch.zeros(1), torch.arange(9)[None]))
    np.testing.assert_allclose(turned, np.concatenate([cos[:, :64], sin[:, :64]], axis=-1), atol=1e-6)


@pytest.mark.thorough
@tiered(
    ("case", "num_beams"),
    [("grouped", 1), ("grouped", 3), ("blocks", 1), ("blocks", 3), ("masked", 1)],
    first=lambda case, num_beams: (case == "grouped") == (num_beams == 1),
)
def test_generation_matches(case, num_beams, randomize, ours):
    """Compare greedy decoding and beam search, including the scores of beams, for prompts of different lengths.

    They are shorter and longer than the windows of 3 and 8 tokens.
    """
    reference = reference_of(case, randomize, scale=0.5)
    prompts, lengths = tokens_of(reference)[:, :9], np.array([9, 4, 6])
    padded, attended = np.zeros_like(prompts), np.zeros_like(prompts)
    for row, length in enumerate(lengths):
        padded[row, 9 - length :], attended[row, 9 - length :] = prompts[row, :length], 1
    with torch.no_grad():
        theirs = reference.generate(
            torch.tensor(padded), attention_mask=torch.tensor(attended), max_new_tokens=12,
            pad_token_id=0, do_sample=False, num_beams=num_beams, output_scores=True, return_dict_in_generate=True,
        )  # fmt: skip
    model, variables = ours(reference)
    options = {"max_new_tokens": 12, "temperature": 0.0, "num_beams": num_beams}
    out = jax.device_get(generate(model, variables, prompts, lengths, **options))
    for row, length in enumerate(lengths):
        assert out.tokens[row, length : length + 12].tolist() == theirs.sequences[row, 9:].tolist()
    assert len({tuple(row[9:]) for row in theirs.sequences.tolist()}) == 3
    if num_beams > 1:
        np.testing.assert_allclose(out.scores, theirs.sequences_scores.numpy(), rtol=1e-4, atol=1e-5)
