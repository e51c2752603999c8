"""Overlaps of boxes. All functions broadcast; the last axis holds the four numbers of a box."""

import jax.numpy as jnp
from jaxtyping import Array, Float


def to_corners(boxes: Float[Array, "*N 4"]) -> Float[Array, "*N 4"]:
    """Convert (center x, center y, width, height) to (left, top, right, bottom)."""
    center, half = boxes[..., :2], boxes[..., 2:] / 2
    return jnp.concatenate([center - half, center + half], axis=-1)


def area(boxes: Float[Array, "*N 4"]) -> Float[Array, "*N"]:
    """Return the areas of boxes (left, top, right, bottom); 0 where right < left or bottom < top."""
    return jnp.prod(jnp.maximum(boxes[..., 2:] - boxes[..., :2], 0), axis=-1)


def iou(a: Float[Array, "*#N 4"], b: Float[Array, "*#N 4"]) -> Float[Array, "*#N"]:
    """Return the intersection over union of boxes (left, top, right, bottom); 0 if the union is empty."""
    return _iou(a, b)[0]


def generalized_iou(a: Float[Array, "*#N 4"], b: Float[Array, "*#N 4"]) -> Float[Array, "*#N"]:
    """Return the generalized IoU of boxes (left, top, right, bottom), from -1 to 1 (arXiv 1902.09630, algorithm 1)."""
    value, union = _iou(a, b)
    enclosing = area(jnp.concatenate([jnp.minimum(a, b)[..., :2], jnp.maximum(a, b)[..., 2:]], axis=-1))
    return value - (enclosing - union) / jnp.where(enclosing > 0, enclosing, 1)


def _iou(a, b):
    inside = area(jnp.concatenate([jnp.maximum(a, b)[..., :2], jnp.minimum(a, b)[..., 2:]], axis=-1))
    union = area(a) + area(b) - inside
    return inside / jnp.where(union > 0, union, 1), union
