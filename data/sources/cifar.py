"""CIFAR-10 and CIFAR-100."""

import io
import pickle
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from lineage.data.content import Images
from lineage.data.sources.base import SOURCES, PathSource
from lineage.data.sources.raw import content, shuffled


@SOURCES.register("cifar")
@dataclass(frozen=True)
class CIFAR(PathSource):
    """CIFAR-10 or CIFAR-100, with its fine classes, in the binary version or in the one for Python.

    Examples come in the order of TensorFlow Datasets, so that runs through either source see the same batches.

    Attributes:
        path: the folder with the files.
    """

    def images(self) -> Images:
        root = Path(self.path)
        meta = next((name for name in _CIFAR if (root / name).is_file()), "")
        if not meta:
            raise FileNotFoundError(
                f"{root} has none of {', '.join(_CIFAR)}: it is not a folder of CIFAR-10 or CIFAR-100."
            )
        train, test, read = _CIFAR[meta]
        splits = {}
        for split, files in (("train", train), ("test", test)):
            rows, label = map(np.concatenate, zip(*(read(root / file) for file in files)))
            splits[split] = shuffled(split, rows.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1), label)
        if meta.endswith(".txt"):
            return Images(splits, (root / meta).read_text(encoding="utf-8").split())
        found = _unpickled(root / meta)
        return Images(splits, [name.decode() for name in found.get(b"label_names", found.get(b"fine_label_names", []))])


def _records(path: Path, skipped: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the pixels [N, 3072] and the labels [N] of a binary file, whose labels come after `skipped` bytes."""
    found, size = content(path), skipped + 1 + 3 * 32 * 32
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
    pickled = content(path)
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
