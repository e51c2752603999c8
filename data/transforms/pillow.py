"""Conversions between image files, Pillow images and arrays, and a base class of transforms."""

import contextlib
import io
import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, UnidentifiedImageError

from lineage.data import shuffle

FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")  # Pillow may start a program for others, such as EPS
MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK", "YCbCr", "LAB", "HSV")  # pixels of 8 bits
ENDS = {"JPEG": b"\xff\xd9", "PNG": b"IEND\xaeB`\x82"}  # last bytes of the files of a format
TILE = 322, 323  # TIFF tags of the width and the height of a tile, which is decoded as a whole


def decode(file: str | Path | bytes | Image.Image, channels: int, where: str = "") -> np.ndarray:
    """Decode an image file, its content, or a Pillow image to uint8 [h, w, channels].

    1 channel is gray, 3 are RGB and 4 RGBA. Errors for a file that is not an image begin with `where`, or the path.
    """
    return np.asarray(Picture(file, channels, where))


@dataclass(frozen=True)
class Picture:
    """Image file, or its content, that is decoded (see `decode`) when NumPy converts it to an array.

    A file with another modification time than `stamp`, if that is not 0, is an error.
    """

    file: str | Path | bytes
    channels: int
    where: str = ""
    stamp: int = 0  # see `stamp`

    @property
    def shape(self) -> tuple[int, int, int]:
        """Height, width and channels; only the header of the file is read."""
        with _opened(self.file, self.where, self.stamp) as image:
            return image.height, image.width, self.channels

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        with opened(self) as image:
            return from_pillow(image)

    def check(self) -> None:
        """Raise the error of `decode` for a file that is no image or is truncated; others are hardly read."""
        with _opened(self.file, self.where, self.stamp) as image:
            end = ENDS.get(image.format or "", b"")
            image.fp.seek(-len(end), os.SEEK_END)
            is_complete = bool(end) and image.mode in MODES and image.fp.read() == end
        if not is_complete:
            np.asarray(self)


def stamp(file: Path) -> int:
    """Return the modification time of a file in nanoseconds; 0 if it cannot be read."""
    with contextlib.suppress(OSError):
        return os.stat(file).st_mtime_ns
    return 0


@contextlib.contextmanager
def opened(image: np.ndarray | Picture) -> Iterator[Image.Image]:
    """Yield a Pillow image, of which only the header may have been read; for errors, see `decode`."""
    if isinstance(image, np.ndarray):
        yield to_pillow(image)
        return
    with _opened(image.file, image.where, image.stamp) as picture:
        if picture.mode not in MODES:
            raise OSError(f"its pixels are {picture.mode}, not of 8 bits")
        if not (picture.width and picture.height):
            raise OSError("it has no pixels")
        mode = {1: "L", 3: "RGB", 4: "RGBA"}[image.channels]
        yield picture if picture.mode == mode else picture.convert(mode)


