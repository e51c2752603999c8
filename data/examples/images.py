"""Subsets of images, and images in memory."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from lineage.data import shuffle
from lineage.data.content import Arrays
from lineage.data.loader import ExampleSource
from lineage.data.transforms.pillow import stack


@dataclass(frozen=True)
class Subset(ExampleSource):
    """The examples of a source whose indices are `chosen` int64 [N]."""

    source: ExampleSource
    chosen: np.ndarray

    def __len__(self) -> int:
        return len(self.chosen)

    def take(self, indices: np.ndarray) -> dict[str, Any]:
        return self.source.take(self.chosen[indices])


def draw(source: ExampleSource, count: int, seed: int) -> Subset:
    """Draw `count` examples at random; a larger count contains the examples of a smaller one."""
    if not 0 < count <= len(source):
        raise ValueError(
            f"task.max_examples is {count}: it must be 0 (all) or at most {len(source)}, the number of examples."
        )
    return Subset(source, shuffle.permute(np.arange(count), len(source), seed))


def in_memory(source: ExampleSource) -> Arrays:
    """Read all labeled images of a source; they must have one size."""
    examples = source.take(np.arange(len(source)))
    return Arrays({"image": stack(examples["image"]), "label": examples["label"]})
