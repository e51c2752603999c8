"""What `data.load` can be told."""

import ast
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of `data.load`, with their defaults; `data` in `configs/base.py` says what each means."""

    source: str = "digits"
    task: str = ""
    batch_size: int
    evaluation_batch_size: int = 0
    seed: int = 0  # of the order of training examples, of their augmentation and of their noise
    train_split: str = ""
    validation_split: str = ""
    test_split: str = ""
    data_dir: str = ""
    tokenizer: str = "bytes"
    vocab_size: int = 0
    lowercase: bool = False
    sequence_length: int = 0
    buckets: Sequence[int] = ()
    stride: int = 0
    evaluation_stride: int = 0
    order: str = ""
    long_text: str = "head"
    validation_fraction: float = 0.1
    max_bytes: int = 0
    text_key: str = "text"
    start_token: str = "end_of_text"
    cache_dir: str = ""
    mask_rate: float = 0.15
    masking: str = "random"
    patch_size: int = 0
    mask_whole_words: bool = False
    noise: str = ""
    max_examples: int = 0
    image_size: int = 0
    shorter_side: int = 0
    max_boxes: int = 100
    evaluation_crop: float = 1.0
    resample: str = "bilinear"
    augment: str = ""
    mean: Sequence[float] = (0.5,)
    std: Sequence[float] = (0.5,)
    image_key: str = "image"
    label_key: str = "label"
    repeats: int = 1
    in_memory: bool = False
    workers: int = 0
    threads: int = 0
    process_index: int = 0  # this process has an equal contiguous part of each global batch
    process_count: int = 1
    workdir: str | Path | None = None  # of the run; keeps its tokenizer

    @property
    def kind(self) -> str:
        """Of the source: what is before the colon."""
        return self.source.partition(":")[0]

    @property
    def path(self) -> str:
        """Of the source: what is after the colon."""
        return self.source.partition(":")[2]

    @property
    def splits(self) -> dict[str, str]:
        """The splits that are asked for by name."""
        asked = {"train": self.train_split, "validation": self.validation_split, "test": self.test_split}
        return {name: split for name, split in asked.items() if split}

    def refuse_all_but(self, names: Sequence[str]) -> None:
        """Raises ValueError for an option that would have no effect: it is a mistake of the user's."""
        for field in fields(self):
            value = getattr(self, field.name)
            value = tuple(value) if isinstance(value, list) else value
            if field.name not in (*_ALWAYS, *names) and value != field.default:
                raise ValueError(
                    f"{field.name}={value!r} has no meaning for source={self.source!r}, which is read for "
                    f"task={self.task!r}"
                )


_ALWAYS = (
    *("source", "task", "batch_size", "evaluation_batch_size", "seed", "train_split", "validation_split", "test_split"),
    *("data_dir", "workers", "threads", "process_index", "process_count", "workdir"),
)


def called(option: str, value: str, known: Mapping[str, Callable[..., Any]]) -> list[Any]:
    """What the functions return that an option's value such as `a | b(2, 10)` calls by their names in `known`.

    Raises ValueError, with what there is, for another name and for other arguments than a function takes.
    """
    results = []
    for text in filter(None, (part.strip() for part in value.split("|"))):
        try:
            call = ast.parse(text, mode="eval").body
            if isinstance(call, ast.Name):
                call = ast.Call(call, [], [])
            named = {keyword.arg: _literal(keyword.value) for keyword in call.keywords}
            results.append(known[call.func.id](*map(_literal, call.args), **named))
        except (SyntaxError, AttributeError, KeyError, TypeError) as error:
            takes = {name: ", ".join(inspect.signature(function).parameters) for name, function in known.items()}
            names = ", ".join(f"{name}({parameters})" if parameters else name for name, parameters in takes.items())
            raise ValueError(f"{option}={value!r}: {text!r} is not one of {names}") from error
    return results


def _literal(node):
    try:
        return ast.literal_eval(node)
    except ValueError:  # a name, or an expression; the functions' own ValueErrors are others
        raise TypeError(f"{ast.unparse(node)} is no literal") from None
