"""Object detection."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float
from scipy.special import softmax

from lineage.configs.registry import Count, Natural
from lineage.data import Examples, ExampleSource, Facts, Images, Tokenizer
from lineage.data.sources.boxes import BoxedImages
from lineage.data.transforms import boxes
from lineage.models import Model
from lineage.tasks.base import TASKS, Batch, Pictures, Result, Sizes, Weights
from lineage.tasks.images import CheckedExamples, ImageTask, first_images, to_pixels
from lineage.tasks.matching import set_loss

PICTURES, THRESHOLD = 12, 0.5  # number of images in the report, and minimum probability of the objects in them
SIZE = 64  # default of image_size


class CheckedObjects(CheckedExamples):
    """Images of a split with objects; classes of objects that are not class indices raise ValueError on access."""

    def take(self, indices: np.ndarray) -> dict[str, Any]:
        examples = self.source.take(indices)
        for index, classes in zip(indices, examples["classes"]):
            if wrong := [number for number in classes.tolist() if not 0 <= number < self.num_classes]:
                where = f"Example {index} of the split {self.split!r} has an object of the class {wrong[0]}"
                raise ValueError(f"{where}: classes must be from 0 to {self.num_classes - 1}.")
        return examples


@TASKS.register("object_detection")
@dataclass(frozen=True)
class ObjectDetection(ImageTask):
    """Predict the boxes and the classes of the objects of an image, as a set (DETR, arXiv 2005.12872).

    Attributes:
        image_size: height and width that images are padded to, in pixels; 0 stands for 64.
        shorter_side: shorter side of images, in pixels, if the longer one fits into `image_size`; 0: as large as fits.
        max_boxes: maximum number of objects in an image.
        augment: augmentation of training images, such as "flip | crop(384, 600) | resize(480, 800)"; empty: none.
        weights: weights of the class loss, of the L1 distance of boxes, and of their generalized IoU.
    """

    reads = "images_with_boxes"
    needs = ("objects",)
    inputs = ("image", "extent")
    evaluators = ("loss", "detection")
    losses = ("class", "distance", "generalized IoU")
    arrays: ClassVar = {
        "image": "float32 B height width channels",
        "extent": "float32 B 2",
        "boxes": "float32 B N 4",
        "classes": "int32 B N",
        "boxes_mask": "bool B N",
        "mask": "bool B",
    }

    shorter_side: Natural = 0
    max_boxes: Count = 100
    weights: Weights = (1.0, 5.0, 2.0)

    def examples(self, content: Images, tokenizer: Tokenizer | None, seed: int) -> Examples:
        size = self.image_size or SIZE
        facts = self.known
        if facts is None:
            train = content.splits["train"]
            ids = tuple(train.categories.values()) if isinstance(train, BoxedImages) else ()
            facts = replace(self.facts(train, content.class_names, size), category_ids=ids)
        evaluation, steps = self.evaluation_transform(facts), boxes.parse(self.augment, size)
        if not any(isinstance(step, boxes.Resize) for step in steps):
            steps += evaluation.steps
        parts, count = content.splits.items(), len(content.class_names)
        splits = {name: CheckedObjects(part, name, count) for name, part in parts}
        return Examples(splits, facts, replace(evaluation, steps=steps, training=True), evaluation)

    def evaluation_transform(self, facts: Facts) -> boxes.Transform:
        size = self.image_size or SIZE
        fit = boxes.Resize(self.shorter_side or size, self.shorter_side or size, size)
        return boxes.Transform([fit], size, self.max_boxes, facts.mean, facts.std, training=False)

    def axes(self, sizes: Sizes) -> dict[str, int]:
        return super().axes(sizes) | {"N": self.max_boxes}

    def forward(self, model: Model, batch: Batch) -> Any:
        """Return logits [L, B, Q, V] and boxes [L, B, Q, 4] of the decoder layers; pixels past `extent` are masked."""
        rows, columns = (
            jnp.arange(size) + 0.5 < (extent * size)[:, None]
            for size, extent in zip(batch["image"].shape[1:3], batch["extent"].T)
        )
        return model(batch["image"], rows[:, :, None] & columns[:, None])

    def loss(self, model: Model, batch: Batch) -> Result:
        """Return the set loss of DETR (see `set_loss`)."""
        logits, predicted = self.forward(model, batch)
        real = batch["boxes_mask"] & batch["mask"][:, None]
        if logits.shape[2] < real.shape[1]:
            queries, max_boxes = logits.shape[2], real.shape[1]
            raise ValueError(f"task.max_boxes is {max_boxes}: it must be at most model.num_queries, {queries}.")
        totals = {"mask": batch["mask"].sum(), "boxes_mask": real.sum().astype(jnp.float32)}
        return set_loss(logits, predicted, batch, self.weights, model.get_variable("run", "real", totals))

    def outputs(self, model: Model, batch: Batch) -> Any:
        """Return the logits and boxes of the last decoder layer, and the sizes of the images."""
        logits, predicted = self.forward(model, batch)
        return logits[-1], predicted[-1], batch["size"]

    def predict(self, outputs: Any, inputs: ExampleSource, facts: Facts) -> list[dict[str, Any]]:
        """Return the objects of each image; boxes are (left, top, width, height) in pixels of the image."""
        *predicted, sizes = outputs
        ids = facts.category_ids or range(1, facts.num_classes + 1)
        predictions = []
        for objects, size in zip(found_objects(*predicted, facts.num_classes), sizes):
            boxes = objects["boxes"].astype(np.float64) * np.tile(size[::-1], 2)
            rows = [
                {"category_id": ids[number], "category": facts.class_names[number], "bbox": box, "score": score}
                for number, box, score in zip(objects["classes"].tolist(), boxes.tolist(), objects["scores"].tolist())
            ]
            predictions.append({"objects": rows})
        return predictions

    def document(self, predictions: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """Yield the objects of all images in the format of COCO's evaluation."""
        for image in predictions:
            for item in image.get("objects", ()):
                yield {"image_id": image["image_id"]} | {key: item[key] for key in ("category_id", "bbox", "score")}

    def pictures(self, context: Any, variables: Any, split: Any) -> Pictures:
        """Return some images with their true objects and the confident predictions.

        Objects are rows (image, class, score, left, top, width, height), with boxes relative to the padded image.
        """
        batch = first_images(split, PICTURES)
        forward, facts = jax.jit(nn.apply(self.forward, context.model)), split.facts
        outputs = forward(variables, {name: jnp.asarray(value) for name, value in batch.items()})
        arrays = {"image": to_pixels(batch["image"], facts), "class_names": np.asarray(facts.class_names)}
        for name, images in zip(("truth", "found"), objects_of(batch, *map(np.asarray, outputs), facts.num_classes)):
            rows = []
            for number, (objects, extent) in enumerate(zip(images, batch["extent"])):
                scores = objects.get("scores", np.ones(len(objects["classes"])))
                numbers, boxes = np.full(len(scores), number), objects["boxes"] * np.tile(extent[::-1], 2)
                rows.append(np.column_stack([numbers, objects["classes"], scores, boxes])[scores >= THRESHOLD])
            arrays[name] = np.concatenate(rows).astype(np.float32)
        return {f"objects_{split.name}": arrays}


