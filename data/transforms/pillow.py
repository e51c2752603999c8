"""Conversions between image files, Pillow images and arrays."""

import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image


def decode(file: str | Path | bytes, channels: int) -> np.ndarray:
    """Decode an image file, or its content, to uint8 [h, w, channels].

    Args:
        file: the path or the content.
        channels: 1 for grey, 3 for RGB, 4 for RGBA.

    Raises:
        ValueError: the file is not an image of 8 bits for each channel.
    """
    try:
        with Image.open(io.BytesIO(file) if isinstance(file, bytes) else file) as image:
            if image.mode not in ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK", "YCbCr", "LAB", "HSV"):
                raise OSError(f"its pixels are {image.mode}, not of 8 bits")
            pixels = np.asarray(image.convert({1: "L", 3: "RGB", 4: "RGBA"}[channels]))
    except OSError as error:
        name = "An example" if isinstance(file, bytes) else file
        raise ValueError(f"{name} cannot be read as an image: {error}.") from None
    return pixels.reshape(*pixels.shape[:2], channels)


def to_pillow(image: np.ndarray) -> Image.Image:
    """Convert uint8 [h, w, c] to a Pillow image."""
    return Image.fromarray(image[..., 0] if image.shape[-1] == 1 else image)


def from_pillow(image: Image.Image) -> np.ndarray:
    """Convert a Pillow image to uint8 [h, w, c]."""
    pixels = np.asarray(image)
    return pixels if pixels.ndim == 3 else pixels[..., None]


def stack(images: Sequence[np.ndarray]) -> np.ndarray:
    """Stack images [h, w, c] of one size to [N, h, w, c].

    Raises:
        ValueError: the images differ in size.
    """
    different = next((image.shape for image in images if image.shape != images[0].shape), None)
    if different:
        raise ValueError(f"Images differ in size, such as {images[0].shape} and {different}: set task.image_size.")
    return np.stack(images)
