"""Checks of the data at the start of a run, and notes on probable mistakes."""

import time
from collections.abc import Iterator

import numpy as np

from lineage.data import Data, Source
from lineage.data.loader import evenly_spaced

MAX_CHECKED = 10_000  # examples of a split


def check_examples(data: Data, seconds: float = 2.0) -> None:
    """Raise ValueError for damaged examples, such as truncated images, that are found within some seconds.

    Examples that are evenly spread over each split are checked (see `ExampleSource.check`).
    """
    parts, errors = [part.source for part in (data.train, *data.splits.values())], []
    for part in parts:
        end = time.monotonic() + seconds / len(parts)
        for index in evenly_spaced(len(part), MAX_CHECKED).tolist():
            try:
                part.check(index)
            except ValueError as error:
                errors.append(str(error))
            if time.monotonic() > end:
                break
    if errors:
        examples = f" ({len(errors) - 1:,} more examples are damaged, such as: {errors[1]})" if len(errors) > 1 else ""
        raise ValueError(errors[0] + examples)


def notes(source: Source, data: Data, classes: int | None) -> Iterator[str]:
    """Yield notes on the files of splits, the classes, a header among examples, truncated texts, and large batches.

    `classes` is the number of classes that the model predicts for each example; None if it does not classify examples.
    """
    examples, facts, size = data.train.source, data.facts, data.train.batch_size
    names = facts.class_names
    if files := source.unread():
        missing = "its path has no split or, for an image, no class"
        yield f"{files[0]} is not read because {missing} ({len(files)} such files)."
    yield from source.notes()
    if files := source.shared():
        yield f"{files[0]} is in several splits ({len(files)} such files): their metrics do not show generalization."
    for name, batches in {"train": data.train, **data.splits}.items():
        yield from (f"split {name}: {note}" for note in batches.source.notes())
    if classes:
        yield from _notes_on_labels(data)
    if classes and len(names) == 1:
        yield f"all examples have the label {names[0]!r}: a classifier needs at least two classes."
    elif classes and names and classes > len(names):
        yield f"model.num_classes is {classes:,}, but the data have {len(names):,} classes."
    labels = getattr(examples, "per_sequence", {}).get("label")
    if source.headerless and labels is not None and len(names) > 2:
        counts = np.bincount(labels)
        if counts[labels[0]] == 1 and (counts == 1).sum() == 1:
            yield f"only the first example has the label {names[labels[0]]!r}: if it is a header, delete it."
    shortened = ("truncated", examples.cut, 0), ("left out", examples.left_out, examples.left_out)
    for result, count, missing in shortened:
        if count:
            longer = f"are longer than task.sequence_length, {facts.sequence_length}, and are {result}"
            yield f"{count:,} of {len(examples) + missing:,} training examples {longer}."
    if len(examples) < size:
        yield (
            f"loader.batch_size is {size:,}, but there are {len(examples):,} training examples: a batch contains some "
            "of them several times."
        )


def _notes_on_labels(data: Data) -> Iterator[str]:
    """Yield notes on classes that are probably the same one, and on evaluation splits of texts with a single class."""
    names, earlier_names = data.facts.class_names, dict[str | float, str]()
    for name in names:
        if (earlier := earlier_names.setdefault(_value(name), name)) != name:
            yield f"the labels {earlier!r} and {name!r} are different classes."
    for split, batches in data.splits.items():
        labels = getattr(batches.source, "per_sequence", {}).get("label", ())
        if len(names) > 1 and len(labels) > 1 and len(set(labels.tolist())) == 1:
            yield f"all {len(labels):,} examples of the split {split} have the label {names[labels[0]]!r}."


def _value(label: str) -> str | float:
    """Return the number in a label, or the label without white space around it."""
    try:
        return float(label)
    except ValueError:
        return label.strip()
