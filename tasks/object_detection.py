"""Object detection."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float
from scipy.special import softmax

from lineage.data import Examples, Facts, Images, Tokenizer
from lineage.data.transforms import boxes
from lineage.models import Model
from lineage.tasks.base import TASKS, Batch, Pictures, Result, Spec, check_range, check_weights, specs
from lineage.tasks.images import ImageTask, first_image, to_pixels
from lineage.tasks.matching import set_loss

PICTURES, SUREST = 12, 0.5  # images in the report, and the least probability of an object that they show
SIZE = 64  # of the frame of images, unless it is given


@TASKS.register("object_detection")
@dataclass(frozen=True)
class ObjectDetection(ImageTask):
    """Predict the boxes and the classes of the objects of an image, as a set (DETR, arXiv 2005.12872).

    Attributes:
        image_size: side of the square in which images lie, in pixels; 0 is 64.
        shorter_side: of images, in pixels, if the longer side then fits into `image_size`; 0 is as large as fits.
        max_boxes: the most objects in an image.
        augment: of training images, steps such as "flip | crop(384, 600) | resize(480, 800)"; "" is none.
        weights: of the losses of the classes, of the distances of the boxes, and of their generalised IoU.
    """

    reads: ClassVar[str] = "images_with_boxes"
    needs: ClassVar[tuple[str, ...]] = ("objects",)
    inputs: ClassVar[tuple[str, ...]] = ("image", "extent")

    shorter_side: int = 0
    max_boxes: int = 100
    weights: tuple[float, ...] = (1.0, 5.0, 2.0)

    def __post_init__(self):
        super().__post_init__()
        check_range("shorter_side", self.shorter_side)
        check_range("max_boxes", self.max_boxes, 1)
        check_weights(self.weights, ("class", "distance", "generalised IoU"))

    def examples(self, content: Images, tokenizer: Tokenizer | None, seed: int) -> Examples:
        size, names = self.image_size or SIZE, tuple(content.class_names)
        image = first_image(content.splits["train"])
        mean, std = self.normalisation(image)
        fit = boxes.Resize(self.shorter_side or size, self.shorter_side or size, size)
        steps = boxes.parse(self.augment, size)
        resized = any(isinstance(step, boxes.Resize) for step in steps)
        make = partial(boxes.Transform, size=size, most=self.max_boxes, mean=mean, std=std)
        facts = Facts(
            num_classes=len(names),
            class_names=names,
            image_size=(size, size),
            channels=image.shape[2],
            mean=mean,
            std=std,
        )
        train = make(steps if resized else [*steps, fit], training=True)
        return Examples(content.splits, facts, None, train, make([fit], training=False))

    def batch_spec(self, batch_size: int, model: Model, facts: Callable[[], Facts], length: int | None = None) -> Spec:
        objects = (batch_size, self.max_boxes)
        image = self.image_spec(batch_size, model, facts)
        numbers = specs(jnp.float32, boxes=(*objects, 4), extent=(batch_size, 2))
        return image | numbers | specs(jnp.int32, classes=objects) | specs(bool, mask=(batch_size,), boxes_mask=objects)

    def forward(self, model: Model, batch: Batch) -> Any:
        """Return logits [L, B, Q, V] and boxes [L, B, Q, 4] of each decoder layer; pixels past `extent` are masked."""
        rows, columns = (
            jnp.arange(size) + 0.5 < (extent * size)[:, None]
            for size, extent in zip(batch["image"].shape[1:3], batch["extent"].T)
        )
        return model(batch["image"], rows[:, :, None] & columns[:, None])

    def loss(self, model: Model, batch: Batch) -> Result:
        """DETR's loss of a set of objects, see `set_loss`.

        Raises:
            ValueError: the model has too few queries.
        """
        logits, found = self.forward(model, batch)
        real = batch["boxes_mask"] & batch["mask"][:, None]
        if logits.shape[2] < real.shape[1]:
            raise ValueError(
                f"model.num_queries is {logits.shape[2]}: task.max_boxes is {real.shape[1]}, it must be at most that."
            )
        whole = {"mask": batch["mask"].sum(), "boxes_mask": real.sum().astype(jnp.float32)}
        return set_loss(logits, found, batch, self.weights, model.get_variable("run", "real", whole))

    def evaluators(self) -> dict[str, dict[str, Any]]:
        return super().evaluators() | {"detection": {"name": "detection"}}

    def predict(self, outputs: Any, batch: dict[str, np.ndarray], facts: Facts) -> list[dict[str, Any]]:
        """Return the objects of each image; boxes are left, top, width and height in the frame, from 0 to 1."""
        return [
            {
                "boxes": (objects["boxes"] * np.tile(extent[::-1], 2)).tolist(),
                "labels": [facts.class_names[number] for number in objects["classes"]],
                "scores": objects["scores"].tolist(),
            }
            for objects, extent in zip(objects_of(batch, *outputs)[1], batch["extent"][np.flatnonzero(batch["mask"])])
        ]

    def pictures(
        self,
        split: str,
        model: Model,
        variables: Mapping[str, Any],
        batches: Iterable[dict[str, np.ndarray]],
        facts: Facts,
        tokenizer: Tokenizer | None,
    ) -> Pictures:
        """Return some images with their true objects and those that the model is sure of.

        Objects are rows (image, class, score, left, top, width, height), the boxes relative to the frame.
        """
        batch = {name: value[:PICTURES] for name, value in next(iter(batches)).items()}
        ask = jax.jit(nn.apply(self.forward, model))
        answer = ask(variables, {name: jnp.asarray(value) for name, value in batch.items()})
        arrays = {"image": to_pixels(batch["image"], facts), "class_names": np.asarray(facts.class_names)}
        for name, images in zip(("truth", "found"), objects_of(batch, *map(np.asarray, answer))):
            rows = []
            for number, (objects, extent) in enumerate(zip(images, batch["extent"])):
                scores = objects.get("scores", np.ones(len(objects["classes"])))
                numbers, placed = np.full(len(scores), number), objects["boxes"] * np.tile(extent[::-1], 2)
                rows.append(np.column_stack([numbers, objects["classes"], scores, placed])[scores >= SUREST])
            arrays[name] = np.concatenate(rows).astype(np.float32)
        return {f"objects_{split}": arrays}


def objects_of(
    batch: Mapping[str, np.ndarray], logits: Float[np.ndarray, "L B Q V"], boxes: Float[np.ndarray, "L B Q 4"]
) -> tuple[list[dict], list[dict]]:
    """Return the true objects of each real image of a batch, and the predicted ones, as `Detections` takes them."""
    chances = softmax(logits[-1].astype(np.float32), axis=-1)[..., :-1]
    found = {"boxes": _placed(boxes[-1]), "classes": chances.argmax(axis=-1), "scores": chances.max(axis=-1)}
    truth = {"boxes": _placed(batch["boxes"])} | {name: batch[name] for name in ("classes", "crowd")}
    real, rows = batch["boxes_mask"] | batch["crowd"], np.flatnonzero(batch["mask"])
    return (
        [{name: value[row][real[row]] for name, value in truth.items()} for row in rows],
        [{name: value[row] for name, value in found.items()} for row in rows],
    )


def _placed(boxes):
    """Return boxes (centre x, centre y, width, height) as (left, top, width, height)."""
    return np.concatenate([boxes[..., :2] - boxes[..., 2:] / 2, boxes[..., 2:]], axis=-1)
