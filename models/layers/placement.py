"""Placement of parameters, where they are used, and of activations, in attention, on a mesh of devices."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from math import gcd, prod
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, PartitionSpec
from jaxtyping import Array, Float

# Mesh axes over which the examples of a batch, the tokens of a sequence and the heads of attention are split.
EXAMPLES, TOKENS, HEADS = ("data", "fsdp"), ("context", "tensor"), ("context", "tensor")

# Function of the path and the shape of a parameter: its placement at rest and in computation.
Placement = Callable[[str, tuple[int, ...]], tuple[PartitionSpec, PartitionSpec]]

_PLACEMENT: ContextVar[Placement | None] = ContextVar("placement", default=None)


@contextmanager
def gathering(placement: Placement | None) -> Iterator[None]:
    """Gather parameters by `placement` in functions that are traced within the block; None disables gathering."""
    token = _PLACEMENT.set(placement)
    try:
        yield
    finally:
        _PLACEMENT.reset(token)


def gathered(module: nn.Module, name: str, value: Any) -> Any:
    """Return a parameter of a module, gathered if its placement in computation differs from that at rest.

    On TPUs, XLA alone would gather it in slices and multiply each of them separately, which is several times slower.
    The gradient is reduced to the placement at rest.
    """
    placement = _PLACEMENT.get()
    if placement is None:
        return value

    def gather(part):
        at_rest, computed = placement("/".join((*module.path, name)), part.shape)
        return part if at_rest == computed else _moved(part, at_rest, computed)

    return jax.tree.map(gather, value)  # a quantized matrix has two parts


def _moved(value: Array, start: PartitionSpec, end: PartitionSpec) -> Array:
    """Return an array moved from one placement to another; its gradient is moved back.

    With both constraints, XLA does not merge the move into the products before and after it.
    """
    return jax.lax.with_sharding_constraint(jax.lax.with_sharding_constraint(value, start), end)


def num_parts(mesh: Mesh | AbstractMesh, axes: tuple[str, ...]) -> int:
    """Return the number of parts into which mesh axes split a dimension."""
    return prod(mesh.shape[axis] for axis in axes)


def dividing(axes: tuple[str, ...], size: int) -> tuple[str, ...]:
    """Return axes of the current mesh if they split a dimension of this size into equal parts, otherwise ()."""
    mesh = jax.sharding.get_abstract_mesh()
    return () if mesh.empty or size % num_parts(mesh, axes) else axes


def by_heads(attend: Callable[..., Array]) -> Callable[..., Array]:
    """Return an attention function that splits heads instead of tokens over the context axis of the mesh, if any.

    An all-to-all exchange before and after attention gives each device whole sequences (DeepSpeed-Ulysses, arXiv
    2309.14509). If there are too few key/value heads, they are repeated.

    Raises:
        ValueError: the query heads cannot be split over the context and tensor axes.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.shape["context"] == 1:
        return attend
    count = num_parts(mesh, HEADS)

    def exchanged(
        query: Float[Array, "B T H C"], key: Float[Array, "B S K C"], value: Float[Array, "B S K E"], *others
    ) -> Float[Array, "B T H E"]:
        heads, copies = query.shape[2], count // gcd(count, key.shape[2])
        if heads % (key.shape[2] * copies):
            given = f"{heads} attention heads and {key.shape[2]} key/value heads cannot be split into {count} parts"
            raise ValueError(f"{given}, the product of mesh.context and mesh.tensor.")
        key, value = (jnp.repeat(x, copies, axis=2) if copies > 1 else x for x in (key, value))
        tokens, split = PartitionSpec(EXAMPLES, "context", "tensor"), PartitionSpec(EXAMPLES, None, HEADS)
        query, key, value = (_moved(x, tokens, split) for x in (query, key, value))
        return _moved(attend(query, key, value, *others), split, tokens)

    return exchanged
