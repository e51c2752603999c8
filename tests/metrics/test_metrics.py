"""Metrics match scikit-learn and plain formulas, and do not depend on the split and order of the data."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sklearn import metrics as reference

from lineage.metrics.classification import correct, correct_top_k
from lineage.metrics.likelihood import bits, cross_entropy, perplexity
from lineage.metrics.states import F1, Confusion, Matthews, Mean, Total


def cases(seed, n=200, classes=7):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(n, classes)).astype(np.float32), rng.integers(0, classes, n)


def test_accuracies_match_scikit_learn():
    logits, labels = cases(0)
    assert float(correct(jnp.asarray(logits), jnp.asarray(labels)).mean()) == pytest.approx(
        reference.accuracy_score(labels, logits.argmax(1))
    )
    for k in (1, 2, 5, 6):
        ours = float(correct_top_k(jnp.asarray(logits), jnp.asarray(labels), k).mean())
        assert ours == pytest.approx(reference.top_k_accuracy_score(labels, logits, k=k))


def test_equal_logits_do_not_count_in_top_k():
    """Check that a model with equal logits for all classes has a top-k accuracy of 0."""
    assert not bool(correct_top_k(jnp.zeros((1, 10)), jnp.array([3]), 5)[0])


def test_confusion_matches_scikit_learn_without_masked_examples():
    logits, labels = cases(1)
    predictions = logits.argmax(1)
    mask = np.random.default_rng(2).random(len(labels)) < 0.7
    state = Confusion.empty(7).update(jnp.asarray(predictions), jnp.asarray(labels), jnp.asarray(mask))
    expected = reference.confusion_matrix(labels[mask], predictions[mask], labels=range(7))
    np.testing.assert_array_equal(state.compute(), expected)


def test_cross_entropy_matches_scikit_learn_log_loss():
    logits, labels = cases(3)
    probabilities = np.exp(logits.astype(np.float64))
    probabilities /= probabilities.sum(1, keepdims=True)
    ours = cross_entropy(jnp.asarray(logits), jnp.asarray(labels)).mean()
    assert float(ours) == pytest.approx(reference.log_loss(labels, probabilities), rel=1e-6)


def test_label_smoothing_equals_cross_entropy_with_smoothed_targets():
    logits, labels = cases(4)
    log_p = np.asarray(jax.nn.log_softmax(logits))
    target = 0.9 * np.eye(7)[labels] + 0.1 / 7
    found = cross_entropy(jnp.asarray(logits).reshape(40, 5, 7), jnp.asarray(labels).reshape(40, 5), 0.1)
    np.testing.assert_allclose(found.reshape(-1), -(target * log_p).sum(1), rtol=1e-5)


def test_cross_entropy_is_finite_for_huge_logits_and_float32_for_bfloat16():
    logits = jnp.array([[1e4, -1e4], [3e38, 0.0]], jnp.bfloat16)
    loss = cross_entropy(logits, jnp.array([0, 0]))
    assert loss.dtype == jnp.float32
    np.testing.assert_array_equal(loss, [0.0, 0.0])


def test_cross_entropy_of_labels_out_of_range_is_nan():
    loss = cross_entropy(jnp.zeros((4, 3)), jnp.array([-1, 0, 2, 3]))
    np.testing.assert_array_equal(np.isnan(loss), [True, False, False, True])


def test_perplexity_and_bits():
    assert perplexity(math.log(50)) == pytest.approx(50)
    assert perplexity(709.0) == math.exp(709)
    assert perplexity(709.9) == perplexity(1e6) == math.inf
    assert math.isnan(perplexity(math.nan))
    assert bits(math.log(2) * 6, per=3.0) == pytest.approx(2.0)  # 6 bits per token of 3 characters


def test_masked_values_do_not_count():
    state = Mean.empty().update(jnp.array([1.0, jnp.nan, jnp.inf]), jnp.array([True, False, False]))
    assert float(state.compute()) == 1.0


def test_host_states_are_more_precise_than_float32():
    state = Mean(jnp.float32(2.0**24), jnp.float32(2.0**24)).to_host()
    one = Mean.empty().update(jnp.ones(1), jnp.ones(1)).to_host()
    for _ in range(3):
        state = state.merge(one)
    assert state.weight == 2**24 + 3
    assert state.compute().dtype == np.float64


def test_total_adds_means_whose_weight_is_1_or_more():
    sums = [(3.0, 2.0), (1.0, 0.5), (5.0, 1.0)]
    assert Total(tuple(Mean(jnp.float32(total), jnp.float32(weight)) for total, weight in sums)).compute() == 7.5


def test_scores_match_scikit_learn():
    random = np.random.default_rng(0)
    for classes, occurring in ((2, 2), (5, 5), (5, 3)):
        truth, found = random.integers(0, occurring, (2, 300))
        found = np.where(random.random(300) < 0.5, truth, found)
        mask = random.random(300) < 0.8
        args = [jnp.asarray(a) for a in (found, truth, mask)]
        average = "binary" if classes == 2 else "macro"
        expected = reference.f1_score(truth[mask], found[mask], average=average)
        assert float(F1.empty(classes).update(*args).compute()) == pytest.approx(expected, abs=1e-6)
        state = Matthews.empty(classes).update(*args)
        for value in (state, state.to_host()):
            expected = reference.matthews_corrcoef(truth[mask], found[mask])
            assert float(value.compute()) == pytest.approx(expected, abs=1e-6)
    one = jnp.ones(1, int)
    assert float(Matthews.empty(2).compute()) == float(Matthews.empty(2).update(one, one).compute()) == 0
