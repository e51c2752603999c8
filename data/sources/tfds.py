"""Data sets that TensorFlow Datasets has prepared as array_record, read without TensorFlow."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from lineage.data.examples.windows import Documents
from lineage.data.loader import Source
from lineage.data.sources.images import decode
from lineage.data.transforms.boxes import gather


@dataclass(frozen=True)
class Records(Source):
    """A split of images: of each record an example is made when it is asked for."""

    records: Any
    make: Callable[[dict[str, Any]], dict[str, Any]]

    def __len__(self) -> int:
        return len(self.records)

    def take(self, indices: np.ndarray) -> dict[str, Any]:
        examples = gather([self.make(record) for record in self.records.__getitems__(indices.tolist())])
        return examples | {name: np.array(examples[name], np.int32) for name in ("label",) if name in examples}


def _labelled(image_key, label_key, channels, record):
    return {"image": decode(record[image_key], channels), "label": record[label_key]}


def _with_boxes(image_key, channels, record):
    """An example as `data.detection` has it."""
    image, objects = decode(record[image_key], channels), record["objects"]
    boxes = np.reshape(objects["bbox"], (-1, 4)).astype(np.float32)[:, [1, 0, 3, 2]]
    return {
        "image": image,
        "boxes": boxes * np.float32([image.shape[1], image.shape[0]] * 2),
        "classes": np.asarray(objects["label"], np.int32),
        "crowd": np.asarray(objects.get("is_crowd", np.zeros(len(boxes))), bool),
    }


@dataclass(frozen=True)
class Texts:
    """One text feature of a split."""

    records: Any
    key: str
    length: int

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> str:
        if not 0 <= index < self.length:
            raise IndexError(index)
        return _decoded(self.records[index][self.key], self.key, index)


def builder(name: str, data_dir: str = "") -> Any:
    """The read-only builder of a prepared data set NAME[/CONFIG][:VERSION]; the newest version unless told.

    `data_dir` "" is TFDS's own default. Raises FileNotFoundError with the command that prepares the data set.
    """
    import tensorflow_datasets
    from etils import epath

    root = epath.Path(data_dir or os.environ.get("TFDS_DATA_DIR") or "~/tensorflow_datasets").expanduser()
    path, _, version = name.partition(":")
    folder = root / path
    versions = []
    if folder.is_dir():
        versions = [child.name for child in folder.iterdir() if (child / "features.json").exists()]
    if version:
        versions = [found for found in versions if found == version]
    if not versions:
        configs = sorted(child.parent.parent.name for child in folder.glob("*/*/features.json"))
        hint = f"; prepared are its configs {', '.join(configs)}" if configs and not version else ""
        raise FileNotFoundError(
            f"the data set {name!r} is not prepared in {root}{hint}: prepare it with "
            f"`tfds build {name} --data_dir={root} --file_format=array_record` (needs the extra `prepare`)"
        )
    newest = max(versions, key=lambda text: [int(part) if part.isdigit() else -1 for part in text.split(".")])
    found = tensorflow_datasets.builder_from_directory(folder / newest)
    formats = [form.value for form in found.info.available_file_formats()]
    if "array_record" not in formats:
        raise ValueError(
            f"the data set {name!r} is prepared in {root} as {', '.join(formats)}: prepare it into another data_dir "
            "with --file_format=array_record"
        )
    return found


def splits(builder: Any, asked: dict[str, str]) -> dict[str, str]:
    """The splits to read: those `asked` for by name, and for the other names what the data set calls so."""
    # Part of the training split as validation is for the user to ask for.
    own = {name: name for name in ("validation", "test") if name in builder.info.splits}
    return {"train": "train"} | own | asked


def feature(builder: Any, key: str) -> Any:
    """What a feature is. Raises ValueError if the data set has none of this name."""
    if key not in builder.info.features:
        raise ValueError(
            f"{builder.info.full_name} has no feature {key!r}: it has {', '.join(sorted(builder.info.features))}"
        )
    return builder.info.features[key]


def _records(builder: Any, split: str, key: str, skip_decoding: bool = False) -> Any:
    import tensorflow_datasets

    feature(builder, key)
    decoders = {key: tensorflow_datasets.decode.SkipDecoding()} if skip_decoding else None
    try:
        return builder.as_data_source(split, decoders=decoders, file_format="array_record")
    except ValueError as error:
        raise ValueError(f"split={split!r} of {builder.info.full_name}: {error}") from None


def images(
    builder: Any, splits: Mapping[str, str], image_key: str, label_key: str
) -> tuple[dict[str, Records], list[str]]:
    """The images of some splits such as `train[:99%]`, and the names of their classes."""
    image, label = feature(builder, image_key), feature(builder, label_key)
    if getattr(label, "num_classes", None) is None:
        raise ValueError(f"feature {label_key!r} of {builder.info.full_name} is not a class label")
    make = partial(_labelled, image_key, label_key, image.shape[-1])
    return _made(builder, splits, image_key, make), [str(name) for name in label.names]


def objects(builder: Any, splits: Mapping[str, str], image_key: str) -> tuple[dict[str, Records], list[str]]:
    """The images of some splits with the boxes of their feature `objects`, and the names of the objects' classes."""
    image, found = feature(builder, image_key), getattr(feature(builder, "objects"), "feature", ())
    if "bbox" not in found or "label" not in found:
        raise ValueError(f"feature 'objects' of {builder.info.full_name} has no 'bbox' and 'label'")
    make = partial(_with_boxes, image_key, image.shape[-1])
    return _made(builder, splits, image_key, make), [str(name) for name in found["label"].names]


def _made(builder, splits, image_key, make):
    records = {name: _records(builder, split, image_key, skip_decoding=True) for name, split in splits.items()}
    return {name: Records(of_split, make) for name, of_split in records.items()}


def texts(builder: Any, split: str, key: str, max_bytes: int = 0) -> Documents:
    """The texts of a split such as `train[:99%]`: the first that fit in max_bytes (0 = all)."""
    records = _records(builder, split, key)
    length = len(records)
    if max_bytes:
        size = np.cumsum([len(records[i][key]) for i in range(min(length, max_bytes))])
        length = int(np.searchsorted(size, max_bytes, side="right"))
    fingerprint = f"{builder.info.full_name} {builder.info.splits[split].num_bytes} {split} {key} {length}"
    return Documents(Texts(records, key, length), fingerprint)


def columns(builder: Any, split: str, keys: Sequence[str]) -> list[list[Any]]:
    """All values of some features of a split such as `train[:99%]`; of texts, as such."""
    for key in keys:
        feature(builder, key)
    records = list(_records(builder, split, keys[0]))
    return [[_decoded(record[key], key, number) for number, record in enumerate(records)] for key in keys]


def _decoded(value: Any, key: str, index: int) -> Any:
    try:
        return value.decode("utf-8") if isinstance(value, bytes) else value
    except UnicodeDecodeError as error:
        raise ValueError(f"feature {key!r} of example {index} is not UTF-8 at byte {error.start}") from None
