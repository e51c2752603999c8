"""Boxes: against counted pixels, and against each other's forms."""

import jax.numpy as jnp
import numpy as np
import pytest

from metrics import boxes


def pixels(box, size=24):
    """Which cells of a grid lie in a box of whole numbers."""
    left, top, right, bottom = box
    mask = np.zeros((size, size), bool)
    mask[top:bottom, left:right] = True
    return mask


def test_overlaps_are_those_of_counted_pixels():
    rng = np.random.default_rng(0)
    pairs = np.sort(rng.integers(0, 24, (200, 2, 2, 2)), axis=2)  # pair, box, first and last, x and y
    pairs[..., 1, :] += 1
    pairs = pairs.reshape(200, 2, 4)
    a, b = (jnp.asarray(pairs[:, i], jnp.float32) for i in range(2))
    found, generalised = boxes.iou(a, b), boxes.generalised_iou(a, b)
    for (first, second), one, other in zip(pairs, found, generalised):
        both, either = (op(pixels(first), pixels(second)).sum() for op in (np.logical_and, np.logical_or))
        start, end = np.minimum(first, second)[:2], np.maximum(first, second)[2:]
        around = pixels([*start, *end]).sum()
        assert one == pytest.approx(both / either, abs=1e-6)
        assert other == pytest.approx(both / either - (around - either) / around, abs=1e-6)
    assert 0 < found.mean() < 1
    assert (generalised < 0).any()


def test_forms_and_borders():
    centres = jnp.asarray(np.random.default_rng(0).random((5, 3, 4)), jnp.float32)
    np.testing.assert_allclose(boxes.to_centres(boxes.to_corners(centres)), centres, atol=1e-6)
    np.testing.assert_allclose(boxes.to_corners(jnp.array([3, 5, 2, 4], jnp.float32)), [2, 3, 4, 7])
    point, inside_out = jnp.array([1, 1, 1, 1], jnp.float32), jnp.array([3, 0, 1, 2], jnp.float32)
    assert boxes.iou(point, point) == boxes.generalised_iou(point, point) == 0
    assert boxes.area(inside_out) == 0
