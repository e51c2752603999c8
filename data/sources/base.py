"""Base class of sources, and their registry."""

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar, Self

from lineage.configs.registry import Registry, check_ranges, declared
from lineage.configs.storage import is_remote, local
from lineage.data.facts import Facts, evaluating
from lineage.data.fingerprint import crc, files_of

SOURCES: Registry = Registry("source")
SPLITS = ("train", "validation", "test")
COMPARED = 1 << 20  # bytes of each file, in evenly spaced blocks, by which copies are found
CONTENT = ("documents", "pairs", "labeled_texts", "tagged_sentences", "questions", "images", "images_with_boxes")


@dataclass(frozen=True)
class For:
    """Kinds of content on which an option of a source has an effect, declared as `Annotated[str, For(("pairs",))]`."""

    kinds: tuple[str, ...]


@dataclass(frozen=True)
class Source:
    """Source of content. A subclass has one method without arguments for each kind of content that it provides.

    The kinds of content are:

    - `documents() -> dict[str, Documents]`: texts, for language modeling;
    - `pairs() -> dict[str, PairedTexts]`: input texts with a target text each;
    - `labeled_texts() -> dict[str, LabeledTexts]`: texts, or pairs of texts, with a label each;
    - `tagged_sentences() -> dict[str, list[TaggedSentence]]`: sentences with a tag for each word;
    - `questions() -> dict[str, list[Question]]`: questions whose answers are parts of a context;
    - `images() -> Images`: labeled images;
    - `images_with_boxes() -> Images`: images with the boxes and classes of their objects.

    Content is returned for each split: "train" and, if they exist, "validation" and "test".

    A path in the options may be remote (see `lineage.configs.storage`); content is then read from a local copy.
    """

    headerless: ClassVar[bool] = False  # whether the files begin with an example instead of a header
    suffixes: ClassVar[tuple[str, ...]] = ()  # of the files to read in folders, before one of compression; (): any
    known: ClassVar[Facts | None] = None  # metadata of training data that are not read, see `facts.evaluating`

    def __post_init__(self):
        check_ranges("source", self)

    def files(self) -> list[str]:
        """Return the paths (files, folders or globs) whose content identifies the data, if any."""
        return []

    def check_files(self) -> None:
        """Raise ValueError if `files` returns a string, whose characters would be read as paths."""
        if isinstance(files := self.files(), str):
            raise ValueError(f"The method files of {type(self).__name__} returns {files!r}: it must return a list.")

    def unread(self) -> list[str]:
        """Return the files in the source's folder that are not read because their paths have no split, or no class."""
        return []

    def shared(self) -> list[str]:
        """Return the files that are read for several splits."""
        return []

    def notes(self) -> Iterator[str]:
        """Yield notes on options that have no effect because of the data."""
        yield from ()

    def without_effect(self, kind: str) -> list[str]:
        """Return the options that differ from their defaults, but have no effect on a kind of content (see `For`)."""
        defaults = {field.name: field.default for field in fields(self)}
        options = (name for name, allowed in declared(type(self), For).items() if kind not in allowed.kinds)
        return [name for name in options if getattr(self, name) != defaults[name]]

    def content_kinds(self) -> list[str]:
        """Return the kinds of content that the source provides."""
        return [kind for kind in CONTENT if hasattr(self, kind)]

    def without_training(self, splits: dict[str, Any]) -> dict[str, Any]:
        """Return the splits to read: all, or those other than "train" if `known` is set.

        All are read if "train" is the only split, or if validation examples are held out from it.
        """
        held_out = getattr(self, "validation_fraction", 0) and "validation" not in splits
        reads_all = self.known is None or held_out or not splits.keys() - {"train"}
        return splits if reads_all else {split: part for split, part in splits.items() if split != "train"}

    def read(self, kind: str) -> Any:
        """Return the content of one kind; raise ValueError if the source does not provide it."""
        if not hasattr(self, kind):
            provided = " and ".join(self.content_kinds()).replace("_", " ") or "nothing"
            raise ValueError(f"The source {self.name!r} provides {provided}, not {kind.replace('_', ' ')}.")
        if not callable(method := getattr(self.copied(), kind)):
            raise ValueError(f"The source {self.name!r} has {kind} as a {type(method).__name__}: it must be a method.")
        return method()

    def copied(self) -> Self:
        """Return the source with its remote paths replaced by local copies."""
        options = {field.name: getattr(self, field.name) for field in fields(self)}
        remote = {key: value for key, value in options.items() if isinstance(value, str) and is_remote(value)}
        copies = {key: local(value, self.suffixes) for key, value in remote.items()}
        return evaluating(replace(self, **copies), self.known) if remote else self

    def read_parts(self, kind: str) -> dict[str, Any]:
        """Return the content of each source in this one, by name; by default only this source."""
        return {self.name: self.read(kind)}

    @property
    def name(self) -> str:
        """Name under which the source is registered."""
        return SOURCES.name_of(self)


SOURCES.base = Source


@dataclass(frozen=True)
class PathSource(Source):
    """Source that reads one path.

    Attributes:
        path: file or folder to read.
    """

    path: str = ""

    def __post_init__(self):
        super().__post_init__()
        if not self.path:
            raise ValueError(f"The source {self.name!r} needs a path, such as --config.source={self.name}:PATH.")

    def files(self) -> list[str]:
        return [self.path]


@dataclass(frozen=True)
class SplitFiles(PathSource):
    """Source that reads one path for each split.

    Attributes:
        path: training data.
        validation_path: validation data; "": none.
        test_path: test data; "": none.
    """

    validation_path: str = ""
    test_path: str = ""

    def paths(self) -> dict[str, str]:
        """Return the path of each split."""
        paths = zip(SPLITS, (self.path, self.validation_path, self.test_path))
        return {split: path for split, path in paths if path}

    def each(self, read: Callable[[str], Any]) -> dict[str, Any]:
        """Return the results of a function for the path of each split."""
        return {split: read(path) for split, path in self.without_training(self.paths()).items()}

    def files(self) -> list[str]:
        return list(self.paths().values())

    def split_files(self) -> dict[str, list[str]]:
        """Return the files of each split."""
        return {split: list(map(str, files_of(path))) for split, path in self.paths().items()}

    def shared(self) -> list[str]:
        return in_several(self.copied().split_files().values())


def in_several(splits: Iterable[Sequence[str]]) -> list[str]:
    """Return the files that are in several splits, also as links or copies."""
    splits = sorted(splits, key=len)
    sizes = Counter(size for files in splits for size in {os.stat(file).st_size for file in files})

    def key(file: str) -> tuple[int, int]:
        stat = os.stat(file)
        is_candidate = stat.st_size and sizes[stat.st_size] > 1
        return (stat.st_size, crc(Path(file), COMPARED)) if is_candidate else (stat.st_dev, stat.st_ino)

    first: dict[tuple[int, int], int] = {}  # split by the key of a file
    return sorted(file for n, files in enumerate(splits) for file in files if first.setdefault(key(file), n) != n)
