"""Metric states give the same result for any split and merge order of the data; invalid data gives nan."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lineage.metrics import states
from lineage.metrics.classification import auroc, correct, correct_top_k, spearman
from lineage.metrics.states import F1, Confusion, ExpectedCalibrationError, Matthews, Mean, Total

CLASSES, SIZE = 3, 24
RANDOM = np.random.default_rng(0)
LABELS, GUESSES = RANDOM.integers(0, CLASSES, (2, SIZE))
PROBABILITIES = RANDOM.dirichlet(np.ones(CLASSES), SIZE).astype(np.float32)
X, Y = RANDOM.normal(size=(2, SIZE)).astype(np.float32)
MASK = RANDOM.random(SIZE) < 0.8


def confusion(kind):
    return jax.jit(lambda mask: kind.empty(CLASSES).update(jnp.asarray(GUESSES), jnp.asarray(LABELS), mask & MASK))


def mean(mask):
    return Mean.empty().update(jnp.asarray(X), mask & MASK)


def calibration(mask):
    return ExpectedCalibrationError.empty(5).update(jnp.asarray(PROBABILITIES), jnp.asarray(LABELS), mask)


UPDATED = {  # state -> function from a mask of examples to the state of the selected examples
    Mean: jax.jit(mean),
    Total: jax.jit(lambda mask: Total((mean(mask), mean(mask & (Y > 0))))),
    Confusion: confusion(Confusion),
    F1: confusion(F1),
    Matthews: confusion(Matthews),
    ExpectedCalibrationError: jax.jit(
        lambda s: ExpectedCalibrationError.empty(5).update(jnp.asarray(PROBABILITIES), jnp.asarray(LABELS), s)
    ),
}


def test_every_state_has_a_case():
    kinds = {value for value in vars(states).values() if isinstance(value, type) and issubclass(value, states.State)}
    assert kinds - {states.State} == {*UPDATED}


@pytest.mark.parametrize("kind", UPDATED, ids=lambda kind: kind.__name__)
@settings(max_examples=50)
@given(st.lists(st.integers(0, 3), min_size=SIZE, max_size=SIZE), st.randoms(use_true_random=False))
def test_result_does_not_depend_on_split_and_order(kind, part_of, random):
    parts = [UPDATED[kind](np.array(part_of) == part).to_host() for part in range(4)]
    while len(parts) > 1:  # merged in any order, starting with any two
        random.shuffle(parts)
        parts.append(parts.pop().merge(parts.pop()))
    actual, whole = parts[0].compute(), UPDATED[kind](np.ones(SIZE, bool)).to_host().compute()
    if kind is Confusion:
        np.testing.assert_array_equal(actual, whole)
    else:
        assert np.isfinite(whole)
        np.testing.assert_allclose(actual, whole, atol=1e-6)


@pytest.mark.parametrize("kind", [Confusion, F1, Matthews])
@pytest.mark.parametrize(("guess", "label"), [(CLASSES, 0), (0, CLASSES), (-1, 1), (1, -1)])
def test_labels_out_of_range_give_nan(kind, guess, label):
    columns = [jnp.array([0, 1, 2, other]) for other in (guess, label)]
    masked = kind.empty(CLASSES).update(*columns, jnp.array([True, True, True, False]))
    assert masked.counts.sum() == 3
    assert np.isfinite(masked.compute()).all()
    state = kind.empty(CLASSES).update(*columns)
    for each in (state, state.to_host().merge(masked.to_host())):
        if kind is Confusion:
            with pytest.raises(ValueError, match=r"1 examples have a class that is not from 0 to 2\."):
                each.compute()
        else:
            assert np.isnan(each.compute())


@pytest.mark.parametrize(
    ("probabilities", "label"),
    [([0.5, 0.5], 2), ([0.5, 0.5], -1), ([0.5, np.nan], 0), ([3.0, 1.0], 0), ([-0.5, 1.5], 1), ([0.0, 1.5], 1)],
)
def test_calibration_of_invalid_probabilities_is_nan(probabilities, label):
    rows, labels = jnp.array([[0.5, 0.5], probabilities]), jnp.array([0, label])
    assert np.isnan(ExpectedCalibrationError.empty().update(rows, labels).compute())
    assert ExpectedCalibrationError.empty().update(rows, labels, jnp.array([True, False])).compute() == 0.5


@pytest.mark.parametrize("size", [10**4, 10**8])
def test_matthews_correlation_of_a_rare_class(size):
    counts = np.array([[size - 2, 1], [0, 1]])  # one of size examples is positive; it is found, with a false alarm
    state = Matthews(counts, np.zeros((), int))
    assert float(state.compute()) == pytest.approx(np.sqrt((size - 2) / (size - 1) / 2), rel=1e-12)
    on_device = Matthews(jnp.asarray(counts, jnp.int32), jnp.zeros((), jnp.int32))
    assert float(on_device.compute()) == pytest.approx(np.sqrt(0.5), rel=1e-3)


def test_empty_states():
    for state in (Mean.empty(), ExpectedCalibrationError.empty()):
        assert np.isnan(state.compute())
        assert np.isnan(state.to_host().compute())
    for state in (F1.empty(2), F1.empty(3), Matthews.empty(2)):
        assert state.compute() == state.to_host().compute() == 0


def test_nan_logits_are_never_correct():
    logits = jnp.array([[np.nan, 0.0, 1.0], [0.0, 1.0, np.nan], [0.0, 1.0, 2.0], [0.0, 1.0, 2.0], [0.0, 1.0, 2.0]])
    labels = jnp.array([0, 1, 3, -1, 2])
    assert correct(logits, labels).tolist() == [False, False, False, False, True]
    assert correct_top_k(logits, labels, 1).tolist() == [False, False, False, False, True]
    assert correct_top_k(logits, labels, 2).tolist() == [False, True, False, False, True]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: auroc([0.1, np.nan], [True, False]), "Value 1 is nan"),
        (lambda: auroc([0.1, 0.2], [1, 0]), "The labels have type int64: they must be boolean"),
        (lambda: auroc([0.1, 0.2], [True]), r"The values have shapes \(2,\) and \(1,\): they must have the same shape"),
        (lambda: spearman([0.1, 0.2], [np.nan, 1.0]), "Value 0 is nan"),
        (lambda: spearman(*np.zeros((2, 1, 2))), r"The values have shapes \(1, 2\) and \(1, 2\)"),
    ],
)
def test_invalid_inputs_raise(call, message):
    with pytest.raises(ValueError, match=message):
        call()


COLUMN, LINE = np.zeros((4, 1), int), np.zeros(4, int)


@pytest.mark.parametrize(
    "update",
    [
        lambda: Mean.empty().update(jnp.ones((4, 1)), jnp.ones(4)),
        lambda: Confusion.empty(2).update(jnp.asarray(LINE), jnp.asarray(COLUMN)),
        lambda: F1.empty(2).update(jnp.asarray(LINE), jnp.asarray(LINE[:1])),
        lambda: Matthews.empty(2).update(jnp.asarray(LINE), jnp.asarray(LINE), jnp.ones((4, 1), bool)),
        lambda: ExpectedCalibrationError.empty().update(jnp.full((4, 2), 0.5), jnp.asarray(COLUMN)),
        lambda: correct(jnp.ones((4, 2)), jnp.asarray(COLUMN)),
    ],
)
def test_columns_are_not_broadcast(update):
    """Otherwise, each prediction would be compared with the label of every example."""
    with pytest.raises(ValueError, match=r"have the shape \(4.*: they must be equal"):
        update()


@pytest.mark.parametrize("size", [2, 5])
@pytest.mark.parametrize("kind", [Confusion, F1, Matthews])
def test_booleans_are_the_classes_0_and_1(kind, size):
    """Otherwise, they would be masks of the rows and columns, without an error if there are two of them."""
    predictions, labels = np.arange(size) % 2 == 0, np.arange(size) > 0
    expected = kind.empty(2).update(jnp.asarray(predictions, int), jnp.asarray(labels, int))
    for types in [(bool, bool), (bool, int), (int, bool)]:
        arrays = [jnp.asarray(array, dtype) for array, dtype in zip((predictions, labels), types)]
        for update in (kind.update, jax.jit(kind.update)):
            np.testing.assert_array_equal(update(kind.empty(2), *arrays).counts, expected.counts)
    top = correct_top_k(jnp.array([[2.0, 1], [0, 1]]), jnp.array([True, True]), 1)
    assert top.tolist() == [False, True]
