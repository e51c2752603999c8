"""The position-wise feed-forward layer and its activations."""

from collections.abc import Callable

import flax.linen as nn
import jax
from jaxtyping import Array, Float


def gelu(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """x Phi(x), exactly (arXiv 1606.08415): BERT's and ViT's."""
    return jax.nn.gelu(x, approximate=False)


def gelu_tanh(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """The tanh approximation of x Phi(x) (arXiv 1606.08415): GPT-2's."""
    return jax.nn.gelu(x, approximate=True)


ACTIVATIONS = {"relu": jax.nn.relu, "gelu": gelu, "gelu_tanh": gelu_tanh, "silu": jax.nn.silu}


class Mlp(nn.Module):
    """activation(x U) W, or with a gate (activation(x G) * x U) W, as in GEGLU and SwiGLU (arXiv 2002.05202).

    Attributes:
        hidden: F, the width between; each of the two projections' when gated.
        activation: elementwise, one of `ACTIVATIONS` or any other function.
        gated: multiply by a second projection.
        dropout: rate on the hidden layer.
        use_bias, kernel_init, bias_init, out_init: of the projections; `out_init` is the output's.
    """

    hidden: int
    activation: Callable = gelu
    gated: bool = False
    dropout: float = 0.0
    use_bias: bool = True
    kernel_init: Callable = nn.initializers.xavier_uniform()
    bias_init: Callable = nn.initializers.zeros
    out_init: Callable = nn.initializers.xavier_uniform()

    @nn.compact
    def __call__(self, x: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
        def dense(name, features, kernel_init):
            return nn.Dense(
                features, use_bias=self.use_bias, kernel_init=kernel_init, bias_init=self.bias_init, name=name
            )

        hidden = dense("up", self.hidden, self.kernel_init)(x)
        if self.gated:
            hidden = self.activation(dense("gate", self.hidden, self.kernel_init)(x)) * hidden
        else:
            hidden = self.activation(hidden)
        hidden = nn.Dropout(self.dropout, deterministic=not self.has_rng("dropout"))(hidden)
        return dense("down", x.shape[-1], self.out_init)(hidden)
