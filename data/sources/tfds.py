"""Data sets that TensorFlow Datasets has prepared as array_record, read without TensorFlow."""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise
from os.path import isdir, isfile
from typing import Annotated, Any

import numpy as np

from lineage.configs.registry import Natural
from lineage.configs.storage import is_remote, local
from lineage.data.content import Images, LabeledTexts, PairedTexts, Question
from lineage.data.documents import Documents
from lineage.data.fingerprint import identity
from lineage.data.sources.base import SOURCES, SPLITS, For, PathSource
from lineage.data.sources.files import parse_json
from lineage.data.sources.records import Records, decoded, parts, reading

CLASS_KEYS = "pythonClassName", "python_class_name", "type"  # of the classes of features, in features.json
BOXES = "REL_YXYX"  # format of boxes: top, left, bottom and right, relative to the image


@SOURCES.register("tfds")
@dataclass(frozen=True)
class TFDS(PathSource):
    """Data set that TensorFlow Datasets has prepared as array_record.

    Attributes:
        path: NAME[/CONFIG][:VERSION] of the data set; by default the newest prepared version.
        data_dir: folder of prepared data sets; "": $TFDS_DATA_DIR or ~/tensorflow_datasets.
        train_split: training split, such as train[:99%].
        validation_split: validation split; "": the data set's own, if it has one.
        test_split: test split; "": the data set's own, if it has one.
        text_key: feature with the text; two features separated by a comma for pairs, such as "de,en".
        label_key: feature with the label.
        image_key: feature with the image.
        max_bytes: maximum number of bytes of documents to read for each split, in whole documents; 0: no limit.
    """

    data_dir: str = ""
    train_split: str = "train"
    validation_split: str = ""
    test_split: str = ""
    text_key: Annotated[str, For(("documents", "pairs", "labeled_texts"))] = "text"
    label_key: Annotated[str, For(("labeled_texts", "images"))] = "label"
    image_key: Annotated[str, For(("images", "images_with_boxes"))] = "image"
    max_bytes: Annotated[Natural, For(("documents",))] = 0

    def copied(self) -> "TFDS":
        return self  # only one data set of a remote `data_dir` is copied

    def files(self) -> list[str]:
        return [str(self._builder.data_dir)]

    def shared(self) -> list[str]:
        """Return the files with examples that are read for several splits, such as train and train[90%:]."""
        parts = sorted(
            (part.filename, part.skip, part.skip + part.take, role)
            for role, split in self._splits.items()
            for part in self._builder.info.splits[split].file_instructions
        )
        return sorted(
            {a for (a, _, stop, x), (b, start, _, y) in pairwise(parts) if a == b and x != y and stop > start}
        )

    def documents(self) -> dict[str, Documents]:
        return {name: self._texts(split) for name, split in self._splits.items()}

    def pairs(self) -> dict[str, PairedTexts]:
        keys = self.text_key.split(",")
        if len(keys) != 2:
            raise ValueError(f"source.text_key is {self.text_key!r}: pairs need two features, such as 'de,en'.")
        return {name: PairedTexts(*columns) for name, columns in self._columns(keys).items()}

    def labeled_texts(self) -> dict[str, LabeledTexts]:
        """Return the texts that have a label, without splits that have none, such as the test splits of GLUE."""
        feature, splits = self._feature(self.label_key), {}
        if feature.shape != ():
            raise ValueError(f"The feature {self.label_key!r} of {self._builder.info.full_name} is not a single label.")
        known = [str(name) for name in getattr(feature, "names", None) or ()]
        for name, (*texts, labels) in self._columns(self.text_key.split(","), self.label_key).items():
            # -1 marks a missing label; for numeric labels, only if there is no other label.
            missing = -1 if known or set(labels) == {-1} else None
            rows = [(row, label) for row, label in zip(zip(*texts), labels) if label != missing]
            if wrong := [label for _, label in rows if known and not 0 <= label < len(known)]:
                where = f"The split {name!r} of {self._builder.info.full_name}"
                raise ValueError(f"{where} has the label {wrong[0]}: it must be from 0 to {len(known) - 1}.")
            if rows:
                named = [known[label] if known else str(label) for _, label in rows]
                splits[name] = LabeledTexts([row for row, _ in rows], named, known)
        return splits

    def questions(self) -> dict[str, list[Question]]:
        self._parts("answers", "text", "answer_start")
        optional = [name for name in Question.OPTIONAL if name in self._builder.info.features]
        splits = self._columns(["question", "context"], "answers", *optional).items()
        return {name: [_question(i, optional, *row) for i, row in enumerate(zip(*columns))] for name, columns in splits}

    def images(self) -> Images:
        """Return the images; -1 is the label of those without one, such as in the test split of ImageNet."""
        _, label = self._feature(self.image_key), self._feature(self.label_key)
        return self._images(self.label_key, self._classes(label, self.label_key))

    def images_with_boxes(self) -> Images:
        """Return the images with boxes; "difficult" objects, as in Pascal VOC, are treated as crowds."""
        features = self._parts("objects", "bbox", "label")
        kind = getattr(getattr(features["bbox"], "bbox_format", None), "value", None)  # None in old files
        if kind not in (None, BOXES):
            given = f"The feature 'objects/bbox' of {self._builder.info.full_name} has the format {kind}"
            raise ValueError(f"{given}: it must be {BOXES}, the default of BBoxFeature.")
        return self._images("", self._classes(features["label"], "objects/label"))

    @cached_property
    def _builder(self) -> Any:
        return find_builder(self.path, self.data_dir)

    @property
    def _splits(self) -> dict[str, str]:
        """Splits to read, by their role: those that are given, and the data set's own unless they are empty."""
        known = {name for name, split in self._builder.info.splits.items() if split.num_examples}
        explicit = self.train_split, self.validation_split, self.test_split
        splits = {role: split or role for role, split in zip(SPLITS, explicit) if split or role in known}
        return self.without_training(splits)

    def _feature(self, key: str) -> Any:
        info = self._builder.info
        if key not in info.features:
            raise ValueError(f"{info.full_name} has no feature {key!r}: it has {', '.join(sorted(info.features))}.")
        return info.features[key]

    def _parts(self, key: str, *names: str) -> Any:
        """Return the features in a feature that is a sequence of dictionaries."""
        import tensorflow_datasets

        features = getattr(self._feature(key), "feature", None)
        if not isinstance(features, tensorflow_datasets.features.FeaturesDict) or {*names} - {*features}:
            missing = " and ".join(map(repr, names))
            raise ValueError(f"The feature {key!r} of {self._builder.info.full_name} has no {missing}.")
        return features

    def _classes(self, feature: Any, key: str) -> Sequence[Any]:
        """Return the names of the classes of a feature, which must be a single class label."""
        if feature.shape != () or getattr(feature, "num_classes", None) is None:
            raise ValueError(f"The feature {key!r} of {self._builder.info.full_name} is not a class label.")
        return feature.names

    def _records(self, split: str, decoders: Any = None) -> Any:
        """Return the examples of a split."""
        info = self._builder.info
        try:
            if not info.splits[split].num_examples:
                raise ValueError("it has no examples")
            _check_counts(info.splits[split].file_instructions)
            return self._builder.as_data_source(split, decoders=decoders, file_format="array_record")
        except ValueError as error:
            raise ValueError(f"The split {split!r} of {info.full_name} cannot be read: {error}") from None

    def _columns(self, texts: Sequence[str], *features: str) -> dict[str, list[list[Any]]]:
        """Return all values of features with texts, and of other features, by split; texts are decoded."""
        read = dict.fromkeys(texts, _text) | dict.fromkeys(features, decoded)
        for key in read:
            self._feature(key)
        splits = {}
        for name, split in self._splits.items():
            with reading(source := self._records(split)):
                rows = list(enumerate(source))
                splits[name] = [[read[key](row[key], key, i) for i, row in rows] for key in (*texts, *features)]
        return splits

    def _texts(self, split: str) -> Documents:
        """Return the first texts of a split with at most `max_bytes` in total (0: all of them)."""
        key = self.text_key
        self._feature(key)  # raises ValueError if there is none
        records = self._records(split)
        length = len(records)
        next(_read_texts(records, key, 1))  # raises ValueError for other features
        if self.max_bytes:
            with reading(records):
                size = np.cumsum([len(records[i][key]) for i in range(min(length, self.max_bytes))])
            length = int(np.searchsorted(size, self.max_bytes, side="right"))
        fingerprint = partial(identity, self.files(), self._builder.info.full_name, split, key, length)
        return Documents(partial(_read_texts, records, key, length), fingerprint)

    def _images(self, label_key: str, class_names: Sequence[Any]) -> Images:
        """Return the images of all splits, with labels, or with boxes if there is no `label_key`."""
        import tensorflow_datasets

        key, feature = self.image_key, self._feature(self.image_key)
        if not isinstance(feature, tensorflow_datasets.features.Image) or feature.np_dtype != np.uint8:
            raise ValueError(f"The feature {key!r} of {self._builder.info.full_name} is not an image of 8 bits.")
        channels = feature.shape[-1]
        if channels is None:
            raise ValueError(f"The images {key!r} of {self._builder.info.full_name} have no known number of channels.")
        if channels not in (1, 3, 4):
            given = f"The images {key!r} of {self._builder.info.full_name} have {channels} channels"
            raise ValueError(f"{given}: they must have 1, 3 or 4.")
        decoders = {key: tensorflow_datasets.decode.SkipDecoding()}
        splits = {}
        for name, split in self._splits.items():
            records, files = self._records(split, decoders), parts(self._builder.info.splits[split].file_instructions)
            splits[name] = Records(records, files, key, label_key, channels, len(class_names))
        return Images(splits, [str(name) for name in class_names])


