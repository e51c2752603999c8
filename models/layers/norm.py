"""Normalisation over the width. Statistics are float32 whatever the input is."""

from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def standardise(x: Float[Array, "*B D"], epsilon: float) -> Float[Array, "*B D"]:
    """(x - mean) / sqrt(variance + epsilon) of each vector. Its derivative needs the result and the deviation alone."""
    return _standardise(x, epsilon)[0]


def _standardise(x, epsilon):
    centred = x - x.mean(axis=-1, keepdims=True)
    inverse = jax.lax.rsqrt(jnp.square(centred).mean(axis=-1, keepdims=True) + epsilon)
    return centred * inverse, inverse


@standardise.defjvp
def _(epsilon, primals, tangents):
    (x,), (t,) = primals, tangents
    out, inverse = _standardise(x, epsilon)
    mean, along = t.mean(axis=-1, keepdims=True), (t * out).mean(axis=-1, keepdims=True)
    return out, inverse * (t - mean - out * along)


class LayerNorm(nn.Module):
    """(x - mean) / sqrt(variance + epsilon) * scale + bias (arXiv 1607.06450).

    Attributes:
        epsilon: part of the model: 1e-12 in BERT and ViT, 1e-5 in GPT-2, 1e-6 in MAE.
        use_bias: without it, only the scale is learned.
    """

    epsilon: float
    use_bias: bool = True

    @nn.compact
    def __call__(self, x: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
        scale = self.param("scale", nn.initializers.ones, (x.shape[-1],))
        out = standardise(x.astype(jnp.float32), self.epsilon) * scale
        if self.use_bias:
            out = out + self.param("bias", nn.initializers.zeros, (x.shape[-1],))
        return out.astype(x.dtype)


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + epsilon) * scale (arXiv 1910.07467).

    Attributes:
        epsilon: part of the model: 1e-6 in T5 and Llama.
    """

    epsilon: float

    @nn.compact
    def __call__(self, x: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
        scale = self.param("scale", nn.initializers.ones, (x.shape[-1],))
        mean_square = jnp.square(x.astype(jnp.float32)).mean(axis=-1, keepdims=True)
        return (x * jax.lax.rsqrt(mean_square + self.epsilon) * scale).astype(x.dtype)
