"""Masked words: what BERT learns to guess (arXiv 1810.04805, section 3.1 and appendix A.1)."""

import numpy as np

from data import shuffle
from data.pipeline import Batch
from data.tokenizers import Tokenizer


def count_masked(rate: float, length: int) -> int:
    """M, how many tokens of a window are chosen: the whole number next to rate x length, at least 1."""
    return max(round(rate * length), 1)


class MaskTokens:
    """Chooses tokens of each window of text: 80% become the mask, 10% a random token, 10% stay; all are to be guessed.

    Other ones each time that a window comes up in training, the same ones in every evaluation, never the end of a text.
    The batch then has `tokens` int32 [B, T] and `tokens_mask` bool [B, T] (True = a token, not padding), and of the
    chosen ones `places` int32 [B, M], where they are, `targets` int32 [B, M], what they were, and `mask` bool [B, M],
    True where there was one to choose.

    Args:
        rate: the part of a window's tokens that is chosen, see `count_masked`.
        tokenizer: of the texts, with a mask.

    Raises:
        ValueError: the rate is not between 0 and 1, or the tokenizer has no mask.
    """

    def __init__(self, rate: float, tokenizer: Tokenizer):
        if not 0 < rate < 1:
            raise ValueError(f"mask_rate={rate} must be between 0 and 1")
        if tokenizer.mask is None:
            raise ValueError("mask_rate needs a tokenizer with a mask: this one has none")
        self.rate, self.mask_token = rate, tokenizer.mask
        self.end, self.vocab_size = tokenizer.end_of_text, tokenizer.vocab_size

    def __call__(self, batch: Batch, keys: np.ndarray) -> Batch:
        """Of a batch of windows; `keys` uint64 [B] draw."""
        tokens = batch["tokens"]
        real = np.roll(batch["mask"], 1, axis=1)  # a token is real if it is the target of the one before
        real[:, 0] = batch["mask"][:, 0]
        free = real & (tokens != self.end)
        order = np.where(free, _draw(keys, 0, tokens.shape[1]), np.uint64(2**64 - 1))
        count = count_masked(self.rate, tokens.shape[1])
        places = np.sort(np.argpartition(order, count - 1, axis=1)[:, :count], axis=1)
        targets, chosen = (np.take_along_axis(a, places, axis=1) for a in (tokens, free))
        tenth = _draw(keys, 1, count) % np.uint64(10)
        random = (_draw(keys, 2, count) % np.uint64(self.vocab_size)).astype(np.int32)
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


def _draw(keys: np.ndarray, use: int, count: int) -> np.ndarray:
    """Random uint64 [B, count] for a use."""
    return np.stack([shuffle.fold(shuffle.fold(keys, use), place) for place in range(count)], axis=1)
