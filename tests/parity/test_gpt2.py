"""GPT-2 matches `transformers`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers

from lineage.models import convert, gpt
from tests.tiers import tiered
from tests.tolerance import assert_close

LENGTH = 9


def reference_of(seed, randomize):
    rng = np.random.default_rng(seed)
    heads = int(rng.integers(1, 5))
    width = heads * int(rng.choice([3, 8, 10]))
    config = transformers.GPT2Config(
        vocab_size=int(rng.integers(11, 50)),
        n_positions=LENGTH + int(rng.integers(0, 5)),
        n_embd=width,
        n_layer=int(rng.integers(1, 5)),
        n_head=heads,
        n_inner=[None, 2 * width + 1][seed % 2],
        activation_function=["gelu_new", "relu", "gelu", "silu"][seed % 4],
        layer_norm_epsilon=float(rng.choice([1e-5, 1e-12, 1e-2])),
        bos_token_id=None,
        eos_token_id=None,
        attn_implementation="eager",
    )
    return randomize(transformers.GPT2LMHeadModel(config), seed)


@tiered("seed", range(4))
def test_logits_hidden_states_and_gradients_match(seed, randomize, assert_same_decoder):
    reference = reference_of(seed, randomize)
    model = assert_same_decoder(reference, reference.transformer.h, reference.transformer.ln_f, LENGTH, seed)
    assert (model.depth, model.epsilon) == (reference.config.n_layer, reference.config.layer_norm_epsilon)


def test_plain_tokens_have_default_positions(randomize, ours):
    reference = reference_of(0, randomize)
    tokens = np.random.default_rng(0).integers(0, reference.config.vocab_size, (3, LENGTH))
    model, variables = ours(reference)
    expected = reference(torch.tensor(tokens)).logits.detach().numpy()
    assert_close(jax.jit(model.apply)(variables, jnp.asarray(tokens)), expected)


def test_export_round_trip(round_trip):
    model = gpt.GPT(vocab_size=31, max_length=12, depth=3, width=24, num_heads=3, mlp_dim=40, epsilon=1e-3, dropout=0.1)
    tokens = np.random.default_rng(0).integers(0, 31, (2, 12)).astype(np.int32)
    actual, expected = round_trip(model, transformers.GPT2LMHeadModel, input_ids=tokens)
    assert_close(actual, expected.logits)


@pytest.mark.parametrize("mlp_dim", [40, None])
def test_models_without_biases_are_exported(mlp_dim, tmp_path):
    """Check that the reference computes the same, and that the model is read again with biases of zero."""
    model = gpt.GPT(vocab_size=31, max_length=12, depth=3, width=24, num_heads=3, mlp_dim=mlp_dim, use_bias=False)
    tokens = np.random.default_rng(0).integers(0, 31, (2, 12)).astype(np.int32)
    random, shapes = np.random.default_rng(3), jax.eval_shape(model.init, jax.random.key(0), tokens)
    variables = jax.tree.map(lambda x: random.normal(0, 0.2, x.shape).astype(np.float32), shapes)
    convert.save(tmp_path, model, variables)
    reference, info = transformers.GPT2LMHeadModel.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values())
    expected = reference.eval()(torch.tensor(tokens, dtype=torch.long)).logits.detach().numpy()
    again, restored = convert.load(tmp_path)
    assert again == model.clone(use_bias=True)
    for one, params in ((model, variables), (again, restored)):
        assert_close(jax.jit(one.apply)(params, tokens), expected)
