"""The loss in blocks of tokens equals that of an array of all logits, with its gradients; the adaptive softmax too."""

from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lineage import models
from lineage.metrics.classification import correct
from lineage.metrics.likelihood import cross_entropy
from lineage.models import Targets
from lineage.models.kernels import vocabulary
from lineage.models.kernels.vocabulary import rows_of_block, scored, token_losses
from lineage.models.layers import AdaptiveEmbed, Embed
from lineage.tasks.causal_lm import CausalLM
from lineage.tasks.sequence_to_sequence import ConditionalLM
from lineage.train.sharding import make_mesh
from tests.tiers import tiered

WORDS, WIDTH, SHAPE = 60, 8, (4, 6)


@pytest.fixture
def small_blocks(monkeypatch):
    """Let 24 tokens take several blocks, of which the last is not full."""
    monkeypatch.setattr(vocabulary, "LOGITS", 20 * WORDS)
    monkeypatch.setattr(vocabulary, "SPARSE_TOKENS", 8)


def targets_of(logits, smoothing=0.0, seed=0):
    """Return targets of which half are the most probable words; a third has weight zero."""
    rng = np.random.default_rng(seed)
    labels = jnp.where(rng.random(SHAPE) < 0.5, logits.argmax(-1), rng.integers(0, WORDS, SHAPE)).astype(jnp.int32)
    return Targets(labels, jnp.asarray(rng.random(SHAPE) < 0.67), smoothing)


def plain(logits, targets):
    """Return the weighted sum of the losses, the losses, and whether they are of the most probable words."""
    loss = cross_entropy(logits, targets.labels, targets.label_smoothing)
    return jnp.where(targets.weights, loss, 0).sum(), (loss, correct(logits, targets.labels))


def assert_same(found, expected, weights, grads, expected_grads):
    assert float(found.total) == pytest.approx(float(expected[0]), rel=1e-6)
    np.testing.assert_allclose(found.loss[weights], expected[1][0][weights], rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(found.correct[weights], expected[1][1][weights])
    assert 0 < found.correct[weights].sum() < weights.sum()
    for mine, other in zip(jax.tree.leaves(grads), jax.tree.leaves(expected_grads), strict=True):
        np.testing.assert_allclose(mine, other, rtol=0, atol=1e-6 * np.abs(other).max())


@tiered(("smoothing", "bias"), [(0.1, True), (0.0, False)])
def test_fused_loss_and_gradients_match(smoothing, bias, normal, small_blocks):
    arguments = (normal(*SHAPE, WIDTH), normal(WORDS, WIDTH), normal(WORDS) if bias else None)

    def logits(x, table, bias):
        return x @ table.T + (0 if bias is None else bias)

    targets = targets_of(logits(*arguments), smoothing)
    whole = jax.jit(jax.value_and_grad(lambda a: plain(logits(*a), targets), has_aux=True))
    expected, expected_grads = whole(arguments)

    def fused(arguments):
        actual = token_losses(*arguments, targets._replace(weights=targets.weights * 0.5))
        return actual.total * 2, actual._replace(total=actual.total * 2)

    (_, actual), grads = jax.jit(jax.value_and_grad(fused, has_aux=True))(arguments)
    assert_same(actual, expected, targets.weights, grads, expected_grads)
    without_gradient = jax.jit(lambda a: fused(a)[1])(arguments)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-6), without_gradient, actual)


@pytest.mark.thorough
@tiered("divisor", [2, 1])
def test_adaptive_softmax_matches_its_log_probabilities(divisor, variables, normal, small_blocks):
    module, x = AdaptiveEmbed(WORDS, WIDTH, (10, 20, 45), divisor), normal(*SHAPE, WIDTH)
    params = variables(module, jnp.zeros((1,), jnp.int32), std=0.7)
    logits = partial(module.apply, method="logits")
    np.testing.assert_allclose(np.exp(logits(params, x)).sum(-1), 1, rtol=1e-5)
    targets = targets_of(logits(params, x))
    assert len(np.unique(np.searchsorted((10, 20, 45), targets.labels, side="right"))) == 4
    whole = jax.jit(jax.value_and_grad(lambda a: plain(logits(*a), targets), has_aux=True))
    expected, expected_grads = whole((params, x))

    def fused(arguments):
        actual = module.apply(*arguments, targets, method="losses")
        return actual.total, actual

    (_, actual), grads = jax.jit(jax.value_and_grad(fused, has_aux=True))((params, x))
    assert_same(actual, expected, targets.weights, grads, expected_grads)


