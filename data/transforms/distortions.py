"""Random distortions of images with Pillow: RandAugment and color jitter."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from PIL import Image, ImageEnhance, ImageOps

from lineage.configs.registry import Natural, Range
from lineage.data.transforms.calls import Checked
from lineage.data.transforms.pillow import PerImage, from_pillow, to_pillow


@dataclass(frozen=True)
class RandAugment(Checked, PerImage):
    """RandAugment (arXiv 1909.13719): operations drawn at random from 16.

    The operations and their strengths are EfficientNet's, as in arXiv 2205.01580: posterize and solarize weaken as the
    magnitude grows. Lengths, there in pixels of a 224x224 image, scale with the image. DeiT, Swin and MAE (arXiv
    2012.12877, table 9) use `randaugment(2, 9, 0.5, 0.5, True)`, but with bicubic interpolation, and the mean color
    instead of gray outside of the image.
    """

    layers: Natural = 2  # number of operations for each image
    magnitude: Annotated[float, Range(0, 10)] = 10  # strength of the operations
    deviation: Annotated[float, Range(0)] = 0.0  # standard deviation of the magnitude
    probability: Annotated[float, Range(0, 1)] = 1.0  # probability of applying each operation that was drawn
    increasing: bool = False  # as in timm: all operations strengthen as the magnitude grows, and none is cutout

    def transform(self, image: np.ndarray, random: np.random.Generator) -> np.ndarray:
        picture = to_pillow(image)
        names = [name for name in OPERATIONS if not (self.increasing and name == "cutout")]
        for number in random.integers(len(names), size=self.layers):
            name, magnitude = names[number], self.magnitude
            if self.probability < 1 and random.random() >= self.probability:
                continue
            if self.deviation:
                magnitude = min(max(random.normal(magnitude, self.deviation), 0), 10)
            strength = magnitude / 10
            if self.increasing and name in _INCREASING:
                strength = _INCREASING[name](strength, _sign(random))
            picture = OPERATIONS[name](picture, strength, random)
        return from_pillow(picture)


@dataclass(frozen=True)
class Jitter(Checked, PerImage):
    """Color jitter in random order; the first three change by a factor from max(1 - value, 0) to 1 + value."""

    brightness: Annotated[float, Range(0)] = 0.4
    contrast: Annotated[float, Range(0)] = 0.4
    saturation: Annotated[float, Range(0)] = 0.4
    hue: Annotated[float, Range(0, 0.5)] = 0.0  # largest rotation in either direction, as a fraction of the circle

    def transform(self, image: np.ndarray, random: np.random.Generator) -> np.ndarray:
        picture = to_pillow(image)
        enhancers = (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color)
        for number in random.permutation(4):
            limit = (self.brightness, self.contrast, self.saturation, self.hue)[number]
            change = random.uniform(max(-limit, -1.0), limit)
            if number < 3:
                picture = enhancers[number](picture).enhance(1 + change)
            elif limit and picture.mode == "RGB":
                hue, *others = picture.convert("HSV").split()
                turned = np.asarray(hue) + np.uint8(int(change * 255) % 256)  # wraps around at 256
                picture = Image.merge("HSV", (Image.fromarray(turned), *others)).convert("RGB")
        return from_pillow(picture)


def _gray(image: Image.Image) -> Any:
    return 128 if image.mode == "L" else (128,) * len(image.mode)


def _affine(image: Image.Image, *matrix: float) -> Image.Image:
    return image.transform(image.size, Image.Transform.AFFINE, matrix, Image.Resampling.NEAREST, fillcolor=_gray(image))


def _sign(random: np.random.Generator) -> int:
    return 1 if random.integers(2) else -1


def _enhance(kind: Any) -> Callable:
    return lambda image, strength, random: kind(image).enhance(0.1 + 1.8 * strength)


def _cutout(image: Image.Image, strength: float, random: np.random.Generator) -> Image.Image:
    image = image.copy()
    y, x = int(random.integers(image.height)), int(random.integers(image.width))
    half_y, half_x = (int(strength * 40 / 224 * side) for side in (image.height, image.width))
    image.paste(_gray(image), (max(x - half_x, 0), max(y - half_y, 0), x + half_x, y + half_y))
    return image


def _posterize(image: Image.Image, strength: float, random: np.random.Generator) -> Image.Image:
    mask = 256 - (1 << (8 - int(4 * strength)))
    return image.point(lambda value: value & mask)


# Name -> operation(Pillow image L or RGB, strength 0..1, generator); signs are random where both directions exist.
OPERATIONS: dict[str, Callable[[Image.Image, float, np.random.Generator], Image.Image]] = {
    "autocontrast": lambda image, strength, random: ImageOps.autocontrast(image),
    "equalize": lambda image, strength, random: ImageOps.equalize(image),
    "invert": lambda image, strength, random: ImageOps.invert(image),
    "rotate": lambda image, strength, random: image.rotate(
        _sign(random) * 30 * strength, Image.Resampling.NEAREST, fillcolor=_gray(image)
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
# Strengths for `increasing`: these operations strengthen with their argument.
_INCREASING: dict[str, Callable[[float, int], float]] = {
    "posterize": lambda strength, sign: 1 - int(4 * strength) / 4,
    "solarize": lambda strength, sign: 1 - int(256 * strength) / 256,
    **dict.fromkeys(("color", "contrast", "brightness", "sharpness"), lambda strength, sign: (1 + sign * strength) / 2),
}
