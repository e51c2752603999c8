"""Normalization over the width or over the tokens of a batch, with statistics in float32 for inputs of any dtype."""

from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT
from jaxtyping import Array, Bool, Float

Vector = Float[Array, "D"]


@partial(jax.custom_jvp, nondiff_argnums=(3, 4))
def standardize(
    x: Float[Array, "*B D"], scale: Vector | None, bias: Vector | None, epsilon: float, centered: bool = True
) -> Float[Array, "*B D"]:
    """Return (x - mean) / sqrt(variance + epsilon) * scale + bias of each vector.

    If not `centered`, the mean is taken to be 0. The derivative needs only the arguments and two statistics per vector.
    """
    return _standardized(x, *_statistics(x, epsilon, centered), scale, bias).astype(x.dtype)


def _statistics(x, epsilon, centered):
    """Return the mean of each vector, and 1 / sqrt(variance + epsilon)."""
    x = x.astype(jnp.float32)
    mean = x.mean(axis=-1, keepdims=True) if centered else 0.0
    return mean, jax.lax.rsqrt(jnp.square(x - mean).mean(axis=-1, keepdims=True) + epsilon)


def _standardized(x, mean, inverse, scale=None, bias=None):
    out = (x.astype(jnp.float32) - mean) * inverse
    out = out if scale is None else out * scale
    return out if bias is None else out + bias


@standardize.defjvp
def _(epsilon, centered, primals, tangents):
    (x, scale, bias), (t, t_scale, t_bias) = primals, tangents
    statistics = _statistics(x, epsilon, centered)
    # Without the barrier, XLA's GPU backend recomputes them, and writes a float32 array for the gradient of the scale.
    mean, inverse = jax.lax.optimization_barrier(statistics)
    out, t = _standardized(x, mean, inverse), t.astype(jnp.float32)
    center = t.mean(axis=-1, keepdims=True) if centered else 0.0
    t = inverse * (t - center - out * (t * out).mean(axis=-1, keepdims=True))
    t = t if scale is None else t * scale + out * t_scale
    t = t if t_bias is None else t + t_bias
    return _standardized(x, *statistics, scale, bias).astype(x.dtype), t.astype(x.dtype)


