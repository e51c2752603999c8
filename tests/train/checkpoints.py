"""Functions that save, restore and damage small checkpoints."""

import resource
from contextlib import contextmanager

import jax
import jax.numpy as jnp
import numpy as np

from lineage.configs.run import Checkpoint
from lineage.train.checkpoint import Checkpoints
from lineage.train.step import TrainState


def state(step=3, width=64, **more):
    params = {"kernel": jax.random.normal(jax.random.key(step), (width, width)), "bias": jnp.ones(width)} | more
    averages = {
        "count": jnp.arange(5, dtype=jnp.int8),
        "seen": jnp.array([True, False]),
        "low": jnp.ones(3, jnp.bfloat16),
    }
    return TrainState(jnp.int32(step), params, (jnp.full(width, -0.0),), averages, jax.tree.map(jnp.copy, params))


def target(state):
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place), state)


def save(folder, *states, metrics=(), **options):
    with Checkpoints(folder, Checkpoint(**options)) as checkpoints:
        for each, values in zip(states, metrics or [{}] * len(states)):
            checkpoints.save(each, {"adapter": {"name": "none"}}, values)


def restore(folder, like=None, step=None):
    with Checkpoints(folder) as checkpoints:
        return checkpoints.restore(target(like or state()), step)


def assert_equal(restored, expected):
    for leaf, other in zip(jax.tree.leaves(restored), jax.tree.leaves(expected), strict=True):
        assert leaf.dtype == other.dtype
        assert np.asarray(leaf).tobytes() == np.asarray(other).tobytes()


@contextmanager
def full_disk(limit):
    """Simulate a full disk: writes beyond `limit` bytes per file fail in the operating system.

    This affects C++ and Python alike and needs no separate file system; Python ignores the accompanying signal.
    """
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def largest_file(folder):
    return max((path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)


def flip(data, at=0.3):
    """Return the data of a checkpoint's largest file with one bit flipped, of an array.

    In the middle of the file may be replaced nodes of the database, which are not read, between two arrays.
    """
    place = int(len(data) * at)
    return data[:place] + bytes([data[place] ^ 0x10]) + data[place + 1 :]
