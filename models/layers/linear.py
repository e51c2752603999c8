"""Affine map over one or several axes."""

import math
from collections.abc import Callable

import flax.linen as nn
import numpy as np
from jaxtyping import Array, Float

from lineage.models.kernels.compiler import gradient_stored, matmul
from lineage.models.layers.placement import gathered
from lineage.models.layers.quantized import Quantized


def product(
    x: Float[Array, "*B R C"], y: Float[Array | np.ndarray, "*A C D"] | Quantized, *bias: Float[Array | np.ndarray, "D"]
) -> Float[Array, "*B R D"]:
    """Return x @ y, or x @ y + bias."""
    if isinstance(y, Quantized):
        return sum(bias, matmul(x, y.values.astype(x.dtype)) * y.scale.astype(x.dtype))
    return matmul(x, y, *bias)


class Linear(nn.Module):
    """Affine map x W + b of the last axes of x; inputs and outputs may have several axes (heads).

    It is computed as one product of two matrices, because XLA's CPU backend transposes operands of more axes in memory
    for the gradient of the kernel. Tokens with a rule for the logical axis "sequence" remain a separate axis: sharded
    tokens cannot be merged with the batch, and on TPUs, merging takes longer.

    Attributes:
        features: sizes of the output's last axes.
        axes: number of last axes of x that are mapped.
        kernel_init: initializer of the kernel, as a matrix (inputs, outputs).
    """

    features: tuple[int, ...]
    axes: int = 1
    use_bias: bool = True
    kernel_init: Callable = nn.initializers.lecun_normal()
    bias_init: Callable = nn.initializers.zeros

    @nn.compact
    def __call__(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        rows, inputs = x.shape[: x.ndim - self.axes], x.shape[x.ndim - self.axes :]
        matrix = (math.prod(inputs), math.prod(self.features))
        shape = (*inputs, *self.features)
        kernel = self.param("kernel", lambda key: self.kernel_init(key, matrix).reshape(shape))
        kernel = gathered(self, "kernel", kernel).reshape(matrix)
        joined = rows if dict(nn.get_logical_axis_rules()).get("sequence") else (-1,)
        if not self.use_bias:
            return product(x.reshape(*joined, matrix[0]), kernel).reshape(*rows, *self.features)
        bias = self.param("bias", self.bias_init, self.features).reshape(-1)
        # Added before reshaping, so that XLA's GPU backend adds it within the product.
        out = product(x.reshape(*joined, matrix[0]), kernel, bias)
        return gradient_stored(out).reshape(*rows, *self.features)
