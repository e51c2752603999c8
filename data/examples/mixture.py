"""Training examples from several sources in fixed proportions."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import numpy as np

from lineage.data import shuffle
from lineage.data.content import Examples
from lineage.data.facts import Facts
from lineage.data.loader import ExampleSource

BY_SPLIT = tuple(field.name for field in fields(Facts) if field.metadata.get("by_split"))
DIFFERENT = (*BY_SPLIT, "has_unanswerable", "category_ids")  # facts that may differ between the sources


@dataclass(frozen=True, eq=False)
class Mixed(ExampleSource):
    """Concatenated examples of several sources; `shuffled` takes them in proportion to `weights`."""

    parts: Sequence[ExampleSource]
    weights: Sequence[float]

    def __len__(self) -> int:
        return int(self._ends[-1])

    @property
    def cut(self) -> int:
        """Number of examples whose texts are truncated."""
        return sum(part.cut for part in self.parts)

    @property
    def left_out(self) -> int:
        """Number of examples that are left out because they are too long."""
        return sum(part.left_out for part in self.parts)

    @cached_property
    def _ends(self) -> np.ndarray:
        return np.cumsum([len(part) for part in self.parts])

    def take(self, indices: np.ndarray) -> dict[str, Any]:
        return self._gather(*self._places(indices))

    def check(self, index: int) -> None:
        part, rank = self._places(np.array([index]))
        self.parts[part[0]].check(int(rank[0]))

    def _places(self, indices):
        """Return the source of each example, and its index there."""
        part = np.searchsorted(self._ends, indices, side="right")
        return part, indices - np.concatenate([[0], self._ends])[part]

    def shuffled(self, positions: np.ndarray, seed: int) -> dict[str, Any]:
        part, ranks = assign(positions, self.weights)
        for number in np.unique(part):
            chosen = part == number
            ranks[chosen] = shuffle.permute(ranks[chosen], len(self.parts[number]), seed + int(number))
        return self._gather(part, ranks)

    def _gather(self, part, indices):
        order = np.argsort(part, kind="stable")
        batches = [self.parts[number].take(indices[part == number]) for number in np.unique(part)]
        return {name: _joined([batch[name] for batch in batches], np.argsort(order)) for name in batches[0]}


def _joined(values, order):
    """Return the values of a feature from all parts in the given order: an array, or a list if shapes differ."""
    if all(isinstance(array, np.ndarray) for array in values) and len({array.shape[1:] for array in values}) == 1:
        return np.concatenate(values)[order]
    rows = [row for array in values for row in array]
    return [rows[index] for index in order]


def assign(positions: np.ndarray, weights: Sequence[float]) -> tuple[np.ndarray, np.ndarray]:
    """Return the source of each position int64 [N] of a stream, and the number of earlier positions of that source.

    Positions are split between the first source and the others by a Beatty sequence, those of the others between the
    second and the rest, and so on. Among the first n positions, the count of each source therefore differs from its
    share by less than the number of sources, for any n.
    """
    part, ranks = np.full(len(positions), len(weights) - 1), positions.copy()
    unassigned = np.arange(len(positions))
    for number in range(len(weights) - 1):
        share = weights[number] / sum(weights[number:])
        before, after = (np.floor((ranks[unassigned] + step) * share).astype(np.int64) for step in (0, 1))
        assigned = after > before
        part[unassigned[assigned]] = number
        ranks[unassigned] = np.where(assigned, before, ranks[unassigned] - before)
        unassigned = unassigned[~assigned]
    return part, ranks


def mix(examples: Mapping[str, Examples], proportions: Callable[[Sequence[int]], Sequence[float]]) -> Examples:
    """Return the training examples of several sources as one split, and their other splits as "validation_NAME".

    `proportions` maps the numbers of training examples to the weights of the sources. ValueError is raised if the
    sources differ in what a model depends on, such as their classes.
    """
    names, parts = list(examples), list(examples.values())
    first, training = parts[0], [part.splits["train"] for part in parts]
    for key in (field.name for field in fields(Facts) if field.name not in DIFFERENT):
        values = [getattr(part.facts, key) for part in parts]
        if other := next((number for number, value in enumerate(values) if value != values[0]), 0):
            listed = " and ".join(f"{str(values[number])[:80]} in {names[number]!r}" for number in (0, other))
            raise ValueError(f"The sources of a mixture must have the same {key}: it is {listed}.")

    def named(values: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
        """Return the values for each split of each source, by "SPLIT_NAME"."""
        return {f"{split}_{name}": value for name, part in zip(names, values) for split, value in part.items()}

    facts = {key: named(getattr(part.facts, key) for part in parts) for key in BY_SPLIT}
    ids = {part.facts.category_ids for part in parts}
    facts["category_ids"] = ids.pop() if len(ids) == 1 else ()
    facts["has_unanswerable"] = any(part.facts.has_unanswerable for part in parts)
    evaluated = named({split: source for split, source in part.splits.items() if split != "train"} for part in parts)
    mixed = Mixed(training, proportions([len(part) for part in training]))
    return replace(first, splits={"train": mixed, **evaluated}, facts=replace(first.facts, **facts))
