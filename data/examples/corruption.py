"""Corruption of windows of tokens: the spans of T5 (arXiv 1910.10683, section 3.1.4) and the noise of denoising
autoencoders (BART, arXiv 1910.13461, section 2.2)."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from lineage.data import shuffle
from lineage.data.content import check_length
from lineage.data.examples.masking import present
from lineage.data.examples.pairs import after, shifted, with_end
from lineage.data.loader import Batch
from lineage.data.tokenizers import Tokenizer
from lineage.data.transforms.calls import parse_calls

MEAN_SPAN = 3  # mean number of tokens in a span (T5)
Noise = Callable[[np.ndarray, np.random.Generator], np.ndarray]  # function of tokens [N]
_ENDS = re.compile(r"[.!?]$|\n")


def count_noise(rate: float, length: int) -> tuple[int, int]:
    """Return the numbers of noise tokens and of spans for `length` tokens; at least one token is kept."""
    noise = min(max(round(rate * length), 1), length - 1)
    return noise, min(max(round(noise / MEAN_SPAN), 1), length - noise)


def lengths(rate: float, inputs_length: int) -> tuple[int, int]:
    """Return the numbers of tokens of a window and of its targets.

    The window is the longest one whose inputs have at most `inputs_length` tokens, including sentinels and end.
    """
    check_length(inputs_length, 3)
    length = 2
    while _sizes(rate, length + 1)[0] <= inputs_length:
        length += 1
    return length, _sizes(rate, length)[1]


def _sizes(rate, length):
    noise, spans = count_noise(rate, length)
    return length - noise + spans + 1, noise + spans + 1


def draw_spans(sizes: np.ndarray, counts: np.ndarray, length: int, keys: np.ndarray) -> np.ndarray:
    """Draw the lengths int64 [B, N] of spans, uniformly over all partitions of `sizes` [B] into `counts` [B] spans."""
    positions = np.arange(length)
    draws = shuffle.draw(keys, length)
    draws = np.where((positions > 0) & (positions < sizes[:, None]), draws, np.uint64(2**64 - 1))
    rank = np.argsort(np.argsort(draws, axis=1), axis=1)
    span = np.cumsum(rank < counts[:, None] - 1, axis=1)  # the span of each token
    spans = np.zeros((len(keys), max(counts.max(), 1)), np.int64)
    np.add.at(spans, (np.arange(len(keys))[:, None], span), positions < sizes[:, None])
    return spans


def draw_noise(rate: float, real: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Draw a mask bool [B, T] of the noise among the `real` tokens [B, T], which come first in each sequence.

    Spans of kept tokens and of noise alternate, starting with kept tokens; `count_noise` gives their number.
    """
    size, length = real.sum(axis=1), real.shape[1]
    noise, spans = np.array([count_noise(rate, n) if n > 1 else (0, 0) for n in size]).T
    lengths = [draw_spans(n, spans, length, shuffle.fold(keys, use)) for use, n in enumerate((size - noise, noise))]
    stops = np.cumsum(np.stack(lengths, axis=2).reshape(len(keys), -1), axis=1)
    changes = np.zeros((len(keys), length + 1), np.int64)  # number of spans that end before each token
    np.add.at(changes, (np.arange(len(keys))[:, None], stops), 1)
    return (np.cumsum(changes, axis=1)[:, :-1] % 2 == 1) & real


