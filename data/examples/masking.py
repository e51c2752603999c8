"""Masked tokens (BERT, arXiv 1810.04805, section 3.1 and appendix A.1) and masked patches (MAE, arXiv 2111.06377)."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from lineage.data import shuffle
from lineage.data.loader import Batch
from lineage.data.tokenizers import Tokenizer

_LAST = np.uint64(2**64 - 1)  # sorts tokens that must not be selected after all others


def count_masked(rate: float, length: int) -> int:
    """Return M, the number of selected tokens of a sequence: rate * length, rounded, at least 1."""
    return max(round(rate * length), 1)


def present(batch: Batch) -> np.ndarray:
    """Return a mask bool [B, T] of the tokens of windows that are not padding."""
    real = np.roll(batch["mask"], 1, axis=1)  # a token is real if it is the target of the previous one
    real[:, 0] = batch["mask"][:, 0]
    return real


class MaskTokens:
    """Transform that selects a fraction `rate` of the tokens of windows (see `count_masked`).

    Of the selected tokens, 80% are replaced by the mask token and 10% by a random token. Training selects different
    tokens each time, evaluation always the same ones. Special tokens are never selected. With `whole_words`, all tokens
    of a word are selected or none; if no word fits, a part of one.

    With `begin`, that token is before each window and the token `sep` after it, so that it has two more tokens.

    The batch then has `tokens` int32 [B, T], `tokens_mask` bool [B, T] (False for padding), `masked_positions` and
    `targets` (the original tokens) int32 [B, M], and `mask` bool [B, M], False where fewer tokens could be selected.
    """

    def __init__(self, rate: float, tokenizer: Tokenizer, whole_words: bool = False, begin: int | None = None):
        if tokenizer.mask is None:
            raise ValueError("Masking needs a tokenizer with a mask token: this one has none.")
        self.rate, self.mask_token, self.vocab_size = rate, tokenizer.mask, tokenizer.vocab_size
        self.special = tokenizer.special
        self.ends = () if begin is None else (begin, tokenizer.sep)
        self.word_marks = tokenizer.word_marks if whole_words else None

    def __call__(self, batch: Batch, keys: np.ndarray) -> Batch:
        return self.hide(*self._enclosed(batch["tokens"], present(batch)), keys)

    def _enclosed(self, tokens, real):
        """Return tokens and the mask of those that are not padding, both [B, T], with the tokens around windows."""
        if not self.ends:
            return tokens, real
        tokens, last = np.pad(tokens, ((0, 0), (1, 1))), real.sum(axis=1) + 1
        tokens[:, 0] = self.ends[0]
        tokens[np.arange(len(tokens)), last] = self.ends[1]
        return tokens, (np.arange(tokens.shape[1]) <= last[:, None]) & real[:, :1]

    def hide(self, tokens: np.ndarray, real: np.ndarray, keys: np.ndarray) -> Batch:
        """Mask tokens int32 [B, T]; `real` bool [B, T] is False for padding."""
        selectable = real & ~self.special[tokens]
        num_masked = count_masked(self.rate, tokens.shape[1])
        counts = np.clip(np.rint(self.rate * real.sum(axis=1)), 1, num_masked)[:, None]
        draws = shuffle.draw(shuffle.fold(keys, 0), tokens.shape[1])
        if self.word_marks:
            selectable &= self._in_words(tokens, selectable, draws, counts[:, 0])
        order = np.where(selectable, draws, _LAST)
        positions = np.argpartition(order, num_masked - 1, axis=1)[:, :num_masked]
        ranks = np.argsort(np.take_along_axis(order, positions, axis=1), axis=1)
        positions = np.take_along_axis(positions, ranks, axis=1)
        targets, chosen = (np.take_along_axis(a, positions, axis=1) for a in (tokens, selectable))
        chosen &= np.arange(num_masked) < counts
        tenth = shuffle.draw(shuffle.fold(keys, 1), num_masked) % np.uint64(10)
        random = (shuffle.draw(shuffle.fold(keys, 2), num_masked) % np.uint64(self.vocab_size)).astype(np.int32)
        new = np.where(tenth < 8, np.int32(self.mask_token), np.where(tenth == 8, random, targets))
        tokens = tokens.copy()
        np.put_along_axis(tokens, positions, np.where(chosen, new, targets), axis=1)
        masked = {"masked_positions": positions.astype(np.int32), "targets": targets, "mask": chosen}
        return {"tokens": tokens, "tokens_mask": real} | masked

    def _in_words(self, tokens, selectable, draws, counts):
        """Select whole words in random order, if they still fit into `counts` [B] selectable tokens in total."""
        begins, ends = self.word_marks
        starts = begins[tokens]
        starts[:, 1:] |= ends[tokens[:, :-1]]
        starts[:, 0] = False
        word, rows = np.cumsum(starts, axis=1), np.arange(len(tokens))
        sizes, chosen = np.zeros(tokens.shape, np.int64), np.zeros(tokens.shape, bool)
        np.add.at(sizes, (rows[:, None], word), selectable)
        order = np.argsort(np.where(sizes, draws, _LAST), axis=1)
        for column in order.T:
            size = sizes[rows, column]
            chosen[rows, column] = size <= counts
            counts = counts - np.where(size <= counts, size, 0)
        none_fits = ~(chosen & (sizes > 0)).any(axis=1)
        chosen[none_fits, order[none_fits, 0]] = True  # of which as many tokens are masked as without whole words
        return np.take_along_axis(chosen, word, axis=1)


@dataclass(frozen=True)
class MaskPatches:
    """Transform that adds `noise` int32 [B, P], a permutation of 0 to P - 1, after a transform of `images`.

    A model sees the int(P (1 - rate)) patches with the smallest noise. Training draws a new order each time, evaluation
    always the same one. `kind` is a name in `PATTERNS`.
    """

    images: Callable[[Batch, np.ndarray], Batch]
    patch_size: int
    rate: float
    kind: str = "random"

    def __call__(self, batch: Batch, keys: np.ndarray) -> Batch:
        batch = self.images(batch, keys)
        rows, columns = (side // self.patch_size for side in batch["image"].shape[1:3])
        masked = rows * columns - int(rows * columns * (1 - self.rate))
        draw = PATTERNS[self.kind]
        values = [draw(rows, columns, masked, shuffle.generator(key)).ravel() for key in shuffle.fold(keys, -1)]
        return batch | {"noise": np.argsort(np.argsort(values, axis=1), axis=1).astype(np.int32)}


def _uniform(rows: int, columns: int, masked: int, random: np.random.Generator) -> np.ndarray:
    return random.random((rows, columns))


def _blocks(rows: int, columns: int, masked: int, random: np.random.Generator) -> np.ndarray:
    """Mask rectangles until enough patches are masked, truncating the last one (arXiv 2106.08254, algorithm 1)."""
    values = random.random((rows, columns))
    chosen = np.zeros((rows, columns), bool)
    priority = rows * columns
    while (left := masked - chosen.sum()) > 0:
        area, aspect = random.uniform(min(16, left), left), math.exp(random.uniform(-1, 1) * math.log(1 / 0.3))
        height = min(max(round(math.sqrt(area * aspect)), 1), rows)
        width = min(max(round(math.sqrt(area / aspect)), 1), columns)
        row, column = random.integers(rows - height + 1), random.integers(columns - width + 1)
        block = np.zeros_like(chosen)
        block[row : row + height, column : column + width] = True
        block &= ~chosen
        values[block] += priority
        chosen, priority = chosen | block, priority - int(block.any())
    return values


def _grid(rows: int, columns: int, masked: int, random: np.random.Generator) -> np.ndarray:
    """Keep one patch of each square of four, at the same position in all squares."""
    values = random.random((rows, columns)) + 1
    row, column = random.integers(2, size=2)
    values[row::2, column::2] -= 1
    return values


PATTERNS = {"random": _uniform, "block": _blocks, "grid": _grid}
