"""Parameters that are sharded over devices, gathered where they are used."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial

import flax.linen as nn
import jax
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array

# From the path and the shape of a parameter to its placement at rest and in computation.
Placement = Callable[[str, tuple[int, ...]], tuple[PartitionSpec, PartitionSpec]]

_PLACEMENT: ContextVar[Placement | None] = ContextVar("placement", default=None)


@contextmanager
def gathering(placement: Placement | None) -> Iterator[None]:
    """Gather parameters by `placement` in the functions that are traced inside the block; None leaves them."""
    token = _PLACEMENT.set(placement)
    try:
        yield
    finally:
        _PLACEMENT.reset(token)


def gathered(module: nn.Module, name: str, value: Array | np.ndarray) -> Array | np.ndarray:
    """Return a parameter of a module, gathered for computation if it is sharded over devices that compute all of it.

    Left to itself, XLA would gather it in slices for TPUs, each of them multiplied alone, which is several times
    slower. The gradient is reduced to where the parameter is at rest.
    """
    placement = _PLACEMENT.get()
    if placement is None:
        return value
    at_rest, computed = placement("/".join((*module.path, name)), value.shape)
    return value if at_rest == computed else _moved(value, at_rest, computed)


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _moved(value, at_rest, computed):
    return jax.lax.with_sharding_constraint(value, computed)


def _forward(value, at_rest, computed):
    return _moved(value, at_rest, computed), None


def _backward(at_rest, computed, _, gradient):
    # In two steps, for the same reason: a product whose result is to be scattered is computed in slices too.
    gradient = jax.lax.with_sharding_constraint(gradient, computed)
    return (jax.lax.with_sharding_constraint(gradient, at_rest),)


_moved.defvjp(_forward, _backward)
