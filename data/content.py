"""Content that sources provide, and the examples that tasks create from it."""

import warnings
from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import dataclass
from itertools import chain
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np

from lineage.data import shuffle
from lineage.data.documents import Documents
from lineage.data.facts import Facts
from lineage.data.loader import Batch, ExampleSource

Transform = Callable[[dict[str, Any], np.ndarray], Batch]


class PairedTexts(NamedTuple):
    """Input texts with a target text each."""

    inputs: list[str]
    targets: list[str]


@dataclass(frozen=True)
class LabeledTexts:
    """Examples of one or two texts, with a label each, as written in the source.

    `names` are the names of all classes in order; empty if the source does not have them.
    """

    texts: Sequence[tuple[str, ...]]
    labels: Sequence[str]
    names: Sequence[str] = ()


@dataclass(frozen=True)
class TaggedSentence:
    """Words, each with the preceding space if there is one, and a tag for each word."""

    words: Sequence[str]
    tags: Sequence[str]

    def __post_init__(self):
        if len(self.words) != len(self.tags):
            raise ValueError(f"A sentence has {len(self.words)} words and {len(self.tags)} tags: {self.words!r:.80}.")


@dataclass(frozen=True)
class Question:
    """Question about a context, with (first character in the context, text) of each reference answer, if any."""

    text: str
    context: str
    answers: Sequence[tuple[int, str]]
    id: str = ""
    OPTIONAL: ClassVar = ("id", "is_impossible")  # fields of SQuAD's files that others may not have

    @classmethod
    def from_fields(cls, text: Any, context: Any, answers: Any, id: Any = None, is_impossible: Any = None) -> Self:
        """Return a question with the fields of SQuAD's files; one that is marked as impossible has no answers."""
        if is_impossible not in (None, False, True):
            raise ValueError(f"is_impossible is {str(is_impossible)[:60]!r}: it must be true or false.")
        return cls(text, context, [] if is_impossible else answers, "" if id is None else str(id))

    def __post_init__(self):
        if wrong := [text for text in (self.text, self.context) if not isinstance(text, str)]:
            raise TypeError(f"a question or context is {str(wrong[0])[:60]}, not text")
        try:
            f"{self.text}{self.context}".encode()
        except UnicodeEncodeError:
            shown = self.text[:60].encode(errors="backslashreplace").decode()
            raise ValueError(f"the question {shown!r} or its context has a lone surrogate, not a character.") from None
        for start, answer in self.answers:
            if start < 0 or not answer or self.context[start : start + len(answer)] != answer:
                raise ValueError(
                    f"The answer {answer[:80]!r} to {self.text[:80]!r} is not at character {start} of its context."
                )

    @property
    def references(self) -> list[str]:
        """Texts of the answers."""
        return [text for _, text in self.answers]


class Images(NamedTuple):
    """Splits of images with labels or boxes, and the names of the classes in order.

    Examples of labeled images have `image` uint8 [h, w, c] and `label`. Examples of images with n objects have
    `image`, `boxes` float32 [n, 4] (left, top, right and bottom edge in pixels), `classes` int32 [n], and `crowd`
    bool [n], which marks a box around several objects.
    """

    splits: Mapping[str, ExampleSource]
    class_names: list[str]

    def check_classes(self, known: Sequence[str]) -> None:
        """Raise ValueError if a class has another index than in `known`; warn if none of the names is known."""
        names = self.class_names
        differing = [index for index, name in enumerate(names) if [name] != list(known[index : index + 1])]
        if known and differing:
            index = differing[0]
            trained = known[index] if index < len(known) else "missing"
            difference = f"class {index} of the source is {names[index]!r}, but {trained!r} in the training data"
            if len(names) != len(known) or set(names) & set(known):
                raise ValueError(f"The classes must be the same, in the same order: {difference}.")
            warnings.warn(f"The classes are matched by their order: {difference}.", stacklevel=2)


