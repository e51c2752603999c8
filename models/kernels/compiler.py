"""Operations that XLA (jaxlib 0.10.2) compiles to slow programs on some platforms, in a form that is fast there.

All return what their plain definitions return.
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Layout, with_layout_constraint
from jaxtyping import Array, Float, Int

FEW_ROWS = 8  # number of rows below which TPUs do not use their matrix unit
FEW_TOKENS = 128  # number of tokens below which, as in decoding, `rotate` does not use a matrix product
MANY_PIXELS, MANY_CHANNELS = 196, 32  # minimum output size and channels for which `convolve` replaces the gradient
Pads = Sequence[tuple[int, int]]  # rows before and after an image, and columns
Rotation = Float[Array, "#B T 1 half"]  # sines or cosines of the angle of each pair
Heads = Float[Array, "B T H C"]


def recomputed(arrays: Any) -> Any:
    """Return arrays from which the backward pass recomputes a derivative, instead of storing intermediate results."""
    return jax.lax.optimization_barrier(arrays)


def computed_once(arrays: Any) -> Any:
    """Return arrays that XLA's CPU backend computes once, instead of duplicating cheap operations and slices."""
    return jax.lax.platform_dependent(arrays, cpu=jax.lax.optimization_barrier, default=lambda arrays: arrays)


@jax.custom_jvp
def gradient_stored(x: Array) -> Array:
    """Return x, whose gradient XLA's GPU backend writes to memory before summing it over tokens.

    The sum would take longer if it were fused with the computation of its terms, as in the gradient of a bias.
    """
    return x


@gradient_stored.defjvp
def _(primals, tangents):
    barrier = jax.lax.optimization_barrier
    return primals[0], jax.lax.platform_dependent(tangents[0], cuda=barrier, default=lambda t: t)


@jax.custom_jvp
def summed_once(x: Array) -> Array:
    """Return x, whose gradient is `computed_once`.

    In an unrolled stack, each layer would otherwise sum the gradients of all later layers again.
    """
    return x


@summed_once.defjvp
def _(primals, tangents):
    return primals[0], computed_once(tangents[0])


def row_major(x: Float[Array, "B P D"]) -> Float[Array, "B P D"]:
    """Return the tokens, in a layout with adjacent channels on GPUs.

    Otherwise XLA's GPU compiler may make the examples adjacent in all layers, because the gradient of positions sums
    over them, which slows down norms and matrix products.
    """

    def constrained(x):
        return with_layout_constraint(x, Layout(major_to_minor=(0, 1, 2)))

    return jax.lax.platform_dependent(x, cuda=constrained, default=lambda x: x)


def matmul(
    x: Float[Array, "*B R C"], y: Float[Array | np.ndarray, "*A C D"], *bias: Float[Array | np.ndarray, "D"]
) -> Float[Array, "*B R D"]:
    """Return x @ y, or x @ y + bias.

    On TPUs, x is padded to at least 8 rows, because the vector unit would multiply fewer slowly. On GPUs, a single row
    is padded too, because XLA would write all products of its elements and those of the matrix to memory.
    """
    rows = x.shape[-2]

    def plain(x, y, *bias):
        return sum(bias, x @ y)

    def widened(x):
        wide = jnp.pad(x, [(0, 0)] * (x.ndim - 2) + [(0, FEW_ROWS - rows), (0, 0)])
        return jax.lax.optimization_barrier(wide)

    def padded(x, y, *bias):
        return sum(bias, (widened(x) @ y)[..., :rows, :])

    def padded_with_bias(x, y, *bias):
        return plain(widened(x), y, *bias)[..., :rows, :]  # otherwise XLA would pad the bias too

    methods = {"tpu": padded} if _fewer(rows, FEW_ROWS) else {}
    if y.ndim == 2 and _fewer(math.prod(x.shape[:-1]), 2):
        methods["cuda"] = padded_with_bias
    return jax.lax.platform_dependent(x, y, *bias, **methods, default=plain) if methods else plain(x, y, *bias)


def matmul_in_8_bits(x: Float[Array, "N R C"], y: Int[Array, "N C F"]) -> Float[Array, "N R F"]:
    """Return x @ y for 8-bit numbers y: on CPUs one by one, because a batched product would convert them all."""

    def each(x, y):
        return jax.lax.map(lambda pair: pair[0] @ pair[1].astype(x.dtype), (x, y))

    def batched(x, y):
        return matmul(x, y.astype(x.dtype))

    return jax.lax.platform_dependent(x, y, cpu=each, default=batched)


def take(table: Array, indices: Int[Array, "N"]) -> Array:
    """Return rows of a table; for a single one, XLA would copy the whole table into another layout on TPUs."""
    if indices.size != 1:
        return jnp.take(table, indices, axis=0)
    return jnp.take(table, jax.lax.optimization_barrier(jnp.tile(indices, 2)), axis=0)[:1]


def rotate(x: Heads, sin: Rotation, cos: Rotation) -> Heads:
    """Rotate each pair (i, i + C/2) of a head by the angles with these sines and cosines."""
    if x.dtype.itemsize > 2 or _fewer(x.shape[1], FEW_TOKENS):  # the product would round values of float32
        return rotated(x, sin, cos)
    return jax.lax.platform_dependent(x, sin, cos, tpu=rotated_by_product, default=rotated)


