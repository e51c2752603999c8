"""Bipartite matching on the device matches SciPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.optimize import linear_sum_assignment

from lineage.tasks.matching import match


@pytest.mark.parametrize(("targets", "queries"), [(1, 1), (3, 7), (12, 12)])
def test_matching_has_minimum_cost(targets, queries):
    rng = np.random.default_rng(targets)
    cost = rng.standard_normal((40, targets, queries)).astype(np.float32)
    cost[::4] += 3 * rng.standard_normal(cost[::4, :, :1].shape)  # rows with different means
    cost[1::4] = cost[1::4, :, :1] + cost[1::4, :1] + 0.1 * cost[1::4]  # long augmenting paths
    real = rng.random((40, targets)) < np.linspace(0, 1.2, 40)[:, None]
    halves = np.split(cost, 2), np.split(real, 2)  # the first half has no example without padding
    found = np.concatenate([jax.jit(match)(*map(jnp.asarray, half)) for half in zip(*halves)])
    for one, mask, choice in zip(cost, real, found):
        np.testing.assert_array_equal(choice[mask], linear_sum_assignment(one[mask])[1])
        assert (choice[~mask] == queries).all()


def test_nonfinite_costs_are_matched_last():
    cost = jnp.asarray([[[jnp.nan, 5.0, 1.0], [0.0, jnp.inf, 1.5]]])
    assert match(cost, jnp.ones((1, 2), bool)).tolist() == [[2, 0]]
