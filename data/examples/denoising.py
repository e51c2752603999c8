"""Noise that BART learns to undo (arXiv 1910.13461, section 2.2): functions of a text's tokens [N] and a generator."""

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
    """The mask `token` in place of that part of the tokens."""
    tokens = tokens.copy()
    tokens[random.choice(len(tokens), round(rate * len(tokens)), replace=False)] = token
    return tokens


def delete(tokens: np.ndarray, random: np.random.Generator, rate: float) -> np.ndarray:
    """Without that part of the tokens."""
    return np.delete(tokens, random.choice(len(tokens), round(rate * len(tokens)), replace=False))


def infill(
    tokens: np.ndarray, random: np.random.Generator, rate: float, mean: float = 3.0, *, token: int
) -> np.ndarray:
    """One mask `token` in place of each of some spans, which have that part of the tokens together.

    Their lengths are drawn from Poisson(`mean`), the last one cut; where one of length 0 is, a mask comes in. Between
    two of them at least one token stays.
    """
    total = round(rate * len(tokens))
    stops = np.minimum(np.cumsum(random.poisson(mean, 20 + int(4 * total / mean))), total)
    lengths = np.diff(stops[: np.searchsorted(stops, total) + 1], prepend=0)
    left = len(tokens) - lengths.sum()
    if len(lengths) > left + 1:  # so many would touch: empty ones go, and then the last ones are one
        lengths = lengths[lengths > 0]
        lengths = np.append(lengths[:left], lengths[left:].sum()) if len(lengths) > left + 1 else lengths
    lengths = lengths if total else lengths[:0]
    gaps = np.sort(random.choice(left + 1, len(lengths), replace=False))  # before which of the tokens that stay
    starts = gaps + np.cumsum(lengths) - lengths
    covered = np.concatenate([np.arange(start, start + size) for start, size in zip(starts, lengths)] or [[]])
    return np.insert(np.delete(tokens, covered.astype(int)), gaps, token)


def permute_sentences(tokens: np.ndarray, random: np.random.Generator, *, ends: np.ndarray) -> np.ndarray:
    """Its sentences in random order; `ends` bool [V] tells the tokens that end one."""
    sentences = np.split(tokens, np.flatnonzero(ends[tokens[:-1]]) + 1)
    return np.concatenate([sentences[number] for number in random.permutation(len(sentences))])


def rotate(tokens: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """Begins with any of the tokens, what was before it at the end."""
    return np.roll(tokens, -int(random.integers(len(tokens))))


def parse(noise: str, tokenizer: Tokenizer) -> list[Noise]:
    """The functions that a string names, such as `permute_sentences | infill(0.3, 3)`, one after the other.

    A sentence ends with a token that ends with . ! or ?, has a new line or is special.

    Raises ValueError for what it does not know, and for numbers out of range.
    """

    def checked(function, **settings):
        if not (0 < settings["rate"] < 1 and settings.get("mean", 1) > 0):
            raise ValueError(f"noise={noise!r}: rates must be between 0 and 1, and lengths above 0")
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
    steps = parse_calls("noise", noise, known)
    if not steps:
        raise ValueError(f"noise={noise!r}: there must be some, such as infill(0.3, 3)")
    return steps


@dataclass(frozen=True)
class AddNoise:
    """Makes inputs of windows by noise, other each time that a window comes up; the targets are what it was before.

    The batch then has what `data.pairs.Pairs` has, all `length` tokens long, the end among them.
    """

    steps: Sequence[Noise]
    length: int
    end: int

    def __call__(self, batch: Batch, keys: np.ndarray) -> Batch:
        """Of a batch of windows of at most `length` - 1 tokens; `keys` uint64 [B] draw."""
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
