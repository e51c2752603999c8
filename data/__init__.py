"""Data: sources, examples, transforms, tokenizers and batches. Imports neither JAX nor TensorFlow."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from lineage.data.content import (
    Arrays,
    Documents,
    Images,
    LabelledTexts,
    PairedTexts,
    Question,
    TaggedSentence,
)
from lineage.data.examples.base import Examples, Transform
from lineage.data.facts import Facts
from lineage.data.loader import Batch, EvaluationBatches, ExampleSource, Loader, TrainBatches
from lineage.data.sources import SOURCES, Source
from lineage.data.tokenizers import TOKENIZERS, Bytes, Tokenizer, TokenizerKind, find

__all__ = [
    "SOURCES",
    "TOKENIZERS",
    "Arrays",
    "Batch",
    "Data",
    "Documents",
    "EvaluationBatches",
    "ExampleSource",
    "Examples",
    "Facts",
    "Images",
    "LabelledTexts",
    "Loader",
    "PairedTexts",
    "Question",
    "Source",
    "TaggedSentence",
    "Task",
    "Tokenizer",
    "TokenizerKind",
    "TrainBatches",
    "Transform",
    "load",
]


class Task(Protocol):
    """The part of a task (see `lineage.tasks`) that makes examples.

    Attributes:
        reads: the kind of content that the source must offer, the name of a method of `Source`.
        special_tokens: the roles of the special tokens that a tokenizer must have.
        optional_tokens: those of them that a tokenizer may lack.
    """

    reads: str
    special_tokens: tuple[str, ...]
    optional_tokens: tuple[str, ...]

    def texts(self, content: Any) -> Mapping[str, Collection[str]]:
        """Return the texts of each split, for training a tokenizer; empty if the task needs no tokenizer."""

    def check_loader(self, loader: Loader) -> None:
        """Raise ValueError for options of the loader that do not apply to the examples."""

    def examples(self, content: Any, tokenizer: Tokenizer | None, seed: int) -> Examples:
        """Return the examples of the content."""


@dataclass(frozen=True)
class Data:
    """The data of a run.

    Attributes:
        train: endless training batches.
        splits: the batches of one pass over each evaluation split.
        tokenizer: the tokenizer; None for images.
        facts: what is known about the data.
    """

    train: TrainBatches
    splits: dict[str, EvaluationBatches]
    tokenizer: Tokenizer | None
    facts: Facts


def load(
    source: Source,
    task: Task,
    tokenizer: TokenizerKind | None,
    loader: Loader,
    *,
    seed: int = 0,
    process_index: int = 0,
    process_count: int = 1,
    workdir: str | Path | None = None,
) -> Data:
    """Read a source and make the batches of a task.

    Args:
        source: where content comes from.
        task: what content is turned into.
        tokenizer: the kind of tokenizer, for tasks on text; one in the workdir takes precedence.
        loader: the options of batches.
        seed: of the order of the training examples, of their augmentation and of their noise.
        process_index: the process that reads its part of each global batch.
        process_count: the number of processes.
        workdir: the folder of the run, which keeps its tokenizer; None keeps none.

    Raises:
        ValueError: the data cannot be read or do not fit together.
        FileNotFoundError: a file does not exist.
    """
    task.check_loader(loader)
    content = source.read(task.reads)
    found = None
    if texts := task.texts(content):
        if tokenizer is None:
            raise ValueError("The task reads texts: it needs a tokenizer.")
        roles, optional = task.special_tokens, task.optional_tokens
        found = find(tokenizer, texts, roles, optional=optional, workdir=workdir, save=process_index == 0)
    elif tokenizer not in (None, Bytes()):
        raise ValueError(f"The task reads no texts, so the tokenizer must be left at its default: it is {tokenizer}.")
    examples = task.examples(content, found, seed)
    reading = {"order": loader.order, "workers": loader.workers, "threads": loader.threads}
    reading |= {"process_index": process_index, "process_count": process_count}
    train = TrainBatches(
        source=examples.splits["train"],
        batch_size=loader.batch_size,
        transform=examples.train_transform,
        seed=seed,
        buckets=tuple(loader.buckets),
        repeats=loader.repeats,
        **reading,
    )
    size = loader.evaluation_batch_size or loader.batch_size
    splits = {
        name: EvaluationBatches(source=part, batch_size=size, transform=examples.transform_of(name), **reading)
        for name, part in examples.splits.items()
        if name != "train"
    }
    facts = replace(examples.facts, examples={name: len(part) for name, part in examples.splits.items()})
    return Data(train, splits, examples.tokenizer, facts)
