"""CIFAR-10, CIFAR-100, and MNIST and its variants, in the files that their authors publish."""

import hashlib
import math
import pickletools
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from lineage.data.content import Arrays, Images
from lineage.data.sources.base import SOURCES, PathSource
from lineage.data.sources.files import gathered, opened, read_lines


@SOURCES.register("cifar")
@dataclass(frozen=True)
class CIFAR(PathSource):
    """CIFAR-10 or CIFAR-100 (with its fine classes), in the binary version or the Python version.

    Examples are in the order of TensorFlow Datasets, so that runs with either source see the same batches.
    """

    def images(self) -> Images:
        root = Path(self.path)
        meta = next((name for name in _CIFAR if (root / name).is_file()), "")
        if not meta:
            known = ", ".join(_CIFAR)
            raise FileNotFoundError(f"{root} has none of {known}: it is not a folder of CIFAR-10 or CIFAR-100.")
        train, test, read = _CIFAR[meta]
        names, splits = _class_names(root / meta), {}
        for split, files in (("train", train), ("test", test)):
            rows, label = map(np.concatenate, zip(*(read(root / file) for file in files)))
            if label.max(initial=0) >= len(names):
                raise ValueError(f"{root} has the label {label.max()}, but {meta} has {len(names)} class names.")
            splits[split] = _shuffled(split, rows.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1), label, root / meta)
        return Images(splits, names)


@SOURCES.register("idx")
@dataclass(frozen=True)
class IDX(PathSource):
    """MNIST, Fashion-MNIST and similar data sets in idx files, which may be gzipped (.gz).

    The files are PATH/<train|t10k>-<images-idx3|labels-idx1>-ubyte. The class names are numbers. Examples are in the
    order of TensorFlow Datasets, so that runs with either source see the same batches.
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
            splits[split] = _shuffled(split, image[..., None], label, _place(root / f"{prefix}-labels-idx1-ubyte"))
        classes = 1 + max(int(part.features["label"].max(initial=0)) for part in splits.values())
        return Images(splits, [str(number) for number in range(classes)])


def _records(path: Path, skipped: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the pixels [N, 3072] and the labels [N] of a binary file, whose labels come after `skipped` bytes."""
    content, size = _content(path), skipped + 1 + 3 * 32 * 32
    if not content:
        raise ValueError(f"{path} is empty: it must have images.")
    if len(content) % size:
        raise ValueError(f"{path} has {len(content)} bytes, not a multiple of {size}.")
    rows = np.frombuffer(content, np.uint8).reshape(-1, size)
    return rows[:, skipped + 1 :], rows[:, skipped]


