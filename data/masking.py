"""Masked words: what BERT learns to guess (arXiv 1810.04805, section 3.1 and appendix A.1)."""

import numpy as np

from data import shuffle
from data.pipeline import Batch
from data.tokenizers import Tokenizer

_LAST = np.uint64(2**64 - 1)  # in the order in which tokens are chosen


def count_masked(rate: float, length: int) -> int:
    """M, how many tokens of a sequence are chosen: the whole number next to rate x length, at least 1."""
    return max(round(rate * length), 1)


def present(batch: Batch) -> np.ndarray:
    """Of windows: bool [B, T], True where there is a token and no padding."""
    real = np.roll(batch["mask"], 1, axis=1)  # a token is real if it is the target of the one before
    real[:, 0] = batch["mask"][:, 0]
    return real


class MaskTokens:
    """Chooses tokens of each window of text: 80% become the mask, 10% a random token, 10% stay; all are to be guessed.

    Other ones each time that a window comes up in training, the same ones in every evaluation, never special tokens.
    The batch then has `tokens` int32 [B, T] and `tokens_mask` bool [B, T] (True = a token, not padding), and of the
    chosen ones `places` int32 [B, M], where they are, `targets` int32 [B, M], what they were, and `mask` bool [B, M],
    True where there was one to choose.

    Args:
        rate: the part of a window's tokens that is chosen, see `count_masked`.
        tokenizer: of the texts, with a mask.
        whole_words: all or none of a word's tokens are chosen, as long as whole words fit.

    Raises:
        ValueError: the rate is not between 0 and 1, or the tokenizer has no mask.
    """

    def __init__(self, rate: float, tokenizer: Tokenizer, whole_words: bool = False):
        if not 0 < rate < 1:
            raise ValueError(f"mask_rate={rate} must be between 0 and 1")
        if tokenizer.mask is None:
            raise ValueError("mask_rate needs a tokenizer with a mask: this one has none")
        self.rate, self.mask_token, self.vocab_size = rate, tokenizer.mask, tokenizer.vocab_size
        self.special = tokenizer.special
        self.word_marks = tokenizer.word_marks if whole_words else None

    def __call__(self, batch: Batch, keys: np.ndarray) -> Batch:
        """Of a batch of windows; `keys` uint64 [B] draw."""
        return self.hide(batch["tokens"], present(batch), keys)

    def hide(self, tokens: np.ndarray, real: np.ndarray, keys: np.ndarray) -> Batch:
        """Of tokens int32 [B, T], of which `real` bool [B, T] are no padding."""
        free = real & ~self.special[tokens]
        count = count_masked(self.rate, tokens.shape[1])
        share = np.clip(np.rint(self.rate * real.sum(axis=1)), 1, count)[:, None]
        draws = shuffle.draw(shuffle.fold(keys, 0), tokens.shape[1])
        if self.word_marks:
            free &= self._in_words(tokens, free, draws, share[:, 0])
        order = np.where(free, draws, _LAST)
        places = np.argpartition(order, count - 1, axis=1)[:, :count]
        places = np.take_along_axis(places, np.argsort(np.take_along_axis(order, places, axis=1), axis=1), axis=1)
        targets, chosen = (np.take_along_axis(a, places, axis=1) for a in (tokens, free))
        chosen &= np.arange(count) < share
        tenth = shuffle.draw(shuffle.fold(keys, 1), count) % np.uint64(10)
        random = (shuffle.draw(shuffle.fold(keys, 2), count) % np.uint64(self.vocab_size)).astype(np.int32)
        new = np.where(tenth < 8, np.int32(self.mask_token), np.where(tenth == 8, random, targets))
        tokens = tokens.copy()
        np.put_along_axis(tokens, places, np.where(chosen, new, targets), axis=1)
        return {
            "tokens": tokens,
            "tokens_mask": real,
            "places": places.astype(np.int32),
            "targets": targets,
            "mask": chosen,
        }

    def _in_words(self, tokens, free, draws, share):
        """True in some whole words with at most `share` [B] free tokens: in random order, each one that still fits."""
        begins, ends = self.word_marks
        starts = begins[tokens]
        starts[:, 1:] |= ends[tokens[:, :-1]]
        starts[:, 0] = False
        word, rows = np.cumsum(starts, axis=1), np.arange(len(tokens))
        sizes, chosen = np.zeros(tokens.shape, np.int64), np.zeros(tokens.shape, bool)
        np.add.at(sizes, (rows[:, None], word), free)
        for column in np.argsort(np.where(sizes, draws, _LAST), axis=1).T:
            size = sizes[rows, column]
            chosen[rows, column] = size <= share
            share = share - np.where(size <= share, size, 0)
        return np.take_along_axis(chosen, word, axis=1)
