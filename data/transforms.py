"""Image transforms, each a function of the images and of one random key for each, never of the batch around them.

Sizes come first (to stacked uint8 [B, h, w, c]), then changes of the pixels, then the normalisation.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from PIL import Image, ImageEnhance, ImageOps

from data import shuffle
from data.images import stack
from data.options import called

Images = Sequence[np.ndarray] | np.ndarray


def _pillow(image: np.ndarray) -> Image.Image:
    return Image.fromarray(image[..., 0] if image.shape[-1] == 1 else image)


def _array(image: Image.Image) -> np.ndarray:
    pixels = np.asarray(image)
    return pixels if pixels.ndim == 3 else pixels[..., None]


@dataclass(frozen=True)
class CentreCrop:
    """Resizes the shorter side to size / fraction (bilinear, as Pillow does), then keeps the central size x size."""

    size: int
    fraction: float = 1.0

    def __post_init__(self):
        if not 0 < self.fraction <= 1:
            raise ValueError(f"evaluation_crop={self.fraction} must be above 0 and at most 1")

    def __call__(self, images: Images, keys: np.ndarray) -> np.ndarray:
        return np.stack([self._one(image) for image in images])

    def _one(self, image: np.ndarray) -> np.ndarray:
        height, width = image.shape[:2]
        scale = round(self.size / self.fraction) / min(height, width)
        width, height = max(round(width * scale), self.size), max(round(height * scale), self.size)
        if (height, width) != image.shape[:2]:
            image = _array(_pillow(image).resize((width, height), Image.Resampling.BILINEAR))
        top, left = (height - self.size) // 2, (width - self.size) // 2
        return image[top : top + self.size, left : left + self.size]


@dataclass(frozen=True)
class RandomCrop:
    """The "inception" crop (arXiv:1409.4842): a part of random area and aspect ratio, resized to size x size."""

    size: int
    min_area: float = 0.05
    max_area: float = 1.0
    max_aspect: float = 4 / 3

    def __post_init__(self):
        if not 0 < self.min_area <= self.max_area <= 1 or self.max_aspect < 1:
            raise ValueError(f"{self}: need 0 < min_area <= max_area <= 1 and max_aspect >= 1")

    def __call__(self, images: Images, keys: np.ndarray) -> np.ndarray:
        return np.stack([self._one(image, shuffle.generator(key)) for image, key in zip(images, keys)])

    def _one(self, image: np.ndarray, random: np.random.Generator) -> np.ndarray:
        top, left, height, width = self.box(*image.shape[:2], random)
        part = _pillow(image[top : top + height, left : left + width])
        return _array(part.resize((self.size, self.size), Image.Resampling.BILINEAR))

    def box(self, height: int, width: int, random: np.random.Generator) -> tuple[int, int, int, int]:
        """(top, left, height, width) of the part; the whole image if ten tries do not fit."""
        for _ in range(10):
            area = random.uniform(self.min_area, self.max_area) * height * width
            aspect = math.exp(random.uniform(-math.log(self.max_aspect), math.log(self.max_aspect)))
            h, w = round(math.sqrt(area / aspect)), round(math.sqrt(area * aspect))
            if 1 <= h <= height and 1 <= w <= width:
                return int(random.integers(height - h + 1)), int(random.integers(width - w + 1)), h, w
        return 0, 0, height, width


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
class RandAugment:
    """RandAugment (arXiv:1909.13719): `layers` operations drawn from 16, each at `magnitude` 0..10.

    Operations and strengths are those of the ImageNet recipe of arXiv:2205.01580, which are EfficientNet's: posterize
    and solarize do less as the magnitude grows. Lengths, there in pixels of a 224 image, scale with the image.
    """

    layers: int = 2
    magnitude: float = 10

    def __post_init__(self):
        if not isinstance(self.layers, int) or self.layers < 0 or not 0 <= self.magnitude <= 10:
            raise ValueError(f"randaugment({self.layers}, {self.magnitude}) needs layers >= 0 and magnitude in 0..10")

    def __call__(self, images: np.ndarray, keys: np.ndarray) -> np.ndarray:
        return np.stack([self._one(image, shuffle.generator(key)) for image, key in zip(images, keys)])

    def _one(self, image: np.ndarray, random: np.random.Generator) -> np.ndarray:
        picture, operations = _pillow(image), list(OPERATIONS.values())
        for number in random.integers(len(OPERATIONS), size=self.layers):
            picture = operations[number](picture, self.magnitude / 10, random)
        return _array(picture)


def _grey(image: Image.Image) -> Any:
    return 128 if image.mode == "L" else (128,) * len(image.mode)


def _affine(image: Image.Image, *matrix: float) -> Image.Image:
    return image.transform(image.size, Image.Transform.AFFINE, matrix, Image.Resampling.NEAREST, fillcolor=_grey(image))


def _sign(random: np.random.Generator) -> int:
    return 1 if random.integers(2) else -1


def _enhance(kind: Any) -> Callable:
    return lambda image, strength, random: kind(image).enhance(0.1 + 1.8 * strength)


def _cutout(image: Image.Image, strength: float, random: np.random.Generator) -> Image.Image:
    image = image.copy()
    y, x = int(random.integers(image.height)), int(random.integers(image.width))
    half_y, half_x = (int(strength * 40 / 224 * side) for side in (image.height, image.width))
    image.paste(_grey(image), (max(x - half_x, 0), max(y - half_y, 0), x + half_x, y + half_y))
    return image


def _posterize(image: Image.Image, strength: float, random: np.random.Generator) -> Image.Image:
    mask = 256 - (1 << (8 - int(4 * strength)))
    return image.point(lambda value: value & mask)


# Name -> operation(Pillow image L or RGB, strength 0..1, generator). Signs are random where both directions exist.
OPERATIONS: dict[str, Callable[[Image.Image, float, np.random.Generator], Image.Image]] = {
    "autocontrast": lambda image, strength, random: ImageOps.autocontrast(image),
    "equalize": lambda image, strength, random: ImageOps.equalize(image),
    "invert": lambda image, strength, random: ImageOps.invert(image),
    "rotate": lambda image, strength, random: image.rotate(
        _sign(random) * 30 * strength, Image.Resampling.NEAREST, fillcolor=_grey(image)
    ),
    "posterize": _posterize,
    "solarize": lambda image, strength, random: ImageOps.solarize(image, int(256 * strength)),
    "solarize_add": lambda image, strength, random: image.point(
        lambda value: min(value + int(110 * strength), 255) if value < 128 else value
    ),
    "color": _enhance(ImageEnhance.Color),
    "contrast": _enhance(ImageEnhance.Contrast),
    "brightness": _enhance(ImageEnhance.Brightness),
    "sharpness": _enhance(ImageEnhance.Sharpness),
    "shear_x": lambda image, strength, random: _affine(image, 1, _sign(random) * 0.3 * strength, 0, 0, 1, 0),
    "shear_y": lambda image, strength, random: _affine(image, 1, 0, 0, _sign(random) * 0.3 * strength, 1, 0),
    "translate_x": lambda image, strength, random: _affine(
        image, 1, 0, _sign(random) * int(strength * 100 / 224 * image.width), 0, 1, 0
    ),
    "translate_y": lambda image, strength, random: _affine(
        image, 1, 0, 0, 0, 1, _sign(random) * int(strength * 100 / 224 * image.height)
    ),
    "cutout": _cutout,
}


def parse(augment: str, image_size: int = 0) -> list[Callable[[Images, np.ndarray], np.ndarray]]:
    """The transforms that a string names, such as `crop | flip | randaugment(2, 10)`; `crop` is to `image_size`.

    Raises ValueError for what it does not know.
    """
    known = {"crop": partial(RandomCrop, image_size), "flip": Flip, "randaugment": RandAugment, "shift": Shift}
    transforms = called("augment", augment, known)
    if any(isinstance(transform, RandomCrop) for transform in transforms[1:]):
        raise ValueError(f"augment={augment!r}: crop must come first")
    if transforms and isinstance(transforms[0], RandomCrop) and not image_size:
        raise ValueError(f"augment={augment!r}: crop needs image_size")
    return transforms


@dataclass(frozen=True)
class Transform:
    """A batch of decoded images to a batch for the model: resized if need be, changed by the steps, and normalised to
    (pixel / 255 - mean) / std in float32."""

    resize: CentreCrop | RandomCrop | None
    steps: Sequence[Callable[[np.ndarray, np.ndarray], np.ndarray]]
    mean: tuple[float, ...]
    std: tuple[float, ...]

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
        return {**batch, "image": pixels}
