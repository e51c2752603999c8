"""Folders of image files."""

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from lineage.configs.registry import Rate
from lineage.data.content import Images
from lineage.data.fingerprint import files_below
from lineage.data.loader import ExampleSource, evenly_spaced
from lineage.data.sources.base import SOURCES, SPLITS, PathSource
from lineage.data.sources.files import held_out, read_lines
from lineage.data.transforms.pillow import Picture, common_channels, stamp

VALIDATION = "validation", "valid", "val", "dev"  # names of the folder of the validation data
NUM_SAMPLED = 100  # training images from which the number of channels is determined
SUFFIXES = frozenset(
    {".bmp", ".gif", ".jfif", ".jpeg", ".jpg", ".pbm", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"}
)


@SOURCES.register("folder")
@dataclass(frozen=True)
class Folder(PathSource):
    """Image files in folders, PATH/<train|validation|test>/<class>/<file>, and in subfolders of those of the classes.

    The folder of the validation data may also be `valid`, `val` or `dev`. The classes are the folders of `train`. All
    images are gray if a hundred training images, evenly spaced, are; otherwise, they are RGB.
    """

    def images(self) -> Images:
        root = Path(self.path)
        folders = self.without_training(_split_folders(root))
        known = self.known if "train" not in folders else None
        names = known.class_names if known else _training_classes(root)
        splits = {split: _labeled(folder, names) for split, folder in folders.items()}
        return _images(splits, names, known and known.channels)

    def unread(self) -> list[str]:
        root = Path(self.copied().path)
        read = _split_folders(root).values()
        others = [path for path in root.iterdir() if path not in read and not path.name.startswith(".")]
        files = [file for path in others for file in image_files(path)]
        loose = [file for folder in (root, *read) for file in folder.iterdir() if is_image(file)]
        return sorted(map(str, files + loose))


@SOURCES.register("imagenet")
@dataclass(frozen=True)
class ImageNet(PathSource):
    """ImageNet's folders of images, PATH/train/<class>/<file> and PATH/val/<class>/<file>, as of 2012 or similar.

    The files of `val` may also be in one folder if PATH has LOC_val_solution.csv, and the folders may be in
    ILSVRC/Data/CLS-LOC, as in Kaggle's archive. The classes are the folders of `train`, named after the words in
    LOC_synset_mapping.txt, synset_words.txt or words.txt in PATH, if there is such a file.

    Attributes:
        validation_fraction: fraction of the training images, evenly spread, that is held out as `validation`, and `val`
            is the split `test`; 0: `val` is the split `validation`.
    """

    validation_fraction: Rate = 0.0

    def images(self) -> Images:
        root = Path(self.path)
        inner = root / "ILSVRC" / "Data" / "CLS-LOC"
        images = inner if inner.is_dir() else root
        classes = _training_classes(images)
        splits = {"train": _labeled(images / "train", classes)}
        if (images / "val").is_dir():
            read = _labeled if _classes(images / "val") else partial(_read_solution, root / "LOC_val_solution.csv")
            splits["test" if self.validation_fraction else "validation"] = read(images / "val", classes)
        if self.validation_fraction:
            files, labels = splits["train"]
            held = held_out(np.arange(len(files)), self.validation_fraction)
            for split, chosen in (("train", ~held), ("validation", held)):
                splits[split] = [files[i] for i in np.flatnonzero(chosen)], labels[chosen]
        return _images(splits, _words(root, classes))


@dataclass(frozen=True)
class Files(ExampleSource):
    """Image files, decoded on access; those that were modified after the source was opened raise ValueError."""

    files: Sequence[Path]
    stamps: np.ndarray = field(init=False, repr=False, compare=False)  # modification times, int64 [N]

    def __post_init__(self):
        object.__setattr__(self, "stamps", np.fromiter(map(stamp, self.files), np.int64, len(self.files)))

    def __len__(self) -> int:
        return len(self.files)

    def picture(self, index: int, channels: int) -> Picture:
        """Return an image; reading it raises ValueError if its file was modified since the source was opened."""
        return Picture(self.files[index], channels, stamp=int(self.stamps[index]))


@dataclass(frozen=True)
class ImageFiles(Files):
    """Image files with their labels."""

    labels: np.ndarray
    channels: int

    def take(self, indices: np.ndarray) -> dict[str, Any]:
        return {"image": [self.picture(index, self.channels) for index in indices], "label": self.labels[indices]}

    def check(self, index: int) -> None:
        self.picture(index, self.channels).check()


def _images(
    splits: dict[str, tuple[Sequence[Path], np.ndarray]], names: Sequence[str], channels: int | None = None
) -> Images:
    if not channels:
        files, _ = splits["train"]
        channels = common_channels((files[index], "") for index in evenly_spaced(len(files), NUM_SAMPLED))
    return Images({split: ImageFiles(*splits[split], channels) for split in SPLITS if split in splits}, list(names))


def _split_folders(root: Path) -> dict[str, Path]:
    """Return the folder of each split; raise ValueError if there are several of the validation data."""
    folders = {split: root / split for split in SPLITS if (root / split).is_dir()}
    validation = [root / name for name in VALIDATION if (root / name).is_dir()]
    if len(validation) > 1:
        names = f"{validation[0].name} and {validation[1].name}"
        raise ValueError(f"{root} has the folders {names}: it must have one folder of validation data.")
    return folders | ({"validation": validation[0]} if validation else {})


def _training_classes(root: Path) -> list[str]:
    if not (root / "train").is_dir():
        where = "images are read from PATH/<split>/<class>/<file>"
        raise FileNotFoundError(f"There is no folder {root / 'train'}: {where}.")
    return _classes(root / "train")


def _labeled(folder: Path, names: Sequence[str]) -> tuple[Sequence[Path], np.ndarray]:
    """Return the image files of a split and their classes."""
    if extra := set(_classes(folder)) - set(names):
        raise ValueError(f"{folder} has the class {min(extra)!r}, which {folder.with_name('train')} does not have.")
    groups = [image_files(folder / name) for name in names]
    empty = [folder / name for name, group in zip(names, groups) if not group]
    if len(empty) == len(names) or (empty and folder.name == "train"):
        raise ValueError(f"There is no image in {empty[0] if empty else folder}.")
    return [*chain(*groups)], np.repeat(np.arange(len(names), dtype=np.int32), [len(group) for group in groups])


def image_files(folder: str | Path) -> list[Path]:
    """Return the sorted image files in a folder and its subfolders, following links, without hidden ones."""
    folder = Path(folder)
    files, start = files_below(folder) if folder.is_dir() else (), len(str(folder)) if folder.parts else 0
    return sorted(file for file in files if is_image(file) and f"{os.sep}." not in f"{os.sep}{str(file)[start:]}")


def is_image(file: Path) -> bool:
    """Return whether a file name is that of an image; hidden files, such as "._a.jpg" of macOS, are not images."""
    return file.suffix.lower() in SUFFIXES and not file.name.startswith(".")


def _classes(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))


