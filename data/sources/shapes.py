"""Synthetic images with boxes."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from lineage.configs.registry import Count
from lineage.data import shuffle
from lineage.data.content import Images, gather
from lineage.data.loader import ExampleSource
from lineage.data.sources.base import SOURCES, Source
from lineage.data.sources.boxes import boxed

# Functions that return whether the points of a square from -1 to 1 (x to the right, y down) are inside the shape.
SHAPES: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "circle": lambda x, y: x * x + y * y <= 1,
    "square": lambda x, y: np.maximum(abs(x), abs(y)) <= 1,
    "triangle": lambda x, y: (2 * abs(x) <= y + 1) & (y <= 1),
    "cross": lambda x, y: (np.minimum(abs(x), abs(y)) <= 1 / 3) & (np.maximum(abs(x), abs(y)) <= 1),
}
SIZES = {"train": 20_000, "validation": 500, "test": 500}  # number of images of each split
MAX_SHAPES = 6  # in an image


@SOURCES.register("shapes")
@dataclass(frozen=True)
class Shapes(Source):
    """Drawn circles, squares, triangles and crosses on noise, at most 6 in an image.

    Attributes:
        image_size: height and width of the images in pixels.
    """

    image_size: Count = 64

    def images_with_boxes(self) -> Images:
        return Images({split: DrawnShapes(split, self.image_size) for split in SIZES}, list(SHAPES))


@dataclass(frozen=True)
class DrawnShapes(ExampleSource):
    """Images of `size` x `size` pixels with at most `MAX_SHAPES` colored shapes on noise, by (split, index)."""

    split: str
    size: int = 64

    def __len__(self) -> int:
        return SIZES[self.split]

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        """Draw one example. Later shapes hide at most a small part of earlier ones; boxes are of whole shapes."""
        if not 0 <= index < len(self):
            raise IndexError(index)
        stream = list(SIZES).index(self.split)
        random = shuffle.generator(shuffle.keys(np.array([index]), stream)[0])
        size, kinds = self.size, list(SHAPES.values())
        ground = random.uniform(0, 255, 3)
        image = ground + random.normal(0, 20, (size, size, 3))
        objects = []
        for _ in range(random.integers(1, MAX_SHAPES + 1)):
            width, height = random.uniform(size / 8, size / 2.5, 2)
            left, top = random.uniform(0, size - width), random.uniform(0, size - height)
            x, y = (np.arange(size) + 0.5 - left) * 2 / width - 1, (np.arange(size) + 0.5 - top) * 2 / height - 1
            number = random.integers(len(kinds))
            inside = kinds[number](x[None, :], y[:, None])
            rows, columns = np.flatnonzero(inside.any(1)), np.flatnonzero(inside.any(0))
            if not len(rows):  # The shape is too small to contain the center of a pixel.
                continue
            box = np.array([columns[0], rows[0], columns[-1] + 1, rows[-1] + 1])
            if all(_overlap(box, other) < 0.2 for other, *_ in objects):
                objects.append((box, number, False))
                color = (ground + random.uniform(64, 192, 3)) % 256
                image[inside] = color + random.normal(0, 10, (inside.sum(), 3))
        return {"image": np.clip(image, 0, 255).astype(np.uint8)} | boxed(objects)

    def take(self, indices: np.ndarray) -> dict[str, list[np.ndarray]]:
        return gather([self[index] for index in indices])


def _overlap(a: np.ndarray, b: np.ndarray) -> float:
    """Return the fraction of the smaller box that is inside the larger one."""
    sides = np.clip(np.minimum(a[2:], b[2:]) - np.maximum(a[:2], b[:2]), 0, None)
    return sides.prod() / min((a[2:] - a[:2]).prod(), (b[2:] - b[:2]).prod())
