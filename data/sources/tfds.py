"""Data sets that TensorFlow Datasets has prepared as array_record, read without TensorFlow."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from lineage.data.content import Documents, Images, LabelledTexts, PairedTexts, Question, gather
from lineage.data.loader import ExampleSource
from lineage.data.sources.base import SOURCES, PathSource
from lineage.data.transforms.pillow import decode


@SOURCES.register("tfds")
@dataclass(frozen=True)
class TFDS(PathSource):
    """Data set that TensorFlow Datasets has prepared as array_record.

    Attributes:
        path: NAME[/CONFIG][:VERSION] of the data set; the newest prepared version unless one is given.
        data_dir: the folder of prepared data sets; "" = $TFDS_DATA_DIR or ~/tensorflow_datasets.
        train_split: the split to train on, such as train[:99%].
        validation_split: the split to validate on; "" = the data set's own, if it has one.
        test_split: the split to test on; "" = the data set's own, if it has one.
        text_key: the feature with the text; two features separated by a comma for pairs, such as "de,en".
        label_key: the feature with the label.
        image_key: the feature with the image.
        max_bytes: the most bytes of documents to read for each split, in whole documents; 0 = no limit.
    """

    data_dir: str = ""
    train_split: str = "train"
    validation_split: str = ""
    test_split: str = ""
    text_key: str = "text"
    label_key: str = "label"
    image_key: str = "image"
    max_bytes: int = 0

    def files(self) -> list[str]:
        return []  # The files of TFDS have checksums of their own.

    def documents(self) -> dict[str, Documents]:
        builder, splits = self._prepared()
        return {name: _texts(builder, split, self.text_key, self.max_bytes) for name, split in splits.items()}

    def pairs(self) -> dict[str, PairedTexts]:
        keys = self.text_key.split(",")
        if len(keys) != 2:
            raise ValueError(f"source.text_key is {self.text_key!r}: pairs need two features, such as 'de,en'.")
        return {name: PairedTexts(*columns) for name, columns in self._columns(keys).items()}

    def labelled_texts(self) -> dict[str, LabelledTexts]:
        """Return the texts that have a label; a split without labels, such as GLUE's test splits, is left out."""
        keys, splits = self.text_key.split(","), {}
        feature = _feature(find_builder(self.path, self.data_dir), self.label_key)
        known = [str(name) for name in getattr(feature, "names", None) or ()]
        for name, (*texts, labels) in self._columns([*keys, self.label_key]).items():
            # -1 marks a missing label. Where labels are numbers, it does so only if there is no other label.
            missing = -1 if known or set(labels) == {-1} else None
            rows = [(row, label) for row, label in zip(zip(*texts), labels) if label != missing]
            if rows:
                named = [known[label] if known else str(label) for _, label in rows]
                splits[name] = LabelledTexts([row for row, _ in rows], named, known)
        return splits

    def questions(self) -> dict[str, list[Question]]:
        return {
            name: [
                Question(
                    question, context, [(int(s), t.decode()) for s, t in zip(found["answer_start"], found["text"])]
                )
                for question, context, found in zip(*columns)
            ]
            for name, columns in self._columns(["question", "context", "answers"]).items()
        }

    def images(self) -> Images:
        builder, splits = self._prepared()
        image, label = _feature(builder, self.image_key), _feature(builder, self.label_key)
        if getattr(label, "num_classes", None) is None:
            raise ValueError(f"The feature {self.label_key!r} of {builder.info.full_name} is not a class label.")
        make = partial(_labelled, self.image_key, self.label_key, image.shape[-1])
        return Images(_made(builder, splits, self.image_key, make), [str(name) for name in label.names])

    def images_with_boxes(self) -> Images:
        builder, splits = self._prepared()
        image, found = _feature(builder, self.image_key), getattr(_feature(builder, "objects"), "feature", ())
        if "bbox" not in found or "label" not in found:
            raise ValueError(f"The feature 'objects' of {builder.info.full_name} has no 'bbox' and 'label'.")
        make = partial(_with_boxes, self.image_key, image.shape[-1])
        return Images(_made(builder, splits, self.image_key, make), [str(name) for name in found["label"].names])

    def _prepared(self) -> tuple[Any, dict[str, str]]:
        """Return the builder of the data set, and the splits to read."""
        builder = find_builder(self.path, self.data_dir)
        # A part of the training split is used for validation only if the user says so.
        own = {name: name for name in ("validation", "test") if name in builder.info.splits}
        asked = {"train": self.train_split, "validation": self.validation_split, "test": self.test_split}
        return builder, {"train": "train"} | own | {name: split for name, split in asked.items() if split}

    def _columns(self, keys: Sequence[str]) -> dict[str, list[list[Any]]]:
        """Return all values of some features, by split; texts are decoded."""
        builder, splits = self._prepared()
        return {name: _columns(builder, split, keys) for name, split in splits.items()}


