"""Average precision of object detection by the definitions of COCO (arXiv 1405.0312) and of PASCAL VOC.

The metrics run on the host in float64 over a whole data set at once, and agree with pycocotools and the VOC
development kit. Boxes are in pixels.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Bool, Float
from numpy.typing import ArrayLike

from lineage.metrics.matching import AREAS, THRESHOLDS, Image, flatten, match_detections

RECALLS = np.linspace(0, 1, 101)  # recalls at which the precision is read
LIMITS = (1, 10, 100)  # maximum numbers of detections per class and image; those with the highest scores count


def box_overlaps(
    boxes: Float[np.ndarray, "N 4"], truths: Float[np.ndarray, "M 4"], crowd: Bool[np.ndarray, "M"], pixel: float = 0.0
) -> Float[np.ndarray, "N M"]:
    """Return the IoU of boxes (left, top, width, height); for a crowd, the fraction of the detection inside the crowd.

    `pixel` is added to every width and height: 1 by the convention of PASCAL VOC, 0 by that of COCO.
    """
    a, b = boxes[:, None], truths[None]
    ends = np.minimum(a[..., :2] + a[..., 2:], b[..., :2] + b[..., 2:])
    sides = np.maximum(ends - np.maximum(a[..., :2], b[..., :2]) + pixel, 0)
    area, true_area = ((box[..., 2] + pixel) * (box[..., 3] + pixel) for box in (a, b))
    return _ratio(sides[..., 0] * sides[..., 1], area, true_area, crowd)


def mask_overlaps(
    masks: Bool[np.ndarray, "N h w"], truths: Bool[np.ndarray, "M h w"], crowd: Bool[np.ndarray, "M"]
) -> Float[np.ndarray, "N M"]:
    """Return the IoU of the masks of one image; for a crowd, the fraction of the detection inside it."""
    a, b = (array.reshape(len(array), math.prod(array.shape[1:])).astype(np.float32) for array in (masks, truths))
    return _ratio((a @ b.T).astype(float), a.sum(1, keepdims=True).astype(float), b.sum(1)[None].astype(float), crowd)


def _ratio(shared, area, truth_area, crowd):
    union = np.where(crowd, area, area + truth_area - shared)
    return np.divide(shared, union, out=np.zeros_like(shared), where=union > 0)


@dataclass(frozen=True)
class Detections:
    """Metric state of the detections and annotated objects of each image, by its unique number.

    Ties between scores are broken by these numbers, as in pycocotools, so the order of merges does not matter.
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
        box_format: str = "xywh",
        pixel: float = 0.0,
    ) -> "Detections":
        """Add an image.

        Args:
            boxes, true_boxes: boxes [N, 4] and [M, 4] in pixels, or boolean masks [N, h, w] and [M, h, w].
            scores: confidences of the detections [N].
            classes, true_classes: classes [N] and [M], from 0 to V - 1.
            true_crowd: bool [M]; a crowd stands for many objects, and the detections inside it are ignored.
            true_ignored: bool [M]; objects whose detection is neither correct nor wrong ("difficult" in VOC).
            true_areas: annotated areas [M] (in COCO, of the masks); None computes the areas of the boxes or masks.
            box_format: "xywh" (left, top, width, height), "xyxy" (corners) or "cxcywh" (center, width, height).
            pixel: see `box_overlaps`.
        """
        boxes, true_boxes = np.asarray(boxes), np.asarray(true_boxes)
        masks = boxes.ndim == 3 or true_boxes.ndim == 3
        if masks:
            boxes, true_boxes = _masks(boxes, true_boxes, image)
            areas, computed_areas = (array.sum((1, 2)).astype(float) for array in (boxes, true_boxes))
        else:
            boxes, true_boxes = (_boxes(array, box_format, image) for array in (boxes, true_boxes))
            areas, computed_areas = (array[:, 2] * array[:, 3] for array in (boxes, true_boxes))
        default = np.zeros(len(computed_areas), bool)
        crowd, ignored = (default if array is None else np.asarray(array, bool) for array in (true_crowd, true_ignored))
        parts = {
            "scores": np.asarray(scores, float),
            "classes": np.asarray(classes, int),
            "areas": areas,
            "true_classes": np.asarray(true_classes, int),
            "true_areas": computed_areas if true_areas is None else np.asarray(true_areas, float),
            "true_crowd": crowd,
            "true_ignored": ignored | crowd if ignored.shape == crowd.shape else ignored,
        }
        self._check(image, parts, len(areas), len(computed_areas))
        overlaps = mask_overlaps if masks else partial(box_overlaps, pixel=pixel)
        new = Image(**parts, overlaps=overlaps(boxes, true_boxes, crowd))
        return Detections(self.num_classes, {**self.images, image: new})

    def _check(self, image, arrays, num_detections, num_objects):
        if image in self.images:
            raise ValueError(f"Image {image} was added before: its number must be unique.")
        for name, values in arrays.items():
            count = num_objects if name.startswith("true") else num_detections
            if values.shape != (count,):
                raise ValueError(f"The shape of {name} of image {image} is {values.shape}: it must be ({count},).")
        for name, quantity in (("scores", "a score"), ("true_areas", "an area")):
            if not np.isfinite(arrays[name]).all():
                raise ValueError(f"Image {image}: {quantity} is not finite.")
        classes = np.concatenate([arrays["classes"], arrays["true_classes"]])
        if len(wrong := classes[(classes < 0) | (classes >= self.num_classes)]):
            raise ValueError(f"A class of image {image} is {wrong[0]}: it must be from 0 to {self.num_classes - 1}.")

    def merge(self, other: "Detections") -> "Detections":
        """Return the state of the images of both states, which must have no image in common."""
        if both := self.images.keys() & other.images.keys():
            raise ValueError(f"Image {min(both)} is in both states: it must be in one of them.")
        if self.num_classes != other.num_classes:
            raise ValueError(f"The states have {self.num_classes} and {other.num_classes} classes: both must be equal.")
        return Detections(self.num_classes, {**self.images, **other.images})

    def compute(self) -> dict[str, float]:
        """Return the twelve COCO metrics, each from 0 to 1; see `Coco.summary`."""
        return coco(self).summary()


