"""Images with boxes: the synthetic set `shapes`, and transforms that move boxes with the pixels.

An example has `image` uint8 [h, w, c] and, for each of its n objects, `boxes` float32 [n, 4] (left, top, right and
bottom edge in pixels), `classes` int32 [n] and `crowd` bool [n], which marks a box around several objects.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

from lineage.data import shuffle
from lineage.data.options import called
from lineage.data.sources.images import from_pillow, to_pillow

Example = dict[str, np.ndarray]

SHAPES: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    # what is inside, of a square from -1 to 1: x to the right, y down
    "circle": lambda x, y: x * x + y * y <= 1,
    "square": lambda x, y: np.maximum(abs(x), abs(y)) <= 1,
    "triangle": lambda x, y: (2 * abs(x) <= y + 1) & (y <= 1),
    "cross": lambda x, y: (np.minimum(abs(x), abs(y)) <= 1 / 3) & (np.maximum(abs(x), abs(y)) <= 1),
}
SIZES = {"train": 20_000, "validation": 500, "test": 500}


@dataclass(frozen=True)
class Shapes:
    """Coloured shapes on noise, at most `most` in an image; an example is a function of (seed, split, index)."""

    split: str
    size: int = 64
    most: int = 6
    seed: int = 0

    def __len__(self) -> int:
        return SIZES[self.split]

    def __getitem__(self, index: int) -> Example:
        """One example: later shapes lie over earlier ones, of which they hide little. Boxes are of whole shapes."""
        if not 0 <= index < len(self):
            raise IndexError(index)
        stream = len(SIZES) * self.seed + list(SIZES).index(self.split)
        random = shuffle.generator(shuffle.keys(np.array([index]), stream)[0])
        size, kinds = self.size, list(SHAPES.values())
        ground = random.uniform(0, 255, 3)
        image = ground + random.normal(0, 20, (size, size, 3))
        boxes, classes = [], []
        for _ in range(random.integers(1, self.most + 1)):
            width, height = random.uniform(size / 8, size / 2.5, 2)
            left, top = random.uniform(0, size - width), random.uniform(0, size - height)
            x, y = (np.arange(size) + 0.5 - left) * 2 / width - 1, (np.arange(size) + 0.5 - top) * 2 / height - 1
            number = random.integers(len(kinds))
            inside = kinds[number](x[None, :], y[:, None])
            rows, columns = np.flatnonzero(inside.any(1)), np.flatnonzero(inside.any(0))
            if not len(rows):  # too small to hit the centre of a pixel
                continue
            box = np.array([columns[0], rows[0], columns[-1] + 1, rows[-1] + 1])
            if all(_overlap(box, other) < 0.2 for other in boxes):
                boxes.append(box)
                classes.append(number)
                colour = (ground + random.uniform(64, 192, 3)) % 256
                image[inside] = colour + random.normal(0, 10, (inside.sum(), 3))
        return {
            "image": np.clip(image, 0, 255).astype(np.uint8),
            "boxes": np.array(boxes, np.float32).reshape(-1, 4),
            "classes": np.array(classes, np.int32),
            "crowd": np.zeros(len(boxes), bool),
        }

    def take(self, indices: np.ndarray) -> dict[str, list[np.ndarray]]:
        """The examples of `indices` int64 [N]."""
        return gather([self[index] for index in indices])


def _overlap(a, b):
    """The part of the smaller box that is in the other."""
    sides = np.clip(np.minimum(a[2:], b[2:]) - np.maximum(a[:2], b[:2]), 0, None)
    return sides.prod() / min((a[2:] - a[:2]).prod(), (b[2:] - b[:2]).prod())


def gather(examples: Sequence[Example]) -> dict[str, list[np.ndarray]]:
    """Examples as lists by feature."""
    return {name: [example[name] for example in examples] for name in examples[0]}


def flip(example: Example) -> Example:
    """Mirrored, left to right."""
    width = example["image"].shape[1]
    boxes = example["boxes"] * np.float32([-1, 1, -1, 1]) + np.float32([width, 0, width, 0])
    return example | {"image": example["image"][:, ::-1], "boxes": boxes[:, [2, 1, 0, 3]]}


def resize(example: Example, height: int, width: int) -> Example:
    """Resized (bilinear, as Pillow does)."""
    image = example["image"]
    if image.shape[:2] == (height, width):
        return example
    scale = np.float32([width / image.shape[1], height / image.shape[0]] * 2)
    picture = to_pillow(image).resize((width, height), Image.Resampling.BILINEAR)
    return example | {"image": from_pillow(picture), "boxes": example["boxes"] * scale}


def crop(example: Example, top: int, left: int, height: int, width: int) -> Example:
    """A part of the image with the parts of the boxes that are in it; objects that are not are left out."""
    boxes = np.clip(example["boxes"] - np.float32([left, top] * 2), 0, np.float32([width, height] * 2))
    kept = (boxes[:, 2:] > boxes[:, :2]).all(axis=1)
    objects = {name: example[name][kept] for name in ("classes", "crowd")}
    image = example["image"][top : top + height, left : left + width]
    return example | {"image": image, "boxes": boxes[kept]} | objects


@dataclass(frozen=True)
class Flip:
    """Mirrors every other image."""

    def __call__(self, example: Example, random: np.random.Generator) -> Example:
        return flip(example) if random.integers(2) else example


@dataclass(frozen=True)
class Resize:
    """The shorter side becomes `low` to `high` pixels long, but the longer one at most `longest` (0 = any length)."""

    low: int
    high: int
    longest: int = 0

    def __post_init__(self):
        if not 0 < self.low <= self.high:
            raise ValueError(f"resize({self.low}, {self.high}) needs 0 < low <= high")

    def __call__(self, example: Example, random: np.random.Generator) -> Example:
        height, width = example["image"].shape[:2]
        scale = random.integers(self.low, self.high + 1) / min(height, width)
        if self.longest:
            scale = min(scale, self.longest / max(height, width))
        return resize(example, max(round(height * scale), 1), max(round(width * scale), 1))


@dataclass(frozen=True)
class Crop:
    """Every other image is cut to a part of `low` to `high` pixels on each side, after it was resized so that its
    shorter side is a little longer than `low` to `high`: DETR's crop (arXiv 2005.12872, appendix A.4)."""

    low: int
    high: int

    def __post_init__(self):
        if not 0 < self.low * 25 // 24 <= self.high:
            raise ValueError(f"crop({self.low}, {self.high}) needs 0 < low <= 24/25 high")

    def __call__(self, example: Example, random: np.random.Generator) -> Example:
        if random.integers(2):
            return example
        example = Resize(self.low * 25 // 24, self.high)(example, random)
        sides = example["image"].shape[:2]
        size = [int(random.integers(min(self.low, side), min(self.high, side) + 1)) for side in sides]
        start = [int(random.integers(side - part + 1)) for side, part in zip(sides, size)]
        return crop(example, *start, *size)


def parse(augment: str, longest: int) -> list[Callable[[Example, np.random.Generator], Example]]:
    """The transforms that a string names, such as `flip | crop(384, 600) | resize(480, 800)`."""
    known = {"flip": Flip, "crop": Crop, "resize": lambda low, high: Resize(low, high, longest)}
    return called("augment", augment, known)


@dataclass(frozen=True)
class Transform:
    """A batch of examples to one for the model.

    Each image goes through the steps, must then fit in a square of `size` pixels, lies in its upper left corner and is
    normalised; the rest is 0. `extent` float32 [B, 2] is the part of the rows and of the columns that it takes. `boxes`
    float32 [B, N, 4] (centre x, centre y, width and height, relative to the image itself) and `classes` int32 [B, N]
    are real where `boxes_mask` bool [B, N] is True, or, in evaluation, `crowd` bool [B, N].

    Attributes:
        most: N.
        training: objects beyond N, and crowds, are left out; in evaluation N must be enough.
    """

    steps: Sequence[Callable[[Example, np.random.Generator], Example]]
    size: int
    most: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    training: bool

    def __call__(self, batch: dict[str, Any], keys: np.ndarray) -> dict[str, np.ndarray]:
        count, channels = len(keys), batch["image"][0].shape[-1]
        out = {
            "image": np.zeros((count, self.size, self.size, channels), np.float32),
            "extent": np.zeros((count, 2), np.float32),
            "boxes": np.zeros((count, self.most, 4), np.float32),
            "classes": np.zeros((count, self.most), np.int32),
            "boxes_mask": np.zeros((count, self.most), bool),
            "crowd": np.zeros((count, self.most), bool),
            "mask": batch["mask"],
        }
        mean, std = np.float32(self.mean), np.float32(self.std)
        names = ("image", "boxes", "classes", "crowd")
        for row, values in enumerate(zip(keys, *(batch[name] for name in names))):
            example, random = dict(zip(names, values[1:])), shuffle.generator(values[0])
            for step in self.steps:
                example = step(example, random)
            self._put(out, row, example, mean, std)
        if self.training:
            del out["crowd"]
        return out

    def _put(self, out, row, example, mean, std):
        image, boxes = example["image"], example["boxes"]
        height, width = image.shape[:2]
        if max(height, width) > self.size:
            raise ValueError(f"an image of {height}x{width} pixels does not fit in image_size={self.size}")
        if len(boxes) > self.most and not self.training:
            raise ValueError(f"an image has {len(boxes)} objects: max_boxes={self.most} must be at least that")
        out["image"][row, :height, :width] = (image * np.float32(1 / 255) - mean) / std
        out["extent"][row] = height / self.size, width / self.size
        boxes = boxes / np.float32([width, height] * 2)
        boxes = np.concatenate([(boxes[:, :2] + boxes[:, 2:]) / 2, boxes[:, 2:] - boxes[:, :2]], axis=1)
        kept = np.flatnonzero(~example["crowd"])[: self.most] if self.training else np.arange(len(boxes))
        found = {"boxes": boxes, "boxes_mask": ~example["crowd"]} | {
            name: example[name] for name in ("classes", "crowd")
        }
        for name, value in found.items():
            out[name][row, : len(kept)] = value[kept]