@dataclass(frozen=True)
class Arrays(ExampleSource):
    """Examples in memory: features stacked on a leading axis."""

    features: Mapping[str, np.ndarray]

    def __post_init__(self):
        lengths = {name: len(values) for name, values in self.features.items()}
        if len({*lengths.values()}) > 1:
            counts = " and ".join(f"{length} of {name!r}" for name, length in lengths.items())
            raise ValueError(f"The numbers of examples differ between the features, {counts}: they must be equal.")

    def __len__(self) -> int:
        return len(next(iter(self.features.values())))

    def take(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        return {name: value[indices] for name, value in self.features.items()}


def splits_of(content: Images | Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the content of each split, as `Source` describes it."""
    return content.splits if isinstance(content, Images) else content


# Type of a split of each kind of content, and of the items of a split that is a sequence.
TYPES: Mapping[str, tuple[type, type | None]] = {
    "documents": (Documents, None),
    "pairs": (PairedTexts, None),
    "labeled_texts": (LabeledTexts, None),
    "tagged_sentences": (Sequence, TaggedSentence),
    "questions": (Sequence, Question),
    "images": (ExampleSource, None),
    "images_with_boxes": (ExampleSource, None),
}


def check_content(source: str, content: Any, kind: str) -> None:
    """Raise ValueError if what a source returns is not of its kind, or its columns are not as documented.

    Content of any kind is a mapping of splits, or `Images` with one.
    """
    splits = splits_of(content)
    if not isinstance(splits, Mapping):
        raise ValueError(f"The source {source!r} returns {type(content).__name__}: it must be a dictionary of splits.")
    _check_types(source, content, splits, kind)
    for split, part in splits.items():
        where = f"The {split} split of the source {source!r} has"
        columns = {"texts": part.texts, "labels": part.labels} if isinstance(part, LabeledTexts) else {}
        columns |= part._asdict() if isinstance(part, PairedTexts) else {}
        if unsized := [name for name, column in columns.items() if not isinstance(column, Sized)]:
            given = type(columns[unsized[0]]).__name__
            raise ValueError(f"{where} {unsized[0]} in a {given}: use a list.")
        if len({len(column) for column in columns.values()}) > 1:
            counts = " and ".join(f"{len(column)} {name}" for name, column in columns.items())
            raise ValueError(f"{where} {counts}: the counts must be equal.")
        _check_texts(where, columns)


def _check_types(source, content, splits, kind):
    """Raise ValueError if the splits, or the items of their sequences, are not those of a kind of content."""
    split_type, item_type = TYPES[kind]
    if split_type is ExampleSource and not isinstance(content, Images):
        name = type(content).__name__
        raise ValueError(f"The source {source!r} returns {name}: it must be Images(splits, class_names).")
    expected = f"a sequence of {item_type.__name__}" if item_type else split_type.__name__
    for split, part in splits.items():
        wrong = None if isinstance(part, split_type) and not isinstance(part, str) else type(part).__name__
        if item_type and not wrong and (items := [item for item in part[:1] if not isinstance(item, item_type)]):
            wrong = f"a {type(part).__name__} of {type(items[0]).__name__}"
        if wrong:
            raise ValueError(f"The {split} split of the source {source!r} is {wrong}: it must be {expected}.")


def _check_texts(where, columns):
    """Raise ValueError if a column of labeled or paired texts has other values."""
    for row in columns.get("texts", ()):
        if not isinstance(row, tuple | list):
            raise ValueError(f"{where} the text {row!r:.60}: it must be a tuple of one or two texts, as in (text,).")
    for name, column in columns.items():
        for value in chain.from_iterable(column) if name == "texts" else column:
            if not isinstance(value, str):
                raise ValueError(f"{where} {value!r:.60} ({type(value).__name__}) in its {name}: they must be texts.")


def as_test_split(content: Images | Mapping[str, Any]) -> Images | Mapping[str, Any]:
    """Return content whose only split is "train" with this split named "test", and other content unchanged."""
    splits = splits_of(content)
    if set(splits) != {"train"}:
        return content
    renamed = {"test": splits["train"]}
    return content._replace(splits=renamed) if isinstance(content, Images) else renamed


def gather(examples: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return a list of the values of each feature."""
    return {name: [example[name] for example in examples] for name in examples[0]}


def check_length(length: int, minimum: int, content: str = "") -> None:
    """Raise ValueError for sequences of fewer than `minimum` tokens, the number that `content` has."""
    if length < minimum:
        reason = f", for {content}" if content else ""
        raise ValueError(f"task.sequence_length is {length}: it must be {minimum} or more{reason}.")


def padded(rows: Sequence[np.ndarray], length: int, fill: int = 0) -> np.ndarray:
    """Return N arrays of at most T = `length` numbers as one array [N, T], padded with `fill`."""
    out = np.full((len(rows), length), fill, rows[0].dtype)
    for number, row in enumerate(rows):
        out[number, : len(row)] = row
    return out


@dataclass(frozen=True)
class Subset(ExampleSource):
    """Examples of a source with the indices `chosen` int64 [N]."""

    source: ExampleSource
    chosen: np.ndarray

    def __len__(self) -> int:
        return len(self.chosen)

    def take(self, indices: np.ndarray) -> dict[str, Any]:
        return self.source.take(self.chosen[indices])

    def check(self, index: int) -> None:
        self.source.check(int(self.chosen[index]))


def random_subset(source: ExampleSource, count: int, seed: int) -> Subset:
    """Draw `count` examples at random; a larger count contains the examples of a smaller one."""
    size = len(source)
    if not 0 < count <= size:
        raise ValueError(f"task.max_examples is {count}: it must be 0 (all) or at most {size}, the number of examples.")
    return Subset(source, shuffle.permute(np.arange(count), size, seed))


@dataclass(frozen=True)
class Decoded(ExampleSource):
    """Images in memory that differ in size, with their labels."""

    images: Sequence[np.ndarray]
    labels: np.ndarray

    def __len__(self) -> int:
        return len(self.images)

    def take(self, indices: np.ndarray) -> dict[str, Any]:
        return {"image": [self.images[index] for index in indices.tolist()], "label": self.labels[indices]}


def in_memory(source: ExampleSource) -> Arrays | Decoded:
    """Read all labeled images of a source."""
    examples = source.take(np.arange(len(source)))
    images = [np.asarray(image) for image in examples["image"]]
    if len({image.shape for image in images}) > 1:
        return Decoded(images, examples["label"])
    return Arrays({"image": np.stack(images), "label": examples["label"]})


@dataclass(frozen=True)
class Examples:
    """Examples of each split, including "train", and the transforms of their batches.

    A transform is called with a batch and a key for each example.
    """

    splits: Mapping[str, ExampleSource]
    facts: Facts
    train_transform: Transform | None = None
    evaluation_transform: Transform | None = None

    def transform(self, split: str) -> Transform | None:
        """Return the transform of the batches of a split."""
        return self.train_transform if split == "train" else self.evaluation_transform
