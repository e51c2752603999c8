"""The key-value cache of incremental decoding: an explicit pytree that goes into a decoder and comes out of it."""

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int


@struct.dataclass
class Cache:
    """Keys and values of the tokens seen so far, and how many there are of them in each row.

    Rows advance on their own, so that prompts of different lengths share a batch: every row writes at its own `length`,
    and what lies beyond it is never read. A stack of layers holds one `Cache` whose arrays have a leading layer axis.
    """

    key: Float[Array, "*L B S K C"]
    value: Float[Array, "*L B S K C"]
    length: Int[Array, "*L B"]

    @classmethod
    def empty(
        cls, layers: int, batch_size: int, max_length: int, num_kv_heads: int, head_size: int, dtype=jnp.float32
    ) -> "Cache":
        """A cache of `layers` layers with room for `max_length` tokens in each row."""
        shape = (layers, batch_size, max_length, num_kv_heads, head_size)
        return cls(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype), jnp.zeros((layers, batch_size), jnp.int32))

    @property
    def max_length(self) -> int:
        return self.key.shape[-3]

    def positions(self, count: int) -> Int[Array, "*L B T"]:
        """The positions that the next `count` tokens of each row take."""
        return self.length[..., None] + jnp.arange(count)

    def append(self, key: Float[Array, "B T K C"], value: Float[Array, "B T K C"]) -> "Cache":
        """One layer's cache with `T` more tokens in each row. Rows must have room: a write never moves others."""
        write = jax.vmap(lambda old, new, start: jax.lax.dynamic_update_slice(old, new, (start, 0, 0)))
        return Cache(
            write(self.key, key.astype(self.key.dtype), self.length),
            write(self.value, value.astype(self.value.dtype), self.length),
            self.length + key.shape[1],
        )

    def gather(self, rows: Int[Array, "N"]) -> "Cache":
        """The cache whose row n is this one's row `rows[n]`: rows may be left out, repeated and reordered."""
        return Cache(
            jnp.take(self.key, rows, axis=-4, mode="clip"),
            jnp.take(self.value, rows, axis=-4, mode="clip"),
            jnp.take(self.length, rows, axis=-1, mode="clip"),
        )

    def rewind(self, length: Int[Array, "B"]) -> "Cache":
        """The cache after no more than the first `length` tokens of each row."""
        return self.replace(length=jnp.broadcast_to(length, self.length.shape))
