"""Labelled images: `image` uint8 [h, w, c] and `label`, from arrays, folders and files of bytes."""

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from lineage.data import shuffle
from lineage.data.loader import Source

_SUFFIXES = frozenset({".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp"})


@dataclass(frozen=True)
class Arrays(Source):
    """Examples in memory: features stacked on a leading axis."""

    features: dict[str, np.ndarray]

    def __len__(self) -> int:
        return len(next(iter(self.features.values())))

    def take(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        return {name: value[indices] for name, value in self.features.items()}


def digits() -> dict[str, Arrays]:
    """scikit-learn's 1,797 handwritten digits, 8x8x1, of 17 grey levels: 1,438 to train on, 359 held out.

    Held out is every fifth example of each class, whatever the seed.
    """
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    images = np.rint(pixels * (255 / 16)).astype(np.uint8).reshape(-1, 8, 8, 1)
    order = np.argsort(labels, kind="stable")
    held_out = np.arange(len(order)) % 5 == 4
    return {
        name: Arrays({"image": images[np.sort(chosen)], "label": labels[np.sort(chosen)].astype(np.int32)})
        for name, chosen in (("train", order[~held_out]), ("test", order[held_out]))
    }


@dataclass(frozen=True)
class Folder(Source):
    """Image files with their labels, decoded when asked for."""

    files: Sequence[Path]
    labels: np.ndarray
    channels: int

    def __len__(self) -> int:
        return len(self.files)

    def take(self, indices: np.ndarray) -> dict[str, Any]:
        return {"image": [decode(self.files[i], self.channels) for i in indices], "label": self.labels[indices]}


def folders(path: str) -> tuple[dict[str, Folder], list[str]]:
    """The splits of PATH/<split>/<class>/<image file>, and the names of the classes (the folders of `train`).

    Images are grey if the first of `train` is, else RGB.
    """
    root = Path(path)
    if not (root / "train").is_dir():
        raise FileNotFoundError(
            f"there is no folder {root / 'train'}: images are read from PATH/<split>/<class>/<file>"
        )
    names = _classes(root / "train")
    splits, channels = {}, 0
    for split in ("train", "validation", "test"):
        if not (root / split).is_dir():
            continue
        extra = set(_classes(root / split)) - set(names)
        if extra:
            raise ValueError(f"{root / split} has the class {min(extra)!r}, which {root / 'train'} lacks")
        found = [
            (file, label)
            for label, name in enumerate(names)
            for file in sorted((root / split / name).glob("*"))
            if file.suffix.lower() in _SUFFIXES
        ]
        if not found:
            raise ValueError(f"there is no image in {root / split}/<class>/")
        files, labels = zip(*found)
        if not channels:
            with Image.open(files[0]) as image:
                channels = 1 if image.mode in ("1", "L") else 3
        splits[split] = Folder(files, np.array(labels, np.int32), channels)
    return splits, names


def _classes(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))


def decode(file: str | Path | bytes, channels: int) -> np.ndarray:
    """An image file, or its content, as uint8 [h, w, channels]; 1 channel is grey, 3 are RGB, 4 RGBA.

    Raises ValueError for a file that is not an image.
    """
    try:
        with Image.open(io.BytesIO(file) if isinstance(file, bytes) else file) as image:
            if image.mode not in ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK", "YCbCr", "LAB", "HSV"):
                raise OSError(f"its pixels are {image.mode}, not of 8 bits")
            pixels = np.asarray(image.convert({1: "L", 3: "RGB", 4: "RGBA"}[channels]))
    except OSError as error:
        raise ValueError(
            f"{'an example' if isinstance(file, bytes) else file} cannot be read as an image: {error}"
        ) from None
    return pixels.reshape(*pixels.shape[:2], channels)


@dataclass(frozen=True)
class Subset(Source):
    """Those of a source's examples that are `chosen` int64 [N]."""

    source: Source
    chosen: np.ndarray

    def __len__(self) -> int:
        return len(self.chosen)

    def take(self, indices: np.ndarray) -> dict[str, Any]:
        return self.source.take(self.chosen[indices])


def draw(source: Source, count: int, seed: int) -> Subset:
    """So many examples of a source, at random; a larger number has those of a smaller one, and more."""
    if not 0 < count <= len(source):
        raise ValueError(f"max_examples={count} must be 0 (all), or at most the {len(source)} examples there are")
    return Subset(source, shuffle.permute(np.arange(count), len(source), seed))


def to_pillow(image: np.ndarray) -> Image.Image:
    """uint8 [h, w, c] as Pillow has it."""
    return Image.fromarray(image[..., 0] if image.shape[-1] == 1 else image)


def from_pillow(image: Image.Image) -> np.ndarray:
    """uint8 [h, w, c]."""
    pixels = np.asarray(image)
    return pixels if pixels.ndim == 3 else pixels[..., None]


def stack(images: Sequence[np.ndarray]) -> np.ndarray:
    """Images [h, w, c] of one size as [N, h, w, c]; ValueError if they differ."""
    different = next((image.shape for image in images if image.shape != images[0].shape), None)
    if different:
        raise ValueError(f"images differ in size, such as {images[0].shape} and {different}: image_size must be set")
    return np.stack(images)


def in_memory(source: Source) -> Arrays:
    """Reads a whole source of images of one size."""
    examples = source.take(np.arange(len(source)))
    return Arrays({"image": stack(examples["image"]), "label": examples["label"]})