def _masks(masks, true_masks, image):
    """Return both as boolean masks of the same size."""
    shape = (true_masks if true_masks.ndim == 3 else masks).shape[1:]
    if wrong := [array.shape for array in (masks, true_masks) if array.size and array.shape[1:] != shape]:
        raise ValueError(f"The size of a mask of image {image} is {wrong[0][1:]}: it must be {shape}, as of others.")
    return (array.astype(bool).reshape(-1, *shape) for array in (masks, true_masks))


def _boxes(boxes, box_format, image):
    """Return boxes as (left, top, width, height)."""
    if boxes.size and boxes.shape[-1] != 4:
        raise ValueError(f"Image {image}: the boxes have the shape {boxes.shape}: it must be [N, 4].")
    boxes = np.asarray(boxes, float).reshape(-1, 4)
    first, last = boxes[:, :2], boxes[:, 2:]
    if box_format == "xyxy":
        boxes = np.concatenate([first, last - first], axis=1)
    elif box_format == "cxcywh":
        boxes = np.concatenate([first - last / 2, last], axis=1)
    elif box_format != "xywh":
        raise ValueError(f"box_format is {box_format!r}: it must be xywh, xyxy or cxcywh.")
    if not np.isfinite(boxes).all():
        raise ValueError(f"Image {image}: a box is not finite.")
    if (boxes[:, 2:] < 0).any():
        raise ValueError(f"Image {image}: a box has a negative width or height.")
    return boxes


@dataclass(frozen=True)
class Coco:
    """Precision and recall by COCO's definition; nan (-1 in pycocotools) where a class has no objects of an area range.

    The axes are `THRESHOLDS`, `RECALLS`, the classes, `AREAS` and `LIMITS`. The precision is interpolated: it is the
    highest one at that recall or a higher one.
    """

    precision: Float[np.ndarray, "T R V A"]
    recall: Float[np.ndarray, "T V A 3"]

    def summary(self) -> dict[str, float]:
        """Return the twelve COCO metrics, each from 0 to 1; nan where no class has objects."""
        names = list(AREAS)
        values = {"ap": self.precision[..., 0], "ap_50": self.precision[0, ..., 0], "ap_75": self.precision[5, ..., 0]}
        values |= {f"ap_{name}": self.precision[..., number] for number, name in enumerate(names[1:], 1)}
        values |= {f"ar_{limit}": self.recall[:, :, 0, number] for number, limit in enumerate(LIMITS)}
        values |= {f"ar_{name}": self.recall[..., number, 2] for number, name in enumerate(names[1:], 1)}
        return {name: _mean(array) for name, array in values.items()}

    def curves(self) -> Float[np.ndarray, "T R"]:
        """Return the precision at `THRESHOLDS` and `RECALLS`, averaged over the classes that have objects, if any."""
        known = ~np.isnan(self.precision[0, 0, :, 0])
        if not known.any():
            return np.full(self.precision.shape[:2], np.nan)
        return np.mean(self.precision[:, :, known, 0], axis=2)

    def by_class(self) -> list[float]:
        """Return the average precision of each class, 0 to 1; nan for a class without objects."""
        return [_mean(self.precision[:, :, number, 0]) for number in range(self.precision.shape[2])]


def _mean(values):
    known = values[~np.isnan(values)]
    return float(known.mean()) if known.size else float("nan")


