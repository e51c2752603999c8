"""Dropout: its rate, its independence of positions and seeds, and its gradient."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lineage.models.layers.attend import DropWeights
from lineage.models.layers.dropout import Dropout, dropped

KEY = {"dropout": jax.random.key(0)}


def zeros(rate, seed, shape=(4, 8, 128, 128)):
    return np.asarray(dropped(rate, jnp.ones(shape), jnp.int32(seed)) == 0, np.float64)


def zero_weights(rate, seed):
    return np.asarray(DropWeights(jnp.int32(seed), rate)(jnp.ones((4, 8, 128, 128))) == 0, np.float64)


def correlation(first, second):
    """Return the correlation, in standard deviations of that of independent values."""
    return np.corrcoef(first.ravel(), second.ravel())[0, 1] * first.size**0.5


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_values_are_dropped_at_the_rate_along_every_axis(rate):
    actual, deviation = zeros(rate, 0), (rate * (1 - rate)) ** 0.5
    for axes in [(0, 1, 2, 3), (1, 2, 3), (2, 3), (0, 1, 2), (0, 1, 3), (0, 2, 3)]:
        mean = actual.mean(axis=axes)
        assert np.abs(mean - rate).max() < 5 * deviation * (mean.size / actual.size) ** 0.5


@pytest.mark.parametrize("make", [zeros, zero_weights])
def test_neighbors_and_seeds_are_independent(make):
    actual = make(0.2, 0)
    for axis in range(4):
        even, odd = (np.take(actual, range(start, actual.shape[axis], 2), axis) for start in (0, 1))
        assert abs(correlation(even, odd)) < 5
    for seed in (1, 2, 2**31 - 1, -1):
        assert abs(correlation(actual, make(0.2, seed))) < 5


def test_dropout_has_the_expected_value_and_its_gradient_the_same_zeros():
    x = jax.random.normal(jax.random.key(1), (64, 1000))
    out, pull = jax.vjp(lambda x: Dropout(0.25).apply({}, x, rngs=KEY), x)
    kept = out != 0
    np.testing.assert_allclose(out, jnp.where(kept, x / 0.75, 0), rtol=1e-6)
    np.testing.assert_allclose(pull(x)[0], out, rtol=1e-6)
    np.testing.assert_allclose(jax.jvp(lambda x: Dropout(0.25).apply({}, x, rngs=KEY), (x,), (x,))[1], out, rtol=1e-6)
    assert float(kept.mean()) == pytest.approx(0.75, abs=5 * (0.1875 / x.size) ** 0.5)


def test_dropout_needs_a_rate_and_a_key():
    x = jnp.ones(100)
    assert (Dropout(0.5).apply({}, x) == 1).all()
    assert (Dropout(0.0).apply({}, x, rngs=KEY) == 1).all()
    assert (Dropout(0.5).apply({}, x, rngs=KEY) == 0).any()
    assert Dropout(0.5).apply({}, x.astype(jnp.bfloat16), rngs=KEY).dtype == jnp.bfloat16


def test_dropout_drops_the_same_values_with_64_bit_types():
    x = jnp.ones((8, 16), jnp.float32)
    expected = Dropout(0.5).apply({}, x, rngs=KEY)
    with jax.enable_x64(True):
        np.testing.assert_array_equal(Dropout(0.5).apply({}, x, rngs=KEY), expected)


def test_two_layers_and_two_steps_drop_different_values():
    x, other = jnp.ones((8, 512)), {"dropout": jax.random.key(1)}
    first, second = (np.asarray(Dropout(0.5).apply({}, x, rngs=rngs)) for rngs in (KEY, other))
    assert abs(correlation(first, second)) < 5
