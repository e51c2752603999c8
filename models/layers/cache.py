"""State of incremental decoding: explicit pytrees that go into a decoder and, for the caches, come out of it again."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int

SEPARATE = 16  # largest batch whose sequences are written one by one: a scatter is slower, but compiles faster


class Rows:
    """Base class of states of which sequences can be selected.

    Attributes:
        BATCH_AXES: batch axis of each field that has one.
    """

    BATCH_AXES: ClassVar[Mapping[str, int]] = {}

    def gather(self, rows: Int[Array, "N"]) -> "Rows":
        """Return the state whose sequence n is sequence `rows[n]` of this one; they may be left out and repeated."""

        def take(name, axis):
            return jax.tree.map(lambda x: jnp.take(x, rows, axis=axis, mode="clip"), getattr(self, name))

        return self.replace(**{name: take(name, axis) for name, axis in self.BATCH_AXES.items()})


class Rewindable(Rows):
    """Base class of caches with the `length` of each sequence."""

    def rewind(self, length: Int[Array, "#B"]) -> "Rewindable":
        """Return the cache as it was after the first `length` tokens of each sequence."""
        return self.replace(length=length)


@struct.dataclass
class LayerCache:
    """Keys and values of the tokens so far in one layer; see `Cache`."""

    key: Float[Array, "N S C"]
    value: Float[Array, "N S C"]
    length: Int[Array | np.ndarray, "#B"]

    @property
    def max_length(self) -> int:
        return self.key.shape[1]

    @property
    def is_empty(self) -> bool:
        """True if the cache is known to be empty when the program is traced."""
        return isinstance(self.length, np.ndarray) and not self.length.any()

    def positions(self, count: int) -> Int[Array, "#B T"]:
        """Return the positions of the next `count` tokens of each sequence."""
        return self.length[:, None] + jnp.arange(count)

    def keys_and_values(self, batch_size: int) -> tuple[Float[Array, "B S K C"], Float[Array, "B S K C"]]:
        """Return the keys and values of each sequence and head."""
        return tuple(x.reshape(batch_size, -1, *x.shape[1:]).swapaxes(1, 2) for x in (self.key, self.value))

    def append(self, key: Float[Array, "B T K C"], value: Float[Array, "B T K C"]) -> "LayerCache":
        """Return the cache with `T` more tokens of each sequence; of several ones, those without room are left out."""
        length = self.length + np.int32(key.shape[1])
        return LayerCache(self._write(self.key, key), self._write(self.value, value), length)

    def _write(self, old, new):
        batch, count, heads, size = new.shape
        new = new.astype(old.dtype).swapaxes(1, 2).reshape(batch * heads, count, size)
        if self.is_empty or (count == 1 and len(self.length) == 1):
            return jax.lax.dynamic_update_slice(old, new, (0, self.length[0], 0))
        if count == 1 and batch <= SEPARATE:
            for row in range(batch):
                own = new[row * heads : (row + 1) * heads]
                old = jax.lax.dynamic_update_slice(old, own, (row * heads, self.length[row], 0))
            return old
        indices = jnp.repeat(jnp.broadcast_to(self.positions(count), (batch, count)), heads, axis=0)
        return old.at[jnp.arange(len(old))[:, None], indices].set(new, mode="drop", unique_indices=True)


@struct.dataclass
class Cache(Rewindable):
    """Keys and values of the tokens so far in every layer.

    Each sequence of the batch may have its own `length`, so that prompts of different lengths can share a batch.

    Every layer has its own arrays, in which sequences and heads are one axis, N = B x K. They are updated in place and
    read by one batched product, whereas XLA's CPU backend copies slices of larger arrays, and arrays of more axes.

    Attributes:
        key, value: room for S tokens of each sequence, in each layer.
        length: number of tokens of each sequence, or of all of them. A NumPy array is known when the program is traced:
            an empty cache is not read.
        num_kv_heads: number of key/value heads, K.
    """

    key: tuple[Float[Array, "N S C"], ...]
    value: tuple[Float[Array, "N S C"], ...]
    length: Int[Array | np.ndarray, "#B"]
    num_kv_heads: int = struct.field(pytree_node=False)

    @classmethod
    def empty(
        cls, layers: int, batch_size: int, max_length: int, num_kv_heads: int, head_size: int, dtype=jnp.float32
    ) -> "Cache":
        """Return a cache of `layers` layers with room for `max_length` tokens of each sequence."""
        zeros = [jnp.zeros((batch_size * num_kv_heads, max_length, head_size), dtype) for _ in range(2 * layers)]
        return cls(tuple(zeros[:layers]), tuple(zeros[layers:]), np.zeros(1, np.int32), num_kv_heads)

    @property
    def layers(self) -> tuple[LayerCache, ...]:
        return tuple(LayerCache(key, value, self.length) for key, value in zip(self.key, self.value))

    def with_layers(self, layers: Sequence[LayerCache]) -> "Cache":
        """Return the cache with these layers, which have the same lengths."""
        keys, values = (tuple(getattr(layer, name) for layer in layers) for name in ("key", "value"))
        return self.replace(key=keys, value=values, length=layers[0].length)

    @property
    def max_length(self) -> int:
        return self.layers[0].max_length

    def positions(self, count: int) -> Int[Array, "#B T"]:
        """Return the positions of the next `count` tokens of each sequence."""
        return self.layers[0].positions(count)

    def gather(self, rows: Int[Array, "N"]) -> "Cache":
        """Return the cache whose sequence n is sequence `rows[n]` of this one; they may be left out and repeated."""

        batch_size = len(self.key[0]) // self.num_kv_heads
        key, value = jax.tree.map(partial(_take, rows=rows, batch_size=batch_size), (self.key, self.value))
        length = self.length if len(self.length) == 1 else jnp.take(self.length, rows, mode="clip")
        return self.replace(key=key, value=value, length=length)


@struct.dataclass
class Memory(Rows):
    """Keys and values of an encoder's output in every layer of a decoder, computed once; see `Cache`."""

    key: tuple[Float[Array, "N S C"], ...]
    value: tuple[Float[Array, "N S C"], ...]
    mask: Bool[Array, "B S"]

    @property
    def layers(self) -> tuple[LayerCache, ...]:
        return tuple(LayerCache(key, value, np.full(1, key.shape[1])) for key, value in zip(self.key, self.value))

    def gather(self, rows: Int[Array, "N"]) -> "Memory":
        """Return the memory whose sequence n is sequence `rows[n]` of this one; they may be left out and repeated."""
        key, value = jax.tree.map(partial(_take, rows=rows, batch_size=len(self.mask)), (self.key, self.value))
        return Memory(key, value, jnp.take(self.mask, rows, axis=0, mode="clip"))