def _read_solution(solution: Path, folder: Path, classes: Sequence[str]) -> tuple[Sequence[Path], np.ndarray]:
    """Return the image files in a folder and their classes, from a table such as "ImageId,PredictionString".

    A prediction is "n01751748 111 108 230 165": a class and a box, perhaps several times.
    """
    if not solution.is_file():
        raise FileNotFoundError(f"{folder} has no folders of classes, and there is no file {solution}.")
    label = {name: number for number, name in enumerate(classes)}
    files, labels = [], []
    for number, line in enumerate(read_lines(str(solution))[1:], 2):
        image, _, prediction = line.partition(",")
        name, file = prediction.partition(" ")[0], folder / f"{image}.JPEG"
        if name not in label:
            raise ValueError(f"{solution}, line {number} has the class {name!r}, which `train` does not have.")
        files.append(file)
        labels.append(label[name])
    if missing := set(files) - set(folder.iterdir()):
        raise FileNotFoundError(f"There is no file {min(missing)}, which {solution} names.")
    return files, np.array(labels, np.int32)


def _words(root: Path, classes: Sequence[str]) -> list[str]:
    """Return the words for each class; if several classes have the same words, the folder is added."""
    files = (root / name for name in ("LOC_synset_mapping.txt", "synset_words.txt", "words.txt"))
    if not (file := next(filter(Path.is_file, files), None)):
        return list(classes)
    rows = (line.replace("\t", " ", 1).partition(" ") for line in read_lines(str(file)))
    words = {name: meaning for name, _, meaning in rows}
    if missing := set(classes) - words.keys():
        raise ValueError(f"{file} has no words for the class {min(missing)!r}.")
    count = Counter(words[name] for name in classes)
    return [words[name] if count[words[name]] == 1 else f"{words[name]} ({name})" for name in classes]
