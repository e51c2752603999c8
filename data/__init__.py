"""Data: sources, examples, transforms, tokenizers and batches. Imports neither JAX nor TensorFlow."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lineage.data import fingerprint
from lineage.data.content import (
    Examples,
    Images,
    LabeledTexts,
    PairedTexts,
    Question,
    TaggedSentence,
    as_test_split,
    check_content,
    splits_of,
)
from lineage.data.documents import Documents, chained
from lineage.data.examples.mixture import mix
from lineage.data.facts import Facts, evaluating
from lineage.data.loader import Batch, EvaluationBatches, ExampleSource, Loader, TrainBatches
from lineage.data.sources import SOURCES, Source
from lineage.data.tokenizers import TOKENIZERS, Bytes, Tokenizer, TokenizerKind, find_tokenizer
from lineage.data.tokens import tokenize


@dataclass(frozen=True)
class Data:
    """Data of a run: endless training batches, one pass over each evaluation split, and metadata.

    For images, the tokenizer is None.
    """

    train: TrainBatches | None  # None if only the evaluation splits were read
    splits: dict[str, EvaluationBatches]
    tokenizer: Tokenizer | None
    facts: Facts


def load(
    source: Source,
    task: Any,
    tokenizer: TokenizerKind | Tokenizer,
    loader: Loader,
    *,
    seed: int = 0,
    process_index: int = 0,
    process_count: int = 1,
    workdir: str | Path | None = None,
    workers: int = 0,
    known: Facts | None = None,
    as_test: bool = False,
) -> Data:
    """Read the content of a source and create the batches of a `lineage.tasks.Task`.

    Args:
        tokenizer: tokenizer, for tasks on text, or its kind; one in the workdir takes precedence over a kind.
        seed: random seed of the order, augmentation and noise of the training examples.
        process_index, process_count: process whose part of each global batch is read, and the number of processes.
        workdir: folder of the run, whose tokenizer is used if it has one.
        workers: number of processes that encode the texts missing from `task.cache_dir`, after verifying those in it;
            0: this process encodes them.
        known: metadata of the training data, to read only the evaluation splits where possible; None: read all splits.
        as_test: whether a source that has only training examples provides them as the split "test", for evaluation.
    """
    task.check_loader(loader)
    if known is not None:
        source, task = evaluating(source, known), evaluating(task, known)
    contents = _contents(source, task.reads, known, as_test)
    if len(contents) > 1 and (loader.order or loader.buckets):
        option = "order" if loader.order else "buckets"
        raise ValueError(f"loader.{option} is {getattr(loader, option)!r}: a mixture does not allow it.")
    texts_of_parts = [task.texts(content) for content in contents.values()]
    texts = texts_of_parts[0] if len(contents) == 1 else chained(texts_of_parts)
    trained = None
    if texts:
        places = {"workdir": workdir, "cache_dir": task.cache_dir}
        trained = find_tokenizer(tokenizer, texts, task.special_tokens, optional=task.optional_tokens, **places)
    elif tokenizer != Bytes():
        raise ValueError(f"The task reads no texts, so the tokenizer must be left at its default: it is {tokenizer}.")
    if workers:
        if not task.cache_dir:
            raise ValueError("task.cache_dir is '': it must be a folder, for a task on documents.")
        for splits in texts_of_parts:
            for documents in splits.values():
                task.encode(documents, trained, workers)
        fingerprint.fingerprint(source.files(), cache_dir=task.cache_dir)  # cached for the starts of runs
    examples_of = {name: _examples(task, content, trained, seed) for name, content in contents.items()}
    examples = mix(examples_of, source.proportions) if len(contents) > 1 else next(iter(examples_of.values()))
    settings = {"loader": loader, "process_index": process_index, "process_count": process_count}
    facts = replace(examples.facts, examples={name: len(split) for name, split in examples.splits.items()})
    train, splits = None, {}
    for name, split in examples.splits.items():
        arguments = {"source": split, "transform": examples.transform(name), **settings}
        if name == "train":
            train = TrainBatches(seed=seed, **arguments)
        else:
            splits[name] = EvaluationBatches(**arguments)
    return Data(train, splits, trained, facts)


def _examples(task: Any, *arguments: Any) -> Examples:
    """Return the examples of a task; raise ValueError if it returns anything else."""
    examples = task.examples(*arguments)
    if not isinstance(examples, Examples):
        returned = f"The method examples of {type(task).__name__} returns a {type(examples).__name__}"
        raise ValueError(f"{returned}: it must be Examples.")
    return examples


def _contents(source: Source, kind: str, known: Facts | None, as_test: bool) -> dict[str, Any]:
    """Return the content of each part of a source.

    Raises ValueError if there are no training examples and none are known, or for classes other than the known ones.
    """
    contents = source.read_parts(kind)
    for name, content in contents.items():
        check_content(name, content, kind)
        if known is None and "train" not in splits_of(content):
            splits = ", ".join(splits_of(content))
            given = f": its splits are {splits}, none of them 'train'" if splits else ""
            raise ValueError(f"The source {name!r} has no training examples{given}.")
        if known is not None and isinstance(content, Images):
            content.check_classes(known.class_names)
    return {name: as_test_split(content) for name, content in contents.items()} if as_test else contents