def coco(state: Detections) -> Coco:
    """Return COCO's precision and recall: in descending order of score, each detection takes the best free object."""
    detections, truths = flatten(state.images, state.num_classes, LIMITS[-1])
    classes, limits = state.num_classes, np.array(list(AREAS.values()))
    outside, ignore = ((areas < limits[:, :1]) | (areas > limits[:, 1:]) for areas in (detections.areas, truths.areas))
    ignore |= truths.ignored
    matched, ignored = match_detections(detections, truths, ignore)
    ignored |= ~matched & outside[:, None]
    correct, wrong = matched & ~ignored, ~matched & ~ignored

    precision = np.full((len(THRESHOLDS), len(RECALLS), classes, len(AREAS)), np.nan)
    recall = np.full((len(THRESHOLDS), classes, len(AREAS), len(LIMITS)), np.nan)
    order = np.lexsort((-detections.scores, detections.classes))  # stable: ties in the order of the images
    of_class = np.split(order, np.searchsorted(detections.classes[order], np.arange(1, classes)))
    for number, members in enumerate(of_class):
        counts = (~ignore[:, truths.classes == number]).sum(axis=1)
        for area in np.flatnonzero(counts):
            hits, count = correct[area][:, members], counts[area]
            precision[:, :, number, area] = _precision(hits, wrong[area][:, members], count)
            for column, limit in enumerate(LIMITS):
                recall[:, number, area, column] = hits[:, detections.ranks[members] < limit].sum(axis=1) / count
    return Coco(precision, recall)


def _precision(correct, wrong, count):
    """Return the precision [T, R] at `RECALLS` of `count` objects; detections [T, N] are in descending order."""
    correct, wrong = np.cumsum(correct, axis=1, dtype=float), np.cumsum(wrong, axis=1, dtype=float)
    values = correct / (correct + wrong + np.spacing(1))
    values = np.maximum.accumulate(values[:, ::-1], axis=1)[:, ::-1]
    values = np.pad(values, ((0, 0), (0, 1)))  # 0 beyond the highest recall
    positions = [np.searchsorted(recall, RECALLS, side="left") for recall in correct / count]
    return np.take_along_axis(values, np.array(positions), axis=1)


class Ranked(NamedTuple):
    """Detections of a class in descending order of score, with the precision and recall of those up to each one."""

    scores: Float[np.ndarray, "N"]
    correct: Bool[np.ndarray, "N"]
    precision: Float[np.ndarray, "N"]
    recall: Float[np.ndarray, "N"]  # nan if there are no objects


def rank(state: Detections, number: int, threshold: float = 0.5) -> Ranked:
    """Return the detections of class `number` as PASCAL VOC ranks them.

    A detection is assigned to the object that it overlaps most, if the IoU exceeds `threshold`; in the development kit,
    it may also equal it. The first detection of an object is correct, all others are wrong; those of an ignored object
    are left out.
    """
    rows, count = [], 0  # the score of each detection, and whether it is correct
    for _, image in sorted(state.images.items()):
        truths, detections = (np.flatnonzero(classes == number) for classes in (image.true_classes, image.classes))
        count, matched = count + (~image.true_ignored[truths]).sum(), set()
        for row in detections[np.argsort(-image.scores[detections], kind="stable")]:
            best = max(truths, key=image.overlaps[row].__getitem__, default=None)
            hit = best is not None and image.overlaps[row, best] > threshold
            if hit and image.true_ignored[best]:
                continue
            rows.append((image.scores[row], hit and best not in matched))
            if hit:
                matched.add(best)
    scores, correct = np.array(sorted(rows, key=lambda row: -row[0])).reshape(-1, 2).T
    hits = np.cumsum(correct)
    recall = hits / count if count else np.full(len(hits), np.nan)
    return Ranked(scores, correct.astype(bool), hits / np.arange(1, len(hits) + 1), recall)


def voc(state: Detections, threshold: float = 0.5, points: Literal[11] | None = None) -> list[float]:
    """Return PASCAL VOC's average precision of each class, 0 to 1; nan for a class without objects.

    The detections are those of `rank`; the state must have been updated with `pixel=1`. `points=11` averages the
    precision at recalls 0, 0.1, ..., 1 (VOC2007); None: the area under the curve.
    """
    known = {*np.concatenate([[], *(image.true_classes[~image.true_ignored] for image in state.images.values())])}
    ranked = [rank(state, number, threshold) if number in known else None for number in range(state.num_classes)]
    return [_area(ranking.recall, ranking.precision, points) if ranking else float("nan") for ranking in ranked]


def mean_over_images(state: Detections, threshold: float = 0.5, points: Literal[11] | None = None) -> float:
    """Return the mean of the average precisions of each class in each image that contains it, as textbooks define mAP.

    Images count equally, whatever their numbers of objects. The options are those of `voc`; nan without objects.
    """
    images = [Detections(state.num_classes, {number: image}) for number, image in state.images.items()]
    return _mean(np.array([score for image in images for score in voc(image, threshold, points)]))


def _area(recall, precision, points):
    if points:
        return float(np.mean([precision[recall >= level].max(initial=0) for level in np.arange(0, 1.1, 0.1)]))
    recall = np.concatenate([[0], recall, [1]])
    precision = np.maximum.accumulate(np.concatenate([[0], precision, [0]])[::-1])[::-1]
    return float((np.diff(recall) * precision[1:]).sum())