def _take(x, rows, batch_size):
    """Return arrays [N, S, C] of some sequences."""
    x = x.reshape(batch_size, -1, *x.shape[1:])
    return jnp.take(x, rows, axis=0, mode="clip").reshape(-1, *x.shape[2:])


@struct.dataclass
class States(Rewindable):
    """Cache of a recurrent decoder: its state [B, S, ...] after every token, so that it can be rewound."""

    state: Any
    length: Int[Array, "B"]

    BATCH_AXES: ClassVar = {"state": 0, "length": 0}

    @classmethod
    def empty(cls, state: Any, max_length: int) -> "States":
        """Return a cache for states like this one, with room for `max_length` tokens of each sequence."""
        state = jax.tree.map(lambda a: jnp.zeros((len(a), max_length, *a.shape[1:]), a.dtype), state)
        return cls(state, jnp.zeros(len(jax.tree.leaves(state)[0]), jnp.int32))

    def positions(self, count: int) -> Int[Array, "B T"]:
        """Return the positions of the next `count` tokens of each sequence."""
        return self.length[:, None] + jnp.arange(count)

    def last(self, first: Any) -> Any:
        """Return the present state; sequences without any token have the state `first`."""

        def read(states, first):
            rows = jnp.arange(len(states))
            return jnp.where((self.length == 0)[:, None], first, states[rows, jnp.maximum(self.length - 1, 0)])

        return jax.tree.map(read, self.state, first)

    def append(self, state: Any) -> "States":
        """Return the cache with the states [B, T, ...] after T more tokens of each sequence."""
        count = jax.tree.leaves(state)[0].shape[1]
        rows, indices = jnp.arange(len(self.length))[:, None], self.positions(count)

        def write(old, new):
            return old.at[rows, indices].set(new.astype(old.dtype), mode="drop")

        return States(jax.tree.map(write, self.state, state), self.length + count)
