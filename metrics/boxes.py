"""Boxes: their forms, and how well two overlap. All broadcast; a box is the last axis."""

import jax.numpy as jnp
from jaxtyping import Array, Float


def to_corners(boxes: Float[Array, "*N 4"]) -> Float[Array, "*N 4"]:
    """(centre x, centre y, width, height) as (left, top, right, bottom)."""
    centre, half = boxes[..., :2], boxes[..., 2:] / 2
    return jnp.concatenate([centre - half, centre + half], axis=-1)


def to_centres(boxes: Float[Array, "*N 4"]) -> Float[Array, "*N 4"]:
    """(left, top, right, bottom) as (centre x, centre y, width, height)."""
    first, last = boxes[..., :2], boxes[..., 2:]
    return jnp.concatenate([(first + last) / 2, last - first], axis=-1)


def area(boxes: Float[Array, "*N 4"]) -> Float[Array, "*N"]:
    """Of boxes by their corners; 0 of those that are turned inside out."""
    return jnp.prod(jnp.maximum(boxes[..., 2:] - boxes[..., :2], 0), axis=-1)


def iou(a: Float[Array, "*#N 4"], b: Float[Array, "*#N 4"]) -> Float[Array, "*#N"]:
    """Intersection over union of boxes by their corners; 0 of two without area."""
    return _iou(a, b)[0]


def generalised_iou(a: Float[Array, "*#N 4"], b: Float[Array, "*#N 4"]) -> Float[Array, "*#N"]:
    """IoU, less the part of the smallest box around both that neither fills: from -1 to 1 (arXiv 1902.09630)."""
    value, union = _iou(a, b)
    around = area(jnp.concatenate([jnp.minimum(a, b)[..., :2], jnp.maximum(a, b)[..., 2:]], axis=-1))
    return value - (around - union) / jnp.where(around > 0, around, 1)


def _iou(a, b):
    inside = area(jnp.concatenate([jnp.maximum(a, b)[..., :2], jnp.minimum(a, b)[..., 2:]], axis=-1))
    union = area(a) + area(b) - inside
    return inside / jnp.where(union > 0, union, 1), union