def _check_counts(parts: Sequence[Any]) -> None:
    """Raise ValueError if a file of a split has another number of examples than `dataset_info.json` says."""
    from array_record.python.array_record_module import ArrayRecordReader

    for part in parts:
        if not isfile(part.filename):
            raise ValueError(f"{part.filename} does not exist")
        try:
            with closing(ArrayRecordReader(part.filename)) as reader:
                count = reader.num_records()
        except RuntimeError as error:
            raise ValueError(f"{part.filename} is damaged or incomplete. {error}") from error
        if count != part.examples_in_shard:
            number = f"{count:,} examples instead of {part.examples_in_shard:,}"
            raise ValueError(f"{part.filename} is damaged, or not that of dataset_info.json: it has {number}")


def _read_texts(records: Any, key: str, length: int) -> Iterator[str]:
    for index in range(length):
        with reading(records):
            text = _text(records[index][key], key, index)
        yield text


def _question(index: int, optional: Sequence[str], text: str, context: str, answers: Any, *others: Any) -> Question:
    starts, texts = answers["answer_start"], answers["text"]
    if len(starts) != len(texts):
        raise ValueError(f"Example {index} has {len(texts)} answers and {len(starts)} positions of answers.")
    pairs = [(int(start), decoded(answer, "answers", index)) for start, answer in zip(starts, texts)]
    return Question.from_fields(text, context, pairs, **dict(zip(optional, others)))


