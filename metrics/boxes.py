"""Boxes: their forms, and how well two overlap. All broadcast; a box is the last axis."""

import jax
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


def convert(boxes: Float[Array, "*N 4"], form: str, to: str) -> Float[Array, "*N 4"]:
    """Boxes of one form in another: corners "xyxy", "xywh" (left, top, width, height), centres "cxcywh".

    Raises:
        ValueError: a form is none of these.
    """
    if unknown := {form, to} - _FORMS.keys():
        raise ValueError(f"the form of boxes is {min(unknown)!r}: it must be {', '.join(_FORMS)}.")
    return _FORMS[to][1](_FORMS[form][0](boxes))


_FORMS = {  # to corners, and back
    "xyxy": (jnp.asarray, jnp.asarray),
    "xywh": (lambda a: a.at[..., 2:].add(a[..., :2]), lambda a: a.at[..., 2:].add(-a[..., :2])),
    "cxcywh": (to_corners, to_centres),
}


def area(boxes: Float[Array, "*N 4"]) -> Float[Array, "*N"]:
    """Of boxes by their corners; 0 of those that are turned inside out."""
    return jnp.prod(jnp.maximum(boxes[..., 2:] - boxes[..., :2], 0), axis=-1)


def iou(a: Float[Array, "*#N 4"], b: Float[Array, "*#N 4"]) -> Float[Array, "*#N"]:
    """Intersection over union of boxes by their corners; 0 of two without area."""
    return _iou(a, b)[0]


def generalised_iou(a: Float[Array, "*#N 4"], b: Float[Array, "*#N 4"]) -> Float[Array, "*#N"]:
    """IoU, less the part of the smallest box around both that neither fills: from -1 to 1 (arXiv 1902.09630)."""
    value, union = _iou(a, b)
    around = area(_around(a, b))
    return value - (around - union) / jnp.where(around > 0, around, 1)


def distance_iou(a: Float[Array, "*#N 4"], b: Float[Array, "*#N 4"]) -> Float[Array, "*#N"]:
    """IoU, less the squared distance of the centres in that of the corners around both: from -1 to 1
    (arXiv 1911.08287, equation 7)."""
    apart = to_centres(a)[..., :2] - to_centres(b)[..., :2]
    diagonal = (to_centres(_around(a, b))[..., 2:] ** 2).sum(axis=-1)
    return iou(a, b) - (apart**2).sum(axis=-1) / jnp.where(diagonal > 0, diagonal, 1)


def complete_iou(a: Float[Array, "*#N 4"], b: Float[Array, "*#N 4"]) -> Float[Array, "*#N"]:
    """`distance_iou`, less how far the ratios of the sides are apart, from 0 to 1, weighted by a factor that the
    gradient takes for a constant (arXiv 1911.08287, equations 8 to 11)."""
    first, second = (jnp.maximum(boxes[..., 2:] - boxes[..., :2], 0) for boxes in (a, b))
    unlike = 4 / jnp.pi**2 * (_slope(first) - _slope(second)) ** 2
    whole = 1 - iou(a, b) + unlike
    weight = jax.lax.stop_gradient(unlike / jnp.where(whole > 0, whole, 1))
    return distance_iou(a, b) - weight * unlike


def _slope(sides):
    """The angle whose tangent is width / height; 0 of a point."""
    width, height = sides[..., 0], sides[..., 1]
    return jnp.arctan2(width, jnp.where((width > 0) | (height > 0), height, 1))


def _around(a, b):
    """The smallest box around both."""
    return jnp.concatenate([jnp.minimum(a, b)[..., :2], jnp.maximum(a, b)[..., 2:]], axis=-1)


def _iou(a, b):
    inside = area(jnp.concatenate([jnp.maximum(a, b)[..., :2], jnp.minimum(a, b)[..., 2:]], axis=-1))
    union = area(a) + area(b) - inside
    return inside / jnp.where(union > 0, union, 1), union
