"""Box formats and overlaps. All functions broadcast; the last axis holds the four numbers of a box."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def to_corners(boxes: Float[Array, "*N 4"]) -> Float[Array, "*N 4"]:
    """Convert (center x, center y, width, height) to (left, top, right, bottom)."""
    center, half = boxes[..., :2], boxes[..., 2:] / 2
    return jnp.concatenate([center - half, center + half], axis=-1)


def to_centers(boxes: Float[Array, "*N 4"]) -> Float[Array, "*N 4"]:
    """Convert (left, top, right, bottom) to (center x, center y, width, height)."""
    first, last = boxes[..., :2], boxes[..., 2:]
    return jnp.concatenate([(first + last) / 2, last - first], axis=-1)


def convert(boxes: Float[Array, "*N 4"], source: str, target: str) -> Float[Array, "*N 4"]:
    """Convert boxes between "xyxy" (left, top, right, bottom), "xywh" (left, top, width, height) and "cxcywh" (center,
    width, height)."""
    if unknown := {source, target} - _FORMATS.keys():
        raise ValueError(f"The box format is {min(unknown)!r}: it must be one of {', '.join(_FORMATS)}.")
    return _FORMATS[target][1](_FORMATS[source][0](boxes))


_FORMATS = {  # format -> (to corners, from corners)
    "xyxy": (jnp.asarray, jnp.asarray),
    "xywh": (lambda a: a.at[..., 2:].add(a[..., :2]), lambda a: a.at[..., 2:].add(-a[..., :2])),
    "cxcywh": (to_corners, to_centers),
}


def area(boxes: Float[Array, "*N 4"]) -> Float[Array, "*N"]:
    """Return the areas of boxes "xyxy"; 0 where right < left or bottom < top."""
    return jnp.prod(jnp.maximum(boxes[..., 2:] - boxes[..., :2], 0), axis=-1)


def iou(a: Float[Array, "*#N 4"], b: Float[Array, "*#N 4"]) -> Float[Array, "*#N"]:
    """Return the intersection over union of boxes "xyxy"; 0 if the union is empty."""
    return _iou(a, b)[0]


def generalized_iou(a: Float[Array, "*#N 4"], b: Float[Array, "*#N 4"]) -> Float[Array, "*#N"]:
    """Return the generalized IoU of boxes "xyxy", from -1 to 1 (arXiv 1902.09630, algorithm 1)."""
    value, union = _iou(a, b)
    enclosing = area(_enclosing(a, b))
    return value - (enclosing - union) / jnp.where(enclosing > 0, enclosing, 1)


def distance_iou(a: Float[Array, "*#N 4"], b: Float[Array, "*#N 4"]) -> Float[Array, "*#N"]:
    """Return the distance IoU of boxes "xyxy", from -1 to 1 (arXiv 1911.08287, equation 7)."""
    offset = to_centers(a)[..., :2] - to_centers(b)[..., :2]
    diagonal = (to_centers(_enclosing(a, b))[..., 2:] ** 2).sum(axis=-1)
    return iou(a, b) - (offset**2).sum(axis=-1) / jnp.where(diagonal > 0, diagonal, 1)


def complete_iou(a: Float[Array, "*#N 4"], b: Float[Array, "*#N 4"]) -> Float[Array, "*#N"]:
    """Return the complete IoU of boxes "xyxy" (arXiv 1911.08287, equations 8 to 11).

    The weight of the aspect-ratio term is a constant in the gradient.
    """
    first, second = (jnp.maximum(boxes[..., 2:] - boxes[..., :2], 0) for boxes in (a, b))
    aspect = 4 / jnp.pi**2 * (_slope(first) - _slope(second)) ** 2
    whole = 1 - iou(a, b) + aspect
    weight = jax.lax.stop_gradient(aspect / jnp.where(whole > 0, whole, 1))
    return distance_iou(a, b) - weight * aspect


def _slope(sides):
    """Return arctan(width / height); 0 for a point."""
    width, height = sides[..., 0], sides[..., 1]
    return jnp.arctan2(width, jnp.where((width > 0) | (height > 0), height, 1))


def _enclosing(a, b):
    """Return the smallest box that encloses both."""
    return jnp.concatenate([jnp.minimum(a, b)[..., :2], jnp.maximum(a, b)[..., 2:]], axis=-1)


def _iou(a, b):
    inside = area(jnp.concatenate([jnp.maximum(a, b)[..., :2], jnp.minimum(a, b)[..., 2:]], axis=-1))
    union = area(a) + area(b) - inside
    return inside / jnp.where(union > 0, union, 1), union
