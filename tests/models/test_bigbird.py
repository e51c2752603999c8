"""BigBird attention matches masked dense attention, with a cost linear in the length."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lineage.models import bigbird, convert
from lineage.models.bert import BERT
from lineage.models.bigbird import BigBird, random_blocks
from lineage.models.layers.attend import Mask, dense
from lineage.models.layers.sparse import BlockSparse
from tests.tiers import tiered
from tests.tolerance import assert_close

SIZES = {"vocab_size": 17, "max_length": 64, "depth": 2, "width": 16, "num_heads": 2, "head": "none"}
TINY = BigBird(**SIZES, block_size=4, num_random_blocks=1)
TOKENS = jnp.asarray(np.random.default_rng(0).integers(3, 17, (2, 40)), jnp.int32)


def seen(others, size, length):
    """Return the attention mask [T, T], block by block as in the paper."""
    blocks = len(others) + 2
    allowed = np.zeros((blocks, blocks), bool)
    for i in range(blocks):
        for j in range(blocks):
            allowed[i, j] = abs(i - j) <= 1 or {i, j} & {0, blocks - 1} or j in others[i - 1]
    return np.kron(allowed, np.ones((size, size), bool))[:length, :length]


@tiered(("length", "size", "count", "kv_heads"), [(32, 4, 1, 4), (29, 4, 3, 2), (28, 3, 2, 1)])
def test_block_attention_matches_masked_attention(length, size, count, kv_heads, normal):
    query, key, value = normal(2, length, 4, 5), normal(2, length, kv_heads, 5), normal(2, length, kv_heads, 3)
    others = random_blocks(2, -(-length // size), count, seed=3)[1]
    padding = jnp.arange(length) < jnp.array([[length], [length - 6]])

    def run(attention, mask):
        def loss(*inputs):
            out = attention(*inputs, mask) * padding[:, :, None, None]
            return jnp.sin(out).sum(), out

        return jax.jit(jax.grad(loss, argnums=(0, 1, 2), has_aux=True))(query, key, value)

    found = run(BlockSparse(others, size), Mask(keys=padding))
    expected = run(dense, Mask(keys=padding, allowed=jnp.asarray(seen(others, size, length))[None, None]))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6), found, expected)


def test_random_blocks_are_uniform_and_distinct():
    others = random_blocks(3, 12, 4, seed=0)
    assert others.shape == (3, 10, 4)
    for layer in others:
        for i, row in enumerate(layer, start=1):
            assert len(set(row)) == 4
            assert set(row) <= set(range(12)) - {0, i - 1, i, i + 1, 11}
    np.testing.assert_array_equal(others, random_blocks(3, 12, 4, seed=0))
    for different in (others[[1, 2, 0]], random_blocks(3, 12, 4, seed=1)):
        assert (np.sort(others) != np.sort(different)).any()
    # All other blocks are equally probable.
    counts = np.bincount(random_blocks(4000, 9, 1, seed=0)[:, 3, 0], minlength=9)
    assert set(np.flatnonzero(counts)) == {1, 2, 6, 7}
    assert counts[[1, 2, 6, 7]].min() > 900
    with pytest.raises(ValueError, match="8 blocks are too few for num_random_blocks=4: at least 9"):
        random_blocks(1, 8, 4, seed=0)


def test_each_layer_has_a_fixed_pattern_of_its_own(variables, monkeypatch):
    params = variables(TINY, TOKENS)

    def hidden():
        state = jax.jit(lambda: TINY.apply(params, TOKENS, mutable=["intermediates"])[1])()
        return np.asarray(state["intermediates"]["stack"]["layers"]["hidden"][0])

    others, first = random_blocks(2, 10, 1, TINY.seed), hidden()
    np.testing.assert_array_equal(hidden(), first)
    monkeypatch.setattr(bigbird, "random_blocks", lambda *_: others[[0, 0]])
    second = hidden()
    np.testing.assert_array_equal(second[0], first[0])
    assert np.abs(second[1] - first[1]).max() > 1e-3


def test_gradients_follow_the_pattern(variables):
    model = TINY.clone(depth=1)
    params = variables(model, TOKENS)["params"]

    def out(table):
        return model.apply({"params": params | {"position": {"table": table}}}, TOKENS[:1, :38])[0].sum(-1)

    reached = np.abs(jax.jit(jax.jacfwd(out))(params["position"]["table"])).max(-1) > 0
    np.testing.assert_array_equal(reached[:, :38], seen(random_blocks(1, 10, 1, model.seed)[0], 4, 38))


def test_short_sequences_use_full_attention(variables):
    params = variables(TINY, TOKENS)
    dense = BERT(**SIZES, activation="gelu_tanh")
    for length, same in ((28, True), (29, False)):
        expected = jax.jit(dense.apply)(params, TOKENS[:, :length])
        difference = np.abs(jax.jit(TINY.apply)(params, TOKENS[:, :length]) - expected).max()
        assert (difference < 1e-5) == same


@pytest.mark.thorough
def test_full_attention_matches_bert(variables):
    """Check sequences of any length."""
    params = variables(TINY, TOKENS)
    full = TINY.clone(attention_type="original_full")
    bert = BERT(**SIZES, activation="gelu_tanh")
    np.testing.assert_array_equal(full.apply(params, TOKENS), bert.apply(params, TOKENS))
    assert np.abs(full.apply(params, TOKENS) - TINY.apply(params, TOKENS)).max() > 1e-3


def test_padded_equals_unpadded(variables):
    """Check padding within the last block, so that the number of blocks is equal."""
    params, apply = variables(TINY, TOKENS), jax.jit(TINY.apply)
    expected = apply(params, TOKENS[:, :37])
    mask = jnp.broadcast_to(jnp.arange(40) < 37, (2, 40))
    assert_close(apply(params, TOKENS, mask=mask)[:, :37], expected)


def test_dropout_is_applied_before_the_embedding_norm(variables):
    model = TINY.clone(dropout=0.5)
    params = variables(model, TOKENS)["params"]
    params = {"params": params | {"embed_norm": {"scale": jnp.ones(16), "bias": jnp.zeros(16)}}}
    rngs = {"dropout": jax.random.key(1)}
    state = jax.jit(lambda: model.apply(params, TOKENS, rngs=rngs, mutable=["intermediates"])[1])()
    embedding = np.asarray(state["intermediates"]["embedding"][0])
    np.testing.assert_allclose(embedding.mean(-1), 0, atol=1e-5)
    np.testing.assert_allclose(embedding.std(-1), 1, atol=1e-3)


@pytest.mark.thorough
def test_work_and_memory_are_linear_in_length():
    model = BigBird(**SIZES | {"max_length": 4096, "depth": 1}, block_size=16)
    params = jax.eval_shape(model.init, jax.random.key(0), TOKENS)["params"]

    def loss(params, tokens):
        return model.apply({"params": params}, tokens).sum()

    def cost(length):
        lowered = jax.jit(jax.grad(loss)).lower(params, jax.ShapeDtypeStruct((1, length), jnp.int32))
        compiled = lowered.compile()
        return compiled.cost_analysis()["flops"], compiled.memory_analysis().temp_size_in_bytes

    costs = np.array([cost(length) for length in (1024, 2048, 4096)])
    growth = costs[1:] / costs[:-1]  # 4 with T x T scores
    assert growth.min() > 1.7
    assert growth.max() < 2.15


def test_export_with_seeded_blocks_raises(variables, tmp_path):
    params = variables(TINY, TOKENS)
    with pytest.raises(ValueError, match="random_blocks is 'seeded': it must be 'first', as in the reference"):
        convert.save(tmp_path, TINY, params)
    convert.save(tmp_path, TINY.clone(random_blocks="first"), params)