@tiered("divisor", [2, 1])
def test_adaptive_inputs_are_the_projected_rows(divisor, variables):
    module, tokens = AdaptiveEmbed(WORDS, WIDTH, (10, 45), divisor), jnp.asarray([[0, 9, 10], [44, 45, 59]])
    params = variables(module, tokens)
    own = params["params"]
    for token, vector in zip(tokens.reshape(-1), module.apply(params, tokens).reshape(-1, WIDTH), strict=True):
        if divisor == 1:
            expected = own["table"][token]
        else:
            cluster = int(token >= 10) + int(token >= 45)
            expected = own[f"table_{cluster}"][token - (0, 10, 45)[cluster]] @ own[f"projection_{cluster}"]
        np.testing.assert_allclose(vector, expected * WIDTH**0.5, rtol=1e-6, atol=1e-6)


def test_sparse_losses_skip_blocks_without_weights(normal, small_blocks):
    x, table = normal(*SHAPE, WIDTH), normal(WORDS, WIDTH)
    weights = np.zeros(SHAPE, bool)
    weights[1, 2] = weights[3] = True
    targets = Targets(jnp.full(SHAPE, 7), jnp.asarray(weights))
    total, expected = scored(x, table, None, targets)
    found_total, actual = scored(x, table, None, targets, sparse=True)
    assert float(found_total) == pytest.approx(float(total), rel=1e-6)
    assert float(total) == pytest.approx(float(expected.loss[weights].sum()), rel=1e-6)
    np.testing.assert_allclose(actual.loss[weights], expected.loss[weights], rtol=1e-6)
    assert (actual.normalizer == 0).sum() == 24 - 8  # one block of eight tokens was computed


@tiered("sizes", [(2, 1, 2, 1), (1, 4, 1, 1), (8, 1, 1, 1)])
def test_devices_of_a_mesh_share_the_tokens(sizes, normal, small_blocks):
    """Check four examples on meshes of four devices, and on eight, which they do not divide over."""
    mesh = make_mesh(*sizes, devices=jax.devices()[: np.prod(sizes)])
    x, table, bias = normal(*SHAPE, WIDTH), normal(WORDS, WIDTH), normal(WORDS)
    targets = targets_of(x @ table.T + bias)

    def loss(arguments):
        total, scores = scored(*arguments, targets, sparse=True)
        return total, scores

    def on_mesh(arguments):
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return loss(arguments)

    (total, scores), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))((x, table, bias))
    with jax.set_mesh(mesh):
        (actual, others), shared = jax.jit(jax.value_and_grad(on_mesh, has_aux=True))((x, table, bias))
    assert float(actual) == pytest.approx(float(total), rel=1e-6)
    np.testing.assert_allclose(others.loss[targets.weights], scores.loss[targets.weights], rtol=1e-6)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), shared, grads)


@pytest.mark.thorough
def test_label_that_is_not_a_word_has_no_loss(variables, normal):
    x, labels = normal(1, 4, WIDTH), jnp.asarray([[-1, WORDS, 3, 50]])
    for module in (Embed(WORDS, WIDTH), AdaptiveEmbed(WORDS, WIDTH, (10, 20))):
        params = variables(module, jnp.zeros((1,), jnp.int32))
        actual = module.apply(params, x, Targets(labels, jnp.ones((1, 4))), method="losses")
        np.testing.assert_array_equal(np.isnan(actual.loss), [[True, True, False, False]])
        assert not actual.correct[0, :2].any()


