"""Image transforms, each a function of the images and of one random key for each, never of the batch around them.

Sizes come first (to stacked uint8 [B, h, w, c]), then changes of the pixels, then the normalisation, then erasing.
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
from lineage.data.transforms.pillow import from_pillow, stack, to_pillow

Images = Sequence[np.ndarray] | np.ndarray
RESAMPLING = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}


def random_box(
    height: int, width: int, areas: tuple[float, float], max_aspect: float, random: np.random.Generator
) -> tuple[int, int, int, int] | None:
    """(top, left, height, width) of a part of an image, of random relative area and aspect ratio.

    None if ten tries do not fit.
    """
    for _ in range(10):
        area = random.uniform(*areas) * height * width
        aspect = math.exp(random.uniform(-math.log(max_aspect), math.log(max_aspect)))
        h, w = round(math.sqrt(area / aspect)), round(math.sqrt(area * aspect))
        if 1 <= h <= height and 1 <= w <= width:
            return int(random.integers(height - h + 1)), int(random.integers(width - w + 1)), h, w
    return None


@dataclass(frozen=True)
class CentreCrop:
    """Resizes the shorter side to size / fraction (as Pillow does), then keeps the central size x size."""

    size: int
    fraction: float = 1.0
    resample: str = "bilinear"

    def __post_init__(self):
        _check_resample(self.resample)
        if not 0 < self.fraction <= 1:
            raise ValueError(f"evaluation_crop={self.fraction} must be above 0 and at most 1")

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
class RandomCrop:
    """The "inception" crop (arXiv:1409.4842): a part of random area and aspect ratio, resized to size x size."""

    size: int
    min_area: float = 0.05
    max_area: float = 1.0
    max_aspect: float = 4 / 3
    resample: str = "bilinear"

    def __post_init__(self):
        _check_resample(self.resample)
        if not 0 < self.min_area <= self.max_area <= 1 or self.max_aspect < 1:
            raise ValueError(f"{self}: need 0 < min_area <= max_area <= 1 and max_aspect >= 1")

    def __call__(self, images: Images, keys: np.ndarray) -> np.ndarray:
        return np.stack([self._one(image, shuffle.generator(key)) for image, key in zip(images, keys)])

    def _one(self, image: np.ndarray, random: np.random.Generator) -> np.ndarray:
        top, left, height, width = self.box(*image.shape[:2], random)
        part = to_pillow(image[top : top + height, left : left + width])
        return from_pillow(part.resize((self.size, self.size), RESAMPLING[self.resample]))

    def box(self, height: int, width: int, random: np.random.Generator) -> tuple[int, int, int, int]:
        """(top, left, height, width) of the part; the whole image if ten tries do not fit."""
        box = random_box(height, width, (self.min_area, self.max_area), self.max_aspect, random)
        return box or (0, 0, height, width)


@dataclass(frozen=True)
class Flip:
    """Mirrors every other image, left to right."""

    def __call__(self, images: np.ndarray, keys: np.ndarray) -> np.ndarray:
        mirrored = shuffle.mix(keys) % np.uint64(2) == 1
        images = images.copy()
        images[mirrored] = images[mirrored, :, ::-1]
        return images


@dataclass(frozen=True)
class Shift:
    """Moves each image by up to `pixels` down or up and left or right; what comes in is 0."""

    pixels: int

    def __post_init__(self):
        if not isinstance(self.pixels, int) or self.pixels < 0:
            raise ValueError(f"shift({self.pixels}) needs a whole number of pixels")

    def __call__(self, images: np.ndarray, keys: np.ndarray) -> np.ndarray:
        n, (batch, height, width, _) = self.pixels, images.shape
        down, right = (shuffle.fold(keys, axis) % np.uint64(2 * n + 1) for axis in (0, 1))
        padded = np.pad(images, ((0, 0), (n, n), (n, n), (0, 0)))
        rows = down.astype(np.int64)[:, None] + np.arange(height)
        columns = right.astype(np.int64)[:, None] + np.arange(width)
        return padded[np.arange(batch)[:, None, None], rows[:, :, None], columns[:, None, :]]


@dataclass(frozen=True)
class Erase:
    """Random erasing (arXiv:1708.04896) as DeiT has it: with this probability, a box of a normalised image, of random
    area and aspect ratio, becomes Gaussian noise."""

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


def _check_resample(name):
    if name not in RESAMPLING:
        raise ValueError(f"resample={name!r} must be {' or '.join(RESAMPLING)}")


def parse(
    augment: str, image_size: int = 0, resample: str = "bilinear"
) -> list[Callable[[Images, np.ndarray], np.ndarray]]:
    """The transforms that a string names, such as `crop | flip | randaugment(2, 10)`; `crop` is to `image_size`.

    Raises ValueError for what it does not know.
    """
    crop = partial(RandomCrop, image_size, resample=resample)
    known = {"crop": crop, "flip": Flip, "randaugment": RandAugment, "jitter": Jitter, "shift": Shift, "erase": Erase}
    transforms = parse_calls("augment", augment, known)
    if any(isinstance(transform, RandomCrop) for transform in transforms[1:]):
        raise ValueError(f"augment={augment!r}: crop must come first")
    if any(isinstance(transform, Erase) for transform in transforms[:-1]):
        raise ValueError(f"augment={augment!r}: erase must come last")
    if transforms and isinstance(transforms[0], RandomCrop) and not image_size:
        raise ValueError(f"augment={augment!r}: crop needs image_size")
    return transforms


@dataclass(frozen=True)
class Transform:
    """A batch of decoded images to a batch for the model: resized if need be, changed by the steps, normalised to
    (pixel / 255 - mean) / std in float32, and erased in part."""

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
