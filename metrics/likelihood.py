"""Cross-entropy, perplexity and bits per unit."""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def cross_entropy(
    logits: Float[Array, "*N V"], labels: Int[Array, "*N"], label_smoothing: float = 0.0
) -> Float[Array, "*N"]:
    """Return -log p(label) of each example, in nats, as float32; nan where the label is not a class index.

    `label_smoothing` is the probability mass that is spread evenly over all classes (arXiv 1512.00567, section 7).
    """
    logits = logits.astype(jnp.float32)
    highest = jax.lax.stop_gradient(logits.max(axis=-1, keepdims=True))
    logits = logits - jnp.where(jnp.isfinite(highest), highest, 0)
    normalizer = jnp.log(jnp.exp(logits).sum(axis=-1))
    # Selected and not gathered: the gradient of a gather is a scatter into another array of the size of the logits.
    place = jnp.arange(logits.shape[-1]) == labels[..., None]
    chosen = jax.lax.select(place, logits, jnp.zeros_like(logits)).sum(axis=-1)
    loss = normalizer - jnp.where((labels >= 0) & (labels < logits.shape[-1]), chosen, jnp.nan)
    if label_smoothing:
        loss = (1 - label_smoothing) * loss + label_smoothing * (normalizer - logits.mean(axis=-1))
    return loss


def perplexity(nats: float) -> float:
    """Return exp(nats) of a mean cross-entropy: inf if it overflows, nan if `nats` is nan."""
    return math.inf if nats > 709 else math.exp(nats)


def bits(nats: float, per: int | float) -> float:
    """Convert nats per token to bits per unit (byte, character), where a token has `per` units on average."""
    return nats / math.log(2) / per
