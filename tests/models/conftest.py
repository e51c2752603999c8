"""Fixtures of the tests of models."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lineage.models.gpt import GPT
from tests.models.toy_decoders import VOCAB, Bigram, random_gpt


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


@pytest.fixture(scope="module")
def gpt():
    return random_gpt(GPT(vocab_size=VOCAB, max_length=32, depth=2, width=16, num_heads=2))


@pytest.fixture
def prompts():
    rng = np.random.default_rng(0)
    return rng.integers(0, VOCAB, (4, 6)), np.array([2, 6, 1, 2])


@pytest.fixture(scope="module")
def bigram():
    model = Bigram()
    return model, model.init(jax.random.key(1), jnp.zeros((1, 1), jnp.int32))
