"""The cache of keys and values."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lineage.models.layers import cache as caches
from lineage.models.layers.cache import Cache


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("separate", [0, 16])
@pytest.mark.parametrize("lengths", [[2], [1, 3, 0], [2, 4, 5]])
def test_tokens_are_written_at_the_length_of_each_sequence(count, separate, lengths, monkeypatch, normal):
    monkeypatch.setattr(caches, "SEPARATE", separate)
    key, value = normal(3, count, 2, 4), normal(3, count, 2, 4)
    cache = Cache.empty(1, 3, 6, 2, 4).rewind(jnp.array(lengths))
    after = cache.with_layers([layer.append(key, value) for layer in cache.layers])
    expected = np.zeros((3, 6, 2, 4), np.float32)
    for row, length in enumerate(np.broadcast_to(lengths, 3)):
        expected[row, length : length + count] = key[row, : 6 - length]  # those without room are left out
    np.testing.assert_array_equal(after.layers[0].keys_and_values(3)[0], expected)
    assert after.length.tolist() == [length + count for length in lengths]


def test_only_a_new_cache_is_known_to_be_empty(normal):
    cache = Cache.empty(1, 2, 6, 2, 4)
    seen = [layer.append(normal(2, 1, 2, 4), normal(2, 1, 2, 4)).is_empty for layer in cache.layers]
    jax.jit(lambda cache: seen.append(cache.layers[0].is_empty))(cache)
    assert (cache.layers[0].is_empty, seen) == (True, [False, False])


def test_gathered_sequences_have_their_keys_and_lengths(normal):
    cache = Cache.empty(2, 3, 6, 2, 4).rewind(jnp.array([1, 2, 3]))
    filled = cache.with_layers([layer.append(normal(3, 2, 2, 4), normal(3, 2, 2, 4)) for layer in cache.layers])
    rows = jnp.array([2, 0, 2, 1])
    actual = filled.gather(rows)
    assert actual.length.tolist() == [5, 3, 5, 4]
    for old, new in zip(filled.layers, actual.layers):
        for expected, kept in zip(old.keys_and_values(3), new.keys_and_values(4)):
            np.testing.assert_array_equal(kept, expected[rows])
