"""The idx files of MNIST and its relatives."""

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lineage.data.content import Images
from lineage.data.sources.base import SOURCES, PathSource
from lineage.data.sources.raw import content, shuffled


@SOURCES.register("idx")
@dataclass(frozen=True)
class IDX(PathSource):
    """MNIST, Fashion-MNIST and their relatives, in idx files, which may be gzipped (.gz).

    The files are PATH/<train|t10k>-<images-idx3|labels-idx1>-ubyte. The class names are numbers. Examples come in the
    order of TensorFlow Datasets, so that runs through either source see the same batches.

    Attributes:
        path: the folder with the four files.
    """

    def images(self) -> Images:
        root, splits = Path(self.path), {}
        for split, prefix in (("train", "train"), ("test", "t10k")):
            image, label = (_array(root / f"{prefix}-{kind}-ubyte") for kind in ("images-idx3", "labels-idx1"))
            if (image.ndim, label.ndim) != (3, 1):
                raise ValueError(
                    f"{self.path} has images {image.shape} and labels {label.shape} of {prefix!r}: "
                    "images must have 3 axes and labels 1."
                )
            if len(image) != len(label):
                raise ValueError(f"{self.path} has {len(image)} images and {len(label)} labels of {prefix!r}.")
            splits[split] = shuffled(split, image[..., None], label)
        classes = 1 + max(int(part.features["label"].max(initial=0)) for part in splits.values())
        return Images(splits, [str(number) for number in range(classes)])


def _array(path: Path) -> np.ndarray:
    """Return the bytes of an idx file in their shape."""
    found = content(path)
    dimensions = found[3] if found[:3] == b"\0\0\x08" and len(found) > 3 else 0
    start = 4 + 4 * dimensions
    shape = np.frombuffer(found[4:start], ">u4").tolist() if dimensions and len(found) >= start else []
    if not shape or len(found) - start != math.prod(shape):
        raise ValueError(f"{path} is not an idx file of bytes, or is truncated: it has {len(found)} bytes.")
    return np.frombuffer(found, np.uint8, offset=start).reshape(shape)
