"""Dropout by a hash of positions instead of random bits: fast on every platform, with the same result on all."""

from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from lineage.models.kernels.compiler import recomputed


class Dropout(nn.Module):
    """Dropout if there is a "dropout" rng, and the identity otherwise (arXiv 1207.0580).

    Values are set to zero with the probability `rate` < 1; the others are divided by 1 - rate.
    """

    rate: float

    def __call__(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        if not self.rate or not self.has_rng("dropout"):
            return x
        return dropped(self.rate, x, seed_of(self.make_rng("dropout")))


def seed_of(key: Key[Array, ""]) -> Int[Array, ""]:
    """Return 32 random bits."""
    return jax.lax.bitcast_convert_type(jax.random.bits(key, dtype=jnp.uint32), jnp.int32)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def dropped(rate: float, x: Float[Array, "B ..."], seed: Int[Array, ""]) -> Float[Array, "B ..."]:
    """Set values to zero with probability `rate`, and divide the others by 1 - `rate`."""
    place = jnp.int32(0)
    for axis, count in list(enumerate(x.shape))[1:]:
        place = place * count + jax.lax.broadcasted_iota(jnp.int32, x.shape, axis)
    kept = keeps(rate, seed, jax.lax.broadcasted_iota(jnp.int32, x.shape, 0), place)
    return jnp.where(kept, x / (1 - rate), 0)


@dropped.defjvp
def _(rate, primals, tangents):
    x, seed = primals
    return dropped(rate, x, seed), dropped(rate, tangents[0], recomputed(seed))  # recomputes the mask


def keeps(rate: float, seed: Int[Array, ""], part: Int[Array, "..."], place: Int[Array, "..."]) -> Bool[Array, "..."]:
    """Return the mask of the values that dropout keeps, with probability 1 - rate, as a function of their positions.

    `seed` is 32 random bits, `part` the index of a part, such as an example, and `place` that of a value within it,
    modulo 2**32. The hash has two rounds of multiplication, see https://github.com/skeeto/hash-prospector.
    """
    bits = _mix(place ^ _mix(seed + part * jnp.int32(-1640531527)))
    return bits >= jnp.int32(round(rate * 2**32) - 2**31)


def _mix(x: Int[Array, "..."]) -> Int[Array, "..."]:
    """Return a bijective hash of 32 bits."""
    shift = jax.lax.shift_right_logical
    x = (x ^ shift(x, jnp.int32(16))) * jnp.int32(0x7FEB352D)
    x = (x ^ shift(x, jnp.int32(15))) * jnp.int32(0x846CA68B - 2**32)
    return x ^ shift(x, jnp.int32(16))
