"""State of incremental decoding: explicit pytrees that go into a decoder and, for the caches, come out of it again."""

from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int


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

    def rewind(self, length: Int[Array, "B"]) -> "Rewindable":
        """Return the cache as it was after the first `length` tokens of each sequence."""
        return self.replace(length=jnp.broadcast_to(length, self.length.shape))


@struct.dataclass
class Cache(Rewindable):
    """Keys and values of the tokens so far in every layer.

    Each sequence of the batch has its own `length`, so that prompts of different lengths can share a batch. One cache
    goes through all layers, each of which works on its own slice, `at(layer)`: a loop over layers writes a token in
    place, whereas slices of a cache would be copied.

    Attributes:
        key, value: room for S tokens of each sequence.
        length: number of tokens of each sequence.
        layer: index of the layer that the methods read and write.
    """

    key: Float[Array, "L B K S C"]
    value: Float[Array, "L B K S C"]
    length: Int[Array, "L B"]
    layer: Int[Array, ""]

    BATCH_AXES: ClassVar = {"key": 1, "value": 1, "length": 1}

    @classmethod
    def empty(
        cls, layers: int, batch_size: int, max_length: int, num_kv_heads: int, head_size: int, dtype=jnp.float32
    ) -> "Cache":
        """Return a cache of `layers` layers with room for `max_length` tokens of each sequence, at the first layer."""
        shape = (layers, batch_size, num_kv_heads, max_length, head_size)
        length = jnp.zeros((layers, batch_size), jnp.int32)
        return cls(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype), length, jnp.zeros((), jnp.int32))

    @property
    def max_length(self) -> int:
        return self.key.shape[-2]

    def at(self, layer: Int[Array, ""] | int) -> "Cache":
        """Return the cache that reads and writes this layer."""
        return self.replace(layer=jnp.asarray(layer, jnp.int32))

    def positions(self, count: int) -> Int[Array, "B T"]:
        """Return the positions of the next `count` tokens of each sequence."""
        return self.length[self.layer][:, None] + jnp.arange(count)

    def keys_and_values(self) -> tuple[Float[Array, "B S K C"], Float[Array, "B S K C"]]:
        """Return the keys and values of the layer."""
        return self.key[self.layer].swapaxes(1, 2), self.value[self.layer].swapaxes(1, 2)

    def append(self, key: Float[Array, "B T K C"], value: Float[Array, "B T K C"]) -> "Cache":
        """Return the cache with `T` more tokens of each sequence of the layer; tokens without room are not written."""
        rows, indices = jnp.arange(len(key))[:, None], self.positions(key.shape[1])

        def write(old, new):
            return old.at[self.layer, rows, :, indices].set(new.astype(old.dtype), mode="drop", unique_indices=True)

        length = self.length.at[self.layer].add(key.shape[1])
        return self.replace(key=write(self.key, key), value=write(self.value, value), length=length)


@struct.dataclass
class Memory(Rows):
    """Keys and values of an encoder's output in every layer of a decoder, computed once."""

    key: Float[Array, "*L B K S C"]
    value: Float[Array, "*L B K S C"]
    mask: Bool[Array, "B S"]

    BATCH_AXES: ClassVar = {"key": 1, "value": 1, "mask": 0}

    def keys_and_values(self) -> tuple[Float[Array, "B S K C"], Float[Array, "B S K C"]]:
        """Return the keys and values of one layer's memory."""
        return self.key.swapaxes(1, 2), self.value.swapaxes(1, 2)


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
