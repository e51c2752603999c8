"""Noise of denoising autoencoders (BART, arXiv 1910.13461, section 2.2): functions of tokens [N] and a generator."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from lineage.data import shuffle
from lineage.data.examples.masking import present
from lineage.data.examples.pairs import shifted
from lineage.data.examples.span_corruption import pack
from lineage.data.loader import Batch
from lineage.data.tokenizers import Tokenizer
from lineage.data.transforms.calls import parse_calls

Noise = Callable[[np.ndarray, np.random.Generator], np.ndarray]
_ENDS = re.compile(r"[.!?]$|\n")


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
    """Replace spans, which have a fraction of the tokens together, by one mask `token` each.

    Their lengths are drawn from Poisson(`mean`), and the last one is cut. A span of length 0 inserts a mask. Spans are
    at least one token apart.
    """
    total = round(rate * len(tokens))
    stops = np.minimum(np.cumsum(random.poisson(mean, 20 + int(4 * total / mean))), total)
    lengths = np.diff(stops[: np.searchsorted(stops, total) + 1], prepend=0)
    left = len(tokens) - lengths.sum()
    if len(lengths) > left + 1:  # too many spans: drop the empty ones, then join the last ones
        lengths = lengths[lengths > 0]
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
    """Rotate the text to begin with a random token."""
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
    """Transform that makes noisy inputs of windows, whose targets are the windows themselves.

    The batch then has the arrays of `pairs.EncodedPairs`, with T = `length`, the end included.
    """

    steps: Sequence[Noise]
    length: int
    end: int

    def __call__(self, batch: Batch, keys: np.ndarray) -> Batch:
        tokens, real = batch["tokens"], present(batch)
        noisy, kept = np.zeros((len(keys), self.length - 1), np.int32), np.zeros((len(keys), self.length - 1), bool)
        for row, key in enumerate(keys):
            new, random = tokens[row, real[row]], shuffle.generator(key)
            for step in self.steps:
                new = step(new, random) if len(new) else new
            new = new[: self.length - 1]
            noisy[row, : len(new)], kept[row, : len(new)] = new, True
        inputs, inputs_mask = pack(noisy, kept, self.length, self.end)
        targets, mask = pack(tokens, real, self.length, self.end)
        return {"inputs": inputs, "inputs_mask": inputs_mask} | shifted(targets, mask & real[:, :1], self.end)
