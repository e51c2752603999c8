"""T5 1.0 and 1.1 match `transformers`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file, save_file

from lineage.models import convert, t5
from lineage.models.layers.position import RelativeBuckets
from tests.tiers import tiered
from tests.tolerance import assert_close


def reference_of(seed, randomize, scale=0.15, tied=False):
    """Return a random T5: version 1.0 for even seeds, and 1.1, with tied or untied embeddings, for odd ones."""
    rng = np.random.default_rng(seed)
    config = transformers.T5Config(
        vocab_size=int(rng.integers(11, 50)),
        d_model=int(rng.integers(9, 30)),
        d_kv=int(rng.choice([3, 8])),
        d_ff=int(rng.integers(10, 40)),
        num_layers=int(rng.integers(1, 4)),
        num_decoder_layers=int(rng.integers(1, 4)),
        num_heads=int(rng.integers(1, 5)),
        relative_attention_num_buckets=[32, 8][seed // 2],
        relative_attention_max_distance=[128, 7][seed // 2],
        layer_norm_epsilon=float(rng.choice([1e-6, 1e-2])),
        feed_forward_proj=["relu", "gated-gelu", "gelu"][seed],
        tie_word_embeddings=seed % 2 == 0,
        decoder_start_token_id=0,
        attn_implementation="eager",
    )
    reference = transformers.T5ForConditionalGeneration(config)
    if seed % 2 and not tied:  # `transformers` 5 ties the embeddings of new models, but not of loaded ones
        reference.lm_head.weight = torch.nn.Parameter(reference.lm_head.weight.clone())
    return randomize(reference, seed, scale)


@tiered(("seed", "tied"), [(0, True), (1, False), (1, True), (2, True)])
def test_logits_hidden_states_and_gradients(seed, tied, randomize, assert_same_encoder_decoder):
    reference = reference_of(seed, randomize, tied=tied)
    assert_same_encoder_decoder(reference, reference.encoder.block, reference.decoder.block, seed)


def test_settings(randomize, ours):
    for seed in (0, 1):
        reference = reference_of(seed, randomize)
        model, config = ours(reference)[0], reference.config
        assert (model.depth, model.decoder_depth) == (config.num_layers, config.num_decoder_layers)
        assert (model.tied, model.gated) == (seed == 0, seed == 1)
        assert model.scale_decoder_outputs is None
        assert model.activation == ["relu", "gelu_tanh"][seed]
        assert model.epsilon == config.layer_norm_epsilon
    model = ours(reference_of(1, randomize, tied=True))[0]
    assert (model.tied, model.gated, model.scale_decoder_outputs) == (True, True, False)


def test_function_of_the_hidden_layers(randomize, ours):
    config = reference_of(1, randomize).config
    assert (config.feed_forward_proj, config.dense_act_fn) == ("gated-gelu", "gelu_new")
    config.dense_act_fn = "relu"  # overrides the function of `feed_forward_proj`, also in files
    reference = randomize(transformers.T5ForConditionalGeneration(config), 1)
    model, variables = ours(reference)
    inputs, tokens = np.random.default_rng(0).integers(0, config.vocab_size, (2, 2, 7))
    expected = reference(input_ids=torch.tensor(inputs), decoder_input_ids=torch.tensor(tokens)).logits
    assert_close(jax.jit(model.apply)(variables, inputs, tokens), expected.detach().numpy())


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(("buckets", "max_distance"), [(32, 128), (8, 20), (64, 256), (10, 6)])
def test_position_buckets_match(bidirectional, buckets, max_distance):
    """Check buckets through a table whose rows are their own indices."""
    attention = transformers.models.t5.modeling_t5.T5Attention
    distance = torch.arange(-300, 301)
    expected = attention._relative_position_bucket(distance, bidirectional, buckets, max_distance)
    module = RelativeBuckets(1, buckets, max_distance, bidirectional)
    table = {"params": {"table": jnp.arange(buckets, dtype=jnp.float32)[:, None]}}
    np.testing.assert_array_equal(module.apply(table, jnp.array([[300]]), 601)[0, 0, 0], expected)


@tiered(("seed", "options"), [(0, {}), (1, {"num_beams": 3, "length_penalty": 0.5})])
def test_generation(seed, options, randomize, assert_same_generation):
    reference = reference_of(seed, randomize, scale=0.4)
    written = assert_same_generation(reference, start=0, stop_tokens=(3, 5), **options)
    assert len({tuple(row) for row in written}) > 4


V1_1 = {"gated": True, "tied": False, "activation": "gelu_tanh"}


@tiered("version", [{}, V1_1, V1_1 | {"tied": True, "scale_decoder_outputs": False}], ids=str)
def test_export_round_trip(version, round_trip):
    model = t5.T5(
        vocab_size=31, depth=2, decoder_depth=3, width=20, num_heads=3, head_size=4, mlp_dim=40, buckets=12,
        max_distance=40, epsilon=1e-3, dropout=0.1, **version,
    )  # fmt: skip
    inputs, tokens = np.random.default_rng(0).integers(0, 31, (2, 2, 12)).astype(np.int32)
    cls = transformers.T5ForConditionalGeneration
    actual, expected = round_trip(model, cls, input_ids=inputs, decoder_input_ids=tokens)
    assert_close(actual, expected.logits)


def test_untied_output_projection_is_not_scaled():
    model = t5.T5(tied=False, scale_decoder_outputs=True)
    with pytest.raises(ValueError, match="`transformers` scales only tied outputs"):
        convert.FAMILIES["t5"].config(model)


@pytest.mark.thorough
def test_old_files_with_repeated_embeddings(tmp_path):
    """Check files that repeat the embedding and have an unused bias."""
    model = t5.T5(vocab_size=9, depth=1, width=8, num_heads=2, head_size=3, mlp_dim=5)
    variables = jax.jit(model.init)(jax.random.key(0), *np.zeros((2, 1, 1), np.int32))
    convert.save(tmp_path, model, variables)
    tensors = load_file(tmp_path / "model.safetensors")
    for copy in ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight"):
        tensors[copy] = tensors["shared.weight"]
    tensors["decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"] = np.ones((32, 2), np.float32)
    save_file(tensors, tmp_path / "model.safetensors")
    jax.tree.map(np.testing.assert_array_equal, convert.load(tmp_path)[1], variables)
    save_file(tensors | {"lm_head.weight": tensors["shared.weight"] + 1}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"lm_head\.weight differs from shared\.weight"):
        convert.load(tmp_path)


def test_activations_round_trip():
    for gated in (False, True):
        for activation in ("relu", "gelu", "gelu_tanh", "silu"):
            written = convert.FAMILIES["t5"].config(t5.T5(gated=gated, activation=activation))
            read = convert.FAMILIES["t5"].settings(written, "", {})
            assert (read["gated"], read["activation"]) == (gated, activation)
            theirs = transformers.T5Config(feed_forward_proj=written["feed_forward_proj"])
            assert theirs.is_gated_act == gated
            x = np.linspace(-3, 3, 50, dtype=np.float32)
            expected = transformers.activations.ACT2FN[theirs.dense_act_fn](torch.tensor(x)).numpy()
            np.testing.assert_allclose(t5.ACTIVATIONS[activation](jnp.asarray(x)), expected, atol=2e-6)
