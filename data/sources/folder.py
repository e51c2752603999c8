"""Folders of image files."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from lineage.data.content import Images
from lineage.data.loader import ExampleSource
from lineage.data.sources.base import SOURCES, PathSource
from lineage.data.transforms.pillow import decode

SPLITS = ("train", "validation", "test")
SUFFIXES = frozenset({".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp"})


@SOURCES.register("folder")
@dataclass(frozen=True)
class Folder(PathSource):
    """Image files in folders, PATH/<train|validation|test>/<class>/<file>.

    The classes are the folders of `train`. All images are gray if the first training image is, else RGB.
    """

    def images(self) -> Images:
        root = Path(self.path)
        if not (root / "train").is_dir():
            where = "images are read from PATH/<split>/<class>/<file>"
            raise FileNotFoundError(f"There is no folder {root / 'train'}: {where}.")
        names = _classes(root / "train")
        found = {split: _labeled(root / split, names) for split in SPLITS if (root / split).is_dir()}
        with Image.open(found["train"][0][0]) as image:
            channels = 1 if image.mode in ("1", "L") else 3
        return Images({split: ImageFiles(*part, channels) for split, part in found.items()}, names)


@dataclass(frozen=True)
class ImageFiles(ExampleSource):
    """Image files with their labels, decoded on access."""

    files: Sequence[Path]
    labels: np.ndarray
    channels: int

    def __len__(self) -> int:
        return len(self.files)

    def take(self, indices: np.ndarray) -> dict[str, Any]:
        return {"image": [decode(self.files[i], self.channels) for i in indices], "label": self.labels[indices]}


def _labeled(folder: Path, names: Sequence[str]) -> tuple[Sequence[Path], np.ndarray]:
    """Return the image files of a split and their classes."""
    if extra := set(_classes(folder)) - set(names):
        raise ValueError(f"{folder} has the class {min(extra)!r}, which {folder.with_name('train')} does not have.")
    groups = [[file for file in sorted((folder / name).glob("*")) if file.suffix.lower() in SUFFIXES] for name in names]
    if not any(groups):
        raise ValueError(f"There is no image in {folder}/<class>/.")
    return [*chain(*groups)], np.repeat(np.arange(len(names), dtype=np.int32), [len(some) for some in groups])


def _classes(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
