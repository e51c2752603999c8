"""Notes on data that are likely to be a mistake but may be meant, shown at the start of a run."""

from collections.abc import Iterator

import numpy as np

from lineage.data import Data, Source


def notes(source: Source, data: Data, classified: bool) -> Iterator[str]:
    """Yield a sentence for each: one class, a header among examples, truncated texts, a batch larger than the data.

    Args:
        classified: whether the model predicts one class of each example.
    """
    examples, facts, size = data.train.source, data.facts, data.train.batch_size
    if classified and len(facts.class_names) == 1:
        yield f"all examples have the label {facts.class_names[0]!r}: a classifier needs at least two classes."
    labels = getattr(examples, "per_sequence", {}).get("label")
    if source.headerless and labels is not None and len(facts.class_names) > 2:
        counts = np.bincount(labels)
        if counts[labels[0]] == 1 and (counts == 1).sum() == 1:
            name = facts.class_names[labels[0]]
            yield f"only the first example has the label {name!r}: if it is a header, delete it."
    if examples.cut:
        yield (
            f"{examples.cut:,} of {len(examples):,} training examples are longer than task.sequence_length, "
            f"{facts.sequence_length}, and are truncated."
        )
    if examples.left_out:
        yield (
            f"{examples.left_out:,} of {len(examples) + examples.left_out:,} training examples are longer than "
            f"task.sequence_length, {facts.sequence_length}, and are left out."
        )
    if len(examples) < size:
        yield (
            f"loader.batch_size is {size:,}, but there are {len(examples):,} training examples: a batch has some of "
            "them several times."
        )