def objects_of(
    batch: Mapping[str, np.ndarray],
    logits: Float[np.ndarray, "L B Q V"],
    boxes: Float[np.ndarray, "L B Q 4"],
    num_classes: int,
) -> tuple[list[dict], list[dict]]:
    """Return the true and the predicted objects of each real image of a batch, as arguments of `Detections`."""
    truth = {"boxes": _from_centers(batch["boxes"])} | {name: batch[name] for name in ("classes", "crowd")}
    real, rows = batch["boxes_mask"] | batch["crowd"], np.flatnonzero(batch["mask"])
    true = [{name: value[row][real[row]] for name, value in truth.items()} for row in rows]
    return true, found_objects(logits[-1, rows], boxes[-1, rows], num_classes)


def found_objects(
    logits: Float[np.ndarray, "B Q V"], boxes: Float[np.ndarray, "B Q 4"], num_classes: int
) -> list[dict[str, np.ndarray]]:
    """Return the predicted objects of each image, as arguments of `Detections`.

    The last logit stands for no object. Classes from `num_classes` on, which the data do not have, are left out.
    """
    probabilities = softmax(logits.astype(np.float32), axis=-1)[..., :-1][..., :num_classes]
    columns = _from_centers(boxes), probabilities.argmax(axis=-1), probabilities.max(axis=-1)
    return [dict(zip(("boxes", "classes", "scores"), row)) for row in zip(*columns)]


def _from_centers(boxes):
    """Return boxes (center x, center y, width, height) as (left, top, width, height)."""
    return np.concatenate([boxes[..., :2] - boxes[..., 2:] / 2, boxes[..., 2:]], axis=-1)
