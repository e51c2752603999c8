"""Quantization of trained matrices to 8 bits by Qwix, for evaluation and generation."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict

from lineage.models.layers import Embed, Linear
from lineage.models.layers.quantized import Quantized

DTYPES = {"int8": jnp.int8, "fp8": jnp.float8_e4m3fn}
Inputs = dict[str, tuple[int, ...]]  # path of a matrix -> its input axes, counted from the end


def input_axes(forward: Callable[..., Any], model: nn.Module, *args: Any) -> Inputs:
    """Return the axes of the matrices of `Linear` and `Embed` layers over which products sum.

    `forward`, a function of the bound model and `args`, must call all layers; it is only traced.
    """
    inputs = {}

    def record(call, args, kwargs, context):
        module = context.module
        if isinstance(module, Linear):
            outputs = len(module.features)
            inputs["/".join((*module.path, "kernel"))] = tuple(range(-outputs - module.axes, -outputs))
        elif isinstance(module, Embed):
            inputs["/".join((*module.path, "table"))] = (-1,)  # of the output layer, if the table is one
        return call(*args, **kwargs)

    with nn.intercept_methods(record):
        jax.eval_shape(nn.init(forward, model), jax.random.key(0), *args)
    return inputs


def check(inputs: Inputs, kind: str) -> None:
    """Raise ValueError if a model has no matrices `inputs` to quantize, so that it would be used as it is."""
    if not inputs:
        reason = "the model has no Linear or Embed of lineage.models.layers, whose matrices are quantized"
        raise ValueError(f"weights is {kind!r}: it must be None, because {reason}.")


def quantize(params: Any, inputs: Inputs, kind: str) -> Any:
    """Return the parameters with the matrices `inputs` replaced by `Quantized` ones, with a scale for each output.

    Quantization is symmetric: the largest magnitude among the weights of an output becomes the largest 8-bit number.
    `inputs` is the result of `input_axes`, `kind` is "int8" or "fp8" (e4m3).

    Raises:
        ValueError: there are no matrices.
    """
    import qwix  # an optional dependency

    check(inputs, kind)
    flat = flatten_dict(params, sep="/")
    for path, axes in inputs.items():
        matrix = flat[path]
        outputs = [axis for axis in range(matrix.ndim) if axis - matrix.ndim not in axes]
        quantized = qwix.quantize(matrix, DTYPES[kind], channelwise_axes=outputs)
        flat[path] = Quantized(quantized.qvalue, quantized.scale.squeeze(axes))
    return unflatten_dict(flat, sep="/")
