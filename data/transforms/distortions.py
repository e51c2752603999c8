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
    magnitude grows. Lengths, there in pixels of a 224x224 image, scale with the image. With `increasing`, they are
    those of timm: DeiT, Swin and MAE (arXiv 2012.12877, table 9) use `randaugment(2, 9, 0.5, 0.5, True)`.
    """

    layers: Natural = 2  # number of operations for each image
    magnitude: Annotated[float, Range(0, 10)] = 10  # strength of the operations
    deviation: Annotated[float, Range(0)] = 0.0  # standard deviation of the magnitude
    probability: Annotated[float, Range(0, 1)] = 1.0  # probability of applying each operation that was drawn
    increasing: bool = False  # whether all operations strengthen as the magnitude grows; cutout is left out

    def transform(self, image: np.ndarray, random: np.random.Generator) -> np.ndarray:
        picture, magnitude = to_pillow(image), self.magnitude
        operations = list((INCREASING if self.increasing else OPERATIONS).values())
        for number in random.integers(len(operations), size=self.layers):
            if self.probability < 1 and random.random() >= self.probability:
                continue
            if self.deviation:
                magnitude = min(max(random.normal(self.magnitude, self.deviation), 0), 10)
            picture = operations[number](picture, magnitude / 10, random)
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
            elif limit and picture.mode in ("RGB", "RGBA"):
                picture = _colors(_turn_hue)(picture, change, random)
        return from_pillow(picture)


def _fill(image: Image.Image, color: tuple[int, int, int] = (128, 128, 128)) -> Any:
    return color if image.mode == "RGB" else 128 if image.mode == "L" else (128,) * len(image.mode)


@dataclass(frozen=True)
class Geometry:
    """Geometric operations: Pillow image, strength 0..1, generator -> image, in both directions.

    Attributes:
        resample: interpolation.
        color: RGB outside of the image; images of other modes get gray.
        shift: function (strength, side of the image) -> translation in pixels.
    """

    resample: Image.Resampling
    color: tuple[int, int, int]
    shift: Callable[[float, int], float]

    def rotate(self, image: Image.Image, strength: float, random: np.random.Generator) -> Image.Image:
        return image.rotate(_sign(random) * 30 * strength, self.resample, fillcolor=_fill(image, self.color))

    def shear_x(self, image: Image.Image, strength: float, random: np.random.Generator) -> Image.Image:
        return self._affine(image, 1, _sign(random) * 0.3 * strength, 0, 0, 1, 0)

    def shear_y(self, image: Image.Image, strength: float, random: np.random.Generator) -> Image.Image:
        return self._affine(image, 1, 0, 0, _sign(random) * 0.3 * strength, 1, 0)

    def translate_x(self, image: Image.Image, strength: float, random: np.random.Generator) -> Image.Image:
        return self._affine(image, 1, 0, _sign(random) * self.shift(strength, image.width), 0, 1, 0)

    def translate_y(self, image: Image.Image, strength: float, random: np.random.Generator) -> Image.Image:
        return self._affine(image, 1, 0, 0, 0, 1, _sign(random) * self.shift(strength, image.height))

    def _affine(self, image, *matrix):
        fill = _fill(image, self.color)
        return image.transform(image.size, Image.Transform.AFFINE, matrix, self.resample, fillcolor=fill)


def _sign(random: np.random.Generator) -> int:
    return 1 if random.integers(2) else -1


def _enhance(kind: Any) -> Callable:
    return lambda image, strength, random: kind(image).enhance(0.1 + 1.8 * strength)


def _cutout(image: Image.Image, strength: float, random: np.random.Generator) -> Image.Image:
    image = image.copy()
    y, x = int(random.integers(image.height)), int(random.integers(image.width))
    half_y, half_x = (int(strength * 40 / 224 * side) for side in (image.height, image.width))
    image.paste(_fill(image), (max(x - half_x, 0), max(y - half_y, 0), x + half_x, y + half_y))
    return image


Operation = Callable[[Image.Image, float, np.random.Generator], Image.Image]  # see `Geometry`


def _colors(operation: Operation) -> Operation:
    """Return an operation that is applied to the colors of an image, without its alpha channel."""

    def applied(image, strength, random):
        if image.mode != "RGBA":
            return operation(image, strength, random)
        changed = operation(image.convert("RGB"), strength, random)
        changed.putalpha(image.getchannel("A"))
        return changed

    return applied


def _turn_hue(image: Image.Image, fraction: float, random: np.random.Generator) -> Image.Image:
    hue, *others = image.convert("HSV").split()
    turned = np.asarray(hue) + np.uint8(int(fraction * 255) % 256)  # wraps around at 256
    return Image.merge("HSV", (Image.fromarray(turned), *others)).convert("RGB")


def _posterize(image: Image.Image, strength: float, random: np.random.Generator) -> Image.Image:
    mask = 256 - (1 << (8 - int(4 * strength)))
    return image.point(lambda value: value & mask)


_EFFICIENTNET = Geometry(
    Image.Resampling.NEAREST, (128, 128, 128), lambda strength, side: int(strength * 100 / 224 * side)
)
_TIMM = Geometry(Image.Resampling.BICUBIC, (124, 116, 104), lambda strength, side: 0.45 * strength * side)
OPERATIONS: dict[str, Operation] = {
    "autocontrast": _colors(lambda image, strength, random: ImageOps.autocontrast(image)),
    "equalize": _colors(lambda image, strength, random: ImageOps.equalize(image)),
    "invert": _colors(lambda image, strength, random: ImageOps.invert(image)),
    "rotate": _EFFICIENTNET.rotate,
    "posterize": _colors(_posterize),
    "solarize": _colors(lambda image, strength, random: ImageOps.solarize(image, int(256 * strength))),
    "solarize_add": _colors(
        lambda image, strength, random: image.point(
            lambda value: min(value + int(110 * strength), 255) if value < 128 else value
        )
    ),
    "color": _enhance(ImageEnhance.Color),
    "contrast": _enhance(ImageEnhance.Contrast),
    "brightness": _enhance(ImageEnhance.Brightness),
    "sharpness": _enhance(ImageEnhance.Sharpness),
    "shear_x": _EFFICIENTNET.shear_x,
    "shear_y": _EFFICIENTNET.shear_y,
    "translate_x": _EFFICIENTNET.translate_x,
    "translate_y": _EFFICIENTNET.translate_y,
    "cutout": _cutout,
}


def _either(name: str) -> Operation:
    """Return an operation whose factor is above or below 1 at random; the strength changes how far."""
    return lambda image, strength, random: OPERATIONS[name](image, (1 + _sign(random) * strength) / 2, random)


INCREASING: dict[str, Operation] = OPERATIONS | {
    **{name: getattr(_TIMM, name) for name in ("rotate", "shear_x", "shear_y", "translate_x", "translate_y")},
    **{name: _either(name) for name in ("color", "contrast", "brightness", "sharpness")},
    "posterize": _colors(lambda image, strength, random: _posterize(image, 1 - int(4 * strength) / 4, random)),
    "solarize": _colors(lambda image, strength, random: ImageOps.solarize(image, 256 - int(256 * strength))),
}
del INCREASING["cutout"]  # timm erases a rectangle after the normalization instead