def _text(value: Any, key: str, index: int) -> str:
    if not isinstance(value, bytes):
        raise ValueError(f"The feature {key!r} of example {index} is {str(value)[:60]}: it must be a text.")
    return decoded(value, key, index)


def find_builder(name: str, data_dir: str = "") -> Any:
    """Return the read-only builder of a prepared data set; see `TFDS.path` and `TFDS.data_dir`."""
    import tensorflow_datasets
    from etils import epath

    place = data_dir or os.environ.get("TFDS_DATA_DIR") or "~/tensorflow_datasets"
    path, _, version = name.partition(":")
    if is_remote(place):
        place = local(f"{place.rstrip('/')}/{path}", ()).removesuffix(f"/{path}")
    root = epath.Path(place).expanduser()
    folder = root / path
    versions = [file.parent.name for file in folder.glob("*/features.json") if version in ("", file.parent.name)]
    if not versions:
        configs = sorted(child.parent.parent.name for child in folder.glob("*/*/features.json"))
        hint = f"; its prepared configs are {', '.join(configs)}" if configs and not version else ""
        raise FileNotFoundError(
            f"The data set {name!r} is not prepared in {root}{hint}: prepare it with "
            f"`tfds build {name} --data_dir={root} --file_format=array_record` (needs the extra `prepare`)."
        )
    newest = max(versions, key=lambda text: [int(part) if part.isdecimal() else -1 for part in text.split(".")])
    if irregular := [path for path in (folder / newest).glob("*") if not (isfile(path) or isdir(path))]:
        raise ValueError(f"{irregular[0]} is not a regular file.")  # opening a pipe would wait forever
    _check_classes(folder / newest / "features.json")
    try:
        builder = tensorflow_datasets.builder_from_directory(folder / newest)
    except Exception as error:  # damaged files raise exceptions of many types
        reason = " ".join(str(error).split())[:200]
        raise ValueError(f"{folder / newest} cannot be read as a data set: {type(error).__name__} {reason}") from error
    if not builder.info.splits:
        raise ValueError(f"{folder / newest / 'dataset_info.json'} has no splits.")
    formats = [form.value for form in builder.info.available_file_formats()]
    if "array_record" not in formats:
        problem = f"The data set {name!r} is prepared in {root} as {', '.join(formats)}"
        raise ValueError(f"{problem}: prepare it into another data_dir with --file_format=array_record.")
    return builder


def _check_classes(path: Any) -> None:
    """Raise ValueError if a file of features has very many labels, or names modules that would be imported."""
    pending = [parse_json(path.read_bytes().decode(errors="replace"), str(path))]
    while pending:
        value = pending.pop()
        if isinstance(value, list):
            pending += value
        if not isinstance(value, dict):
            continue
        pending += value.values()
        count = value.get("numClasses", value.get("num_classes", 0))
        if isinstance(count, float) or len(str(count)) > 7:  # a list of so many names would exhaust the memory
            raise ValueError(f"{path} has a feature of {str(count)[:20]} classes: it must have less than 10,000,000.")
        names = (value.get(key) for key in CLASS_KEYS)
        for module in (name.rpartition(".")[0] for name in names if isinstance(name, str)):
            if module and not module.startswith("tensorflow_datasets.") and module not in sys.modules:
                raise ValueError(f"{path} has a class of the module {module!r}: import it first if you trust it.")
