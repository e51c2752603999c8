"""Overlaps match counted pixels; corners, and boxes without area."""

import jax.numpy as jnp
import numpy as np
import pytest

from lineage.metrics import boxes


def pixels(box, size=24):
    """Return the cells of a grid that lie in a box with integer corners."""
    left, top, right, bottom = box
    mask = np.zeros((size, size), bool)
    mask[top:bottom, left:right] = True
    return mask


def test_overlaps_match_counted_pixels():
    rng = np.random.default_rng(0)
    pairs = np.sort(rng.integers(0, 24, (200, 2, 2, 2)), axis=2)  # pair, box, first and last, x and y
    pairs[..., 1, :] += 1
    pairs = pairs.reshape(200, 2, 4)
    a, b = (jnp.asarray(pairs[:, i], jnp.float32) for i in range(2))
    actual, generalized = boxes.iou(a, b), boxes.generalized_iou(a, b)
    for (first, second), one, other in zip(pairs, actual, generalized):
        both, either = (op(pixels(first), pixels(second)).sum() for op in (np.logical_and, np.logical_or))
        start, end = np.minimum(first, second)[:2], np.maximum(first, second)[2:]
        around = pixels([*start, *end]).sum()
        assert one == pytest.approx(both / either, abs=1e-6)
        assert other == pytest.approx(both / either - (around - either) / around, abs=1e-6)
    assert 0 < actual.mean() < 1
    assert (generalized < 0).any()


def test_formats_and_borders():
    np.testing.assert_allclose(boxes.to_corners(jnp.array([3, 5, 2, 4], jnp.float32)), [2, 3, 4, 7])
    point, inside_out = jnp.array([1, 1, 1, 1], jnp.float32), jnp.array([3, 0, 1, 2], jnp.float32)
    assert boxes.iou(point, point) == boxes.generalized_iou(point, point) == 0
    assert boxes.area(inside_out) == 0
