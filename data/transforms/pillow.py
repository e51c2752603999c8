"""Conversions between image files, Pillow images and arrays, and a base class of transforms."""

import contextlib
import io
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from lineage.data import shuffle


def decode(file: str | Path | bytes | Image.Image, channels: int, where: str = "") -> np.ndarray:
    """Decode an image file, its content, or an image of Pillow, to uint8 [h, w, channels].

    There is 1 channel for gray, 3 are RGB and 4 RGBA. The error of a file that is not an image begins with `where`, by
    default its path.
    """
    with _opened(file, where) as image:
        if image.mode not in ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK", "YCbCr", "LAB", "HSV"):
            raise OSError(f"its pixels are {image.mode}, not of 8 bits")
        pixels = np.asarray(image.convert({1: "L", 3: "RGB", 4: "RGBA"}[channels]))
    return pixels.reshape(*pixels.shape[:2], channels)


def channels_of(file: str | Path | bytes, where: str = "") -> int:
    """Return 1 if an image file, or its content, is gray, else 3; for `where`, see `decode`."""
    with _opened(file, where) as image:
        return 1 if image.mode in ("1", "L") else 3


@contextlib.contextmanager
def _opened(file: str | Path | bytes | Image.Image, where: str) -> Iterator[Image.Image]:
    if isinstance(file, Image.Image):
        yield file
        return
    try:
        with Image.open(io.BytesIO(file) if isinstance(file, bytes) else file) as image:
            yield image
    except (OSError, SyntaxError, Image.DecompressionBombError) as error:  # SyntaxError: some damaged PNG files
        where = where or ("An example" if isinstance(file, bytes) else file)
        raise ValueError(f"{where} cannot be read as an image: {error}.") from None


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
