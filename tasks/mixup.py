"""Mixup and CutMix: each image and its label are mixed with the next ones of the batch."""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key


def kept(
    key: Key[Array, ""], size: tuple[int, int], mixup: float, cutmix: float
) -> tuple[Float[Array, "height width 1"], Float[Array, ""]]:
    """Return the mixing ratio of each pixel, drawn once per batch, and its mean, the ratio of labels.

    If both `mixup` and `cutmix` are above 0, each is applied with probability 1/2 (DeiT, arXiv 2012.12877).

    Args:
        size: height and width.
        mixup: parameter a of Beta(a, a); the ratio of all pixels is the larger of x and 1 - x (arXiv 1710.09412).
        cutmix: parameter a of Beta(a, a), the fraction of the image outside of a box whose center is uniform; the
            pixels in the box are replaced (arXiv 1905.04899, section 3.1).
    """
    share, inside = jnp.float32(1), jnp.zeros((*size, 1), bool)
    if mixup:
        share = jax.random.beta(key, mixup, mixup)
        share = jnp.maximum(share, 1 - share)
    if cutmix:
        keys = jax.random.split(jax.random.fold_in(key, 1), 3)
        side = jnp.sqrt(1 - jax.random.beta(keys[0], cutmix, cutmix))
        center = jax.random.uniform(keys[1], (2,))
        row, column = (
            jnp.abs((jnp.arange(length) + 0.5) / length - middle) < side / 2 for length, middle in zip(size, center)
        )
        inside = (row[:, None] & column)[..., None]
        if mixup:
            cut = jax.random.bernoulli(keys[2])
            share, inside = jnp.where(cut, 1, share), inside & cut
    pixels = jnp.where(inside, 0, share)
    return pixels, pixels.mean()


@partial(jax.jit, static_argnums=(2, 3, 4))
def mixed(
    key: Key[Array, ""], batch: dict[str, Array], num_classes: int, mixup: float, cutmix: float
) -> dict[str, Array]:
    """Return the batch with mixed images `image` [B, h, w, c] and the probabilities `target` [B, V] of classes."""
    image = batch["image"]
    pixels, share = kept(key, image.shape[1:3], mixup, cutmix)
    target = mix(jax.nn.one_hot(batch["label"], num_classes), share)
    return batch | {"image": mix(image, pixels.astype(image.dtype)), "target": target}


def mix(values: Float[Array, "B *N"], part: Float[Array, "..."]) -> Float[Array, "B *N"]:
    """Return the weighted mean of each example's values and the next one's."""
    return part * values + (1 - part) * jnp.roll(values, 1, axis=0)
