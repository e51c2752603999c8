"""Image augmentation: functions of images and a random key for each.

Resizing or cropping comes first (to stacked uint8 [B, h, w, c]), then changes of the pixels, normalization, erasing.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from PIL import Image

from lineage.data import shuffle
from lineage.data.transforms.calls import parse_calls
from lineage.data.transforms.distortions import Jitter, RandAugment
from lineage.data.transforms.pillow import PerImage, from_pillow, stack, to_pillow

Images = Sequence[np.ndarray] | np.ndarray
RESAMPLING = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}


def random_box(
    height: int, width: int, areas: tuple[float, float], max_aspect: float, random: np.random.Generator
) -> tuple[int, int, int, int] | None:
    """Draw a box (top, left, height, width) of random relative area and aspect ratio; None if no box of ten fits."""
    for _ in range(10):
        area = random.uniform(*areas) * height * width
        aspect = math.exp(random.uniform(-math.log(max_aspect), math.log(max_aspect)))
        h, w = round(math.sqrt(area / aspect)), round(math.sqrt(area * aspect))
        if 1 <= h <= height and 1 <= w <= width:
            return int(random.integers(height - h + 1)), int(random.integers(width - w + 1)), h, w
    return None


@dataclass(frozen=True)
class CentreCrop:
    """Resize the shorter side to size / fraction with Pillow, then keep the central size x size pixels.

    Attributes:
        size: height and width of the result in pixels.
        fraction: fraction of the resized image's shorter side that is kept.
        resample: interpolation, a name of `RESAMPLING`.
    """

    size: int
    fraction: float = 1.0
    resample: str = "bilinear"

    def __post_init__(self):
        if not 0 < self.fraction <= 1:
            raise ValueError(f"task.evaluation_crop is {self.fraction}: it must be above 0 and at most 1.")

    def __call__(self, images: Images, keys: np.ndarray) -> np.ndarray:
        return np.stack([self._one(image) for image in images])

    def _one(self, image: np.ndarray) -> np.ndarray:
        height, width = image.shape[:2]
        scale = round(self.size / self.fraction) / min(height, width)
        width, height = max(round(width * scale), self.size), max(round(height * scale), self.size)
        if (height, width) != image.shape[:2]:
            image = from_pillow(to_pillow(image).resize((width, height), RESAMPLING[self.resample]))
        top, left = (height - self.size) // 2, (width - self.size) // 2
        return image[top : top + self.size, left : left + self.size]


@dataclass(frozen=True)
class RandomCrop(PerImage):
    """Inception's crop (arXiv 1409.4842): a box of random area and aspect ratio, resized to size x size pixels.

    Attributes:
        size: height and width of the result in pixels.
        min_area, max_area: range of the relative area.
        max_aspect: largest aspect ratio; the smallest is its inverse.
        resample: interpolation, a name of `RESAMPLING`.
    """

    size: int
    min_area: float = 0.05
    max_area: float = 1.0
    max_aspect: float = 4 / 3
    resample: str = "bilinear"

    def __post_init__(self):
        if self.resample not in RESAMPLING:
            raise ValueError(f"task.resample is {self.resample!r}: it must be {' or '.join(RESAMPLING)}.")
        if not 0 < self.min_area <= self.max_area <= 1 or self.max_aspect < 1:
            raise ValueError(f"{self}: need 0 < min_area <= max_area <= 1 and max_aspect >= 1.")

    def transform(self, image: np.ndarray, random: np.random.Generator) -> np.ndarray:
        top, left, height, width = self.box(*image.shape[:2], random)
        part = to_pillow(image[top : top + height, left : left + width])
        return from_pillow(part.resize((self.size, self.size), RESAMPLING[self.resample]))

    def box(self, height: int, width: int, random: np.random.Generator) -> tuple[int, int, int, int]:
        """Draw the box (top, left, height, width); the whole image if no box of ten fits."""
        box = random_box(height, width, (self.min_area, self.max_area), self.max_aspect, random)
        return box or (0, 0, height, width)


@dataclass(frozen=True)
class Flip:
    """Mirror each image left to right with probability 1/2."""

    def __call__(self, images: np.ndarray, keys: np.ndarray) -> np.ndarray:
        mirrored = shuffle.mix(keys) % np.uint64(2) == 1
        images = images.copy()
        images[mirrored] = images[mirrored, :, ::-1]
        return images


@dataclass(frozen=True)
class Shift:
    """Translate each image by up to `pixels` in each direction; the border is filled with 0."""

    pixels: int

    def __post_init__(self):
        if not isinstance(self.pixels, int) or self.pixels < 0:
            raise ValueError(f"shift({self.pixels}) needs a whole number of pixels, 0 or more.")

    def __call__(self, images: np.ndarray, keys: np.ndarray) -> np.ndarray:
        n, (batch, height, width, _) = self.pixels, images.shape
        down, right = (shuffle.fold(keys, axis) % np.uint64(2 * n + 1) for axis in (0, 1))
        padded = np.pad(images, ((0, 0), (n, n), (n, n), (0, 0)))
        rows = down.astype(np.int64)[:, None] + np.arange(height)
        columns = right.astype(np.int64)[:, None] + np.arange(width)
        return padded[np.arange(batch)[:, None, None], rows[:, :, None], columns[:, None, :]]


@dataclass(frozen=True)
class Erase:
    """Random erasing (arXiv 1708.04896) as in DeiT: a box of a normalized image becomes Gaussian noise.

    Attributes:
        probability: probability of erasing a box of an image.
        min_area, max_area: range of the box's relative area.
        max_aspect: largest aspect ratio; the smallest is its inverse.
    """

    probability: float = 0.25
    min_area: float = 0.02
    max_area: float = 1 / 3
    max_aspect: float = 10 / 3

    def __post_init__(self):
        if not 0 <= self.probability <= 1 or not 0 < self.min_area <= self.max_area <= 1 or self.max_aspect < 1:
            raise ValueError(f"{self}: need probability in 0..1, 0 < min_area <= max_area <= 1 and max_aspect >= 1")

    def __call__(self, images: np.ndarray, keys: np.ndarray) -> np.ndarray:
        images = images.copy()
        for image, key in zip(images, keys):
            random = shuffle.generator(key)
            if random.random() < self.probability:
                box = random_box(*image.shape[:2], (self.min_area, self.max_area), self.max_aspect, random)
                top, left, height, width = box or (0, 0, 0, 0)
                part = image[top : top + height, left : left + width]
                part[:] = random.standard_normal(part.shape, image.dtype)
        return images


def parse(
    augment: str, image_size: int = 0, resample: str = "bilinear"
) -> list[Callable[[Images, np.ndarray], np.ndarray]]:
    """Return the transforms of a pipeline such as `crop | flip | randaugment(2, 10)`.

    Args:
        augment: pipeline.
        image_size: height and width in pixels of the images that `crop` returns.
        resample: interpolation of `crop`.

    Raises:
        ValueError: a transform is unknown or in the wrong position.
    """
    crop = partial(RandomCrop, image_size, resample=resample)
    known = {"crop": crop, "flip": Flip, "randaugment": RandAugment, "jitter": Jitter, "shift": Shift, "erase": Erase}
    transforms = parse_calls("task.augment", augment, known)
    if any(isinstance(transform, RandomCrop) for transform in transforms[1:]):
        raise ValueError(f"task.augment is {augment!r}: crop must come first.")
    if any(isinstance(transform, Erase) for transform in transforms[:-1]):
        raise ValueError(f"task.augment is {augment!r}: erase must come last.")
    if transforms and isinstance(transforms[0], RandomCrop) and not image_size:
        raise ValueError(f"task.augment is {augment!r}: crop needs task.image_size.")
    return transforms


@dataclass(frozen=True)
class Transform:
    """Transform of batches of decoded images into batches for the model.

    Attributes:
        resize: transform to images of one size; None for images that have one size.
        steps: transforms of images uint8.
        mean, std: normalization to (pixel / 255 - mean) / std in float32.
        erase: a transform of normalized images.
    """

    resize: CentreCrop | RandomCrop | None
    steps: Sequence[Callable[[np.ndarray, np.ndarray], np.ndarray]]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    erase: Erase | None = None

    def __call__(self, batch: dict[str, Any], keys: np.ndarray) -> dict[str, np.ndarray]:
        images = batch["image"]
        if self.resize:
            images = self.resize(images, shuffle.fold(keys, 0))
        elif isinstance(images, list):
            images = stack(images)
        for number, step in enumerate(self.steps, 1):
            images = step(images, shuffle.fold(keys, number))
        mean, std = np.float32(self.mean), np.float32(self.std)
        pixels = images * (1 / (255 * std))
        pixels -= mean / std
        if self.erase:
            pixels = self.erase(pixels, shuffle.fold(keys, len(self.steps) + 1))
        return {**batch, "image": pixels}
