"""How well objects are found: COCO's average precision (Lin et al. 2014), by its own evaluator."""

import contextlib
import io
from collections.abc import Mapping, Sequence

import numpy as np
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

Objects = Mapping[str, np.ndarray]


def average_precision(truth: Sequence[Objects], found: Sequence[Objects]) -> dict[str, float]:
    """`ap`, the mean over classes and over overlaps (IoU) from 0.5 to 0.95, `ap_50` and `ap_75`; -1 without any truth.

    Args:
        truth: of each image, `boxes` [n, 4] (left, top, width, height, in any unit), `classes` [n] and `crowd` [n].
        found: of each image, `boxes` [n, 4], `classes` [n] and `scores` [n], of which the 100 highest count.
    """
    coco = COCO()
    coco.dataset = {
        "images": [{"id": number} for number in range(len(truth))],
        "categories": [{"id": int(number)} for number in np.unique(np.concatenate([t["classes"] for t in truth]))],
        "annotations": [a | {"iscrowd": int(a.pop("crowd"))} for a in _rows(truth, "crowd")],
    }
    with contextlib.redirect_stdout(io.StringIO()):
        coco.createIndex()
        results = COCO()
        results.dataset = coco.dataset | {
            "annotations": [a | {"score": a.pop("scores")} for a in _rows(found, "scores")]
        }
        results.createIndex()
        evaluation = COCOeval(coco, results, "bbox")
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    return dict(zip(("ap", "ap_50", "ap_75"), map(float, evaluation.stats)))


def _rows(images, more):
    """One dictionary for each object of all images."""
    rows = []
    for number, image in enumerate(images):
        for box, kind, value in zip(image["boxes"].tolist(), image["classes"].tolist(), image[more].tolist()):
            area = box[2] * box[3]
            rows.append({"id": len(rows) + 1, "image_id": number, "category_id": kind, "bbox": box, "area": area})
            rows[-1][more] = value
    return rows
