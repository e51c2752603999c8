"""How much probability a model gives to what is true."""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def cross_entropy(
    logits: Float[Array, "*N V"], labels: Int[Array, "*N"], label_smoothing: float = 0.0
) -> Float[Array, "*N"]:
    """-log p(label) of each example, in nats, float32; nan where the label is no class.

    Args:
        logits: of any float type.
        labels: indices of the true classes.
        label_smoothing: this part of the target is spread evenly over all classes (arXiv 1512.00567, section 7).
    """
    logits, labels = logits.astype(jnp.float32), jnp.where(labels < 0, logits.shape[-1], labels)  # -1 is not the last
    normaliser = jax.nn.logsumexp(logits, axis=-1)
    loss = normaliser - jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
    if label_smoothing:
        loss = (1 - label_smoothing) * loss + label_smoothing * (normaliser - logits.mean(axis=-1))
    return loss


def perplexity(nats: float) -> float:
    """exp of a mean cross-entropy in nats; inf where that is too large for a float, nan of nan."""
    return math.inf if nats > 709 else math.exp(nats)


def bits(nats: float, per: float) -> float:
    """A mean cross-entropy in nats a token as bits a unit (byte, character), of which a token has `per` on average."""
    return nats / math.log(2) / per
