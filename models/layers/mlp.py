"""The position-wise MLP and its activation functions."""

import math
from collections.abc import Callable
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from lineage.models.kernels.compiler import recomputed
from lineage.models.layers.dropout import Dropout
from lineage.models.layers.linear import Linear


def _with_derivative(derivative):
    """Return a decorator that defines the derivative of an elementwise function.

    Otherwise XLA's CPU backend stores, or recomputes, half a dozen intermediate results in loops that it does not
    vectorize.
    """

    def decorate(function):
        activation = jax.custom_jvp(function)

        @activation.defjvp
        def _(primals, tangents):
            (x,), (t,) = primals, tangents
            return function(x), (derivative(recomputed(x)) * t).astype(x.dtype)

        return activation

    return decorate


def _normal_cdf(x):
    return 0.5 + 0.5 * jax.lax.erf(x * math.sqrt(0.5))


def _gelu_derivative(x):
    x = x.astype(jnp.float32)
    return _normal_cdf(x) + x * jnp.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)


def _tanh_sigmoid(x):
    return jax.nn.sigmoid(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x))  # (1 + tanh) / 2


def _gelu_tanh_derivative(x):
    sigmoid = _tanh_sigmoid(x)
    return sigmoid + x * sigmoid * (1 - sigmoid) * 2 * math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * x * x)


@_with_derivative(_gelu_derivative)
def gelu(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Return x Phi(x), exactly (arXiv 1606.08415), as in BERT and ViT."""
    wide = x.astype(jnp.float32)  # 1 + erf(x) would be 0 in bfloat16 for x < -2
    return (wide * _normal_cdf(wide)).astype(x.dtype)


@_with_derivative(_gelu_tanh_derivative)
def gelu_tanh(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Return the tanh approximation of x Phi(x) (arXiv 1606.08415), as in GPT-2."""
    return x * _tanh_sigmoid(x)


ACTIVATIONS = {"relu": jax.nn.relu, "gelu": gelu, "gelu_tanh": gelu_tanh, "silu": jax.nn.silu}


class Mlp(nn.Module):
    """MLP activation(x U) W, or gated, (activation(x G) * x U) W, as in GEGLU and SwiGLU (arXiv 2002.05202).

    Attributes:
        mlp_dim: width of the hidden layer, F; when gated, of each of the two projections.
        gated: whether the hidden layer is multiplied by a second projection.
        dropout: rate on the hidden layer.
        out_init: initializer of the output projection.
    """

    mlp_dim: int
    activation: Callable = gelu
    gated: bool = False
    dropout: float = 0.0
    use_bias: bool = True
    kernel_init: Callable = nn.initializers.xavier_uniform()
    bias_init: Callable = nn.initializers.zeros
    out_init: Callable = nn.initializers.xavier_uniform()

    @nn.compact
    def __call__(self, x: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
        linear = partial(Linear, use_bias=self.use_bias, bias_init=self.bias_init)
        project = partial(linear, (self.mlp_dim,), kernel_init=self.kernel_init)
        hidden = project(name="up")(x)
        hidden = self.activation(project(name="gate")(x)) * hidden if self.gated else self.activation(hidden)
        hidden = Dropout(self.dropout)(hidden)
        return linear((x.shape[-1],), kernel_init=self.out_init, name="down")(hidden)
