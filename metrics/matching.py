"""Matching of detections to annotated objects over a whole data set, for `metrics.detection`."""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

THRESHOLDS = np.linspace(0.5, 0.95, 10)  # IoU thresholds
AREAS = {"all": (0, 1e10), "small": (0, 32**2), "medium": (32**2, 96**2), "large": (96**2, 1e10)}  # in square pixels


class Image(NamedTuple):
    """The N detections and M annotated objects of an image, and their overlaps."""

    scores: Float[np.ndarray, "N"]
    classes: Int[np.ndarray, "N"]
    areas: Float[np.ndarray, "N"]
    true_classes: Int[np.ndarray, "M"]
    true_areas: Float[np.ndarray, "M"]
    true_crowd: Bool[np.ndarray, "M"]
    true_ignored: Bool[np.ndarray, "M"]
    overlaps: Float[np.ndarray, "N M"]


class FlatDetections(NamedTuple):
    """N detections, grouped by image and class, in descending order of their scores."""

    scores: np.ndarray
    classes: np.ndarray
    areas: np.ndarray
    keys: np.ndarray  # one number per image and class
    ranks: np.ndarray  # position within its image and class
    overlaps: np.ndarray  # flattened overlaps of all images
    rows: np.ndarray  # start of the row of each detection in `overlaps`


class Truths(NamedTuple):
    """M annotated objects, grouped by image and class."""

    classes: np.ndarray
    areas: np.ndarray
    crowd: np.ndarray
    ignored: np.ndarray
    keys: np.ndarray  # one number per image and class
    columns: np.ndarray  # column among the overlaps of a detection


def flatten(images: Mapping[int, Image], num_classes: int, limit: int | float) -> tuple[FlatDetections, Truths]:
    """Concatenate images; at most `limit` detections per image and class are kept, those with the highest scores."""
    kinds = (float, int, float, int, float, bool, bool)
    nothing = Image._make([*(np.zeros(0, kind) for kind in kinds), np.zeros((0, 0))])
    ordered = [*(images[number] for number in sorted(images)), nothing]
    merged = Image(*(np.concatenate([field.ravel() for field in fields]) for fields in zip(*ordered)))
    counts = np.array([image.overlaps.shape for image in ordered])
    starts, sizes = np.cumsum(counts, axis=0) - counts, counts.prod(axis=1)
    of_detection, of_truth = (np.repeat(np.arange(len(ordered)), column) for column in counts.T)  # index of the image
    within = np.arange(len(of_detection)) - starts[of_detection, 0]
    columns = np.arange(len(of_truth)) - starts[of_truth, 1]
    rows = (np.cumsum(sizes) - sizes)[of_detection] + within * counts[of_detection, 1]

    keys = of_detection * num_classes + merged.classes
    order = np.lexsort((-merged.scores, keys))
    ranks = np.arange(len(keys)) - np.searchsorted(keys[order], keys[order])
    kept, ranks = order[ranks < limit], ranks[ranks < limit]
    fields = (field[kept] for field in (merged.scores, merged.classes, merged.areas, keys))
    detections = FlatDetections._make([*fields, ranks, merged.overlaps, rows[kept]])
    keys = of_truth * num_classes + merged.true_classes
    order = np.argsort(keys, kind="stable")
    fields = (merged.true_classes, merged.true_areas, merged.true_crowd, merged.true_ignored, keys, columns)
    return detections, Truths(*(field[order] for field in fields))


def match_detections(
    detections: FlatDetections, truths: Truths, ignore: Bool[np.ndarray, "A M"]
) -> tuple[Bool[np.ndarray, "A T N"], Bool[np.ndarray, "A T N"]]:
    """Match detections to annotated objects by COCO's rules, for A area ranges and T IoU thresholds.

    Detections choose in descending order of their scores. An object is matched once, a crowd any number of times.
    Ignored objects (`ignore`) are chosen only by detections that match no other object. Return masks of the detections
    that matched an object, and of those that matched an ignored one.
    """
    thresholds = np.minimum(THRESHOLDS, 1 - 1e-10)[:, None, None]
    matched, ignored = np.zeros((2, len(AREAS), len(THRESHOLDS), len(detections.keys)), bool)
    first, last = (np.searchsorted(truths.keys, detections.keys, side) for side in ("left", "right"))
    sizes = last - first
    for width in 2 ** np.arange(int(sizes.max(initial=0)).bit_length() + 1):  # group by number of candidates
        members = np.flatnonzero((sizes > width // 2) & (sizes <= width))
        group = np.unique(detections.keys[members], return_inverse=True)[1]
        assigned = np.zeros((len(AREAS), len(THRESHOLDS), group.max(initial=-1) + 1, width), bool)
        slots = np.arange(width)
        for rank in range(detections.ranks[members].max(initial=-1) + 1):
            is_current = detections.ranks[members] == rank
            current, key = members[is_current], group[is_current]
            real = slots < sizes[current, None]
            columns = np.where(real, first[current, None] + slots, 0)
            cells = detections.rows[current, None] + truths.columns[columns] * real
            overlaps = np.where(real, detections.overlaps[cells], -1)
            free = (overlaps >= thresholds) & (~assigned[:, :, key] | truths.crowd[columns])
            counts = ~ignore[:, columns][:, None]
            counted, taking = _best(overlaps, free & counts)
            other, taking_other = _best(overlaps, free & ~counts)
            chosen = np.where(counted, taking, taking_other)
            assigned[:, :, key] |= (slots == chosen[..., None]) & (counted | other)[..., None]
            matched[..., current], ignored[..., current] = counted | other, ~counted & other
    return matched, ignored


def _best(overlaps, allowed):
    """Return whether any object may be matched, and the one of largest overlap (the last in ties): [A, T, N]."""
    values = np.where(allowed, overlaps, -1)[..., ::-1]
    return allowed.any(axis=-1), allowed.shape[-1] - 1 - values.argmax(axis=-1)