def replace_spans(tokens: np.ndarray, spans: np.ndarray, sentinels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return tokens [B, T] with a sentinel at the first token of each span, and a mask of the remaining tokens."""
    is_first = spans.copy()
    is_first[:, 1:] &= ~spans[:, :-1]
    number = np.minimum(np.cumsum(is_first, axis=1) - 1, len(sentinels) - 1)
    return np.where(is_first, sentinels[number], tokens), is_first | ~spans


def pack(tokens: np.ndarray, kept: np.ndarray, length: int, end: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the `kept` tokens of each sequence and `end`, int32 [B, length], padded with `end`, and their mask."""
    ids, mask = with_end([row[chosen] for row, chosen in zip(tokens, kept)], length, end)
    return ids.astype(np.int32), mask


@dataclass(frozen=True)
class CorruptSpans:
    """Transform that replaces spans with a fraction `rate` of the tokens of windows by a sentinel each.

    The batch then has the arrays of `pairs.EncodedPairs`; the targets are the sentinels and the spans.
    """

    rate: float
    inputs_length: int
    targets_length: int
    sentinels: np.ndarray
    start: int
    end: int

    def __call__(self, batch: Batch, keys: np.ndarray) -> Batch:
        tokens, real = batch["tokens"], present(batch)
        noise = draw_noise(self.rate, real, keys)
        inputs, kept = replace_spans(tokens, noise, self.sentinels)
        targets, removed = replace_spans(tokens, real & ~noise, self.sentinels)
        inputs, inputs_mask = pack(inputs, kept & real, self.inputs_length, self.end)
        targets, mask = pack(targets, removed & real, self.targets_length, self.end)
        return {"inputs": inputs, "inputs_mask": inputs_mask} | shifted(targets, mask & real[:, :1], self.start)


def mask(tokens: np.ndarray, random: np.random.Generator, rate: float, *, token: int) -> np.ndarray:
    """Replace a fraction of the tokens by the mask `token`."""
    tokens = tokens.copy()
    tokens[random.choice(len(tokens), round(rate * len(tokens)), replace=False)] = token
    return tokens


def delete(tokens: np.ndarray, random: np.random.Generator, rate: float) -> np.ndarray:
    """Delete a fraction of the tokens."""
    return np.delete(tokens, random.choice(len(tokens), round(rate * len(tokens)), replace=False))


def infill(
    tokens: np.ndarray, random: np.random.Generator, rate: float, mean: float = 3.0, *, token: int
) -> np.ndarray:
    """Replace spans that together have a fraction of the tokens by one mask `token` each.

    Their lengths are drawn from Poisson(`mean`), and the last span is truncated. A span of length 0 inserts a mask.
    Spans are at least one token apart, and at most as many as removed tokens, so that the text does not become longer.
    """
    total = round(rate * len(tokens))
    stops = np.minimum(np.cumsum(random.poisson(mean, 20 + int(4 * total / mean))), total)
    lengths = np.diff(stops[: np.searchsorted(stops, total) + 1], prepend=0)
    left = len(tokens) - lengths.sum()
    if (surplus := len(lengths) - min(left + 1, total)) > 0:  # drop empty spans, then merge the last ones
        lengths = np.delete(lengths, np.flatnonzero(lengths == 0)[:surplus])
        lengths = np.append(lengths[:left], lengths[left:].sum()) if len(lengths) > left + 1 else lengths
    lengths = lengths if total else lengths[:0]
    gaps = np.sort(random.choice(left + 1, len(lengths), replace=False))  # the kept token that follows each span
    starts = gaps + np.cumsum(lengths) - lengths
    covered = np.concatenate([np.arange(start, start + size) for start, size in zip(starts, lengths)] or [[]])
    return np.insert(np.delete(tokens, covered.astype(int)), gaps, token)


def permute_sentences(tokens: np.ndarray, random: np.random.Generator, *, ends: np.ndarray) -> np.ndarray:
    """Permute sentences; `ends` bool [V] marks the tokens that end a sentence."""
    sentences = np.split(tokens, np.flatnonzero(ends[tokens[:-1]]) + 1)
    return np.concatenate([sentences[number] for number in random.permutation(len(sentences))])


def rotate(tokens: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """Rotate the text so that it starts with a random token."""
    return np.roll(tokens, -int(random.integers(len(tokens))))


def parse(noise: str, tokenizer: Tokenizer) -> list[Noise]:
    """Return the functions of a pipeline such as `permute_sentences | infill(0.3, 3)`.

    A sentence ends with a token that ends with . ! or ?, contains a newline or is special.
    """

    def checked(function, **settings):
        if not (0 < settings["rate"] < 1 and settings.get("mean", 1) > 0):
            raise ValueError(f"task.noise is {noise!r}: rates must be between 0 and 1, and lengths above 0.")
        return partial(function, **settings)

    def sentences():
        texts = (tokenizer.decode([token]) for token in range(tokenizer.vocab_size))
        return partial(permute_sentences, ends=tokenizer.special | [bool(_ENDS.search(text)) for text in texts])

    known = {
        "mask": lambda rate: checked(mask, rate=rate, token=tokenizer.mask),
        "delete": lambda rate: checked(delete, rate=rate),
        "infill": lambda rate, mean=3.0: checked(infill, rate=rate, mean=mean, token=tokenizer.mask),
        "permute_sentences": sentences,
        "rotate": lambda: rotate,
    }
    steps = parse_calls("task.noise", noise, known)
    if not steps:
        raise ValueError(f"task.noise is {noise!r}: it must name a function, such as infill(0.3, 3).")
    return steps


@dataclass(frozen=True)
class AddNoise:
    """Transform that adds noise to windows to make the inputs; the targets are the windows themselves.

    The token `begin`, if any, is before both. The batch then has the arrays of `pairs.EncodedPairs`, with T = `length`,
    including the end.
    """

    steps: Sequence[Noise]
    length: int
    end: int
    begin: int | None = None

    def __call__(self, batch: Batch, keys: np.ndarray) -> Batch:
        tokens, real = batch["tokens"], present(batch)
        noisy = []
        for text, is_real, key in zip(tokens, real, keys):
            new, random = text[is_real], shuffle.generator(key)
            for step in self.steps:
                new = step(new, random) if len(new) else new
            noisy.append(after(self.begin, new))
        inputs, inputs_mask = with_end(noisy, self.length, self.end)
        clean = [after(self.begin, text[is_real]) for text, is_real in zip(tokens, real)]
        targets, mask = with_end(clean, self.length, self.end)
        return {"inputs": inputs, "inputs_mask": inputs_mask} | shifted(targets, mask & real[:, :1], self.end)
