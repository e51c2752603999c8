import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lineage import models
from lineage.models.elmo import ELMo, ScalarMix
from lineage.models.layers.linear import Linear
from lineage.tasks.causal_lm import BidirectionalLM
from tests.tolerance import assert_close

TINY = ELMo(vocab_size=11, depth=2, width=6, cell_dim=8, dropout=0.0)
TOKENS = jnp.asarray(np.random.default_rng(0).permutation(11)[None, :5], jnp.int32)


@pytest.fixture(scope="module")
def params():
    shapes = jax.eval_shape(TINY.init, jax.random.key(0), TOKENS)["params"]
    rng = np.random.default_rng(1)
    return jax.tree.map(lambda x: jnp.asarray(0.7 * rng.standard_normal(x.shape), x.dtype), shapes)


@jax.jit
def features(params, tokens, mask=None):
    return TINY.apply({"params": params}, tokens, mask=mask, method="features")


def test_parameter_count_matches_published_model():
    """Check the LSTMs and the tables of the vocabulary, without the character layer of the published 93.6M."""
    module = models.build("elmo", "original", vocab_size=11)
    shapes = jax.eval_shape(module.init, jax.random.key(0), TOKENS)["params"]
    lstm = 4 * 4096 * (512 + 512 + 1) + 4096 * 512
    assert sum(leaf.size for leaf in jax.tree.leaves(shapes)) == 4 * lstm + 11 * (512 + 512 + 1)


def test_gradients_of_forward_and_backward_states_are_unidirectional(params):
    """Check gradients with respect to the embedding table, for tokens that all differ."""

    def sums(table):
        layers = features(params | {"embed": {"table": table}}, TOKENS)[1:, 0]
        return layers.reshape(2, 5, 2, 6).sum(-1)  # layer, position, direction

    jacobian = jax.jit(jax.jacobian(sums))(params["embed"]["table"])[..., TOKENS[0], :]
    seen = np.abs(jacobian).max(-1) > 0
    for layer in seen:
        np.testing.assert_array_equal(layer[:, 0], np.tril(np.ones((5, 5))))
        np.testing.assert_array_equal(layer[:, 1], np.triu(np.ones((5, 5))))


def test_padding_has_no_effect(params):
    padded, mask = jnp.pad(TOKENS, ((0, 0), (0, 3))), jnp.arange(8)[None] < 5
    np.testing.assert_allclose(features(params, padded, mask)[:, :, :5], features(params, TOKENS), atol=1e-6)


def test_clipped_layer_matches_published_equations(params):
    """Compare a clipped forward layer with the cell of the published models, one token at a time."""
    cell = jax.tree.map(np.asarray, params["forward_0"]["cell"])
    memory, out, memories, expected = np.zeros(8), np.zeros(6), [], []
    for x in np.asarray(params["embed"]["table"])[TOKENS[0]]:
        gates = x @ cell["input"]["kernel"] + cell["input"]["bias"] + out @ cell["recurrent"]["kernel"]
        input_gate, forget_gate, new, output_gate = np.split(gates, 4)
        memory = memory / (1 + np.exp(-forget_gate)) + np.tanh(new) / (1 + np.exp(-input_gate))
        memory = np.clip(memory, -0.4, 0.4)
        out = (np.tanh(memory) / (1 + np.exp(-output_gate))) @ cell["output"]["kernel"]
        out = np.clip(out, -0.4, 0.4)
        memories.append(memory)
        expected.append(out)
    assert (np.abs(memories) == 0.4).any()
    assert (np.abs(expected) == 0.4).any()
    layers = TINY.clone(clip=0.4).apply({"params": params}, TOKENS, method="features")
    assert_close(layers[1, 0, :, :6], np.stack(expected))


def test_loss_is_the_sum_of_both_directions(params):
    """Compare with the losses of the next token for 3 positions and of the previous token for 2 positions."""
    padded = jnp.pad(TOKENS[:, :3], ((0, 0), (0, 2)))
    batch = {"tokens": padded, "targets": jnp.roll(TOKENS, -1, axis=1), "mask": jnp.arange(5)[None] < 3}
    loss, weight, aux = jax.jit(nn.apply(BidirectionalLM().loss, TINY))({"params": params}, batch)
    last = features(params, TOKENS[:, :3])[-1, 0]
    head = params["head"]
    scores = [jax.nn.log_softmax(half @ head["kernel"] + head["bias"]) for half in (last[:, :6], last[:, 6:])]
    tokens = TOKENS[0]
    ahead = -sum(scores[0][t, tokens[t + 1]] for t in range(3))
    back = -sum(scores[1][t, tokens[t - 1]] for t in (1, 2))
    assert weight == 5
    np.testing.assert_allclose(loss, ahead + back, rtol=1e-5)
    np.testing.assert_allclose(aux["loss"].compute(), (ahead + back) / 5, rtol=1e-5)
    np.testing.assert_allclose(aux["backward_loss"].compute(), back / 2, rtol=1e-5)


class Tagger(nn.Module):
    """Linear layer on a learned mixture of the layers of a frozen ELMo."""

    def setup(self):
        self.elmo, self.mix, self.head = TINY, ScalarMix(), Linear((3,))

    def __call__(self, tokens):
        return self.head(self.mix(jax.lax.stop_gradient(self.elmo.features(tokens))))


@pytest.mark.thorough
def test_scalar_mix_of_a_frozen_model_is_trained(params):
    tagger = Tagger()
    made = jax.jit(tagger.init)(jax.random.key(0), TOKENS)["params"]
    weights = np.array([0.3, -1.0, 0.5], np.float32)
    made |= {"elmo": params, "mix": {"weights": weights, "gamma": jnp.asarray(1.5)}}

    @jax.jit
    def logits(params):
        return tagger.apply({"params": params}, TOKENS)

    share = np.exp(weights) / np.exp(weights).sum()
    mixed = 1.5 * sum(part * layer for part, layer in zip(share, features(params, TOKENS)[:, 0]))
    expected = mixed @ made["head"]["kernel"] + made["head"]["bias"]
    assert_close(logits(made)[0], expected)

    grads = jax.jit(jax.grad(lambda params: jnp.square(logits(params)).sum()))(made)
    assert not any(leaf.any() for leaf in jax.tree.leaves(grads["elmo"]))
    assert all(leaf.any() for leaf in jax.tree.leaves((grads["mix"], grads["head"])))
    np.testing.assert_allclose(grads["mix"]["weights"].sum(), 0, atol=1e-4)  # the softmax is invariant to a constant
