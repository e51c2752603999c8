"""Normalization over the width or over the tokens of a batch, with statistics in float32 whatever the input's dtype."""

from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT
from jaxtyping import Array, Bool, Float


@partial(jax.custom_jvp, nondiff_argnums=(3, 4))
def standardize(
    x: Float[Array, "*B D"],
    scale: Float[Array, "D"] | None,
    bias: Float[Array, "D"] | None,
    epsilon: float,
    centered: bool = True,
) -> Float[Array, "*B D"]:
    """Return (x - mean) / sqrt(variance + epsilon) * scale + bias of each vector.

    If not `centered`, the mean is taken to be 0. The derivative needs only the arguments and two numbers per vector.
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
    # Without the barrier, XLA's GPU backend recomputes them and writes a float32 array for the gradient of the scale.
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
        epsilon: constant added to the variance; 1e-12 in BERT and ViT, 1e-5 in GPT-2, 1e-6 in MAE.
        use_bias: learn a bias beside the scale.
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

    When the collection "statistics" is mutable, as in training, the statistics of the batch are used and update the
    running statistics (with gradient accumulation, of each micro-batch in turn). Otherwise the running ones are used.

    Attributes:
        epsilon: constant added to the variance or the mean square.
        momentum: weight of the old running statistics in an update.
        use_affine: learn a scale and a bias.
    """

    epsilon: float
    momentum: float = 0.9
    use_affine: bool = True

    def running(self, name, *init):
        return self.variable("statistics", name, *init)

    def follow(self, running, value, shares):
        """Update a running mean with a batch; a batch without any real token leaves it unchanged."""
        if not self.is_initializing():
            new = self.momentum * running.value + (1 - self.momentum) * value
            running.value = jnp.where(shares.any(), new, running.value)

    def affine(self, x, dtype):
        if not self.use_affine:
            return x.astype(dtype)
        scale = self.param("scale", nn.initializers.ones, x.shape[-1:])
        return (x * scale + self.param("bias", nn.initializers.zeros, x.shape[-1:])).astype(dtype)


def normalize(norm: nn.Module, x: Float[Array, "B T D"], mask: Bool[Array, "#B T"] | None) -> Float[Array, "B T D"]:
    """Return `norm(x)`; a norm over tokens gets the mask, which is True for real tokens."""
    return norm(x, mask) if isinstance(norm, TokenNorm) else norm(x)


def _shares(x, mask):
    """Return the weight of each token in a mean, [*B, 1]; the weights sum to 1."""
    real = jnp.ones(x.shape[:-1]) if mask is None else jnp.broadcast_to(mask, x.shape[:-1]).astype(jnp.float32)
    return (real / jnp.maximum(real.sum(), 1))[..., None]


def _mean(x, shares):
    return (x * shares).sum(axis=tuple(range(x.ndim - 1)))


@jax.custom_jvp
def _moments(x, shares):
    """Return the mean and the variance; without its own derivative, XLA would read x again for a term that is 0."""
    center = _mean(x, shares)
    return center, _mean(jnp.square(x - center), shares)


@_moments.defjvp
def _(primals, tangents):
    (x, shares), (t, _) = primals, tangents
    center, variance = _moments(x, shares)
    return (center, variance), (_mean(t, shares), 2 * _mean((x - center) * t, shares))


class BatchNorm(TokenNorm):
    """Batch normalization (arXiv 1502.03167); the running variance is unbiased.

    Attributes:
        frozen: use the running statistics in training too, and do not update them.
    """

    frozen: bool = False

    @nn.compact
    def __call__(self, x: Float[Array, "*B D"], mask: Bool[Array, "..."] | None = None) -> Float[Array, "*B D"]:
        wide, mean = x.astype(jnp.float32), self.running("mean", jnp.zeros, x.shape[-1:])
        variance = self.running("variance", jnp.ones, x.shape[-1:])
        used = mean.value, variance.value
        if self.is_mutable_collection("statistics") and not self.frozen:
            shares = _shares(x, mask)
            used = _moments(wide, shares)
            self.follow(mean, used[0], shares)
            unbiased = used[1] / jnp.maximum(1 - shares.max(), shares.max())  # n / (n - 1)
            self.follow(variance, unbiased, shares)
        return self.affine((wide - used[0]) * jax.lax.rsqrt(used[1] + self.epsilon), x.dtype)


class PowerNorm(TokenNorm):
    """Power normalization: x / psi * scale + bias, psi^2 being the running mean of x^2 (arXiv 2003.07845, algorithm 2).

    psi is that of the previous steps, so that the output does not depend on the batch's statistics; the term that they
    would add to the derivative is approximated by a running mean, see `power`. In the first `warmup` steps, in which
    psi changes fast, the batch's own psi is used, as in the authors' code.

    Attributes:
        warmup: number of steps that use the batch's statistics.
    """

    warmup: int = 4000

    @nn.compact
    def __call__(self, x: Float[Array, "*B D"], mask: Bool[Array, "..."] | None = None) -> Float[Array, "*B D"]:
        wide, square = x.astype(jnp.float32), self.running("square", jnp.ones, x.shape[-1:])
        steps = self.running("steps", jnp.zeros, (), jnp.int32)
        nu = self.variable(OVERWRITE_WITH_GRADIENT, "nu", jnp.zeros, x.shape[-1:])
        used, shares = square.value, _shares(x, mask)
        if self.is_mutable_collection("statistics"):
            batch = _mean(jnp.square(wide), shares)
            used = jnp.where(steps.value < self.warmup, batch, used)
            self.follow(square, batch, shares)
            if not self.is_initializing():
                steps.value = steps.value + 1
        return self.affine(power(wide, jax.lax.rsqrt(used + self.epsilon), nu.value, shares, self.momentum), x.dtype)


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def power(
    x: Float[Array, "*B D"],
    inverse: Float[Array, "D"],
    nu: Float[Array, "D"],
    shares: Float[Array, "*B 1"],
    momentum: float,
) -> Float[Array, "*B D"]:
    """Return x / psi, with an approximate derivative (arXiv 2003.07845, algorithm 2).

    `nu` is a running mean of gradient times result over the tokens, weighted by `shares`; for a loss that is a sum over
    tokens, it does not depend on their number. Its value after the step is returned as its derivative, which Flax's
    collection "_overwrite_with_gradient" takes as the new value.
    """
    return x * inverse


def _power_forward(x, inverse, nu, shares, momentum):
    out = x * inverse
    return out, (out, inverse, nu, shares)


def _power_backward(momentum, kept, gradient):
    out, inverse, nu, shares = kept
    squares, products = _mean(jnp.square(out), shares), _mean(gradient * out, shares)
    after = nu * (1 - (1 - momentum) * squares) + (1 - momentum) * products
    return (gradient - nu * out) * inverse, jnp.zeros_like(inverse), after, jnp.zeros_like(shares)


power.defvjp(_power_forward, _power_backward)
