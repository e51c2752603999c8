"""Hashes of arrays."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lineage.train import reading
from lineage.train.reading import hash_array, hash_leaves

# If the read of one array fails, Orbax leaves the reads of the others unfinished.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


def bits(array):
    return np.ascontiguousarray(array).reshape(-1).view(f"u{array.dtype.itemsize}")


def flip_two_signs(words):
    words[[3, 70]] ^= 1 << 8 * words.itemsize - 1


def move_one_bit_up_and_one_down(words):
    words[3] += 4
    words[70] -= 4


def swap_two(words):
    words[[3, 70]] = words[[70, 3]]


def rotate(words):
    words[:] = np.roll(words, 1)


@pytest.mark.parametrize("corrupt", [flip_two_signs, move_one_bit_up_and_one_down, swap_two, rotate])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "uint32"])
def test_corruption_that_keeps_the_sum_of_the_bits_is_detected(corrupt, dtype):
    right = np.asarray(jnp.arange(10, 110).astype(dtype)).copy()
    wrong = right.copy()
    corrupt(bits(wrong))
    total = 2 ** (8 * right.itemsize)
    assert bits(right).sum(dtype=np.uint64) % total == bits(wrong).sum(dtype=np.uint64) % total
    for hashed in (hash_array, lambda array: hash_leaves([array])[0]):
        assert hashed(right) != hashed(wrong)


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (1,), (8, 16), (16, 8, 24)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32", "uint8", "bool"])
def test_hash_depends_on_the_values_only(shape, dtype, monkeypatch):
    """Check equal hashes of a host's blocks, one device and any sharding, and known values of the hash."""
    monkeypatch.setattr(reading, "BLOCK", 100)
    array = jax.random.normal(jax.random.key(0), shape).astype(dtype)
    expected = sum(murmur(int(word) ^ murmur(index)) for index, word in enumerate(bits(np.asarray(array)))) % 2**32
    assert hash_array(np.asarray(array)) == expected
    mesh = jax.make_mesh((4, 2), ("a", "b"))
    for spec in [(), ("a",), ("b", "a"), (None, ("a", "b"))]:
        if len(spec) <= len(shape) and 0 not in shape and shape != (1,):
            array = jax.device_put(array, jax.NamedSharding(mesh, jax.P(*spec)))
        assert hash_leaves([array]) == [expected]


def murmur(word):
    """Return the finalizer of MurmurHash3 with Python's integers."""
    word = (word ^ word >> 16) * 0x85EBCA6B % 2**32
    word = (word ^ word >> 13) * 0xC2B2AE35 % 2**32
    return word ^ word >> 16
