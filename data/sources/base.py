"""The base class of sources, and their registry."""

from dataclasses import dataclass
from typing import Any, NoReturn

from lineage.configs.registry import Registry
from lineage.data.content import Documents, Images, LabelledTexts, PairedTexts, Question, TaggedSentence

SOURCES: Registry = Registry("source")
CONTENT = ("documents", "pairs", "labelled_texts", "tagged_sentences", "questions", "images", "images_with_boxes")


@dataclass(frozen=True)
class Source:
    """Origin of content; a subclass implements the methods of the kinds of content that it offers.

    Each kind of content is given for each split: "train" and, where there are such, "validation" and "test".
    """

    def documents(self) -> dict[str, Documents]:
        """Return texts, for language modelling."""
        self._refuse("documents")

    def pairs(self) -> dict[str, PairedTexts]:
        """Return input texts with a target text each."""
        self._refuse("pairs")

    def labelled_texts(self) -> dict[str, LabelledTexts]:
        """Return texts, or pairs of texts, with a label each."""
        self._refuse("labelled_texts")

    def tagged_sentences(self) -> dict[str, list[TaggedSentence]]:
        """Return sentences with a tag for each word."""
        self._refuse("tagged_sentences")

    def questions(self) -> dict[str, list[Question]]:
        """Return questions whose answers are parts of a context."""
        self._refuse("questions")

    def images(self) -> Images:
        """Return labelled images."""
        self._refuse("images")

    def images_with_boxes(self) -> Images:
        """Return images with the boxes and classes of their objects."""
        self._refuse("images_with_boxes")

    def files(self) -> list[str]:
        """Return the paths (files, folders or globs) whose content identifies the data; empty where there are none."""
        return []

    def read(self, kind: str) -> Any:
        """Return the content of a kind, the name of one of the source's methods.

        Raises:
            ValueError: the source does not offer this kind of content.
        """
        method = getattr(self, kind, None)
        if method is None:
            self._refuse(kind)
        return method()

    def offers(self) -> list[str]:
        """Return the kinds of content that the source offers."""
        return [kind for kind in CONTENT if getattr(type(self), kind) is not getattr(Source, kind)]

    @property
    def name(self) -> str:
        """The name that the source is registered under."""
        return next((name for name, cls in SOURCES.items() if cls is type(self)), type(self).__name__)

    def _refuse(self, kind: str) -> NoReturn:
        offered = " and ".join(map(_words, self.offers())) or "nothing"
        raise ValueError(f"The source {self.name!r} offers {offered}, not {_words(kind)}.")


@dataclass(frozen=True)
class PathSource(Source):
    """Source that reads one path.

    Attributes:
        path: the file or folder to read.

    Raises:
        ValueError: there is no path.
    """

    path: str = ""

    def __post_init__(self):
        if not self.path:
            raise ValueError(f"The source {self.name!r} needs a path, such as --config.source={self.name}:PATH.")

    def files(self) -> list[str]:
        return [self.path]


@dataclass(frozen=True)
class SplitFiles(PathSource):
    """Source that reads one path for each split.

    Attributes:
        path: what to train on.
        validation_path: what to validate on; "" = nothing.
        test_path: what to test on; "" = nothing.
    """

    validation_path: str = ""
    test_path: str = ""

    def paths(self) -> dict[str, str]:
        """Return the path of each split."""
        paths = {"train": self.path, "validation": self.validation_path, "test": self.test_path}
        return {split: path for split, path in paths.items() if path}

    def files(self) -> list[str]:
        return list(self.paths().values())


def _words(kind: str) -> str:
    return kind.replace("_", " ")
