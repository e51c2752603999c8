"""GPT-2 matches `transformers`."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
import transformers

from lineage.models import convert, gpt
from tests.tiers import tiered
from tests.tolerance import assert_close

LENGTH = 9
SEEDS = range(4)


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


def batch_of(reference, seed, lengths=(LENGTH, LENGTH - 4, LENGTH - 6), left=(False, True, False)):
    """Return sequences without padding, with padding on the left, and with padding on the right."""
    tokens = np.random.default_rng(seed + 100).integers(0, reference.config.vocab_size, (len(lengths), LENGTH))
    mask, positions = np.zeros(tokens.shape, bool), np.zeros(tokens.shape, np.int32)
    for row, (length, on_left) in enumerate(zip(lengths, left)):
        start = LENGTH - length if on_left else 0
        mask[row, start : start + length] = True
        positions[row, start : start + length] = np.arange(length)
    return tokens.astype(np.int32), mask, positions


def run(reference, tokens, mask, positions):
    """Return the logits and hidden states of the reference, including the output of the last block before the
    final norm.
    """
    last = []
    hook = reference.transformer.h[-1].register_forward_hook(lambda module, args, output: last.append(output))
    out = reference(
        torch.tensor(tokens, dtype=torch.long),
        attention_mask=torch.tensor(mask, dtype=torch.long),
        position_ids=torch.tensor(positions, dtype=torch.long),
        output_hidden_states=True,
    )
    hook.remove()
    hidden = [*out.hidden_states[:-1], last[0][0] if isinstance(last[0], tuple) else last[0]]
    return out.logits, [value.detach().numpy() for value in hidden], out.hidden_states[-1].detach().numpy()


@tiered("seed", SEEDS)
def test_logits_hidden_states_and_gradients_match(seed, randomize, ours, gradients, assert_same_gradients):
    reference = reference_of(seed, randomize)
    tokens, mask, positions = batch_of(reference, seed)
    model, variables = ours(reference)
    assert model.depth == reference.config.n_layer
    assert model.epsilon == reference.config.layer_norm_epsilon

    logits, hidden, normalized = run(reference, tokens, mask, positions)
    targets = np.roll(tokens, -1, axis=1)
    counted = torch.nn.functional.cross_entropy(
        logits[torch.tensor(mask)], torch.tensor(targets[mask], dtype=torch.long)
    )
    counted.backward()

    def loss(params):
        inputs = {"tokens": jnp.asarray(tokens), "mask": jnp.asarray(mask), "positions": jnp.asarray(positions)}
        out, state = model.apply({"params": params}, **inputs, mutable=["intermediates"])
        losses = optax.softmax_cross_entropy_with_integer_labels(out, targets)
        return (losses * mask).sum() / mask.sum(), (out, state["intermediates"])

    (value, (out, seen)), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(variables["params"])
    assert_close(out[mask], logits.detach().numpy()[mask])
    ours_hidden = [seen["embedding"][0], *seen["stack"]["layers"]["hidden"][0]]
    assert len(ours_hidden) == len(hidden) == reference.config.n_layer + 1
    for mine, theirs in zip(ours_hidden, hidden):
        assert_close(mine[mask], theirs[mask])
    final = model.bind(variables).norm(ours_hidden[-1])
    assert_close(final[mask], normalized[mask])
    np.testing.assert_allclose(value, counted.item(), rtol=1e-5)
    assert_same_gradients(grads, gradients(reference))


def test_plain_tokens_have_default_positions(randomize, ours):
    reference = reference_of(0, randomize)
    tokens = batch_of(reference, 0)[0]
    model, variables = ours(reference)
    expected = reference(torch.tensor(tokens, dtype=torch.long)).logits.detach().numpy()
    assert_close(jax.jit(model.apply)(variables, jnp.asarray(tokens)), expected)


@pytest.mark.parametrize(("use_bias", "mlp_dim"), [(True, 40), (False, 40), (False, None)])
def test_export_round_trip(use_bias, mlp_dim, tmp_path):
    """Check that the reference computes the same; a model without biases is read again with biases of zero."""
    sizes = {"vocab_size": 31, "max_length": 12, "depth": 3, "width": 24, "num_heads": 3, "mlp_dim": mlp_dim}
    model = gpt.GPT(**sizes, epsilon=1e-3, dropout=0.1, use_bias=use_bias)
    tokens = np.random.default_rng(0).integers(0, 31, (2, 12)).astype(np.int32)
    variables = random_like(jax.eval_shape(model.init, jax.random.key(0), tokens))
    convert.save(tmp_path, model, variables)
    reference, info = transformers.GPT2LMHeadModel.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values())
    expected = reference.eval()(torch.tensor(tokens, dtype=torch.long)).logits.detach().numpy()
    assert_close(jax.jit(model.apply)(variables, jnp.asarray(tokens)), expected)

    again, restored = convert.load(tmp_path)
    assert again == model.clone(use_bias=True)
    if use_bias:
        jax.tree.map(np.testing.assert_array_equal, restored, {"params": variables["params"]})
    assert_close(jax.jit(again.apply)(restored, jnp.asarray(tokens)), expected)


def random_like(tree, seed=3):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: jnp.asarray(0.2 * rng.standard_normal(x.shape), x.dtype), tree)