def rotated(x: Heads, sin: Rotation, cos: Rotation) -> Heads:
    """Return `rotate` by its definition."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def rotated_by_product(x: Heads, sin: Rotation, cos: Rotation) -> Heads:
    """Return `rotate`, computed with a matrix product that turns each pair by 90 degrees.

    On TPUs this is faster than splitting heads in halves, each of which would be padded to 128 lanes.
    """
    half = x.shape[-1] // 2
    turn = np.roll(np.eye(2 * half), half, axis=1)
    turn[half:] *= -1
    turned = jnp.einsum("BTHC,CD->BTHD", x, turn.astype(x.dtype), preferred_element_type=jnp.float32)
    sin, cos = (jnp.concatenate([part, part], axis=-1) for part in (sin, cos))
    return (x.astype(jnp.float32) * cos + turned * sin).astype(x.dtype)


def convolve(
    x: Float[Array, "B height width C"], kernel: Float[Array, "size size C D"], stride: int, pads: Pads
) -> Float[Array, "B h w D"]:
    """Return a convolution; a 1x1 kernel is not padded.

    On CPUs, a convolution with a 1x1 kernel is a matrix product, because XLA's gradient of the kernel is slow. For
    large images, the gradient of a 3x3 kernel is also computed by matrix products, one for each of its nine positions.
    """

    def product(x, kernel):
        x = x[:, ::stride, ::stride]
        return (x.reshape(-1, x.shape[-1]) @ kernel[0, 0]).reshape(*x.shape[:3], kernel.shape[-1])

    convolution = partial(_convolution, stride=stride, pads=pads)
    if len(kernel) == 1:
        return jax.lax.platform_dependent(x, kernel, cpu=product, default=convolution)
    is_small = _fewer(x.shape[1] * x.shape[2], MANY_PIXELS * stride**2) or min(kernel.shape[2:]) < MANY_CHANNELS
    if len(kernel) != 3 or is_small:
        return convolution(x, kernel)
    return _convolution_of_large_images(stride, tuple(pads), x, kernel)


def _convolution(x, kernel, stride, pads):
    numbers = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(x, kernel, (stride, stride), pads, dimension_numbers=numbers)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _convolution_of_large_images(stride, pads, x, kernel):
    return _convolution(x, kernel, stride, pads)


def _convolution_forward(stride, pads, x, kernel):
    return _convolution(x, kernel, stride, pads), (x, kernel)


def _convolution_backward(stride, pads, operands, gradient):
    x, kernel = operands
    height, width = gradient.shape[1:3]

    def by_convolution(x, gradient):
        return jax.linear_transpose(partial(_convolution, x, stride=stride, pads=pads), kernel)(gradient)[0]

    def by_products(x, gradient):
        x = jnp.pad(x, [(0, 0), *pads, (0, 0)])
        transposed = jax.lax.optimization_barrier(gradient.reshape(-1, gradient.shape[-1]).T)

        def product(row, column):
            rows, columns = (slice(i, i + stride * (n - 1) + 1, stride) for i, n in ((row, height), (column, width)))
            part = x[:, rows, columns].reshape(-1, x.shape[-1])
            return jax.lax.optimization_barrier(transposed @ part).T  # XLA would transpose the operands instead

        size = range(len(kernel))
        return jnp.stack([jnp.stack([product(row, column) for column in size]) for row in size])

    of_x = jax.linear_transpose(partial(_convolution, kernel=kernel, stride=stride, pads=pads), x)(gradient)[0]
    return of_x, jax.lax.platform_dependent(x, gradient, cpu=by_products, default=by_convolution)


_convolution_of_large_images.defvjp(_convolution_forward, _convolution_backward)


def max_pool(x: Float[Array, "B height width D"]) -> Float[Array, "B h w D"]:
    """Return the maximum of each 3x3 window, with a stride of 2; its gradient goes to the first of equal values.

    On CPUs and GPUs it is the maximum of nine slices, because XLA's gradient of a maximum over windows is slow.
    """
    slices = partial(_max_of_slices, x.shape)
    pool = partial(nn.max_pool, window_shape=(3, 3), strides=(2, 2))
    return jax.lax.platform_dependent(x, cpu=slices, cuda=slices, default=pool)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _max_of_slices(shape, x):
    return _max_forward(shape, x)[0]


def _max_forward(shape, x):
    rows, columns = ([slice(start, size - 2 + start, 2) for start in range(3)] for size in shape[1:3])
    slices = [x[:, row, column] for row in rows for column in columns]
    highest, index = slices[0], jnp.zeros(slices[0].shape, jnp.uint8)
    for number, new in enumerate(slices[1:], start=1):
        higher = (new > highest) | jnp.isnan(new)
        highest, index = jnp.where(higher, new, highest), jnp.where(higher, number, index)
    return highest, index


def _max_backward(shape, index, gradient):
    zero, total = jnp.zeros((), gradient.dtype), 0
    for number, offsets in enumerate(np.ndindex(3, 3)):
        part = jnp.where(index == number, gradient, zero)
        sizes = zip(offsets, shape[1:], part.shape[1:])
        pads = [(first, size - first - 2 * count + 1, 1) for first, size, count in sizes]
        total += jax.lax.pad(part, zero, [(0, 0, 0), *pads, (0, 0, 0)])
    return (total,)


_max_of_slices.defvjp(_max_forward, _max_backward)


def _fewer(count: Any, limit: int) -> bool:
    """Return whether a number is below a limit; a symbolic number, as in exported programs, is not."""
    return isinstance(count, int) and count < limit