@dataclass(frozen=True)
class Records(ExampleSource):
    """A split of images; examples are made from records on access."""

    records: Any
    make: Callable[[dict[str, Any]], dict[str, Any]]

    def __len__(self) -> int:
        return len(self.records)

    def take(self, indices: np.ndarray) -> dict[str, Any]:
        examples = gather([self.make(record) for record in self.records.__getitems__(indices.tolist())])
        return examples | {name: np.array(examples[name], np.int32) for name in ("label",) if name in examples}


@dataclass(frozen=True)
class Texts:
    """The values of a text feature in the first `length` examples of a split."""

    records: Any
    key: str
    length: int

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> str:
        if not 0 <= index < self.length:
            raise IndexError(index)
        return _decoded(self.records[index][self.key], self.key, index)


def find_builder(name: str, data_dir: str = "") -> Any:
    """Return the read-only builder of a prepared data set.

    Args:
        name: NAME[/CONFIG][:VERSION]; the newest prepared version unless one is given.
        data_dir: the folder of prepared data sets; "" = $TFDS_DATA_DIR or ~/tensorflow_datasets.

    Raises:
        FileNotFoundError: the data set is not prepared; the message has the command that prepares it.
        ValueError: it is prepared in another format.
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
        hint = f"; its prepared configs are {', '.join(configs)}" if configs and not version else ""
        raise FileNotFoundError(
            f"The data set {name!r} is not prepared in {root}{hint}: prepare it with "
            f"`tfds build {name} --data_dir={root} --file_format=array_record` (needs the extra `prepare`)."
        )
    newest = max(versions, key=lambda text: [int(part) if part.isdigit() else -1 for part in text.split(".")])
    found = tensorflow_datasets.builder_from_directory(folder / newest)
    formats = [form.value for form in found.info.available_file_formats()]
    if "array_record" not in formats:
        raise ValueError(
            f"The data set {name!r} is prepared in {root} as {', '.join(formats)}: prepare it into another data_dir "
            "with --file_format=array_record."
        )
    return found


def _feature(builder: Any, key: str) -> Any:
    if key not in builder.info.features:
        raise ValueError(
            f"{builder.info.full_name} has no feature {key!r}: it has {', '.join(sorted(builder.info.features))}."
        )
    return builder.info.features[key]


def _records(builder: Any, split: str, key: str, skip_decoding: bool = False) -> Any:
    import tensorflow_datasets

    _feature(builder, key)
    decoders = {key: tensorflow_datasets.decode.SkipDecoding()} if skip_decoding else None
    try:
        return builder.as_data_source(split, decoders=decoders, file_format="array_record")
    except ValueError as error:
        raise ValueError(f"The split {split!r} of {builder.info.full_name} cannot be read: {error}") from None


def _made(
    builder: Any, splits: Mapping[str, str], image_key: str, make: Callable[[dict[str, Any]], dict[str, Any]]
) -> dict[str, Records]:
    records = {name: _records(builder, split, image_key, skip_decoding=True) for name, split in splits.items()}
    return {name: Records(of_split, make) for name, of_split in records.items()}


def _labelled(image_key: str, label_key: str, channels: int, record: dict[str, Any]) -> dict[str, Any]:
    return {"image": decode(record[image_key], channels), "label": record[label_key]}


def _with_boxes(image_key: str, channels: int, record: dict[str, Any]) -> dict[str, Any]:
    image, objects = decode(record[image_key], channels), record["objects"]
    boxes = np.reshape(objects["bbox"], (-1, 4)).astype(np.float32)[:, [1, 0, 3, 2]]
    return {
        "image": image,
        "boxes": boxes * np.float32([image.shape[1], image.shape[0]] * 2),
        "classes": np.asarray(objects["label"], np.int32),
        "crowd": np.asarray(objects.get("is_crowd", np.zeros(len(boxes))), bool),
    }


def _texts(builder: Any, split: str, key: str, max_bytes: int) -> Documents:
    """Return the first texts of a split that have at most `max_bytes` together (0 = all of them)."""
    records = _records(builder, split, key)
    length = len(records)
    if max_bytes:
        size = np.cumsum([len(records[i][key]) for i in range(min(length, max_bytes))])
        length = int(np.searchsorted(size, max_bytes, side="right"))
    fingerprint = f"{builder.info.full_name} {builder.info.splits[split].num_bytes} {split} {key} {length}"
    return Documents(Texts(records, key, length), fingerprint)


def _columns(builder: Any, split: str, keys: Sequence[str]) -> list[list[Any]]:
    for key in keys:
        _feature(builder, key)
    records = list(_records(builder, split, keys[0]))
    return [[_decoded(record[key], key, number) for number, record in enumerate(records)] for key in keys]


def _decoded(value: Any, key: str, index: int) -> Any:
    try:
        return value.decode("utf-8") if isinstance(value, bytes) else value
    except UnicodeDecodeError as error:
        raise ValueError(f"The feature {key!r} of example {index} is not UTF-8 at byte {error.start}.") from None
