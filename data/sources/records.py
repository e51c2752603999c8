"""Records of images in the files of a data set of TensorFlow Datasets."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lineage.data.content import gather
from lineage.data.loader import ExampleSource
from lineage.data.transforms.pillow import Picture, stamp

CROWD = "is_crowd", "is_difficult"  # features of objects, as in COCO and Pascal VOC, that count as crowds


class Part(NamedTuple):
    """Part of a split in a file: the index after its last example, and the modification time of the file."""

    file: Path
    end: int
    stamp: int


def parts(instructions: Sequence[Any]) -> list[Part]:
    """Return the parts of a split, given its file instructions."""
    files = [Path(instruction.filename) for instruction in instructions]
    ends = accumulate(instruction.take for instruction in instructions)
    return [Part(file, end, stamp(file)) for file, end in zip(files, ends)]


@dataclass(frozen=True)
class Records(ExampleSource):
    """Images of a split with labels, or with boxes if there is no `label_key`; they are decoded on access."""

    records: Any
    parts: Sequence[Part]
    image_key: str
    label_key: str
    channels: int
    classes: int

    def __len__(self) -> int:
        return len(self.records)

    def take(self, indices: np.ndarray) -> dict[str, Any]:
        for place in np.unique(np.searchsorted([part.end for part in self.parts], indices, side="right")):
            file, _, before = self.parts[place]
            if stamp(file) != before:
                raise ValueError(f"{file} has changed since the data were opened.")
        with reading(self.records):
            records = self.records.__getitems__(indices.tolist())
            place = f"of the split {self.records.split!r} of {self.records.dataset_info.full_name}"
            images = [
                Picture(record[self.image_key], self.channels, f"Example {index} {place}")
                for record, index in zip(records, indices)
            ]
            if self.label_key:
                key, rows = self.label_key, zip(records, indices)
                return {"image": images, "label": np.array([decoded(row[key], key, i) for row, i in rows], np.int32)}
            rows = zip(images, records, indices)
            return gather([self._with_boxes(np.asarray(image), row["objects"], i) for image, row, i in rows])

    def _with_boxes(self, image: np.ndarray, objects: dict[str, Any], index: int) -> dict[str, np.ndarray]:
        boxes = np.reshape(objects["bbox"], (-1, 4)).astype(np.float32)[:, [1, 0, 3, 2]]
        boxes *= np.float32([image.shape[1], image.shape[0]] * 2)
        classes = np.asarray(objects["label"], np.int32)
        flags = [np.asarray(objects[name], bool) for name in CROWD if name in objects]
        if {len(boxes)} != {len(classes), *map(len, flags)}:
            raise ValueError(f"Example {index} has {len(boxes)} boxes and {len(classes)} labels.")
        crowd = np.any([np.zeros(len(boxes), bool), *flags], axis=0)
        if not np.isfinite(boxes).all():
            raise ValueError(f"Example {index} has a box that is not finite.")
        if wrong := [label for label in classes.tolist() if not 0 <= label < self.classes]:
            allowed = f"labels must be from 0 to {self.classes - 1}"
            raise ValueError(f"Example {index} has a box with the label {wrong[0]}: {allowed}.")
        return {"image": image, "boxes": boxes, "classes": classes, "crowd": crowd}


@contextmanager
def reading(records: Any) -> Iterator[None]:
    """Raise ValueError with the name of the data set if a split is damaged, or has wrong values."""
    try:
        yield
    except (OSError, MemoryError):
        raise
    except Exception as error:  # damaged files raise exceptions of many types
        message = f"The split {records.split!r} of {records.dataset_info.full_name} cannot be read: {error}"
        raise ValueError(message) from error


def decoded(value: Any, key: str, index: int) -> Any:
    if value is None:
        raise ValueError(f"Example {index} has no value of the feature {key!r}.")
    try:
        return value.decode("utf-8") if isinstance(value, bytes) else value
    except UnicodeDecodeError as error:
        raise ValueError(f"The feature {key!r} of example {index} is not UTF-8 at byte {error.start}.") from None
