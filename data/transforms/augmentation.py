"""Image augmentation: functions of images and a random key for each.

Resizing or cropping comes first (to stacked uint8 [B, h, w, c]), then pixel transforms, normalization and erasing.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import numpy as np
from PIL import Image

from lineage.configs.registry import Natural, Range
from lineage.data import shuffle
from lineage.data.transforms.calls import Checked, parse_calls
from lineage.data.transforms.distortions import Jitter, RandAugment
from lineage.data.transforms.pillow import PerImage, Picture, check_pixels, crop, from_pillow, opened, stack

Images = Sequence[np.ndarray | Picture] | np.ndarray
Step = Callable[[Images, np.ndarray], np.ndarray]  # function of images and a key for each
Fraction = Annotated[float, Range(above=0, high=1)]
ELONGATED = 64  # ratio of a resized image to its crop from which on only the crop is computed, which rounds differently
RESAMPLING = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}


class RandomBox(Checked):
    """Base class of transforms that draw a box of random area and aspect ratio."""

    min_area: float  # range of the area of the box, as a fraction of the image's
    max_area: float
    max_aspect: float  # the minimum aspect ratio is its inverse

    def __post_init__(self):
        super().__post_init__()
        if self.min_area > self.max_area:
            raise ValueError(f"min_area is {self.min_area}: it must be at most max_area, which is {self.max_area}.")

    def box(self, height: int, width: int, random: np.random.Generator) -> tuple[int, int, int, int] | None:
        """Draw a box (top, left, height, width) in an image; return None if none of ten boxes fits."""
        for _ in range(10):
            area = random.uniform(self.min_area, self.max_area) * height * width
            aspect = math.exp(random.uniform(-math.log(self.max_aspect), math.log(self.max_aspect)))
            h, w = round(math.sqrt(area / aspect)), round(math.sqrt(area * aspect))
            if 1 <= h <= height and 1 <= w <= width:
                return int(random.integers(height - h + 1)), int(random.integers(width - w + 1)), h, w
        return None


@dataclass(frozen=True)
class CenterCrop:
    """Resize the shorter side to size / fraction with Pillow, then keep the central size x size pixels.

    The longer side is rounded down, as in torchvision and `transformers`. With `squash`, both sides are resized to
    size / fraction.
    """

    size: int
    fraction: float = 1.0
    resample: str = "bilinear"
    squash: bool = False

    def __call__(self, images: Images, keys: np.ndarray) -> np.ndarray:
        return np.stack([self._one(image) for image in images])

    def _one(self, image: np.ndarray | Picture) -> np.ndarray:
        with opened(image) as picture:
            shorter, sides = round(self.size / self.fraction), picture.size
            width, height = (shorter if self.squash else side * shorter // min(sides) for side in sides)
            left, top = (width - self.size) // 2, (height - self.size) // 2
            edges, kind = (left, top, left + self.size, top + self.size), RESAMPLING[self.resample]
            if width * height > ELONGATED * self.size**2:  # the whole resized image could be far larger than the file
                box = tuple(edge * side / length for edge, side, length in zip(edges, sides * 2, (width, height) * 2))
                return from_pillow(picture.resize((self.size, self.size), kind, box=box))
            if (width, height) != picture.size:
                picture = picture.resize((width, height), kind)
            return from_pillow(picture.crop(edges))


@dataclass(frozen=True)
class RandomCrop(RandomBox, PerImage):
    """Inception's crop (arXiv 1409.4842): a random box, or the image if none fits, resized to size x size pixels."""

    size: int
    min_area: Fraction = 0.05
    max_area: Fraction = 1.0
    max_aspect: Annotated[float, Range(1)] = 4 / 3
    resample: str = "bilinear"

    def __post_init__(self):
        super().__post_init__()
        if self.resample not in RESAMPLING:
            raise ValueError(f"task.resample is {self.resample!r}: it must be {' or '.join(RESAMPLING)}.")

    def transform(self, image: np.ndarray | Picture, random: np.random.Generator) -> np.ndarray:
        with opened(image) as picture:
            box = self.box(picture.height, picture.width, random)
            return from_pillow(crop(picture, box, self.size, RESAMPLING[self.resample]))

    def box(self, height: int, width: int, random: np.random.Generator) -> tuple[int, int, int, int]:
        return super().box(height, width, random) or (0, 0, height, width)


