import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lineage import models
from lineage.models import convert
from lineage.models.llama import Llama
from tests.tolerance import assert_close

TINY = Llama(vocab_size=17, max_length=14, depth=2, width=16, num_heads=4, num_kv_heads=2, mlp_dim=24)
WINDOW = TINY.clone(window=3)
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 17, (2, 10)), jnp.int32)


@pytest.mark.parametrize("kv_heads", [1, 2, 4, 8])
def test_cache_size_is_proportional_to_key_value_heads(kv_heads, variables):
    """Check that the size of the cache is proportional to the number of key/value heads."""

    def cache_bytes(kv_heads):
        model = TINY.clone(num_heads=8, num_kv_heads=kv_heads)
        cache = model.apply(variables(model, TOKENS), 2, 14, method="init_cache")
        assert [key.shape for key in cache.key] == [(2 * (kv_heads or 8), 14, 2)] * 2
        return sum(array.nbytes for array in cache.key + cache.value)

    assert cache_bytes(None) == 8 // kv_heads * cache_bytes(kv_heads)


@pytest.mark.thorough
def test_gradients_are_causal_within_the_window(variables):
    """Check gradients with respect to the inputs of the stack: two layers with windows of 3 reach 2 x 2 tokens back."""
    for model, reach in ((TINY, 10), (WINDOW, 4)):
        params = variables(model, TOKENS)

        def out(x, model=model, params=params):
            return model.bind(params).stack(x)[0][0].sum(-1)

        jacobian = jax.jit(jax.jacobian(out))(params["params"]["embed"]["table"][TOKENS[:1]])[:, 0]
        distance = np.arange(10)[:, None] - np.arange(10)
        np.testing.assert_array_equal(np.abs(jacobian).max(-1) > 0, (distance >= 0) & (distance <= reach))


def test_given_positions_are_used(variables):
    """Check positions with a gap: RoPE depends only on distances, so a constant offset has no effect."""
    params, apply = variables(TINY, TOKENS), jax.jit(TINY.apply)
    places = jnp.array([0, 1, 2, 7, 8, 9])
    holed = jnp.full((2, 10), 9).at[:, places].set(TOKENS[:, :6])
    mask = jnp.zeros((2, 10), bool).at[:, places].set(True)
    positions = jnp.cumsum(mask[:1], axis=1) - 1
    expected = apply(params, TOKENS[:, :6])
    logits = apply(params, holed, mask=mask, positions=positions)[:, places]
    assert_close(logits, expected)
    assert np.abs(apply(params, holed, mask=mask)[:, places] - expected).max() > 1e-3


def test_initialization_scale():
    """Check that output projections of the 2 L sublayers are scaled by 1 / sqrt(2 L), and tied and untied tables."""
    model = TINY.clone(depth=8, width=64)
    logits, variables = jax.jit(model.init_with_output)(jax.random.key(0), TOKENS)
    assert logits.std() < 0.3
    params = variables["params"]
    layers = params["stack"]["layers"]
    for leaf in (params["embed"]["table"], params["unembed"]["table"], layers["mlp"]["gate"]["kernel"]):
        assert leaf.std() == pytest.approx(0.02, rel=0.1)
    for leaf in (layers["attention"]["out"]["kernel"], layers["mlp"]["down"]["kernel"]):
        assert leaf.std() == pytest.approx(0.02 / 4, rel=0.1)
    tied = jax.eval_shape(model.clone(tied=True).init, jax.random.key(0), TOKENS)["params"]
    assert set(params) - set(tied) == {"unembed"}


def test_invalid_rope_scaling_raises():
    with pytest.raises(ValueError, match=r"model.rope_scaling is 'yarm'\. Did you mean 'yarn'"):
        models.build("llama", rope_scaling="yarm")
    model = TINY.clone(rope_scaling="llama3", rope_turns=(4.0, 4.0))
    with pytest.raises(ValueError, match=r"rope_turns is \(4.0, 4.0\): the second number must be greater"):
        model.init(jax.random.key(0), TOKENS)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("model", "config", "message"),
    [
        (TINY, {"attention_bias": True}, "attention_bias is True: it must be False"),
        (TINY, {"architectures": ["LlamaModel"]}, "architectures is 'LlamaModel': it must be 'LlamaForCausalLM'"),
        (TINY, {"rope_parameters": {"rope_type": "dynamic"}}, "rope_type is 'dynamic': it must be one of"),
        (TINY, {"rope_parameters": {"rope_type": "linear"}}, "factor of rope_type 'linear' is None: it must be"),
        (
            TINY,
            {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "attention_factor": 1.5}},
            "attention_factor of the rotary positions is 1.5: it must be None",
        ),
        (WINDOW, {"sliding_window": 0}, "sliding_window is 0: it must be an integer of at least 1"),
        (TINY, {"tie_word_embeddings": True}, r"tensor lm_head\.weight differs from model\.embed_tokens\.weight"),
    ],
)
def test_unsupported_folders_raise(model, config, message, tmp_path, variables):
    convert.save(tmp_path, model, variables(model, TOKENS))
    written = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(written | config))
    with pytest.raises(ValueError, match=message):
        convert.load(tmp_path)
