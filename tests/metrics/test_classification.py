"""Precision, recall, F1, AUROC, rank correlation and calibration match scikit-learn and SciPy."""

import warnings

import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn import metrics as reference

from lineage.metrics.classification import auroc, precision_recall_f1, regression, spearman
from lineage.metrics.states import Confusion, ExpectedCalibrationError

LABELS = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=30)
PAIRS = st.lists(st.tuples(st.sampled_from([0.0, 0.25, 0.5, 1e-3, 1.0, -2.0]), st.booleans()), max_size=30)


@settings(max_examples=80)
@given(LABELS, st.sampled_from([None, "micro", "macro", "weighted"]))
def test_precision_recall_and_f1_match_scikit_learn(pairs, average):
    truth, guesses = np.array(pairs).T
    counts = Confusion.empty(4).update(jnp.asarray(guesses), jnp.asarray(truth)).compute()
    some = {} if average else {"labels": range(4)}
    expected = reference.precision_recall_fscore_support(truth, guesses, average=average, zero_division=0, **some)
    for ours, theirs in zip(precision_recall_f1(np.asarray(counts), average), expected):
        np.testing.assert_allclose(ours, theirs, atol=1e-12)


@settings(max_examples=200)
@given(PAIRS)
def test_auroc_matches_scikit_learn(pairs):
    scores, labels = np.array([s for s, _ in pairs], float), np.array([t for _, t in pairs], bool)
    if labels.all() or not labels.any():
        assert np.isnan(auroc(scores, labels))
    else:
        assert auroc(scores, labels) == pytest.approx(reference.roc_auc_score(labels, scores), abs=1e-12)


@settings(max_examples=200)
@given(st.lists(st.tuples(st.integers(-3, 3), st.integers(-3, 3)), min_size=2, max_size=30))
def test_spearman_matches_scipy(pairs):
    x, y = np.array(pairs, float).T
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = scipy.stats.spearmanr(x, y).statistic
    np.testing.assert_allclose(spearman(x, y), expected, atol=1e-12)


@settings(max_examples=100)
@given(st.lists(st.tuples(st.integers(-3, 3), st.integers(-3, 3)), min_size=1, max_size=30))
def test_scores_of_a_regression_match_scipy(pairs):
    x, y = np.array(pairs, float).T
    actual = regression(1e3 + 1e-3 * x, y)
    expected = {"pearson": 0.0, "spearman": 0.0, "mse": np.mean((1e3 + 1e-3 * x - y) ** 2)}
    if len(x) > 1 and np.ptp(x) and np.ptp(y):
        expected |= {"pearson": scipy.stats.pearsonr(x, y).statistic, "spearman": scipy.stats.spearmanr(x, y).statistic}
    assert actual == pytest.approx(expected, abs=1e-8)


@pytest.mark.thorough
@pytest.mark.parametrize("bins", [10, 2])
def test_calibration_matches_worked_example_in_any_split(bins):
    random = np.random.default_rng(0)
    probabilities, labels = random.dirichlet(np.ones(4) / 2, 500).astype(np.float32), random.integers(0, 4, 500)
    confidence, guesses = probabilities.max(axis=1), probabilities.argmax(axis=1)
    labels = np.where(confidence < 0.5, guesses, labels)  # too low a confidence in some bins, too high in others
    right = guesses == labels
    expected = 0
    for low in np.arange(bins) / bins:
        here = (confidence > low) & (confidence <= low + 1 / bins)
        expected += abs(right[here].sum() - confidence[here].sum()) / 500
    whole = ExpectedCalibrationError.empty(bins).update(jnp.asarray(probabilities), jnp.asarray(labels))
    assert float(whole.compute()) == pytest.approx(expected, abs=1e-6)
    parts = [slice(0, 1), slice(1, 200), slice(200, 500)]
    empty = ExpectedCalibrationError.empty(bins)
    states = [empty.update(jnp.asarray(probabilities[p]), jnp.asarray(labels[p])) for p in parts]
    merged = states[2].to_host().merge(states[0].to_host()).merge(states[1].to_host())
    assert float(merged.compute()) == pytest.approx(expected, abs=1e-6)
    mask = jnp.arange(500) < 200
    masked = empty.update(jnp.asarray(probabilities), jnp.asarray(labels), mask)
    assert float(masked.compute()) == pytest.approx(float(states[0].merge(states[1]).compute()), abs=1e-6)
    sure = ExpectedCalibrationError.empty().update(jnp.eye(4), jnp.arange(4))
    assert float(sure.compute()) == 0


@pytest.mark.parametrize("bins", [13, 100])
def test_bins_of_calibration_include_their_upper_bounds(bins):
    bounds = np.float32(np.arange(bins // 2 + 1, bins + 1) / bins)
    probabilities = jnp.asarray(np.stack([bounds, 1 - bounds], axis=1))
    counts = ExpectedCalibrationError.empty(bins).update(probabilities, jnp.zeros(len(bounds), int)).sums[0]
    assert counts.tolist() == [0] * (bins // 2) + [1] * len(bounds)