def _batch(path: Path, key: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the pixels [N, 3072] and the labels [N] of a file of the Python version."""
    batch = _unpickled(path)
    label, pixels = batch.get(key), batch.get("data")
    state = pixels.state if isinstance(pixels, _Stub) else ()
    match state:
        case (_, shape, _Stub(arguments=("u1" | b"u1", *_)), False, str() | bytes() as content):
            content = content.encode("latin-1") if isinstance(content, str) else content
        case _:
            shape, content = (), b""
    valid = isinstance(label, list) and all(type(number) is int and 0 <= number < 256 for number in label)
    if not valid or shape != (len(label), 3 * 32 * 32) or len(content) != math.prod(shape):
        raise ValueError(f"{path} has no images of 3x32x32 bytes, each with one of {key!r}.")
    return np.frombuffer(content, np.uint8).reshape(shape), np.array(label, np.uint8)


def _class_names(path: Path) -> list[str]:
    if path.suffix == ".txt":
        return " ".join(read_lines(str(path))).split()
    metadata = _unpickled(path)
    names = metadata.get("label_names", metadata.get("fine_label_names"))
    if not isinstance(names, list) or not all(isinstance(name, str | bytes) for name in names):
        raise ValueError(f"{path} has no list of names as 'label_names' or 'fine_label_names'.")
    return [name.decode(errors="replace") if isinstance(name, bytes) else name for name in names]


@dataclass
class _Stub:
    """Inert object in a pickle: the name of its class or function, the arguments of the call, and its state."""

    name: str
    arguments: Any = ()
    state: Any = ()


def _unpickled(path: Path) -> dict[str, Any]:
    """Return the dictionary in a pickle, whose keys are texts or bytes; see `_interpreted`."""
    content = _content(path)
    try:
        values = _interpreted(content)
        return {key.decode() if isinstance(key, bytes) else key: value for key, value in values.items()}
    except Exception as error:  # Damaged bytes can raise almost anything.
        raise ValueError(f"{path} is not one of CIFAR's files for Python: {error}.") from None


def _interpreted(content: bytes) -> Any:
    """Return the object in a pickle, of literals, lists, dictionaries and `_Stub`s; nothing is imported or called."""
    stack: list[Any] = []
    memo: dict[int, Any] = {}
    marks: list[int] = []

    def popped(start: int) -> list[Any]:
        items = stack[start:]
        del stack[start:]
        return items

    for opcode, value, _ in pickletools.genops(content):
        match opcode.name:
            case "MARK":
                marks.append(len(stack))
            case "PUT" | "BINPUT" | "LONG_BINPUT" | "MEMOIZE":
                memo[len(memo) if value is None else value] = stack[-1]
            case "GET" | "BINGET" | "LONG_BINGET":
                stack.append(memo[value])
            case "NONE" | "NEWTRUE" | "NEWFALSE" | "EMPTY_LIST" | "EMPTY_DICT" | "EMPTY_TUPLE" as name:
                stack.append(_LITERALS[name]())
            case "TUPLE":
                stack.append(tuple(popped(marks.pop())))
            case "TUPLE1" | "TUPLE2" | "TUPLE3" as name:
                stack.append(tuple(popped(len(stack) - int(name[-1]))))
            case "APPEND" | "APPENDS" as name:
                items = popped(marks.pop() if name == "APPENDS" else -1)
                stack[-1].extend(items)
            case "SETITEM" | "SETITEMS" as name:
                items = popped(marks.pop() if name == "SETITEMS" else -2)
                if not all(isinstance(key, str | bytes) for key in items[::2]):  # other keys can take forever to hash
                    raise ValueError("a key is neither text nor bytes")
                stack[-1].update(zip(items[::2], items[1::2], strict=True))
            case "GLOBAL":
                stack.append(_Stub(value))
            case "STACK_GLOBAL":
                stack.append(_Stub(" ".join(popped(-2))))
            case "REDUCE":
                called, arguments = popped(-2)
                stack.append(_Stub(called.name, arguments))
            case "BUILD":
                instance, state = popped(-2)
                instance.state = state
                stack.append(instance)
            case name if value is not None or name == "STOP":
                stack += [value] * (name not in ("PROTO", "FRAME", "STOP"))
            case name:
                raise ValueError(f"it has the opcode {name}")
    return stack.pop()


_LITERALS: dict[str, Any] = {"EMPTY_LIST": list, "EMPTY_DICT": dict, "EMPTY_TUPLE": tuple}
_LITERALS |= {"NONE": lambda: None, "NEWTRUE": lambda: True, "NEWFALSE": lambda: False}
# The file with the class names -> the training files, the test files, and the function that reads them.
_TEN = [f"data_batch_{number}" for number in range(1, 6)]
_CIFAR = {
    "batches.meta.txt": ([f"{name}.bin" for name in _TEN], ["test_batch.bin"], partial(_records, skipped=0)),
    "fine_label_names.txt": (["train.bin"], ["test.bin"], partial(_records, skipped=1)),
    "batches.meta": (_TEN, ["test_batch"], partial(_batch, key="labels")),
    "meta": (["train"], ["test"], partial(_batch, key="fine_labels")),
}


def _array(path: Path) -> np.ndarray:
    """Return the bytes of an idx file in their shape."""
    content = _content(path)
    dimensions = content[3] if content[:3] == b"\0\0\x08" and len(content) > 3 else 0
    start = 4 + 4 * dimensions
    shape = np.frombuffer(content[4:start], ">u4").tolist() if dimensions and len(content) >= start else []
    sound = 0 < len(shape) <= 32 and 0 < math.prod(shape[1:]) < 2**31  # for NumPy
    if not sound or len(content) - start != math.prod(shape):
        raise ValueError(f"{path} is not an idx file of bytes, or is truncated: it has {len(content)} bytes.")
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape)


def _content(path: Path) -> bytes:
    """Return the content of a file or, if it does not exist, of the gzipped file next to it."""
    place = _place(path)
    with opened(place) as file:
        return b"".join(gathered(iter(partial(file.read, 1 << 20), b""), place))


def _place(path: Path) -> Path:
    """Return the path of a file or, if it does not exist, of the gzipped file next to it."""
    zipped = path.with_name(f"{path.name}.gz")
    if not (path.is_file() or zipped.is_file()):
        raise FileNotFoundError(f"There is no file {path}, and no {zipped.name}.")
    return path if path.is_file() else zipped


def _shuffled(split: str, image: np.ndarray, label: np.ndarray, path: Path) -> Arrays:
    """Return images and labels in the order of TensorFlow Datasets, by the hash of the split's name and the index."""
    hashes = gathered((hashlib.md5(f"{split}{number}".encode()).digest() for number in range(len(label))), path)
    order = sorted(range(len(label)), key=hashes.__getitem__)
    return Arrays({"image": np.ascontiguousarray(image[order]), "label": label[order].astype(np.int32)})
