"""Labelled images in files of plain bytes: the idx files of MNIST and its relatives, and CIFAR's.

Examples come in the order in which TensorFlow Datasets writes them, so that a run through either sees equal batches.
"""

import gzip
import hashlib
import io
import math
import pickle
import zlib
from functools import partial
from pathlib import Path

import numpy as np

from lineage.data.sources.images import Arrays


def idx(path: str) -> tuple[dict[str, Arrays], list[str]]:
    """The splits of PATH/<train|t10k>-<images-idx3|labels-idx1>-ubyte, which may be gzipped (.gz); classes are numbers.

    Raises FileNotFoundError or ValueError for a file that is absent or damaged.
    """
    splits = {}
    for split, prefix in (("train", "train"), ("test", "t10k")):
        image, label = (_array(Path(path, f"{prefix}-{kind}-ubyte")) for kind in ("images-idx3", "labels-idx1"))
        if (image.ndim, label.ndim) != (3, 1):
            raise ValueError(
                f"{path} has images {image.shape} and labels {label.shape} of {prefix!r}: not 3 axes and 1"
            )
        if len(image) != len(label):
            raise ValueError(f"{path} has {len(image)} images and {len(label)} labels of {prefix!r}")
        splits[split] = _ordered(split, image[..., None], label)
    classes = 1 + max(int(part.features["label"].max(initial=0)) for part in splits.values())
    return splits, [str(number) for number in range(classes)]


def cifar(path: str) -> tuple[dict[str, Arrays], list[str]]:
    """The splits of CIFAR-10 or CIFAR-100 in a folder of the binary version or of the one for Python, and the names of
    the (fine) classes.

    Raises FileNotFoundError or ValueError for a file that is absent or damaged.
    """
    root = Path(path)
    meta = next((name for name in _CIFAR if (root / name).is_file()), "")
    if not meta:
        raise FileNotFoundError(f"{path} has none of {', '.join(_CIFAR)}: it is no folder of CIFAR-10 or CIFAR-100")
    train, test, read = _CIFAR[meta]
    splits = {}
    for split, files in (("train", train), ("test", test)):
        rows, label = map(np.concatenate, zip(*(read(root / file) for file in files)))
        splits[split] = _ordered(split, rows.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1), label)
    if meta.endswith(".txt"):
        return splits, (root / meta).read_text(encoding="utf-8").split()
    found = _unpickled(root / meta)
    return splits, [name.decode() for name in found.get(b"label_names", found.get(b"fine_label_names", []))]


def _records(path, skipped):
    """Pixels [N, 3072] and labels [N] of a binary file, whose labels come after so many bytes."""
    content, size = _content(path), skipped + 1 + 3 * 32 * 32
    if len(content) % size:
        raise ValueError(f"{path} has {len(content)} bytes, not a multiple of {size}")
    rows = np.frombuffer(content, np.uint8).reshape(-1, size)
    return rows[:, skipped + 1 :], rows[:, skipped]


def _batch(path, key):
    """Pixels [N, 3072] and labels [N] of a file for Python."""
    found = _unpickled(path)
    rows, label = np.asarray(found.get(b"data")), np.asarray(found.get(key))
    if rows.dtype != np.uint8 or rows.shape != (*label.shape, 3 * 32 * 32):
        raise ValueError(f"{path} has no images of 3x32x32 bytes, each with one of {key.decode()!r}")
    return rows, label


def _unpickled(path):
    content = _content(path)
    try:
        found = _Unpickler(io.BytesIO(content), encoding="bytes").load()
    except Exception as error:  # there is little that damaged bytes could not raise
        raise ValueError(f"{path} is not one of CIFAR's files for Python: {error}") from None
    return found if isinstance(found, dict) else {}


class _Unpickler(pickle.Unpickler):
    """Makes arrays and what Python's syntax has alone: it calls nothing else, whatever the bytes name."""

    def find_class(self, module, name):
        known = {"_reconstruct": np.empty(0).__reduce__()[0], "ndarray": np.ndarray, "dtype": np.dtype}
        if module.partition(".")[0] != "numpy" or name not in known:
            raise pickle.UnpicklingError(f"it names {module}.{name}")
        return known[name]


# The file that names the classes -> those of the training, those of the test, and what reads them.
_TEN = [f"data_batch_{number}" for number in range(1, 6)]
_CIFAR = {
    "batches.meta.txt": ([f"{name}.bin" for name in _TEN], ["test_batch.bin"], partial(_records, skipped=0)),
    "fine_label_names.txt": (["train.bin"], ["test.bin"], partial(_records, skipped=1)),
    "batches.meta": (_TEN, ["test_batch"], partial(_batch, key=b"labels")),
    "meta": (["train"], ["test"], partial(_batch, key=b"fine_labels")),
}


def _array(path):
    """The bytes of an idx file in their shape."""
    content = _content(path)
    dimensions = content[3] if content[:3] == b"\0\0\x08" and len(content) > 3 else 0
    start = 4 + 4 * dimensions
    shape = np.frombuffer(content[4:start], ">u4").tolist() if dimensions and len(content) >= start else []
    if not shape or len(content) - start != math.prod(shape):
        raise ValueError(f"{path} is not an idx file of bytes, or is cut: it has {len(content)} bytes")
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape)


def _content(path):
    """Of a file or, where it is absent, of the gzipped one beside it."""
    zipped = path.with_name(f"{path.name}.gz")
    if path.is_file():
        return path.read_bytes()
    if not zipped.is_file():
        raise FileNotFoundError(f"there is no file {path}, and no {zipped.name}")
    try:
        return gzip.decompress(zipped.read_bytes())
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{zipped} cannot be unpacked: {error}") from None


def _ordered(split, image, label):
    """By the hash of the split's name and the number of the example."""
    order = sorted(range(len(label)), key=lambda number: hashlib.md5(f"{split}{number}".encode()).digest())
    return Arrays({"image": np.ascontiguousarray(image[order]), "label": label[order].astype(np.int32)})