@dataclass(frozen=True)
class Flip:
    """Mirror each image left to right with probability 1/2."""

    def __call__(self, images: np.ndarray, keys: np.ndarray) -> np.ndarray:
        mirrored = shuffle.mix(keys) % np.uint64(2) == 1
        images = images.copy()
        images[mirrored] = images[mirrored, :, ::-1]
        return images


@dataclass(frozen=True)
class Shift(Checked):
    """Translate each image by up to `pixels` in each direction; the border is filled with 0."""

    pixels: Natural

    def __call__(self, images: np.ndarray, keys: np.ndarray) -> np.ndarray:
        n, (batch, height, width, _) = self.pixels, images.shape
        down, right = (shuffle.fold(keys, axis) % np.uint64(2 * n + 1) for axis in (0, 1))
        padded = np.pad(images, ((0, 0), (n, n), (n, n), (0, 0)))
        rows = down.astype(np.int64)[:, None] + np.arange(height)
        columns = right.astype(np.int64)[:, None] + np.arange(width)
        return padded[np.arange(batch)[:, None, None], rows[:, :, None], columns[:, None, :]]


@dataclass(frozen=True)
class Erase(RandomBox):
    """Random erasing (arXiv 1708.04896) as in DeiT: a random box of a normalized image becomes Gaussian noise."""

    probability: Annotated[float, Range(0, 1)] = 0.25
    min_area: Fraction = 0.02
    max_area: Fraction = 1 / 3
    max_aspect: Annotated[float, Range(1)] = 10 / 3

    def __call__(self, images: np.ndarray, keys: np.ndarray) -> np.ndarray:
        images = images.copy()
        for image, key in zip(images, keys):
            random = shuffle.generator(key)
            if random.random() < self.probability:
                top, left, height, width = self.box(*image.shape[:2], random) or (0, 0, 0, 0)
                region = image[top : top + height, left : left + width]
                region[:] = random.standard_normal(region.shape, image.dtype)
        return images


def parse(augment: str, image_size: int = 0, resample: str = "bilinear") -> list[Step]:
    """Return the transforms of a pipeline such as `crop | flip | shift(2)`; the other options are those of `crop`."""
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
    """Transform of batches of decoded images into batches for the model, (pixel / 255 - mean) / std in float32."""

    resize: CenterCrop | RandomCrop | None  # None if the images have one size
    steps: Sequence[Step]  # transforms of images uint8
    mean: tuple[float, ...]
    std: tuple[float, ...]
    erase: Erase | None = None  # after the normalization

    def __call__(self, batch: dict[str, Any], keys: np.ndarray) -> dict[str, np.ndarray]:
        images = batch["image"]
        for image in images:
            check_pixels(image)
        if self.resize:
            images = self.resize(images, shuffle.fold(keys, 0))
        elif isinstance(images, list):
            images = stack(images)
        for number, step in enumerate(self.steps, 1):
            images = step(images, shuffle.fold(keys, number))
        pixels = self._normalized(images)
        if self.erase:
            pixels = self.erase(pixels, shuffle.fold(keys, len(self.steps) + 1))
        return {**batch, "image": pixels}

    def _normalized(self, images: np.ndarray) -> np.ndarray:
        *_, width, channels = images.shape
        mean, std = (np.broadcast_to(np.float32(values), channels) for values in (self.mean, self.std))
        # Process whole rows, because NumPy's loop over the last axis is slow for an axis of size 3.
        pixels = images.reshape(*images.shape[:-2], -1) * np.tile(1 / (255 * std), width)
        pixels -= np.tile(mean / std, width)
        return pixels.reshape(images.shape)
