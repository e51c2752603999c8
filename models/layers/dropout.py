"""Dropout that is active where a random key is given."""

import flax.linen as nn
from jaxtyping import Array, Float


class Dropout(nn.Dropout):
    """Dropout if there is a "dropout" rng, and the identity otherwise."""

    def __call__(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        return super().__call__(x, deterministic=not self.has_rng("dropout"))
