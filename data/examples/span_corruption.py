"""Span corruption: what T5 learns to fill in (arXiv 1910.10683, section 3.1.4)."""

from dataclasses import dataclass

import numpy as np

from lineage.data import shuffle
from lineage.data.examples.masking import present
from lineage.data.examples.pairs import shifted
from lineage.data.loader import Batch

MEAN_SPAN = 3


def count_noise(rate: float, length: int) -> tuple[int, int]:
    """Of `length` tokens, how many are noise, and in how many spans; at least one token is not."""
    noise = min(max(round(rate * length), 1), length - 1)
    return noise, min(max(round(noise / MEAN_SPAN), 1), length - noise)


def lengths(rate: float, inputs_length: int) -> tuple[int, int]:
    """How many tokens of a text make inputs of at most `inputs_length`, sentinels and end included, and targets of how
    many.

    Raises ValueError for a rate that is not between 0 and 1, and for inputs too short for any text.
    """
    if not 0 < rate < 1 or inputs_length < 3:
        raise ValueError(f"mask_rate={rate} must be between 0 and 1, and sequence_length={inputs_length} at least 3")
    length = 2
    while _sizes(rate, length + 1)[0] <= inputs_length:
        length += 1
    return length, _sizes(rate, length)[1]


def _sizes(rate, length):
    noise, spans = count_noise(rate, length)
    return length - noise + spans + 1, noise + spans + 1


def draw_spans(sizes: np.ndarray, counts: np.ndarray, length: int, keys: np.ndarray) -> np.ndarray:
    """Lengths int64 [B, N] of spans, all such lists alike likely: `counts` [B] spans of at least one token, the others
    of none, `sizes` [B] tokens together, of at most `length`."""
    places = np.arange(length)
    draws = shuffle.draw(keys, length)
    draws = np.where((places > 0) & (places < sizes[:, None]), draws, np.uint64(2**64 - 1))
    rank = np.argsort(np.argsort(draws, axis=1), axis=1)
    span = np.cumsum(rank < counts[:, None] - 1, axis=1)  # which the token at a place is of
    spans = np.zeros((len(keys), max(counts.max(), 1)), np.int64)
    np.add.at(spans, (np.arange(len(keys))[:, None], span), places < sizes[:, None])
    return spans


def draw_noise(rate: float, real: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Which of the `real` tokens [B, T], the first of each row, are noise: bool [B, T].

    Spans of tokens to keep and of noise by turns, the former first, as many as `count_noise` says.
    """
    size, length = real.sum(axis=1), real.shape[1]
    noise, spans = np.array([count_noise(rate, n) if n > 1 else (0, 0) for n in size]).T
    parts = [draw_spans(n, spans, length, shuffle.fold(keys, use)) for use, n in enumerate((size - noise, noise))]
    stops = np.cumsum(np.stack(parts, axis=2).reshape(len(keys), -1), axis=1)
    turns = np.zeros((len(keys), length + 1), np.int64)
    np.add.at(turns, (np.arange(len(keys))[:, None], stops), 1)
    return (np.cumsum(turns, axis=1)[:, :-1] % 2 == 1) & real


def replace_spans(tokens: np.ndarray, spans: np.ndarray, sentinels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Tokens [B, T] with the sentinel of each span at its first token, and which of them are left: bool [B, T]."""
    first = spans.copy()
    first[:, 1:] &= ~spans[:, :-1]
    number = np.minimum(np.cumsum(first, axis=1) - 1, len(sentinels) - 1)
    return np.where(first, sentinels[number], tokens), first | ~spans


def pack(tokens: np.ndarray, kept: np.ndarray, length: int, end: int) -> tuple[np.ndarray, np.ndarray]:
    """The `kept` tokens of each row and the end, ids int32 [B, `length`] filled up with it, and where there is none of
    the filling, bool."""
    ids = np.full((len(tokens), length), end, np.int32)
    rows, columns = np.nonzero(kept)
    ids[rows, (np.cumsum(kept, axis=1) - 1)[rows, columns]] = tokens[rows, columns]
    return ids, np.arange(length) <= kept.sum(axis=1)[:, None]


@dataclass(frozen=True)
class CorruptSpans:
    """Makes inputs and targets of windows: of the inputs, spans are replaced by sentinels, which the targets have with
    what they stand for. Other ones each time that a window comes up.

    The batch then has what `data.pairs.Pairs` has, `tokens` beginning with `start`; both sides have fixed lengths.

    Attributes:
        rate: the part of the tokens that is replaced.
        inputs_length, targets_length: see `lengths`.
        sentinels: ids in the order of the spans.
        start, end: what outputs begin with, and what inputs and targets end with.
    """

    rate: float
    inputs_length: int
    targets_length: int
    sentinels: np.ndarray
    start: int
    end: int

    def __call__(self, batch: Batch, keys: np.ndarray) -> Batch:
        """Of a batch of windows; `keys` uint64 [B] draw."""
        tokens, real = batch["tokens"], present(batch)
        noise = draw_noise(self.rate, real, keys)
        (inputs, left), (targets, gone) = (
            replace_spans(tokens, spans, self.sentinels) for spans in (noise, real & ~noise)
        )
        inputs, inputs_mask = pack(inputs, left & real, self.inputs_length, self.end)
        targets, mask = pack(targets, gone & real, self.targets_length, self.end)
        return {"inputs": inputs, "inputs_mask": inputs_mask} | shifted(targets, mask & real[:, :1], self.start)
