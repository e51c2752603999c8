"""CIFAR-10 and CIFAR-100, and MNIST and its relatives, in the files that their authors publish."""

import gzip
import hashlib
import io
import math
import pickle
import zlib
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from lineage.data.content import Arrays, Images
from lineage.data.sources.base import SOURCES, PathSource


@SOURCES.register("cifar")
@dataclass(frozen=True)
class CIFAR(PathSource):
    """CIFAR-10 or CIFAR-100, with its fine classes, in the binary version or in the one for Python.

    Examples come in the order of TensorFlow Datasets, so that runs through either source see the same batches.
    """

    def images(self) -> Images:
        root = Path(self.path)
        meta = next((name for name in _CIFAR if (root / name).is_file()), "")
        if not meta:
            known = ", ".join(_CIFAR)
            raise FileNotFoundError(f"{root} has none of {known}: it is not a folder of CIFAR-10 or CIFAR-100.")
        train, test, read = _CIFAR[meta]
        splits = {}
        for split, files in (("train", train), ("test", test)):
            rows, label = map(np.concatenate, zip(*(read(root / file) for file in files)))
            splits[split] = _shuffled(split, rows.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1), label)
        if meta.endswith(".txt"):
            return Images(splits, (root / meta).read_text(encoding="utf-8").split())
        found = _unpickled(root / meta)
        return Images(splits, [name.decode() for name in found.get(b"label_names", found.get(b"fine_label_names", []))])


@SOURCES.register("idx")
@dataclass(frozen=True)
class IDX(PathSource):
    """MNIST, Fashion-MNIST and their relatives, in idx files, which may be gzipped (.gz).

    The files are PATH/<train|t10k>-<images-idx3|labels-idx1>-ubyte. The class names are numbers. Examples come in the
    order of TensorFlow Datasets, so that runs through either source see the same batches.
    """

    def images(self) -> Images:
        root, splits = Path(self.path), {}
        for split, prefix in (("train", "train"), ("test", "t10k")):
            image, label = (_array(root / f"{prefix}-{kind}-ubyte") for kind in ("images-idx3", "labels-idx1"))
            if (image.ndim, label.ndim) != (3, 1):
                shapes = f"images {image.shape} and labels {label.shape} of {prefix!r}"
                raise ValueError(f"{self.path} has {shapes}: images must have 3 axes and labels 1.")
            if len(image) != len(label):
                raise ValueError(f"{self.path} has {len(image)} images and {len(label)} labels of {prefix!r}.")
            splits[split] = _shuffled(split, image[..., None], label)
        classes = 1 + max(int(part.features["label"].max(initial=0)) for part in splits.values())
        return Images(splits, [str(number) for number in range(classes)])


def _records(path: Path, skipped: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the pixels [N, 3072] and the labels [N] of a binary file, whose labels come after `skipped` bytes."""
    found, size = _content(path), skipped + 1 + 3 * 32 * 32
    if len(found) % size:
        raise ValueError(f"{path} has {len(found)} bytes, not a multiple of {size}.")
    rows = np.frombuffer(found, np.uint8).reshape(-1, size)
    return rows[:, skipped + 1 :], rows[:, skipped]


def _batch(path: Path, key: bytes) -> tuple[np.ndarray, np.ndarray]:
    """Return the pixels [N, 3072] and the labels [N] of a file for Python."""
    found = _unpickled(path)
    rows, label = np.asarray(found.get(b"data")), np.asarray(found.get(key))
    if rows.dtype != np.uint8 or rows.shape != (*label.shape, 3 * 32 * 32):
        raise ValueError(f"{path} has no images of 3x32x32 bytes, each with one of {key.decode()!r}.")
    return rows, label


def _unpickled(path: Path) -> dict:
    pickled = _content(path)
    try:
        found = _Unpickler(io.BytesIO(pickled), encoding="bytes").load()
    except Exception as error:  # Damaged bytes can raise almost anything.
        raise ValueError(f"{path} is not one of CIFAR's files for Python: {error}.") from None
    return found if isinstance(found, dict) else {}


class _Unpickler(pickle.Unpickler):
    """Unpickler that makes arrays and Python's literals, and refuses to call anything else."""

    def find_class(self, module, name):
        known = {"_reconstruct": np.empty(0).__reduce__()[0], "ndarray": np.ndarray, "dtype": np.dtype}
        if module.partition(".")[0] != "numpy" or name not in known:
            raise pickle.UnpicklingError(f"it names {module}.{name}")
        return known[name]


# The file with the class names -> the training files, the test files, and the function that reads them.
_TEN = [f"data_batch_{number}" for number in range(1, 6)]
_CIFAR = {
    "batches.meta.txt": ([f"{name}.bin" for name in _TEN], ["test_batch.bin"], partial(_records, skipped=0)),
    "fine_label_names.txt": (["train.bin"], ["test.bin"], partial(_records, skipped=1)),
    "batches.meta": (_TEN, ["test_batch"], partial(_batch, key=b"labels")),
    "meta": (["train"], ["test"], partial(_batch, key=b"fine_labels")),
}


def _array(path: Path) -> np.ndarray:
    """Return the bytes of an idx file in their shape."""
    found = _content(path)
    dimensions = found[3] if found[:3] == b"\0\0\x08" and len(found) > 3 else 0
    start = 4 + 4 * dimensions
    shape = np.frombuffer(found[4:start], ">u4").tolist() if dimensions and len(found) >= start else []
    if not shape or len(found) - start != math.prod(shape):
        raise ValueError(f"{path} is not an idx file of bytes, or is truncated: it has {len(found)} bytes.")
    return np.frombuffer(found, np.uint8, offset=start).reshape(shape)


def _content(path: Path) -> bytes:
    """Return the content of a file or, if there is no such file, of the gzipped one beside it."""
    zipped = path.with_name(f"{path.name}.gz")
    if path.is_file():
        return path.read_bytes()
    if not zipped.is_file():
        raise FileNotFoundError(f"There is no file {path}, and no {zipped.name}.")
    try:
        return gzip.decompress(zipped.read_bytes())
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{zipped} cannot be decompressed: {error}.") from None


def _shuffled(split: str, image: np.ndarray, label: np.ndarray) -> Arrays:
    """Return images and labels in the order of TensorFlow Datasets, by the hash of the split's name and the index."""
    order = sorted(range(len(label)), key=lambda number: hashlib.md5(f"{split}{number}".encode()).digest())
    return Arrays({"image": np.ascontiguousarray(image[order]), "label": label[order].astype(np.int32)})
