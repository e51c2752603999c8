"""Overlaps match counted pixels and the equations of the papers; conversions between box formats."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

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
    found, generalized = boxes.iou(a, b), boxes.generalized_iou(a, b)
    for (first, second), one, other in zip(pairs, found, generalized):
        both, either = (op(pixels(first), pixels(second)).sum() for op in (np.logical_and, np.logical_or))
        start, end = np.minimum(first, second)[:2], np.maximum(first, second)[2:]
        around = pixels([*start, *end]).sum()
        assert one == pytest.approx(both / either, abs=1e-6)
        assert other == pytest.approx(both / either - (around - either) / around, abs=1e-6)
    assert 0 < found.mean() < 1
    assert (generalized < 0).any()


def by_paper(a, b, complete):
    """Compute DIoU and CIoU (arXiv 1911.08287) box by box in PyTorch."""
    (x1, y1, x2, y2), (u1, v1, u2, v2) = a.unbind(-1), b.unbind(-1)
    shared = (torch.min(x2, u2) - torch.max(x1, u1)).clamp(min=0) * (torch.min(y2, v2) - torch.max(y1, v1)).clamp(min=0)
    overlap = shared / ((x2 - x1) * (y2 - y1) + (u2 - u1) * (v2 - v1) - shared)
    rho = ((x1 + x2 - u1 - u2) / 2) ** 2 + ((y1 + y2 - v1 - v2) / 2) ** 2  # squared distance of the centers
    c = (torch.max(x2, u2) - torch.min(x1, u1)) ** 2 + (torch.max(y2, v2) - torch.min(y1, v1)) ** 2
    value = overlap - rho / c
    if not complete:
        return value
    v = 4 / torch.pi**2 * (torch.atan((u2 - u1) / (v2 - v1)) - torch.atan((x2 - x1) / (y2 - y1))) ** 2  # equation 9
    with torch.no_grad():
        alpha = v / (1 - overlap + v)  # equation 11
    return value - alpha * v


@pytest.mark.parametrize("function", [boxes.distance_iou, boxes.complete_iou])
def test_values_and_gradients_match_the_equations(function):
    rng = np.random.default_rng(1)
    first = rng.uniform(0, 1, (2, 200, 2))
    pairs = np.concatenate([first, first + rng.uniform(0.05, 1, (2, 200, 2))], axis=-1).astype(np.float32)
    value, pull = jax.vjp(function, *pairs)
    a, b = (torch.tensor(each, dtype=torch.float64, requires_grad=True) for each in pairs)
    expected = by_paper(a, b, function is boxes.complete_iou)
    np.testing.assert_allclose(value, expected.detach(), atol=2e-6)
    expected.sum().backward()
    for ours, theirs in zip(pull(jnp.ones(200)), (a, b)):
        np.testing.assert_allclose(ours, theirs.grad, atol=2e-5)


def test_empty_boxes_have_finite_values_and_gradients():
    point, line, far = jnp.array([[1, 1, 1, 1], [0, 0, 2, 0], [3, 3, 4, 4]], jnp.float32)
    for function in (boxes.distance_iou, boxes.complete_iou):
        assert function(point, point) == 0
        assert -1 < function(point, far) < 0
        for pair in ((point, point), (point, far), (line, far)):
            assert all(np.isfinite(part).all() for part in jax.grad(function, (0, 1))(*pair))
    np.testing.assert_allclose(boxes.complete_iou(far, far), 1)


def test_conversions_between_all_formats():
    known = {"xyxy": [1, 2, 4, 8], "xywh": [1, 2, 3, 6], "cxcywh": [2.5, 5, 3, 6]}
    known = {form: jnp.array([values], jnp.float32) for form, values in known.items()}
    for form, values in known.items():
        for to, expected in known.items():
            np.testing.assert_allclose(boxes.convert(values, form, to), expected)
    with pytest.raises(ValueError, match="The box format is 'yxyx': it must be one of xyxy, xywh, cxcywh"):
        boxes.convert(known["xywh"], "xywh", "yxyx")


def test_formats_and_borders():
    centers = jnp.asarray(np.random.default_rng(0).random((5, 3, 4)), jnp.float32)
    np.testing.assert_allclose(boxes.to_centers(boxes.to_corners(centers)), centers, atol=1e-6)
    np.testing.assert_allclose(boxes.to_corners(jnp.array([3, 5, 2, 4], jnp.float32)), [2, 3, 4, 7])
    point, inside_out = jnp.array([1, 1, 1, 1], jnp.float32), jnp.array([3, 0, 1, 2], jnp.float32)
    assert boxes.iou(point, point) == boxes.generalized_iou(point, point) == 0
    assert boxes.area(inside_out) == 0
