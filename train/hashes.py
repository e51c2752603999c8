"""Verification of checkpoints: hashes of arrays, sizes, and errors of files behind those of Orbax and TensorStore."""

import errno
import math
import os
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lineage.data.fingerprint import files_below

BLOCK = 1 << 16  # number of values hashed at a time on the host; fits a CPU's cache


def hash_leaves(state: Any) -> list[int]:
    """Return a 32-bit hash of each leaf of a state, independent of its sharding; Orbax stores no hashes."""
    return [int(value) for value in jax.device_get(_device_hashes(jax.tree.leaves(state)))]


@jax.jit
def _device_hashes(leaves):
    return [_device_hash(leaf) for leaf in jax.device_put(leaves, jax.memory.Space.Device)]


def _device_hash(leaf):
    """Return the sum of a hash of each value's bits and its index; the sum does not depend on the order."""
    words = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}
    bits = leaf if leaf.dtype == bool else jax.lax.bitcast_convert_type(leaf, words[leaf.dtype.itemsize])
    index, stride = jnp.uint32(0), 1
    for axis in reversed(range(leaf.ndim)):
        index += jax.lax.broadcasted_iota(jnp.uint32, leaf.shape, axis) * np.uint32(stride % 2**32)
        stride *= leaf.shape[axis]
    return jnp.sum(_mixed(bits.astype(jnp.uint32) ^ _mixed(index)), dtype=jnp.uint32)


def hash_array(array: np.ndarray) -> int:
    """Return the same hash, computed on the host, for arrays that may not fit on a device."""
    bits, total = array.reshape(-1).view(f"u{array.itemsize}"), 0
    for start in range(0, bits.size, BLOCK):
        part = bits[start : start + BLOCK].astype(np.uint32)
        index = np.arange(len(part), dtype=np.uint32) + np.uint32(start % 2**32)
        total += int(_mixed(part ^ _mixed(index)).sum(dtype=np.uint32))
    return total % 2**32


def _mixed(words):
    """Return the finalizer of MurmurHash3 of 32-bit words, a bijection that changes half of the bits on average."""
    words = (words ^ words >> 16) * np.uint32(0x85EBCA6B)
    words = (words ^ words >> 13) * np.uint32(0xC2B2AE35)
    return words ^ words >> 16


def check_size(arrays: Any, folder: Path) -> None:
    """Raise ValueError if arrays, given by Orbax's metadata, need far more memory than the files in their folder."""
    needed = 0
    for leaf in jax.tree.leaves(arrays):
        chunk = leaf.storage.chunk_shape if leaf.storage else None  # a chunk, which is read as a whole, may be larger
        needed += max(math.prod(leaf.shape), math.prod(chunk or ())) * np.dtype(leaf.dtype).itemsize
    if needed > 10**8 + 100 * sum(path.stat().st_size for path in folder.rglob("*")):
        raise ValueError(f"its arrays would need {needed:,} bytes")


def error_number(error: BaseException | None) -> int | None:
    """Return the errno of an error or of the one that caused it; None if there is none.

    TensorStore, which reads and writes the arrays, raises ValueError with the number only in the message, and Orbax
    raises another error from it.
    """
    number: int | None = None
    while error and not number:
        code = re.search(r"os_error_code='(\d+)'", str(error))
        number = error.errno if isinstance(error, OSError) else code and int(code[1])
        number = errno.ENOMEM if isinstance(error, MemoryError) else number
        number = errno.EAGAIN if "can't start new thread" in str(error) else number  # a plain RuntimeError
        error = error.__cause__ or error.__context__
    return number


def unreadable(folder: Path) -> OSError | None:
    """Return the error of a file or folder that cannot be opened, which Orbax may hide; None if there is none."""
    try:
        for file in files_below(folder):
            os.close(os.open(file, os.O_RDONLY | os.O_NONBLOCK))  # a pipe would block without a writer
        return None
    except OSError as error:
        return error
