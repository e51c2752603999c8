"""Dropout by a hash of positions instead of random bits, which is fast on every platform and equal on all of them."""

from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key


class Dropout(nn.Module):
    """Dropout if there is a "dropout" rng, and the identity otherwise (arXiv 1207.0580).

    Attributes:
        rate: probability to set a value to zero, below 1; the others are divided by 1 - rate.
    """

    rate: float

    def __call__(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        if not self.rate or not self.has_rng("dropout"):
            return x
        return dropped(self.rate, x, seed_of(self.make_rng("dropout")))


def seed_of(key: Key[Array, ""]) -> Int[Array, ""]:
    """Return 32 random bits."""
    return jax.lax.bitcast_convert_type(jax.random.bits(key), jnp.int32)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def dropped(rate: float, x: Float[Array, "B ..."], seed: Int[Array, ""]) -> Float[Array, "B ..."]:
    """Set values to zero with a probability, and divide the others by its complement."""
    place = jnp.int32(0)
    for axis, count in list(enumerate(x.shape))[1:]:
        place = place * count + jax.lax.broadcasted_iota(jnp.int32, x.shape, axis)
    kept = keeps(rate, seed, jax.lax.broadcasted_iota(jnp.int32, x.shape, 0), place)
    return jnp.where(kept, x / (1 - rate), 0)


@dropped.defjvp
def _(rate, primals, tangents):
    x, seed = primals
    # So that the compiler computes in the backward pass again which values are kept.
    return dropped(rate, x, seed), dropped(rate, tangents[0], jax.lax.optimization_barrier(seed))


def keeps(rate: float, seed: Int[Array, ""], part: Int[Array, "..."], place: Int[Array, "..."]) -> Bool[Array, "..."]:
    """Return whether values are kept, with probability 1 - rate, by their positions.

    The bits are those of a hash function with two rounds of multiplication, https://github.com/skeeto/hash-prospector.

    Args:
        rate: probability of False.
        seed: 32 random bits.
        part, place: number of the part, such as an example, and number of the value in it, modulo 2**32.
    """
    bits = _mixed(place ^ _mixed(seed + part * jnp.int32(-1640531527)))
    return bits >= jnp.int32(round(rate * 2**32) - 2**31)


def _mixed(x: Int[Array, "..."]) -> Int[Array, "..."]:
    """Return a bijective function of 32 bits, each of which depends on all of them."""
    shift = jax.lax.shift_right_logical
    x = (x ^ shift(x, jnp.int32(16))) * jnp.int32(0x7FEB352D)
    x = (x ^ shift(x, jnp.int32(15))) * jnp.int32(0x846CA68B - 2**32)
    return x ^ shift(x, jnp.int32(16))
