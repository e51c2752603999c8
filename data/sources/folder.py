"""Folders of image files."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from lineage.data.content import Images
from lineage.data.loader import ExampleSource
from lineage.data.sources.base import SOURCES, PathSource
from lineage.data.transforms.pillow import decode

_SUFFIXES = frozenset({".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp"})


@SOURCES.register("folder")
@dataclass(frozen=True)
class Folder(PathSource):
    """Image files in folders, PATH/<train|validation|test>/<class>/<file>.

    The classes are the folders of `train`. All images are gray if the first training image is, else RGB.

    Attributes:
        path: folder with the splits.
    """

    def images(self) -> Images:
        root = Path(self.path)
        if not (root / "train").is_dir():
            where = "images are read from PATH/<split>/<class>/<file>"
            raise FileNotFoundError(f"There is no folder {root / 'train'}: {where}.")
        names = _classes(root / "train")
        splits, channels = {}, 0
        for split in ("train", "validation", "test"):
            if not (root / split).is_dir():
                continue
            files, labels = _labelled(root, split, names)
            if not channels:
                with Image.open(files[0]) as image:
                    channels = 1 if image.mode in ("1", "L") else 3
            splits[split] = ImageFiles(files, np.array(labels, np.int32), channels)
        return Images(splits, names)


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


def _labelled(root: Path, split: str, names: Sequence[str]) -> tuple[Sequence[Path], Sequence[int]]:
    """Return the image files of a split and their classes."""
    extra = set(_classes(root / split)) - set(names)
    if extra:
        raise ValueError(f"{root / split} has the class {min(extra)!r}, which {root / 'train'} does not have.")
    found = [
        (file, label)
        for label, name in enumerate(names)
        for file in sorted((root / split / name).glob("*"))
        if file.suffix.lower() in _SUFFIXES
    ]
    if not found:
        raise ValueError(f"There is no image in {root / split}/<class>/.")
    files, labels = zip(*found)
    return files, labels


def _classes(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
