"""Examples: what a task makes from the content of a source."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from lineage.data.facts import Facts
from lineage.data.loader import Batch, ExampleSource
from lineage.data.tokenizers import Tokenizer

Transform = Callable[[dict[str, Any], np.ndarray], Batch]


@dataclass(frozen=True)
class Examples:
    """Examples of each split, and the transforms that their batches go through.

    Attributes:
        splits: the examples of each split; "train" must be among them.
        facts: what is known about them; `data.load` adds the number of examples.
        tokenizer: the tokenizer of the texts; None for images.
        train_transform: the transform of training batches, given a batch and a random key for each of its rows.
        evaluation_transform: the same for evaluation, either one for all splits or one for each split.
    """

    splits: Mapping[str, ExampleSource]
    facts: Facts
    tokenizer: Tokenizer | None = None
    train_transform: Transform | None = None
    evaluation_transform: Transform | Mapping[str, Transform] | None = None

    def transform_of(self, split: str) -> Transform | None:
        """Return the transform of an evaluation split."""
        transform = self.evaluation_transform
        return transform[split] if isinstance(transform, Mapping) else transform
