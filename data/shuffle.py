"""Counter-based random numbers: each is a function of its position, so any position has the same cost.

Grain's shuffle maps one index at a time (about 50 microseconds each) and is limited to 2^32 examples; this one maps the
indices of a whole batch at once and has no such limit.
"""

import numpy as np

_ROUNDS = 8
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def mix(values: np.ndarray) -> np.ndarray:
    """Hash uint64 [...] to uint64 [...] one to one, by the finalizer of SplitMix64 (Steele et al., 2014)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def keys(positions: np.ndarray, seed: int) -> np.ndarray:
    """Return a uint64 key for each of the positions [N] of the stream of `seed`."""
    return mix(positions.astype(np.uint64) * _GOLDEN + mix(np.array([seed % 2**64], np.uint64)))


def fold(parent: np.ndarray, number: int) -> np.ndarray:
    """Derive independent keys [N] from the keys `parent` [N] for use number `number`."""
    return mix(parent + _GOLDEN * np.arange(number + 1, number + 2, dtype=np.uint64))


def draw(parent: np.ndarray, count: int) -> np.ndarray:
    """Draw random uint64 [N, count] from the keys `parent` [N]."""
    return mix(parent[:, None] + _GOLDEN * np.arange(1, count + 1, dtype=np.uint64))


def generator(key: np.uint64) -> np.random.Generator:
    """Return a NumPy random generator for one key."""
    return np.random.Generator(np.random.Philox(key=int(key)))


def permute(positions: np.ndarray, length: int, seed: int) -> np.ndarray:
    """Return the indices int64 [N] at `positions` int64 [N] of an endless stream of permutations of `length` examples.

    The permutation is an alternating Feistel network over Z_a x Z_b with ab >= length, applied again to results that
    are `length` or more (Black and Rogaway, "Ciphers with arbitrary finite domains", 2002).
    """
    epoch, index = np.divmod(positions, length)
    round_keys = keys(epoch, seed)
    index = index.astype(np.uint64)
    a = np.uint64(int(np.ceil(np.sqrt(length))))
    b = np.uint64(-(-length // int(a)))
    outside = slice(None)
    while True:
        left, right = np.divmod(index[outside], b)
        key = round_keys[outside]
        for number in range(0, _ROUNDS, 2):
            left = (left + mix(key + right + np.uint64(number << 56))) % a
            right = (right + mix(key + left + np.uint64((number + 1) << 56))) % b
        index[outside] = left * b + right
        outside = np.flatnonzero(index >= np.uint64(length))
        if not len(outside):
            return index.astype(np.int64)
