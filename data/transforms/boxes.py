"""Transforms of images that also transform their boxes; `content.Images` describes the examples."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

from lineage.configs.registry import Count
from lineage.data import shuffle
from lineage.data.transforms.calls import Checked, parse_calls
from lineage.data.transforms.pillow import check_pixels, from_pillow, to_pillow

MAX_PIXELS = 10**8  # of a resized image
Example = dict[str, np.ndarray]
Step = Callable[[Example, np.random.Generator], Example]


def flip(example: Example) -> Example:
    """Mirror an image left to right."""
    width = example["image"].shape[1]
    boxes = example["boxes"] * np.float32([-1, 1, -1, 1]) + np.float32([width, 0, width, 0])
    return example | {"image": example["image"][:, ::-1], "boxes": boxes[:, [2, 1, 0, 3]]}


def resize(example: Example, height: int, width: int) -> Example:
    """Resize an image with Pillow's bilinear interpolation."""
    image = example["image"]
    if image.shape[:2] == (height, width):
        return example
    if height * width > MAX_PIXELS:
        before = f"{image.shape[1]}x{image.shape[0]}"
        raise ValueError(f"An image of {before} pixels would become {width}x{height}: too large.")
    scale = np.float32([width / image.shape[1], height / image.shape[0]] * 2)
    picture = to_pillow(image).resize((width, height), Image.Resampling.BILINEAR)
    return example | {"image": from_pillow(picture), "boxes": example["boxes"] * scale}


def crop(example: Example, top: int, left: int, height: int, width: int) -> Example:
    """Crop an image and its boxes; objects outside the crop are removed."""
    boxes = np.clip(example["boxes"] - np.float32([left, top] * 2), 0, np.float32([width, height] * 2))
    kept = (boxes[:, 2:] > boxes[:, :2]).all(axis=1)
    objects = {name: example[name][kept] for name in ("classes", "crowd")}
    image = example["image"][top : top + height, left : left + width]
    return example | {"image": image, "boxes": boxes[kept]} | objects


@dataclass(frozen=True)
class Flip:
    """Mirror an image left to right with probability 1/2."""

    def __call__(self, example: Example, random: np.random.Generator) -> Example:
        return flip(example) if random.integers(2) else example


@dataclass(frozen=True)
class Resize(Checked):
    """Resize the shorter side to `low` to `high` pixels, and the longer side to at most `longest` (0: no limit).

    The longer side is rounded down, as in the reference implementation of DETR.
    """

    low: Count
    high: int
    longest: int = 0

    def __post_init__(self):
        super().__post_init__()
        if self.low > self.high:
            raise ValueError(f"Resize.low is {self.low}: it must be at most high, which is {self.high}.")

    def __call__(self, example: Example, random: np.random.Generator) -> Example:
        height, width = example["image"].shape[:2]
        shorter, longer = sorted((height, width))
        size = exact = random.integers(self.low, self.high + 1)
        if self.longest and longer / shorter * size > self.longest:
            exact = self.longest * shorter / longer
            size = max(round(exact), 1)
        other = max(int(exact * longer / shorter), 1)
        return resize(example, size, other) if height <= width else resize(example, other, size)


@dataclass(frozen=True)
class Crop(Checked):
    """Crop an image to `low` to `high` pixels on each side with probability 1/2 (DETR, arXiv 2005.12872, appendix A.4).

    The image is resized first, so that its shorter side is a little longer than `low` to `high` pixels.
    """

    low: Count
    high: int

    def __post_init__(self):
        super().__post_init__()
        if self.low * 25 // 24 > self.high:
            raise ValueError(f"Crop.low is {self.low}: it must be at most 24/25 of high, which is {self.high}.")

    def __call__(self, example: Example, random: np.random.Generator) -> Example:
        if random.integers(2):
            return example
        example = Resize(self.low * 25 // 24, self.high)(example, random)
        sides = example["image"].shape[:2]
        size = [int(random.integers(min(self.low, side), min(self.high, side) + 1)) for side in sides]
        start = [int(random.integers(side - length + 1)) for side, length in zip(sides, size)]
        return crop(example, *start, *size)


def parse(augment: str, longest: int) -> list[Step]:
    """Return the transforms of a pipeline such as `flip | crop(384, 600) | resize(480, 800)`."""
    known = {"flip": Flip, "crop": Crop, "resize": lambda low, high: Resize(low, high, longest)}
    return parse_calls("task.augment", augment, known)


@dataclass(frozen=True)
class Transform:
    """Transform of batches of images with boxes into batches for the model.

    Each image is transformed by the steps, normalized to (pixel / 255 - mean) / std and placed in the upper left corner
    of a square of `size` pixels, the rest of which is 0. `extent` float32 [B, 2] is the fraction of the rows and of the
    columns that the image covers. `boxes` float32 [B, N, 4] (center x, center y, width, height, relative to the image)
    and `classes` int32 [B, N], N = `max_boxes`, are valid where `boxes_mask` bool [B, N] is True or, in evaluation,
    `crowd` bool [B, N]. Training leaves out crowds, what is outside of the image, objects without area (as DETR does),
    and the objects beyond N. In evaluation, more than N are an error, and `size` int32 [B, 2] is the height and width
    of each image before the steps, in pixels.
    """

    steps: Sequence[Step]
    size: int
    max_boxes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    training: bool

    def __call__(self, batch: dict[str, Any], keys: np.ndarray) -> dict[str, np.ndarray]:
        for image in batch["image"]:
            check_pixels(image)
        count, channels = len(keys), batch["image"][0].shape[-1]
        shapes = {"image": (self.size, self.size, channels), "extent": (2,), "boxes": (self.max_boxes, 4)}
        out = {name: np.zeros((count, *shape), np.float32) for name, shape in shapes.items()}
        kinds = {"classes": np.int32, "boxes_mask": bool, "crowd": bool}
        out |= {name: np.zeros((count, self.max_boxes), kind) for name, kind in kinds.items()}
        sizes = np.array([image.shape[:2] for image in batch["image"]], np.int32)
        out |= {"size": sizes, "mask": batch["mask"]}
        for row, key in enumerate(keys):
            example = {name: batch[name][row] for name in ("image", "boxes", "classes", "crowd")}
            if self.training:
                example = crop(example, 0, 0, *sizes[row])
            random = shuffle.generator(key)
            for step in self.steps:
                example = step(example, random)
            self._store(out, row, example)
        if self.training:
            del out["crowd"], out["size"]
        return out

    def _store(self, out, row, example):
        image, boxes = example["image"], example["boxes"]
        height, width = image.shape[:2]
        if max(height, width) > self.size:
            raise ValueError(f"An image of {height}x{width} does not fit in task.image_size, which is {self.size}.")
        if len(boxes) > self.max_boxes and not self.training:
            raise ValueError(f"task.max_boxes is {self.max_boxes}: an image has {len(boxes)} objects.")
        scaled = image * np.float32(1 / 255)
        out["image"][row, :height, :width] = (scaled - np.float32(self.mean)) / np.float32(self.std)
        out["extent"][row] = height / self.size, width / self.size
        boxes = boxes / np.float32([width, height] * 2)
        boxes = np.concatenate([(boxes[:, :2] + boxes[:, 2:]) / 2, boxes[:, 2:] - boxes[:, :2]], axis=1)
        kept = np.flatnonzero(~example["crowd"])[: self.max_boxes] if self.training else np.arange(len(boxes))
        for name, value in (example | {"boxes": boxes, "boxes_mask": ~example["crowd"]}).items():
            if name != "image":
                out[name][row, : len(kept)] = value[kept]
