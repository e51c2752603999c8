"""Labelled images in files of plain bytes: the idx files of MNIST and its relatives, and CIFAR's binary version.

Examples come in the order in which TensorFlow Datasets writes them, so that a run through either sees equal batches.
"""

import gzip
import hashlib
import math
import zlib
from pathlib import Path

import numpy as np

from data.images import Arrays


def idx(path: str) -> tuple[dict[str, Arrays], list[str]]:
    """The splits of PATH/<train|t10k>-<images-idx3|labels-idx1>-ubyte, which may be gzipped (.gz); classes are numbers.

    Raises FileNotFoundError or ValueError for a file that is absent or damaged.
    """
    splits = {}
    for split, prefix in (("train", "train"), ("test", "t10k")):
        image, label = (_array(Path(path, f"{prefix}-{kind}-ubyte")) for kind in ("images-idx3", "labels-idx1"))
        if len(image) != len(label):
            raise ValueError(f"{path} has {len(image)} images and {len(label)} labels of {prefix!r}")
        splits[split] = _ordered(split, image[..., None], label)
    classes = 1 + max(int(part.features["label"].max(initial=0)) for part in splits.values())
    return splits, [str(number) for number in range(classes)]


def cifar(path: str) -> tuple[dict[str, Arrays], list[str]]:
    """The splits of CIFAR-10 or CIFAR-100 in a folder of the binary version, and the names of the (fine) classes.

    Raises FileNotFoundError or ValueError for a file that is absent or cut.
    """
    root = Path(path)
    if (root / "batches.meta.txt").is_file():
        names, skipped, files = "batches.meta.txt", 0, [f"data_batch_{number}.bin" for number in range(1, 6)]
        of_split = {"train": files, "test": ["test_batch.bin"]}
    elif (root / "fine_label_names.txt").is_file():
        names, skipped, of_split = "fine_label_names.txt", 1, {"train": ["train.bin"], "test": ["test.bin"]}
    else:
        raise FileNotFoundError(
            f"{path} has no batches.meta.txt (CIFAR-10) and no fine_label_names.txt (CIFAR-100): "
            "the binary version is read, not the one for Python"
        )
    splits = {}
    for split, files in of_split.items():
        content, size = b"".join(_content(root / file) for file in files), skipped + 1 + 3 * 32 * 32
        if len(content) % size:
            raise ValueError(f"{path} has {len(content)} bytes in {', '.join(files)}, not a multiple of {size}")
        rows = np.frombuffer(content, np.uint8).reshape(-1, size)
        image = rows[:, skipped + 1 :].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
        splits[split] = _ordered(split, image, rows[:, skipped])
    return splits, (root / names).read_text(encoding="utf-8").split()


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