def crop(image: Image.Image, box: tuple[int, int, int, int], size: int, resample: Image.Resampling) -> Image.Image:
    """Return a box (top, left, height, width) of an image, resized to size x size pixels.

    A JPEG file that has not been decoded yet is decoded at 1/2, 1/4 or 1/8 of its size if the box is at least twice as
    large as the result. For two photos, the mean difference of the pixels was 1 of 255, and at most 4.
    """
    top, left, height, width = box
    full_width, edges = image.width, (left, top, left + width, top + height)
    drafted = image.draft(None, (-(-image.width * size // width), -(-image.height * size // height)))
    if drafted and image.width < full_width:
        scale = drafted[1][2] / full_width
        return image.resize((size, size), resample, box=tuple(edge * scale for edge in edges))
    return image.crop(edges).resize((size, size), resample)


def channels_of(file: str | Path | bytes, where: str = "") -> int:
    """Return 1 if an image file, or its content, is gray, else 3; for `where`, see `decode`."""
    with _opened(file, where) as image:
        return 1 if image.mode in ("1", "L") else 3


def common_channels(images: Iterable[tuple[str | Path | bytes, str]]) -> int:
    """Return 1 if all images, each with its `where` (see `decode`), are gray; 3 as soon as one is not."""
    return 1 if all(channels_of(file, where) == 1 for file, where in images) else 3


@contextlib.contextmanager
def _opened(file: str | Path | bytes | Image.Image, where: str, stamp: int = 0) -> Iterator[Image.Image]:
    try:
        if isinstance(file, Image.Image):
            yield file
            return
        if not isinstance(file, bytes):
            status = os.stat(file)
            if not stat.S_ISREG(status.st_mode):
                raise OSError("it is not a regular file")  # opening a pipe would wait forever
            if stamp not in (0, status.st_mtime_ns):
                raise OSError("it has changed since the data were opened")
        # Given a path, Pillow maps uncompressed gray TIFF files into memory and applies their EXIF orientation wrongly.
        with (
            io.BytesIO(file) if isinstance(file, bytes) else open(file, "rb") as content,
            Image.open(content, formats=FORMATS) as image,
        ):
            _check_size(image, len(file) if isinstance(file, bytes) else os.stat(file).st_size)
            yield image
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:  # depends on the format
        unnamed = {Image.Image: "A Pillow image", bytes: "An example"}
        where = where or next((name for kind, name in unnamed.items() if isinstance(file, kind)), str(file))
        reason = f"it is none of {', '.join(FORMATS)}" if isinstance(error, UnidentifiedImageError) else error
        raise ValueError(f"{where} cannot be read as an image: {reason}.") from None


def _check_size(image, size):
    """Raise OSError for an image that needs far more memory or time than its file of `size` bytes suggests."""
    if image.format in ("JPEG", "MPO"):
        image.fp.seek(0)
        if (scans := image.fp.read().count(b"\xff\xda")) > 100 + size // 10_000:  # each passes over all pixels
            raise OSError(f"it has {scans:,} scans, of which a photo has only a few")
    if size > 10**6 and image.tile and image.tile[0][0] == "ppm_plain":
        raise OSError("it is a plain PPM file, in which each number is a text, of more than 1 MB")
    tags = getattr(image, "tag_v2", {})
    tile = [tags.get(tag) for tag in TILE]
    width, height = (max(side, edge) if isinstance(edge, int) else side for side, edge in zip(image.size, tile))
    if (needed := 4 * width * height) > 10**8 + 100 * size:  # Pillow has up to 4 bytes for each pixel
        raise OSError(
            f"{width:,} x {height:,} pixels need {needed:,} bytes, above 100 MB and 100 times the file's size"
        )


def check_pixels(image: Any) -> None:
    """Raise ValueError for an image that is neither a `Picture` nor an array uint8 [h, w, c] with pixels."""
    if isinstance(image, Picture):
        return
    if not isinstance(image, np.ndarray):
        raise ValueError(f"An image is a {type(image).__name__}: it must be an array uint8 [h, w, c].")
    if image.dtype != np.uint8 or image.ndim != 3 or not image.size:
        raise ValueError(f"An image is an array {image.dtype} {list(image.shape)}: it must be uint8 [h, w, c].")


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
    return np.atleast_3d(np.asarray(image))


def stack(images: Sequence[np.ndarray]) -> np.ndarray:
    """Stack images [h, w, c] to [N, h, w, c]; raise ValueError if they differ in size."""
    images = [np.asarray(image) for image in images]
    different = next((image.shape for image in images if image.shape != images[0].shape), None)
    if different:
        raise ValueError(f"Images differ in size, such as {images[0].shape} and {different}: set task.image_size.")
    return np.stack(images)


class PerImage:
    """Base class of transforms of batches that transform each image independently, with its own random numbers."""

    def __call__(self, images: Sequence[np.ndarray], keys: np.ndarray) -> np.ndarray:
        return np.stack([self.transform(image, shuffle.generator(key)) for image, key in zip(images, keys)])

    def transform(self, image: np.ndarray, random: np.random.Generator) -> np.ndarray:
        """Return the transformed image uint8 [h, w, c]."""
        raise NotImplementedError