class LayerNorm(nn.Module):
    """Layer normalization: (x - mean) / sqrt(variance + epsilon) * scale + bias (arXiv 1607.06450).

    Attributes:
        epsilon: constant added to the variance; 1e-12 in BERT, 1e-6 in ViT, 1e-5 in GPT-2.
        use_bias: whether to learn a bias in addition to the scale.
    """

    epsilon: float
    use_bias: bool = True

    @nn.compact
    def __call__(self, x: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
        scale = self.param("scale", nn.initializers.ones, x.shape[-1:])
        bias = self.param("bias", nn.initializers.zeros, x.shape[-1:]) if self.use_bias else None
        return standardize(x, scale, bias, self.epsilon)


class RMSNorm(nn.Module):
    """Root-mean-square normalization: x / sqrt(mean(x^2) + epsilon) * scale (arXiv 1910.07467)."""

    epsilon: float

    @nn.compact
    def __call__(self, x: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
        return standardize(x, self.param("scale", nn.initializers.ones, x.shape[-1:]), None, self.epsilon, False)


class TokenNorm(nn.Module):
    """Base class of norms of each feature over the tokens of the batch, or over those where a mask is True.

    When the collection "statistics" is mutable, as in training, the batch's statistics are used, and update the running
    statistics (with gradient accumulation, once for each micro-batch). Otherwise the running statistics are used.

    Attributes:
        epsilon: constant added to the variance or the mean square.
        momentum: weight of the old running statistics in an update.
    """

    epsilon: float
    momentum: float = 0.9

    def update(self, running, value, weights):
        """Update a running mean; a batch without any real token leaves it unchanged."""
        if not self.is_initializing():
            new = self.momentum * running.value + (1 - self.momentum) * value
            running.value = jnp.where(weights.any(), new, running.value)

    def affine(self, x):
        """Return a learned scale and bias."""
        initializers = {"scale": nn.initializers.ones, "bias": nn.initializers.zeros}
        return tuple(self.param(name, initializer, x.shape[-1:]) for name, initializer in initializers.items())


def normalize(norm: nn.Module, x: Float[Array, "B T D"], mask: Bool[Array, "#B T"] | None) -> Float[Array, "B T D"]:
    """Return `norm(x)`; a norm over tokens is given the mask, which is True for real tokens."""
    return norm(x, mask) if isinstance(norm, TokenNorm) else norm(x)


def _token_weights(x, mask):
    """Return the weight of each token in a mean [*B, 1]; the weights sum to 1."""
    real = jnp.ones(x.shape[:-1]) if mask is None else jnp.broadcast_to(mask, x.shape[:-1]).astype(jnp.float32)
    return (real / jnp.maximum(real.sum(), 1))[..., None]


def _mean(x, weights):
    return (x * weights).sum(axis=tuple(range(x.ndim - 1)))


@partial(jax.custom_jvp, nondiff_argnums=(4,))
def standardize_tokens(
    x: Float[Array, "*B D"],
    scale: Vector | None,
    bias: Vector | None,
    weights: Float[Array, "*B 1"],
    epsilon: float,
) -> tuple[Float[Array, "*B D"], Vector, Vector]:
    """Return (x - mean) / sqrt(variance + epsilon) * scale + bias, and the mean and the variance of each feature.

    They are weighted over the vectors. The derivative needs a single pass for all sums over the vectors.
    """
    wide = x.astype(jnp.float32)
    mean = _mean(wide, weights)
    variance = _mean(jnp.square(wide - mean), weights)
    out = _standardized(x, mean, jax.lax.rsqrt(variance + epsilon), scale, bias)
    return out.astype(x.dtype), mean, variance


@standardize_tokens.defjvp
def _(epsilon, primals, tangents):
    (x, scale, _, weights), (t, t_scale, t_bias, _) = primals, tangents
    results = standardize_tokens(*primals, epsilon)
    _, mean, variance = results
    inverse, t = jax.lax.rsqrt(variance + epsilon), t.astype(jnp.float32)
    out = _standardized(x, mean, inverse)
    first, second = _mean(t, weights), _mean(t * out, weights)
    # In this form, the gradients of mean and variance are the same sums as those of scale and bias.
    factor = inverse if scale is None else inverse * scale
    of_out, constant = -factor * second, -factor * first
    if scale is not None:
        of_out, constant = of_out + t_scale, constant + t_bias
    t = factor * t + out * of_out + constant
    return results, (t.astype(x.dtype), first, 2 * second / inverse)


class BatchNorm(TokenNorm):
    """Batch normalization (arXiv 1502.03167) with an unbiased running variance.

    Attributes:
        use_affine: whether to learn a scale and a bias.
        frozen: whether the running statistics are used in training too, and are not updated.
    """

    use_affine: bool = True
    frozen: bool = False

    @nn.compact
    def __call__(self, x: Float[Array, "*B D"], mask: Bool[Array, "..."] | None = None) -> Float[Array, "*B D"]:
        mean = self.variable("statistics", "mean", jnp.zeros, x.shape[-1:])
        variance = self.variable("statistics", "variance", jnp.ones, x.shape[-1:])
        affine = self.affine(x) if self.use_affine else (None, None)
        if self.frozen or not self.is_mutable_collection("statistics"):
            inverse = jax.lax.rsqrt(variance.value + self.epsilon)
            return _standardized(x, mean.value, inverse, *affine).astype(x.dtype)
        weights = _token_weights(x, mask)
        out, *used = standardize_tokens(x, *affine, weights, self.epsilon)
        self.update(mean, used[0], weights)
        unbiased = used[1] / jnp.maximum(1 - weights.max(), weights.max())  # n / (n - 1)
        self.update(variance, unbiased, weights)
        return out


class PowerNorm(TokenNorm):
    """Power normalization: x / psi * scale + bias, with the running mean psi^2 of x^2 (arXiv 2003.07845, algorithm 2).

    psi is that of the previous steps, so that the output does not depend on the batch's statistics; a running mean
    approximates the term that they would add to the derivative, see `power`. In the first `warmup` steps, in which psi
    changes fast, the batch's own psi is used, as in the authors' code.
    """

    warmup: int = 4000

    @nn.compact
    def __call__(self, x: Float[Array, "*B D"], mask: Bool[Array, "..."] | None = None) -> Float[Array, "*B D"]:
        wide, square = x.astype(jnp.float32), self.variable("statistics", "square", jnp.ones, x.shape[-1:])
        steps = self.variable("statistics", "steps", jnp.zeros, (), jnp.int32)
        nu = self.variable(OVERWRITE_WITH_GRADIENT, "nu", jnp.zeros, x.shape[-1:])
        used, weights = square.value, _token_weights(x, mask)
        if self.is_mutable_collection("statistics"):
            batch = _mean(jnp.square(wide), weights)
            used = jnp.where(steps.value < self.warmup, batch, used)
            self.update(square, batch, weights)
            if not self.is_initializing():
                steps.value = steps.value + 1
        out = power(wide, jax.lax.rsqrt(used + self.epsilon), nu.value, weights, self.momentum)
        scale, bias = self.affine(x)
        return (out * scale + bias).astype(x.dtype)


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def power(
    x: Float[Array, "*B D"], inverse: Vector, nu: Vector, weights: Float[Array, "*B 1"], momentum: float
) -> Float[Array, "*B D"]:
    """Return x / psi, with an approximate derivative (arXiv 2003.07845, algorithm 2).

    `nu` is a running mean, over the tokens with `weights`, of the gradient times the result; for a loss that is a sum
    over tokens, it does not depend on their number. Its updated value is returned as its derivative, which replaces it
    because it is in Flax's collection "_overwrite_with_gradient".
    """
    return x * inverse


def _power_forward(x, inverse, nu, weights, momentum):
    out = x * inverse
    return out, (out, inverse, nu, weights)


def _power_backward(momentum, residuals, gradient):
    out, inverse, nu, weights = residuals
    squares, products = _mean(jnp.square(out), weights), _mean(gradient * out, weights)
    after = nu * (1 - (1 - momentum) * squares) + (1 - momentum) * products
    return (gradient - nu * out) * inverse, jnp.zeros_like(inverse), after, jnp.zeros_like(weights)


power.defvjp(_power_forward, _power_backward)
