"""How often the right class is found."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def correct(logits: Float[Array, "*N V"], labels: Int[Array, "*N"]) -> Bool[Array, "*N"]:
    """Whether the highest logit is the label's; of equal ones the first counts."""
    return logits.argmax(axis=-1) == labels


def correct_top_k(logits: Float[Array, "*N V"], labels: Int[Array, "*N"], k: int) -> Bool[Array, "*N"]:
    """Whether fewer than `k` other classes have a logit at least as high as the label's."""
    own = jnp.take_along_axis(logits, labels[..., None], axis=-1)
    return (logits >= own).sum(axis=-1) <= k
