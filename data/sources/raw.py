"""Helpers for data sets of images in files of plain bytes."""

import gzip
import hashlib
import zlib
from pathlib import Path

import numpy as np

from lineage.data.content import Arrays


def content(path: Path) -> bytes:
    """Return the content of a file or, if there is no such file, of the gzipped one beside it.

    Raises:
        FileNotFoundError: there is neither.
        ValueError: the gzipped file is damaged.
    """
    zipped = path.with_name(f"{path.name}.gz")
    if path.is_file():
        return path.read_bytes()
    if not zipped.is_file():
        raise FileNotFoundError(f"There is no file {path}, and no {zipped.name}.")
    try:
        return gzip.decompress(zipped.read_bytes())
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{zipped} cannot be decompressed: {error}.") from None


def shuffled(split: str, image: np.ndarray, label: np.ndarray) -> Arrays:
    """Return images and labels in the order of TensorFlow Datasets, by the hash of the split's name and the index."""
    order = sorted(range(len(label)), key=lambda number: hashlib.md5(f"{split}{number}".encode()).digest())
    return Arrays({"image": np.ascontiguousarray(image[order]), "label": label[order].astype(np.int32)})
