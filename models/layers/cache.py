"""State of incremental decoding: pytrees that a decoder takes and, in the case of caches, returns."""

from collections.abc import Sequence
from itertools import product
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from lineage.models.layers.quantized import Entries, Quantized, quantized, vectors

SEPARATE = 16  # maximum number of tokens that are written one by one: a scatter is slower, but compiles faster


class Rows:
    """Base class of states whose sequences can be selected and replaced."""

    BY_ROW: ClassVar[tuple[str, ...]] = ()  # fields whose first axis is sequences, or sequences x heads

    @property
    def batch_size(self) -> int:
        return len(jax.tree.leaves(getattr(self, self.BY_ROW[-1]))[0])

    def gather(self, rows: Int[Array, "N"]) -> "Rows":
        """Return the state whose sequence n is sequence `rows[n]` of this one; sequences may be repeated or omitted."""
        count = self.batch_size

        def take(x):
            split = x.reshape(count, len(x) // count, *x.shape[1:])
            return jnp.take(split, rows, axis=0, mode="clip").reshape(-1, *x.shape[1:])

        return self.replace(**{name: jax.tree.map(take, getattr(self, name)) for name in self.BY_ROW})

    def put(self, rows: Int[Array, "N"], others: "Rows") -> "Rows":
        """Return the state with its sequences `rows` replaced by those of `others`; repeated rows must be equal."""
        count = self.batch_size

        def write(old, new):
            split = old.reshape(count, len(old) // count, *old.shape[1:])
            return split.at[rows].set(new.reshape(len(rows), -1, *new.shape[1:])).reshape(old.shape)

        pairs = {name: (getattr(self, name), getattr(others, name)) for name in self.BY_ROW}
        return self.replace(**{name: jax.tree.map(write, *pair) for name, pair in pairs.items()})


class Lengths:
    """Base class of caches with the `length` of each sequence, and optionally its `end`, see `until`."""

    def positions(self, count: int) -> Int[Array, "#B T"]:
        """Return the positions of the next `count` tokens of each sequence."""
        return self.length[:, None] + jnp.arange(count)

    def length_after(self, count: int) -> Int[Array | np.ndarray, "#B"]:
        """Return the length of each sequence after a call with `count` tokens."""
        length = self.length + np.int32(count)
        return length if self.end is None else jnp.minimum(length, self.end)

    def rewind(self, length: Int[Array, "#B"]) -> "Lengths":
        """Return the cache as it was after the first `length` tokens of each sequence."""
        return self.replace(length=length)

    def until(self, end: Int[Array, "B"]) -> "Lengths":
        """Return the cache limited to `end` tokens of each sequence; further tokens of the next call are padding."""
        return self.replace(end=end)


@struct.dataclass
class LayerCache(Lengths):
    """Keys and values of the tokens so far in one layer; see `Cache`."""

    key: Entries
    value: Entries
    length: Int[Array | np.ndarray, "#B"]
    end: Int[Array, "B"] | None = None
    rolling: bool = struct.field(pytree_node=False, default=False)

    @property
    def max_length(self) -> int:
        return self.key.shape[1]

    @property
    def is_empty(self) -> bool:
        """True if the cache is known to be empty at trace time."""
        return isinstance(self.length, np.ndarray) and not self.length.any()

    @property
    def entry_positions(self) -> Int[Array, "#B S"] | None:
        """Positions of the entries, those of unused entries being later than all tokens. None: 0 to S-1."""
        if not self.rolling:
            return None
        entries, last = jnp.arange(self.max_length), self.length[:, None] - 1
        return jnp.where(entries > last, entries, last - (last - entries) % self.max_length)

    def keys_and_values(self, batch_size: int) -> tuple[Float[Array, "B S K C"], Float[Array, "B S K C"]]:
        """Return the keys and values of each sequence and head."""
        pair = (vectors(entries) for entries in (self.key, self.value))
        return tuple(x.reshape(batch_size, -1, *x.shape[1:]).swapaxes(1, 2) for x in pair)

    def append(self, key: Float[Array, "B T K C"], value: Float[Array, "B T K C"]) -> "LayerCache":
        """Return the cache with T more tokens of each sequence; if T > 1, those without room are dropped."""
        after = self.replace(length=self.length_after(key.shape[1]), end=None)
        if self.rolling and self.is_empty and key.shape[1] > self.max_length:  # keep the last tokens of each sequence
            last = after.entry_positions[..., None, None]
            key, value = (jnp.take_along_axis(x, last, axis=1) for x in (key, value))
        return after.replace(key=self._write(self.key, key), value=self._write(self.value, value))

    def _write(self, old, new):
        new = new.astype(old.dtype)
        return jax.tree.map(self._write_arrays, old, quantized(new) if isinstance(old, Quantized) else new)

    def _write_arrays(self, old, new):
        batch, count, heads, *size = new.shape
        new = new.swapaxes(1, 2).reshape(batch * heads, count, *size)
        rest = [0] * len(size)
        if self.is_empty:
            return jax.lax.dynamic_update_slice(old, new, (0, 0, *rest))
        entries = self.positions(count) % self.max_length if self.rolling else self.positions(count)
        if entries.size <= SEPARATE:
            step = len(new) // len(entries)
            # In reverse order: a token without room is clamped to the last entry, and then overwritten.
            for row, i in product(range(len(entries)), reversed(range(count))):
                token = new[row * step : (row + 1) * step, i : i + 1]
                old = jax.lax.dynamic_update_slice(old, token, (row * step, entries[row, i], *rest))
            return old
        indices = jnp.repeat(jnp.broadcast_to(entries, (batch, count)), heads, axis=0)
        return old.at[jnp.arange(len(old))[:, None], indices].set(new, mode="drop", unique_indices=True)


@struct.dataclass
class Cache(Rows, Lengths):
    """Keys and values of the tokens so far in every layer.

    Each sequence of the batch may have its own `length`, so that prompts of different lengths can share a batch.

    Every layer has its own arrays, in which sequences and heads are one axis, N = B x K. They are updated in place and
    read by one batched product, whereas XLA's CPU backend copies slices of larger arrays and arrays of more axes.

    Attributes:
        key, value: S entries of each sequence, in each layer; see `in_8_bits`.
        length: number of tokens of each sequence, or one number for all. A NumPy array is known at trace time, so that
            an empty cache is not read.
        num_kv_heads: number of key/value heads, K.
        end: see `until`.
        rewinds: for a ring buffer, the maximum number of tokens by which it is rewound. The token at position p
            replaces that at p - S, and attention with a window to T more tokens requires S >= window + T - 1 entries
            unless the cache is known to be empty. None: entry p holds position p.
    """

    key: tuple[Entries, ...]
    value: tuple[Entries, ...]
    length: Int[Array | np.ndarray, "#B"]
    num_kv_heads: int = struct.field(pytree_node=False)
    end: Int[Array, "B"] | None = None
    rewinds: int | None = struct.field(pytree_node=False, default=None)

    BY_ROW: ClassVar = ("key", "value")  # `put` does not replace the lengths

    @property
    def batch_size(self) -> int:
        return self.key[0].shape[0] // self.num_kv_heads

    @classmethod
    def empty(
        cls,
        layers: int,
        batch_size: int,
        entries: int,
        num_kv_heads: int,
        head_size: int,
        dtype=jnp.float32,
        rewinds: int | None = None,
    ) -> "Cache":
        """Return an empty cache of `layers` layers with `entries` entries of each sequence."""
        zeros = [jnp.zeros((batch_size * num_kv_heads, entries, head_size), dtype) for _ in range(2 * layers)]
        empty = np.zeros(1, np.int32)
        return cls(tuple(zeros[:layers]), tuple(zeros[layers:]), empty, num_kv_heads, rewinds=rewinds)

    @property
    def layers(self) -> tuple[LayerCache, ...]:
        shared = self.length, self.end, self.rewinds is not None
        return tuple(LayerCache(key, value, *shared) for key, value in zip(self.key, self.value))

    def with_layers(self, layers: Sequence[LayerCache]) -> "Cache":
        """Return the cache with these layers, which must have the same lengths."""
        keys, values = (tuple(getattr(layer, name) for layer in layers) for name in ("key", "value"))
        return self.replace(key=keys, value=values, length=layers[0].length, end=None)

    def rewind(self, length: Int[Array, "#B"]) -> "Cache":
        """Return the cache as it was after the first `length` tokens of each sequence.

        Raise ValueError if a ring buffer is rewound by more than `rewinds` tokens, except in a compiled program, where
        lengths are not known.
        """
        back = self.length - length
        if self.rewinds is not None and not isinstance(back, jax.core.Tracer) and back.max() > self.rewinds:
            raise ValueError(
                f"a ring buffer for rewinding by at most {self.rewinds} tokens is rewound by {back.max()}."
            )
        return self.replace(length=length)

    def in_8_bits(self) -> "Cache":
        """Return this empty cache for keys and values in int8, with a scale for each token and head."""
        arrays = self.key + self.value
        empty = [Quantized(jnp.zeros(x.shape, jnp.int8), jnp.zeros(x.shape[:2], x.dtype)) for x in arrays]
        return self.replace(key=tuple(empty[: len(self.key)]), value=tuple(empty[len(self.key) :]))

    def gather(self, rows: Int[Array, "N"]) -> "Cache":
        length = self.length if len(self.length) == 1 else jnp.take(self.length, rows, mode="clip")
        return super().gather(rows).replace(length=length)


@struct.dataclass
class Memory(Rows):
    """Keys and values of an encoder's output in every layer of a decoder, which are computed once; see `Cache`."""

    key: tuple[Entries, ...]
    value: tuple[Entries, ...]
    mask: Bool[Array, "B S"]

    BY_ROW: ClassVar = ("key", "value", "mask")

    @property
    def layers(self) -> tuple[LayerCache, ...]:
        return tuple(LayerCache(key, value, np.full(1, key.shape[1])) for key, value in zip(self.key, self.value))

    def in_8_bits(self) -> "Memory":
        """Return the memory with keys and values in int8, with a scale for each token and head."""
        return self.replace(key=tuple(map(quantized, self.key)), value=tuple(map(quantized, self.value)))


@struct.dataclass
class States(Rows, Lengths):
    """Cache of a recurrent decoder: its state [B, S, ...] after every token, so that it can be rewound."""

    state: Any
    length: Int[Array, "B"]
    end: Int[Array, "B"] | None = None

    BY_ROW: ClassVar = ("state", "length")

    @classmethod
    def empty(cls, state: Any, max_length: int) -> "States":
        """Return an empty cache for states of this structure, with room for `max_length` tokens of each sequence."""
        state = jax.tree.map(lambda a: jnp.zeros((len(a), max_length, *a.shape[1:]), a.dtype), state)
        return cls(state, jnp.zeros(len(jax.tree.leaves(state)[0]), jnp.int32))

    def last(self, first: Any) -> Any:
        """Return the current state, or `first` for sequences without tokens."""

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

        return States(jax.tree.map(write, self.state, state), self.length_after(count))
