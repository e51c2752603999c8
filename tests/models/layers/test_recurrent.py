from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lineage.models.layers.recurrent import Cell, Layer, Recurrent

WIDTH, INPUTS = 6, 5


def test_padding_on_either_side_has_no_effect(variables, normal):
    x, module = normal(1, 4, INPUTS), Recurrent("gru", WIDTH, 2, bidirectional=True)
    weights = variables(module, x)
    apply = jax.jit(module.apply)
    expected, ends = apply(weights, x)
    for before, after in ((0, 3), (2, 1)):
        padded = jnp.concatenate([normal(1, before, INPUTS), x, normal(1, after, INPUTS)], axis=1)
        real = jnp.arange(before + 4 + after)[None]
        out, padded_ends = apply(weights, padded, mask=(real >= before) & (real < before + 4))
        np.testing.assert_allclose(out[:, before : before + 4], expected, atol=1e-6)
        jax.tree.map(partial(np.testing.assert_allclose, atol=1e-6), padded_ends, ends)


@pytest.mark.parametrize("reverse", [False, True])
def test_gradients_are_unidirectional(reverse, variables, normal):
    x, module = normal(1, 5, INPUTS), Layer(partial(Cell, "lstm", WIDTH), reverse=reverse)
    weights = variables(module, x)
    jacobian = jax.jacobian(lambda x: module.apply(weights, x)[0][0].sum(-1))(x)[:, 0]
    seen = np.abs(jacobian).max(-1) > 0
    np.testing.assert_array_equal(seen, np.triu(np.ones((5, 5))) if reverse else np.tril(np.ones((5, 5))))


def test_dropout_is_applied_between_layers_only(variables, normal):
    x, key = normal(2, 4, INPUTS), {"dropout": jax.random.key(0)}
    for depth, same in ((1, True), (2, False)):
        module = Recurrent("rnn", WIDTH, depth, dropout=0.5)
        weights = variables(module, x)
        apply = jax.jit(module.apply)
        first, second = apply(weights, x)[0], apply(weights, x, rngs=key)[0]
        assert np.allclose(first, second) == same
