"""BART matches `transformers`."""

import json

import jax
import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file, save_file

from lineage.models import bart, convert
from tests.tiers import tiered
from tests.tolerance import assert_close

REAL = 3  # tokens below are special: 1, the padding, has no gradient in the reference


def reference_of(seed, randomize, scale=0.15, scale_embedding=False):
    rng = np.random.default_rng(seed)
    heads = int(rng.integers(1, 5))
    width = heads * int(rng.choice([3, 8]))
    config = transformers.BartConfig(
        vocab_size=int(rng.integers(11, 50)),
        max_position_embeddings=int(rng.integers(13, 17)),
        d_model=width,
        encoder_layers=int(rng.integers(1, 4)),
        decoder_layers=int(rng.integers(1, 4)),
        encoder_attention_heads=heads,
        decoder_attention_heads=heads,
        encoder_ffn_dim=2 * width + 1,
        decoder_ffn_dim=2 * width + 1,
        activation_function=["gelu", "relu"][seed % 2],
        scale_embedding=scale_embedding,
        forced_eos_token_id=None,
        eos_token_id=None,
        attn_implementation="eager",
    )
    reference = transformers.BartForConditionalGeneration(config)
    for part in (reference.model.encoder, reference.model.decoder):
        assert part.layernorm_embedding.eps == 1e-5
    reference.final_logits_bias.normal_(0, scale, generator=torch.Generator().manual_seed(seed))
    return randomize(reference, seed, scale)


@tiered(("seed", "scale_embedding"), [(0, False), (1, False), (2, False), (3, True)])
def test_logits_hidden_states_and_gradients(seed, scale_embedding, randomize, assert_same_encoder_decoder):
    reference = reference_of(seed, randomize, scale_embedding=scale_embedding)
    encoder, decoder = reference.model.encoder.layers, reference.model.decoder.layers
    assert_same_encoder_decoder(reference, encoder, decoder, seed, lowest=REAL)


BLOCKED = {"no_repeat_ngram_size": 2, "min_new_tokens": 4, "forced_first_token": 7, "repetition_penalty": 1.2}
BLOCKED["excluded_tokens"] = (9, 11)


@pytest.mark.thorough
@tiered(
    ("seed", "options"),
    [(0, {}), (1, {"num_beams": 3, "length_penalty": 0.5}), (2, BLOCKED), (3, BLOCKED | {"num_beams": 3})],
    first=2,
)
def test_generation(seed, options, randomize, assert_same_generation):
    reference = reference_of(seed, randomize, scale=0.4)
    settings = reference.generation_config
    settings.forced_bos_token_id = settings.forced_eos_token_id = None
    settings.no_repeat_ngram_size = settings.min_length = None
    written = assert_same_generation(reference, start=2, stop_tokens=(3, 5), new=11, lowest=REAL, **options)
    assert len({tuple(row) for row in written}) > 3


def test_file_without_head_has_no_bias(randomize, tmp_path):
    """Check files whose names have no prefix, and old ones with a copy of the embedding and versions."""
    reference = reference_of(0, randomize)
    tokens = np.random.default_rng(0).integers(REAL, reference.config.vocab_size, (2, 6)).astype(np.int32)
    reference.model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == ["BartModel"]
    tensors = load_file(tmp_path / "model.safetensors")
    old = {"encoder.embed_tokens.weight": tensors["shared.weight"]}
    old |= {
        f"{prefix}{side}.version": np.full(1, 3.0, "f") for prefix in ("", "model.") for side in ("encoder", "decoder")
    }
    save_file(tensors | old, tmp_path / "model.safetensors")
    model, variables = convert.load(tmp_path)
    assert not model.logits_bias
    args = {"input_ids": torch.tensor(tokens).long(), "decoder_input_ids": torch.tensor(tokens).long()}
    expected = (reference(**args).logits - reference.final_logits_bias).detach().numpy()
    assert_close(jax.jit(model.apply)(variables, tokens, tokens), expected)


@tiered("settings", [{}, {"logits_bias": True}, {"scale_embedding": True}], ids=str)
def test_export_round_trip(settings, round_trip):
    model = bart.BART(
        vocab_size=31, max_length=12, depth=2, decoder_depth=3, width=24, num_heads=3, mlp_dim=40, activation="gelu",
        dropout=0.1, attention_dropout=0.2, activation_dropout=0.3, **settings,
    )  # fmt: skip
    inputs, tokens = np.random.default_rng(0).integers(0, 31, (2, 2, 12)).astype(np.int32)
    cls = transformers.BartForConditionalGeneration
    actual, expected = round_trip(model, cls, input_ids=inputs, decoder_input_ids=tokens)
    assert_close(actual, expected.logits)
