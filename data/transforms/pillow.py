"""Conversions between image files, Pillow images and arrays, and a base class of transforms."""

import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from lineage.data import shuffle


def decode(file: str | Path | bytes, channels: int) -> np.ndarray:
    """Decode an image file, or its content, to uint8 [h, w, channels]: 1 for gray, 3 for RGB, 4 for RGBA."""
    try:
        with Image.open(io.BytesIO(file) if isinstance(file, bytes) else file) as image:
            if image.mode not in ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK", "YCbCr", "LAB", "HSV"):
                raise OSError(f"its pixels are {image.mode}, not of 8 bits")
            pixels = np.asarray(image.convert({1: "L", 3: "RGB", 4: "RGBA"}[channels]))
    except (OSError, SyntaxError, Image.DecompressionBombError) as error:
        name = "An example" if isinstance(file, bytes) else file
        raise ValueError(f"{name} cannot be read as an image: {error}.") from None
    return pixels.reshape(*pixels.shape[:2], channels)


def to_pillow(image: np.ndarray) -> Image.Image:
    """Convert uint8 [h, w, c] to a Pillow image."""
    return Image.fromarray(image[..., 0] if image.shape[-1] == 1 else image)


def png(image: np.ndarray) -> bytes:
    """Return the .png file of an image uint8 [h, w, c]."""
    file = io.BytesIO()
    to_pillow(image).save(file, "PNG")
    return file.getvalue()


def from_pillow(image: Image.Image) -> np.ndarray:
    """Convert a Pillow image to uint8 [h, w, c]."""
    pixels = np.asarray(image)
    return pixels if pixels.ndim == 3 else pixels[..., None]


def stack(images: Sequence[np.ndarray]) -> np.ndarray:
    """Stack images [h, w, c] to [N, h, w, c]. Raises ValueError if they differ in size."""
    different = next((image.shape for image in images if image.shape != images[0].shape), None)
    if different:
        raise ValueError(f"Images differ in size, such as {images[0].shape} and {different}: set task.image_size.")
    return np.stack(images)


class PerImage:
    """Base class of transforms of batches that transform each image by itself, with random numbers of its own."""

    def __call__(self, images: Sequence[np.ndarray], keys: np.ndarray) -> np.ndarray:
        return np.stack([self.transform(image, shuffle.generator(key)) for image, key in zip(images, keys)])

    def transform(self, image: np.ndarray, random: np.random.Generator) -> np.ndarray:
        """Return the transformed image uint8 [h, w, c]."""
        raise NotImplementedError
