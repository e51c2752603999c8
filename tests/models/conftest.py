"""Fixtures of the tests of models."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest


@pytest.fixture
def variables():
    """Return a function that draws random parameters for a module, including those initialized with zeros."""

    def make(module, *args, seed=0, std=0.3, **kwargs):
        rng = np.random.default_rng(seed)
        shapes = jax.eval_shape(partial(module.init, **kwargs), jax.random.key(0), *args)
        drawn = jax.tree.map(lambda x: jnp.asarray(std * rng.standard_normal(x.shape), x.dtype), shapes)
        return {"params": drawn["params"]}

    return make


@pytest.fixture
def normal():
    """Return a function that draws normally distributed arrays, different in each call."""
    rng = np.random.default_rng(1)
    return lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)
