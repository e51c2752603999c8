"""Texts as an encoder reads them: `[CLS] first [SEP]` or `[CLS] first [SEP] second [SEP]`, and padding."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from lineage.data.loader import ExampleSource
from lineage.data.tokenizers import Tokenizer

ROLES = ("cls", "sep", "pad", "mask")


@dataclass(frozen=True)
class Encoded(ExampleSource):
    """Rows of token ids, with what belongs to each row and to each of its tokens.

    An example has `tokens`, `segments` int32 [T] (which text a token is of: 0 or 1), `tokens_mask` bool [T] (True = a
    token), and one entry of everything else.

    Attributes:
        tokens: of each row.
        seconds: of each row, where its second text starts.
        origins: of each row, the number of the text, sentence or question that it is of: the long ones have several.
        length: T.
        pad: the token that fills a row up.
        per_row: name -> what every row has.
        per_token: name -> an array as long as each row; 0 or False where there is no token.
    """

    tokens: Sequence[np.ndarray]
    seconds: np.ndarray
    origins: np.ndarray
    length: int
    pad: int
    per_row: Mapping[str, np.ndarray] = field(default_factory=dict)
    per_token: Mapping[str, Sequence[np.ndarray]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def is_cut(self) -> bool:
        """Whether a text has several rows."""
        return len(set(self.origins.tolist())) < len(self)

    @property
    def lengths(self) -> np.ndarray:
        """Tokens int64 [N] of each row."""
        return np.array([len(row) for row in self.tokens])

    def take(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        padded = {"tokens": self._padded(self.tokens, indices, self.pad)}
        padded |= {name: self._padded(rows, indices, 0) for name, rows in self.per_token.items()}
        mask = np.arange(self.length) < np.array([len(self.tokens[i]) for i in indices])[:, None]
        second = np.arange(self.length) >= self.seconds[indices, None]
        padded |= {"tokens_mask": mask, "segments": (second & mask).astype(np.int32)}
        return padded | {name: values[indices] for name, values in self.per_row.items()}

    def _padded(self, rows, indices, fill):
        out = np.full((len(indices), self.length), fill, rows[indices[0]].dtype)
        for number, index in enumerate(indices):
            out[number, : len(rows[index])] = rows[index]
        return out


def check(length: int, least: int = 4) -> None:
    """Raises ValueError for too short a row."""
    if length < least:
        raise ValueError(f"sequence_length={length} must be at least {least}")


def join(tokenizer: Tokenizer, *texts: np.ndarray) -> tuple[np.ndarray, int]:
    """One row of one or two texts' tokens, and where the second starts in it."""
    row = [tokenizer.cls, *(token for text in texts for token in (*text, tokenizer.sep))]
    return np.array(row, np.int32), len(texts[0]) + 2


def rows(
    joined: Sequence[tuple[np.ndarray, int]], origins: Sequence[int], length: int, tokenizer: Tokenizer, **others
) -> Encoded:
    """The rows that `join` made, as a source. Raises ValueError where there is none."""
    if not joined:
        raise ValueError("the data set is empty: at least one example is needed")
    tokens, seconds = zip(*joined)
    return Encoded(tokens, np.array(seconds), np.array(origins), length, tokenizer.pad, **others)


def starts(count: int, room: int, stride: int) -> range:
    """Where windows of `room` tokens start that together have all `count`: `stride` apart; 0 = without overlap.

    Raises ValueError for a stride that leaves tokens out.
    """
    if not 0 <= stride <= room:
        raise ValueError(f"stride={stride} must be from 0 (no overlap) to {room}, the tokens of a text in a window")
    return range(0, max(count - room, 0) + (stride or room), stride or room)


def longest_first(first: int, second: int, room: int) -> tuple[int, int]:
    """How many tokens of two texts stay when the longer one loses its last until both fit (arXiv 1810.04805)."""
    first = min(first, max(room - second, (room + 1) // 2))
    return first, min(second, room - first)
