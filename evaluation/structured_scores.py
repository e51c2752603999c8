"""Scores of answers, tags and boxes in files, and the texts and references in files of predictions."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from lineage.metrics import answers
from lineage.metrics.detection import Detections, coco
from lineage.metrics.tagging import Spans

Entries = Sequence[str | Sequence[str]]


def texts(entries: Entries) -> list[str]:
    """Return the one text of each entry."""
    if wrong := [entry for entry in entries if not isinstance(entry, str) and len(entry) != 1]:
        raise ValueError(f"{wrong[0]!r} are several texts: one of each is compared.")
    return [entry if isinstance(entry, str) else entry[0] for entry in entries]


def several(columns: Sequence[Entries]) -> list[list[str]]:
    """Return the references of each text, from all files."""
    return [[text for entry in row for text in ([entry] if isinstance(entry, str) else entry)] for row in zip(*columns)]


def one(columns: Sequence[Any]) -> Any:
    """The references of the only file."""
    if len(columns) > 1:
        raise ValueError(f"there are {len(columns)} files of references: this metric has one.")
    return columns[0]


def by_question(predictions, truth):
    """Answers, and one column of references, from SQuAD's documents: {id: answer}, and the data set."""
    try:
        asked = [item for article in truth["data"] for paragraph in article["paragraphs"] for item in paragraph["qas"]]
        found = {item["id"]: [answer["text"] for answer in item["answers"]] for item in asked}
    except (KeyError, TypeError) as error:
        raise ValueError(f"the references are not a file of SQuAD's: {type(error).__name__} {error}") from None
    if missing := found.keys() - predictions.keys():
        raise ValueError(f"{len(missing)} of {len(found)} questions have no prediction, such as {min(missing)}.")
    return [predictions[number] for number in found], [list(found.values())]


def squad(predictions, references):
    """Shares; where some questions have no answer, of those that have one and of those that have none too."""
    rows = list(zip(texts(predictions), several(references)))
    groups = {"": rows}
    if not all(truth for _, truth in rows):
        groups |= {"answered_": [row for row in rows if row[1]], "unanswerable_": [row for row in rows if not row[1]]}
    return {
        prefix + score.__name__: float(np.mean([score(*row) for row in group]))
        for prefix, group in groups.items()
        for score in (answers.exact_match, answers.f1)
        if group
    }


def tagging(predictions, references, *, scheme=""):
    tags, truths = ([e.split() if isinstance(e, str) else e for e in some] for some in (predictions, one(references)))
    state = Spans.empty().update(tags, truths, scheme or None)
    found = state.compute()._asdict() | {f"{how}_f1": state.compute(how).f1 for how in ("macro", "weighted")}
    return found | {f"f1 {kind}": value for kind, value in zip(state.types, state.compute(None).f1)}


def boxes(predictions, references):
    """Boxes: COCO's twelve numbers, and the average precision of each category."""
    truth = one(references)
    try:
        names = {each["id"]: each["name"] for each in sorted(truth["categories"], key=lambda each: each["id"])}
        numbers = {category: number for number, category in enumerate(names)}
        images = {image["id"]: ([], []) for image in truth["images"]}
        for which, entries in enumerate((predictions, truth["annotations"])):
            for entry in entries:
                rest = (entry["iscrowd"], entry["area"]) if which else (entry["score"],)
                images[entry["image_id"]][which].append((entry["bbox"], numbers[entry["category_id"]], *rest))
    except (KeyError, TypeError) as error:
        raise ValueError(f"the files are not COCO's results and instances: {type(error).__name__} {error}") from None
    state = Detections.empty(len(names))
    for image, (found, true) in images.items():
        boxes, classes, scores = map(np.array, zip(*found) if found else ((), (), ()))
        true_boxes, true_classes, crowd, areas = map(np.array, zip(*true) if true else ((), (), (), ()))
        sizes = {"true_crowd": crowd, "true_areas": areas}
        state = state.update(image, boxes, scores, classes, true_boxes, true_classes, **sizes)
    result = coco(state)
    return result.summary() | {f"ap {name}": value for name, value in zip(names.values(), result.by_class())}
