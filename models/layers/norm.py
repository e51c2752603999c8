"""Normalisation over the width, or over the tokens of a batch. Statistics are float32 whatever the input is."""

from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT
from jaxtyping import Array, Bool, Float


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


class TokenNorm(nn.Module):
    """A norm of each feature over all tokens of the batch: over those where `mask` is True, if there is one.

    In training, which is when the collection "statistics" is mutable, running statistics follow the batches': on many
    devices those of the whole batch, of accumulated parts each part's in turn. Otherwise they take the batch's place.

    Attributes:
        epsilon: part of the model.
        momentum: what running statistics keep of themselves in a step.
        use_affine: a scale and a bias are learned.
    """

    epsilon: float
    momentum: float = 0.9
    use_affine: bool = True

    def running(self, name, *init):
        return self.variable("statistics", name, *init)

    def follow(self, running, value, shares):
        """The running mean after a batch; one without any real token leaves it as it is."""
        if not self.is_initializing():
            new = self.momentum * running.value + (1 - self.momentum) * value
            running.value = jnp.where(shares.any(), new, running.value)

    def affine(self, x, dtype):
        if not self.use_affine:
            return x.astype(dtype)
        scale = self.param("scale", nn.initializers.ones, x.shape[-1:])
        return (x * scale + self.param("bias", nn.initializers.zeros, x.shape[-1:])).astype(dtype)


def normalise(norm: nn.Module, x: Float[Array, "B T D"], mask: Bool[Array, "#B T"] | None) -> Float[Array, "B T D"]:
    """`norm(x)`; a norm over tokens is told which of them are real."""
    return norm(x, mask) if isinstance(norm, TokenNorm) else norm(x)


def _shares(x, mask):
    """What each token counts in a mean: [*B, 1], in all 1."""
    real = jnp.ones(x.shape[:-1]) if mask is None else jnp.broadcast_to(mask, x.shape[:-1]).astype(jnp.float32)
    return (real / jnp.maximum(real.sum(), 1))[..., None]


def _mean(x, shares):
    return (x * shares).sum(axis=tuple(range(x.ndim - 1)))


class BatchNorm(TokenNorm):
    """(x - mean) / sqrt(variance + epsilon) * scale + bias (arXiv 1502.03167). The running variance is unbiased.

    Attributes:
        frozen: running statistics take the batch's place in training too, and stay as they are.
    """

    frozen: bool = False

    @nn.compact
    def __call__(self, x: Float[Array, "*B D"], mask: Bool[Array, "..."] | None = None) -> Float[Array, "*B D"]:
        wide, mean = x.astype(jnp.float32), self.running("mean", jnp.zeros, x.shape[-1:])
        variance = self.running("variance", jnp.ones, x.shape[-1:])
        used = mean.value, variance.value
        if self.is_mutable_collection("statistics") and not self.frozen:
            shares = _shares(x, mask)
            centre = _mean(wide, shares)
            used = centre, _mean(jnp.square(wide - centre), shares)
            self.follow(mean, centre, shares)
            unbiased = used[1] / jnp.maximum(1 - shares.max(), shares.max())  # n / (n - 1)
            self.follow(variance, unbiased, shares)
        return self.affine((wide - used[0]) * jax.lax.rsqrt(used[1] + self.epsilon), x.dtype)


class PowerNorm(TokenNorm):
    """x / psi * scale + bias, psi^2 being the running mean of x^2 (arXiv 2003.07845, algorithm 2).

    psi is that of the steps before, so that no batch's statistics are in the output. What their derivative would be is
    approximated by a running mean, see `power`. For the first `warmup` steps, in which psi changes fast, the batch's
    own takes its place, as in the authors' code.

    Attributes:
        warmup: steps.
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
    """x times 1 / psi, with an approximate derivative (arXiv 2003.07845, algorithm 2).

    `nu` follows the mean of gradient times result over the tokens, each with its share: of a loss that is a sum, as the
    objectives' are, it does not depend on how many there are. What comes out as its own derivative is what it is after
    the step: Flax's collection "_overwrite_with_gradient" takes that as its new value.
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
