"""How well objects are found: average precision as COCO counts it (Lin et al. 2014) and as PASCAL VOC does.

On the host, in float64, over a whole data set at once: what one image holds is small and differs from image to image.
The numbers are those of pycocotools and of the VOC development kit.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int
from numpy.typing import ArrayLike

THRESHOLDS = np.linspace(0.5, 0.95, 10)  # of IoU
RECALLS = np.linspace(0, 1, 101)  # at which precision is read
AREAS = {"all": (0, 1e10), "small": (0, 32**2), "medium": (32**2, 96**2), "large": (96**2, 1e10)}  # in square pixels
LIMITS = (1, 10, 100)  # detections of a class in an image that count, those with the highest scores


def box_overlaps(
    boxes: Float[np.ndarray, "N 4"], truths: Float[np.ndarray, "M 4"], crowd: Bool[np.ndarray, "M"], pixel: float = 0.0
) -> Float[np.ndarray, "N M"]:
    """IoU of boxes (left, top, width, height); of a crowd, the part of the detection that is in it.

    `pixel` is what the last pixel of a box adds to its width and height: 1 in PASCAL VOC, 0 in COCO.
    """
    a, b = boxes[:, None], truths[None]
    ends = np.minimum(a[..., :2] + a[..., 2:], b[..., :2] + b[..., 2:])
    sides = np.maximum(ends - np.maximum(a[..., :2], b[..., :2]) + pixel, 0)
    areas = [(boxes[..., 2] + pixel) * (boxes[..., 3] + pixel) for boxes in (a, b)]
    return _ratio(sides[..., 0] * sides[..., 1], *areas, crowd)


def mask_overlaps(
    masks: Bool[np.ndarray, "N h w"], truths: Bool[np.ndarray, "M h w"], crowd: Bool[np.ndarray, "M"]
) -> Float[np.ndarray, "N M"]:
    """IoU of masks of one image; of a crowd, the part of the detection that is in it."""
    a, b = (each.reshape(len(each), -1).astype(np.float32) for each in (masks, truths))
    return _ratio((a @ b.T).astype(float), a.sum(1, keepdims=True).astype(float), b.sum(1)[None].astype(float), crowd)


def _ratio(shared, area, truth_area, crowd):
    union = np.where(crowd, area, area + truth_area - shared)
    return np.divide(shared, union, out=np.zeros_like(shared), where=union > 0)


class Image(NamedTuple):
    """What is known of an image: its N detections, its M truths and how they overlap."""

    scores: Float[np.ndarray, "N"]
    classes: Int[np.ndarray, "N"]
    areas: Float[np.ndarray, "N"]
    true_classes: Int[np.ndarray, "M"]
    true_areas: Float[np.ndarray, "M"]
    true_crowd: Bool[np.ndarray, "M"]
    true_ignored: Bool[np.ndarray, "M"]
    overlaps: Float[np.ndarray, "N M"]


@dataclass(frozen=True)
class Detections:
    """The detections of images beside the truth, as a metric state: `empty`, `update`, `merge`, `compute`.

    Attributes:
        num_classes: V.
        images: by their number, which must be another one for each image: the order of the images decides between
            equal scores, as in pycocotools, and does not depend on how they came together.
    """

    num_classes: int
    images: Mapping[int, Image] = field(default_factory=dict)

    @classmethod
    def empty(cls, num_classes: int) -> "Detections":
        return cls(num_classes)

    def update(
        self,
        image: int,
        boxes: ArrayLike,
        scores: ArrayLike,
        classes: ArrayLike,
        true_boxes: ArrayLike,
        true_classes: ArrayLike,
        *,
        true_crowd: ArrayLike | None = None,
        true_ignored: ArrayLike | None = None,
        true_areas: ArrayLike | None = None,
        form: str = "xywh",
        pixel: float = 0.0,
    ) -> "Detections":
        """With one more image.

        Args:
            image: its number.
            boxes, true_boxes: [N, 4] and [M, 4] in pixels, or masks bool [N, h, w] and [M, h, w].
            scores: [N] of the detections; the higher, the surer.
            classes, true_classes: [N] and [M], from 0 to V - 1.
            true_crowd: bool [M], True = stands for many objects: all detections in it are ignored.
            true_ignored: bool [M], True = finding it is neither right nor wrong (VOC's "difficult").
            true_areas: [M], as annotated (COCO's are those of the masks); None = those of the boxes or masks.
            form: of boxes: left, top, width and height; the corners ("xyxy"); or the centre, width and height
                ("cxcywh").
            pixel: see `box_overlaps`.

        Raises:
            ValueError: lengths differ, a class is out of range, a score or a box is not finite, a box is inside out, or
                the image was there before.
        """
        boxes, true_boxes = np.asarray(boxes), np.asarray(true_boxes)
        masks = boxes.ndim == 3 or true_boxes.ndim == 3
        if masks:
            shape = (true_boxes if true_boxes.ndim == 3 else boxes).shape[1:]
            if wrong := [each.shape for each in (boxes, true_boxes) if each.size and each.shape[1:] != shape]:
                raise ValueError(f"image {image}: masks are {wrong[0]}, beside {shape}: all must be of one size.")
            boxes, true_boxes = (each.astype(bool).reshape(-1, *shape) for each in (boxes, true_boxes))
            areas, own = (each.sum((1, 2)).astype(float) for each in (boxes, true_boxes))
        else:
            boxes, true_boxes = (_boxes(each, form, image) for each in (boxes, true_boxes))
            areas, own = (each[:, 2] * each[:, 3] for each in (boxes, true_boxes))
        none = np.zeros(len(own), bool)
        crowd, ignored = (none if each is None else np.asarray(each, bool) for each in (true_crowd, true_ignored))
        parts = {
            "scores": np.asarray(scores, float),
            "classes": np.asarray(classes, int),
            "areas": areas,
            "true_classes": np.asarray(true_classes, int),
            "true_areas": own if true_areas is None else np.asarray(true_areas, float),
            "true_crowd": crowd,
            "true_ignored": ignored | crowd if ignored.shape == crowd.shape else ignored,
        }
        self._check(image, parts, len(areas), len(own))
        overlaps = mask_overlaps if masks else partial(box_overlaps, pixel=pixel)
        new = Image(**parts, overlaps=overlaps(boxes, true_boxes, crowd))
        return Detections(self.num_classes, {**self.images, image: new})

    def _check(self, image, parts, found, true):
        if image in self.images:
            raise ValueError(f"image {image} was there before: every image must have its own number.")
        for name, values in parts.items():
            if values.shape != (count := true if name.startswith("true") else found,):
                raise ValueError(f"image {image}: {name} is {values.shape}, for {count} boxes or masks.")
        if not np.isfinite(parts["scores"]).all():
            raise ValueError(f"image {image}: a score is not finite.")
        classes = np.concatenate([parts["classes"], parts["true_classes"]])
        if len(wrong := classes[(classes < 0) | (classes >= self.num_classes)]):
            raise ValueError(f"image {image}: the class {wrong[0]} must be 0 to {self.num_classes - 1}.")

    def merge(self, other: "Detections") -> "Detections":
        """The state of both states' images together; ValueError if they have one in common or differ in classes."""
        if both := self.images.keys() & other.images.keys():
            raise ValueError(f"image {min(both)} is in both: every image counts once.")
        if self.num_classes != other.num_classes:
            raise ValueError(f"the states are of {self.num_classes} classes and of {other.num_classes}.")
        return Detections(self.num_classes, {**self.images, **other.images})

    def compute(self) -> dict[str, float]:
        """COCO's twelve numbers, 0 to 1; nan where there is nothing that they are of."""
        return coco(self).summary()


def _boxes(boxes, form, image):
    boxes = np.asarray(boxes, float).reshape(-1, 4)
    if form == "xyxy":
        boxes = np.concatenate([boxes[:, :2], boxes[:, 2:] - boxes[:, :2]], axis=1)
    elif form == "cxcywh":
        boxes = np.concatenate([boxes[:, :2] - boxes[:, 2:] / 2, boxes[:, 2:]], axis=1)
    elif form != "xywh":
        raise ValueError(f"form={form!r} must be xywh, xyxy or cxcywh.")
    if not np.isfinite(boxes).all():
        raise ValueError(f"image {image}: a box is not finite.")
    if (boxes[:, 2:] < 0).any():
        raise ValueError(f"image {image}: a box has a negative width or height.")
    return boxes


@dataclass(frozen=True)
class Coco:
    """COCO's precision and recall; -1 where a class has no truth of a size.

    Attributes:
        precision: [T, R, V, A] at `THRESHOLDS`, `RECALLS` and `AREAS`: the highest at that recall or a higher one.
        recall: [T, V, A, 3], with at most 1, 10 and 100 detections of a class in an image.
    """

    precision: Float[np.ndarray, "T R V A"]
    recall: Float[np.ndarray, "T V A 3"]

    def summary(self) -> dict[str, float]:
        """The twelve numbers; nan where there is nothing that they are of."""
        names = list(AREAS)
        values = {"ap": self.precision[..., 0], "ap_50": self.precision[0, ..., 0], "ap_75": self.precision[5, ..., 0]}
        values |= {f"ap_{name}": self.precision[..., number] for number, name in enumerate(names[1:], 1)}
        values |= {f"ar_{most}": self.recall[:, :, 0, number] for number, most in enumerate(LIMITS)}
        values |= {f"ar_{name}": self.recall[..., number, 2] for number, name in enumerate(names[1:], 1)}
        return {name: _mean(each) for name, each in values.items()}

    def curves(self) -> Float[np.ndarray, "T R"]:
        """Precision at `THRESHOLDS` and `RECALLS`, the mean of the classes that have truths; nan where none has."""
        known = self.precision[0, 0, :, 0] > -1
        return (
            np.mean(self.precision[:, :, known, 0], axis=2)
            if known.any()
            else np.full(self.precision.shape[:2], np.nan)
        )

    def by_class(self) -> list[float]:
        """The average precision of each class."""
        return [_mean(self.precision[:, :, number, 0]) for number in range(self.precision.shape[2])]


def _mean(values):
    known = values[values > -1]
    return float(known.mean()) if known.size else float("nan")


def coco(state: Detections) -> Coco:
    """What COCO's evaluation has: each detection, the surest first, takes the free truth that it overlaps most."""
    found, truths = _flat(state, LIMITS[-1])
    classes, limits = state.num_classes, np.array(list(AREAS.values()))
    outside, ignore = ((areas < limits[:, :1]) | (areas > limits[:, 1:]) for areas in (found.areas, truths.areas))
    ignore |= truths.ignored
    matched, ignored = _match(found, truths, ignore)
    ignored |= ~matched & outside[:, None]
    right, wrong = matched & ~ignored, ~matched & ~ignored

    precision = np.full((len(THRESHOLDS), len(RECALLS), classes, len(AREAS)), -1.0)
    recall = np.full((len(THRESHOLDS), classes, len(AREAS), len(LIMITS)), -1.0)
    order = np.lexsort((-found.scores, found.classes))  # stable: of equal scores in the order of the images
    own = np.split(order, np.searchsorted(found.classes[order], np.arange(1, classes)))
    for number in range(classes):
        counts = (~ignore[:, truths.classes == number]).sum(axis=1)
        for area in np.flatnonzero(counts):
            mine, count = right[area][:, own[number]], counts[area]
            precision[:, :, number, area] = _precision(mine, wrong[area][:, own[number]], count)
            for column, most in enumerate(LIMITS):
                recall[:, number, area, column] = mine[:, found.ranks[own[number]] < most].sum(axis=1) / count
    return Coco(precision, recall)


def _precision(right, wrong, count):
    """Of detections [T, N], the surest first, the precision at `RECALLS` of `count` truths: [T, R]."""
    right, wrong = np.cumsum(right, axis=1, dtype=float), np.cumsum(wrong, axis=1, dtype=float)
    values = right / (right + wrong + np.spacing(1))
    values = np.maximum.accumulate(values[:, ::-1], axis=1)[:, ::-1]
    values = np.pad(values, ((0, 0), (0, 1)))  # beyond the highest recall it is 0
    places = [np.searchsorted(row, RECALLS, side="left") for row in right / count]
    return np.take_along_axis(values, np.array(places), axis=1)


def voc(state: Detections, threshold: float = 0.5, points: Literal[11] | None = None) -> list[float]:
    """PASCAL VOC's average precision of each class; nan of one without truth.

    A detection is for the truth that it overlaps most, if by more than the threshold, which the surest one has found;
    the others are wrong. The state must have been made with `pixel` 1.

    Args:
        state: of the images.
        threshold: of IoU.
        points: 11 reads precision at the recalls 0, 0.1, ... 1, as VOC2007 did; None is the area under the curve.
    """
    found, truths = _flat(state, np.inf)
    first, last = (np.searchsorted(truths.keys, found.keys, side) for side in ("left", "right"))
    of = np.repeat(np.arange(len(first)), last - first)  # every detection beside every truth of its image and class
    truth = np.arange(len(of)) - np.searchsorted(of, of) + first[of]
    order = np.lexsort((-found.overlaps[found.rows[of] + truths.columns[truth]], of))
    best = order[np.unique(of[order], return_index=True)[1]]
    overlap, taken = np.zeros(len(first)), np.zeros(len(first), int)
    overlap[of[best]], taken[of[best]] = found.overlaps[found.rows[of] + truths.columns[truth]][best], truth[best]
    hits = overlap > threshold

    scores = []
    for number in range(state.num_classes):
        count = (~truths.ignored[truths.classes == number]).sum()
        own = np.flatnonzero(found.classes == number)
        own = own[np.argsort(-found.scores[own], kind="stable")]
        own = own[~(hits[own] & np.append(truths.ignored, False)[taken[own]])]
        right = np.zeros(len(own), bool)
        right[np.unique(np.where(hits[own], taken[own], -1 - np.arange(len(own))), return_index=True)[1]] = True
        right &= hits[own]
        recall, precision = np.cumsum(right) / max(count, 1), np.cumsum(right) / np.arange(1, len(own) + 1)
        scores.append(_area(recall, precision, points) if count else float("nan"))
    return scores


def _area(recall, precision, points):
    if points:
        return float(np.mean([precision[recall >= at].max(initial=0) for at in np.arange(0, 1.1, 0.1)]))
    recall = np.concatenate([[0], recall, [1]])
    precision = np.maximum.accumulate(np.concatenate([[0], precision, [0]])[::-1])[::-1]
    return float((np.diff(recall) * precision[1:]).sum())


class _Found(NamedTuple):
    """N detections, those of an image and a class together, the surest first."""

    scores: np.ndarray
    classes: np.ndarray
    areas: np.ndarray
    keys: np.ndarray  # of an image and a class
    ranks: np.ndarray  # among those of the same key
    overlaps: np.ndarray  # of all images in a row
    rows: np.ndarray  # where among them its own begin


class _Truths(NamedTuple):
    """M truths, those of an image and a class together."""

    classes: np.ndarray
    areas: np.ndarray
    crowd: np.ndarray
    ignored: np.ndarray
    keys: np.ndarray  # of an image and a class
    columns: np.ndarray  # where it is among the overlaps of a detection


def _flat(state, most):
    nothing = Image(*(np.zeros(0, kind) for kind in (float, int, float, int, float, bool, bool)), np.zeros((0, 0)))
    images = [*(state.images[number] for number in sorted(state.images)), nothing]
    whole = Image(*(np.concatenate([part.ravel() for part in parts]) for parts in zip(*images)))
    counts = np.array([image.overlaps.shape for image in images])
    of_found, of_truth = (np.repeat(np.arange(len(images)), column) for column in counts.T)
    within, columns = (
        np.arange(len(of)) - (np.cumsum(column) - column)[of] for of, column in zip((of_found, of_truth), counts.T)
    )
    rows = (np.cumsum(counts.prod(axis=1)) - counts.prod(axis=1))[of_found] + within * counts[of_found, 1]

    keys = of_found * state.num_classes + whole.classes
    order = np.lexsort((-whole.scores, keys))
    ranks = np.arange(len(keys)) - np.searchsorted(keys[order], keys[order])
    kept, ranks = order[ranks < most], ranks[ranks < most]
    parts = (part[kept] for part in (whole.scores, whole.classes, whole.areas, keys))
    found = _Found(*parts, ranks, whole.overlaps, rows[kept])
    keys = of_truth * state.num_classes + whole.true_classes
    order = np.argsort(keys, kind="stable")
    parts = (whole.true_classes, whole.true_areas, whole.true_crowd, whole.true_ignored, keys, columns)
    return found, _Truths(*(part[order] for part in parts))


def _match(found, truths, ignore):
    """Which detections have found a truth, and which one that is ignored: bool [A, T, N] each.

    `ignore` [A, M] are the truths that do not count among those of a size. A truth is found once, a crowd by any
    number; what does not count is left to detections that find nothing else.
    """
    thresholds = np.minimum(THRESHOLDS, 1 - 1e-10)[:, None, None]
    matched, ignored = np.zeros((2, len(AREAS), len(THRESHOLDS), len(found.keys)), bool)
    first, last = (np.searchsorted(truths.keys, found.keys, side) for side in ("left", "right"))
    sizes = last - first
    for width in 2 ** np.arange(int(sizes.max(initial=0)).bit_length() + 1):  # those with about as many truths together
        here = np.flatnonzero((sizes > width // 2) & (sizes <= width))
        number_of = np.unique(found.keys[here], return_inverse=True)[1]
        taken = np.zeros((len(AREAS), len(THRESHOLDS), number_of.max(initial=-1) + 1, width), bool)
        places = np.arange(width)
        for rank in range(found.ranks[here].max(initial=-1) + 1):
            now = found.ranks[here] == rank
            own, key = here[now], number_of[now]
            real = places < sizes[own, None]
            columns = np.where(real, first[own, None] + places, 0)
            overlaps = np.where(real, found.overlaps[found.rows[own, None] + truths.columns[columns] * real], -1)
            free = (overlaps >= thresholds) & (~taken[:, :, key] | truths.crowd[columns])
            counts = ~ignore[:, columns][:, None]
            counted, taking = _best(overlaps, free & counts)
            other, taking_other = _best(overlaps, free & ~counts)
            chosen = np.where(counted, taking, taking_other)
            taken[:, :, key] |= (places == chosen[..., None]) & (counted | other)[..., None]
            matched[..., own], ignored[..., own] = counted | other, ~counted & other
    return matched, ignored


def _best(overlaps, allowed):
    """Is any truth allowed, and which of those has the largest overlap, of equal ones the last: [A, T, N] each."""
    values = np.where(allowed, overlaps, -1)[..., ::-1]
    return allowed.any(axis=-1), allowed.shape[-1] - 1 - values.argmax(axis=-1)
