"""Documents: texts that may be read several times, in pieces if they are long."""

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import NamedTuple

_PIECE, _CHUNK = 1 << 18, 1 << 20  # characters of a piece of a text, and of a group of pieces
_BETWEEN_LINES = re.compile(r"(?<=\S)\n(?!\s)")


class Piece(NamedTuple):
    """Part of a text, and whether it is the first and the last one."""

    text: str
    is_first: bool
    is_last: bool


class Documents:
    """Texts in a fixed order, which may be read again in each pass.

    Args:
        texts: the texts, or a function that yields them; a long one may be an iterable of its consecutive blocks, which
            need not be in memory together.
        fingerprint: string that identifies the texts, or a function that returns it, with the argument `cache_dir` of
            `lineage.data.fingerprint.fingerprint`; "": computed from the texts.

    Raises:
        ValueError: the texts are a generator or another iterator, which can be read only once.
    """

    always_ended = False  # whether an end of text also follows a single document

    def __init__(
        self,
        texts: Iterable[str | Iterable[str]] | Callable[[], Iterator[str]],
        fingerprint: str | Callable[..., str] = "",
    ):
        if isinstance(texts, Iterator):
            kind = type(texts).__name__
            raise ValueError(
                f"The texts of documents are a {kind}, which can be read only once: they must be a list, or a function "
                "that yields the texts in each call."
            )
        self._texts = texts
        self._fingerprint = self._identity = fingerprint
        self._digest = ""  # of the texts in the last complete pass

    def __iter__(self) -> Iterator[str]:
        for text in self.items():
            yield text if isinstance(text, str) else "".join(text)

    def items(self) -> Iterator[str | Iterable[str]]:
        """Yield each text as it was given: whole, or as an iterable of its blocks; raise ValueError for other values.

        A complete pass over texts without a fingerprint of their own records their digest.
        """
        digest = None if self._identity else hashlib.sha256()
        for text in self._texts() if callable(self._texts) else self._texts:
            if isinstance(text, bytes) or not isinstance(text, Iterable):
                raise ValueError(f"a document is {text!r:.60} ({type(text).__name__}): it must be a text.")
            yield _checked(text, digest)
        if digest:
            self._digest = digest.hexdigest()

    def pieces(self) -> Iterator[Piece]:
        """Yield the pieces of the texts (see `split_lines`)."""
        for text in self.items():
            before, is_first = None, True
            for piece in split_lines([text] if isinstance(text, str) else text):
                if before is not None:
                    yield Piece(before, is_first, is_last=False)
                    is_first = False
                before = piece
            yield Piece(before, is_first, is_last=True)

    def split(self) -> "Documents":
        """Return the pieces as documents, so that no whole document has to be in memory."""
        return Documents(lambda: (piece.text for piece in self.pieces()))

    def chunks(self) -> Iterator[list[Piece]]:
        """Yield the pieces in groups of about 1 Mi characters."""
        group, size = [], 0
        for piece in self.pieces():
            group.append(piece)
            size += len(piece.text) + 1
            if size >= _CHUNK:
                yield group
                group, size = [], 0
        if group:
            yield group

    def fingerprint(self, cache_dir: str | Path = "") -> str:
        """Return a string that identifies the texts; `cache_dir` keeps checksums of their files."""
        if callable(self._fingerprint):
            self._fingerprint = self._fingerprint(cache_dir=cache_dir)
        if not self._fingerprint:
            for _ in self:
                pass
            self._fingerprint = self._digest
        return self._fingerprint

    def check_unchanged(self, cache_dir: str | Path = "") -> None:
        """Raise ValueError if the texts or their files have changed since the first call of `fingerprint`."""
        if callable(self._identity) and self._identity(cache_dir=cache_dir) != self.fingerprint(cache_dir):
            raise ValueError("the files of texts changed while they were read: start again when they do not change.")
        if not self._identity and self._digest != self.fingerprint(cache_dir):
            raise ValueError(
                "the texts of documents differ between two passes: the function that yields them must yield the same "
                "texts in each call."
            )


def _checked(text, digest):
    """Return a text, or an iterable of its blocks; add it to the digest, unless that is None, when it is read."""
    if not isinstance(text, str):
        return _checked_blocks(text, digest)
    if digest:
        digest.update(f"{text} {len(text)} ".encode())
    return text


def _checked_blocks(blocks, digest):
    length = 0
    for block in blocks:
        if not isinstance(block, str):
            raise ValueError(f"a document has the block {block!r:.60} ({type(block).__name__}): it must be a text.")
        length += len(block)
        if digest:
            digest.update(block.encode())
        yield block
    if digest:
        digest.update(f" {length} ".encode())


def split_lines(blocks: Iterable[str]) -> Iterator[str]:
    """Split a text, given in blocks, into pieces of about 256 Ki characters, after single newlines between two lines.

    The pieces do not depend on the blocks. Tokenizers that split texts into words also split at these newlines, so the
    tokens of the pieces are those of the text, except that a tokenizer which adds a space or a mark before a text, such
    as Llama 2's, adds it before each piece.
    """
    text, start = "", 0
    for block in chain(filter(None, blocks), [""]):
        text, place = text[start:], max(_PIECE, len(text) - start - 1)  # newlines before `place` have been searched
        text, start = text + block, 0
        # A newline at the end of this block may be followed by white space in the next one.
        while (newline := _BETWEEN_LINES.search(text, place)) and (newline.end() < len(text) or not block):
            yield text[start : newline.end()]
            start = newline.end()
            place = start + _PIECE
    yield text[start:]


def chained(texts: Sequence[Mapping[str, Iterable[str]]]) -> dict[str, Documents]:
    """Return the concatenated texts of each split in several mappings; they may be read several times."""
    splits = dict.fromkeys(chain(*texts))
    parts = {split: [mapping[split] for mapping in texts if split in mapping] for split in splits}
    return {split: Documents(partial(chain.from_iterable, part)) for split, part in parts.items()}


def are_several(texts: Iterable[str]) -> bool:
    """Return whether there are at least two texts, without reading more."""
    return len(list(islice(texts.items() if isinstance(texts, Documents) else texts, 2))) > 1
