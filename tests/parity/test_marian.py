"""Marian, a BART with sinusoidal positions, matches `transformers`."""

import re

import numpy as np
import pytest
import torch
import transformers

from lineage.models import bart, convert
from tests.tiers import tiered

REAL = 3  # tokens below are special


def reference_of(seed, randomize, scale=0.15):
    rng = np.random.default_rng(seed)
    heads = int(rng.integers(1, 4))
    width = heads * int(rng.choice([3, 8]))
    vocab_size = int(rng.integers(21, 50))
    config = transformers.MarianConfig(
        vocab_size=vocab_size,
        max_position_embeddings=int(rng.integers(13, 17)),
        d_model=width,
        encoder_layers=int(rng.integers(1, 4)),
        decoder_layers=int(rng.integers(1, 4)),
        encoder_attention_heads=heads,
        decoder_attention_heads=heads,
        encoder_ffn_dim=2 * width + 1,
        decoder_ffn_dim=2 * width + 1,
        activation_function="swish",
        scale_embedding=seed % 2 == 0,
        pad_token_id=1,
        decoder_start_token_id=1,
        eos_token_id=None,
        forced_eos_token_id=None,
        attn_implementation="eager",
    )
    reference = transformers.MarianMTModel(config)
    for side in (reference.model.encoder, reference.model.decoder):  # a fixed table, not a parameter
        table = side.embed_positions.create_weight()
        del side.embed_positions.weight
        side.embed_positions.register_buffer("weight", table)
    reference.final_logits_bias.normal_(0, scale, generator=torch.Generator().manual_seed(seed))
    return randomize(reference, seed, scale)


@tiered("seed", range(2))
def test_logits_hidden_states_and_gradients(seed, randomize, assert_same_encoder_decoder):
    reference = reference_of(seed, randomize)
    encoder, decoder = reference.model.encoder.layers, reference.model.decoder.layers
    assert_same_encoder_decoder(reference, encoder, decoder, seed, lowest=REAL)


@pytest.mark.thorough
def test_generation(randomize, assert_same_generation):
    reference = reference_of(2, randomize, scale=0.4)
    reference.generation_config.forced_eos_token_id = None
    settings = {"start": 1, "stop_tokens": (3, 5), "new": 11, "lowest": REAL, "num_beams": 3}
    free = assert_same_generation(reference, **settings)
    excluded = max({token for row in free for token in row} - {3, 5})  # written without the option
    written = assert_same_generation(reference, excluded_tokens=(1, excluded), **settings)
    assert not any({1, excluded} & {*row} for row in written)


def test_export_round_trip(round_trip):
    model = bart.BART(
        vocab_size=31, max_length=12, depth=2, decoder_depth=3, width=24, num_heads=3, mlp_dim=40, activation="silu",
        logits_bias=True, dropout=0.1, scale_embedding=True, position="sinusoidal", embed_norm=False,
    )  # fmt: skip
    inputs, tokens = np.random.default_rng(0).integers(0, 30, (2, 2, 12)).astype(np.int32)
    actual, expected = round_trip(model, transformers.MarianMTModel, input_ids=inputs, decoder_input_ids=tokens)
    np.testing.assert_allclose(actual, expected.logits, rtol=0, atol=1e-5)


def test_export_of_mixed_bart_and_marian_settings_raises(tmp_path):
    given = "a BART with {'position': 'sinusoidal', 'embed_norm': True} cannot be written for `transformers`"
    needed = "{'position': 'learned', 'embed_norm': True} or {'position': 'sinusoidal', 'embed_norm': False}"
    with pytest.raises(ValueError, match=re.escape(f"{given}: it must have {needed}.")):
        convert.save(tmp_path, bart.BART(position="sinusoidal"), {"params": {}})