@pytest.mark.thorough
@tiered(
    ("name", "kind", "smoothing"),
    [("gpt", CausalLM, 0.1), ("llama", CausalLM, 0.0), ("transformer_xl", CausalLM, 0.0), ("gpt", ConditionalLM, 0.1)],
)
def test_causal_language_models_may_fuse_the_loss(name, kind, smoothing, variables, small_blocks):
    """Check the loss, its weight, the accuracy and all gradients of the task."""
    model = models.build(name, vocab_size=WORDS, max_length=8, depth=1, width=8, num_heads=2)
    rng = np.random.default_rng(0)
    tokens, targets = (jnp.asarray(rng.integers(0, WORDS, SHAPE), jnp.int32) for _ in range(2))
    batch = {"tokens": tokens, "targets": targets, "mask": jnp.asarray(rng.random(SHAPE) < 0.67)}
    task, params = kind(label_smoothing=smoothing), variables(model, tokens)

    def result(model):
        def loss(params):
            total, *rest = nn.apply(task.loss, model)(params, batch, rngs={"dropout": jax.random.key(0)})
            return total, rest

        return jax.jit(jax.value_and_grad(loss, has_aux=True))(params)

    found, expected = result(model.clone(fused_loss=True)), result(model)
    assert jax.tree.leaves(expected[0])[0] > 1
    for mine, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        # The gradient of a key's bias is zero but for rounding.
        np.testing.assert_allclose(mine, other, rtol=0, atol=2e-6 * np.abs(other).max() + 1e-7)
    unsmoothed = nn.apply(kind(label_smoothing=0.0).loss, model)(params, batch)[0]
    for each in (model, model.clone(fused_loss=True)):  # without dropout, labels are not smoothed
        np.testing.assert_allclose(nn.apply(task.loss, each)(params, batch)[0], unsmoothed, rtol=1e-6)


@pytest.mark.parametrize("kind", [CausalLM, ConditionalLM])
def test_fused_losses_have_no_array_of_all_logits(kind, variables):
    model = models.build("gpt", vocab_size=WORDS, max_length=8, depth=1, width=8, num_heads=2)
    tokens = jnp.zeros(SHAPE, jnp.int32)
    batch = {"tokens": tokens, "targets": tokens, "mask": tokens == 0}

    def computes_logits(model):
        loss = nn.apply(kind().loss, model)
        return f"[{SHAPE[0]},{SHAPE[1]},{WORDS}]" in str(jax.make_jaxpr(loss)(variables(model, tokens), batch))

    assert computes_logits(model)
    assert not computes_logits(model.clone(fused_loss=True))


def test_block_sizes():
    """Check that there are as few blocks as possible, and that sparse blocks are small."""
    assert rows_of_block(9000, 20_003, sparse=False) == 3000
    assert rows_of_block(9000, 160_000, sparse=True) == 416
    assert rows_of_block(9000, 20_000, sparse=True) == 504
    assert rows_of_block(5, 20, sparse=False) == 5
    assert rows_of_block(64, 2**30, sparse=False) == 8


@pytest.mark.parametrize("cutoffs", [(), (0, 5), (20, 10), (10, 60)])
def test_cutoffs_that_do_not_rise_raise(cutoffs):
    with pytest.raises(ValueError, match="cutoffs is"):
        AdaptiveEmbed(WORDS, WIDTH, cutoffs).init(jax.random.key(0), jnp.zeros((1,), jnp.int32))


@pytest.mark.thorough
def test_unsupported_options_raise(variables, normal):
    with pytest.raises(ValueError, match="divisor is 4: the vectors of the last cluster would be empty"):
        AdaptiveEmbed(WORDS, WIDTH, (10, 20), 4).init(jax.random.key(0), jnp.zeros((1,), jnp.int32))
    module = AdaptiveEmbed(WORDS, WIDTH, (10, 20))
    params = variables(module, jnp.zeros((1,), jnp.int32))
    targets = Targets(jnp.zeros((1, 2), jnp.int32), jnp.ones((1, 2)), 0.1)
    with pytest.raises(ValueError, match=r"label_smoothing is 0.1: it must be 0 with an adaptive softmax"):
        module.apply(params, normal(1, 2, WIDTH), targets, method="losses")
