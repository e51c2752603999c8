from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lineage.models import build
from lineage.models.layers.attend import (
    Additive,
    Mask,
    Weighting,
    dense,
    dot_product,
    masked_softmax,
    scaled_dot_product,
)
from lineage.models.layers.attention import IMPLEMENTATIONS, Attention
from lineage.models.layers.cache import Cache
from lineage.models.layers.position import RelativeKeys, rotary
from lineage.models.layers.sparse import windowed
from lineage.models.swin import Cosine
from tests.tiers import tiered

KEYS = np.array([[51, 70], [56, 82], [58, 88]], np.float64)
VALUES = np.array([[40, 155], [43, 159], [48, 162]], np.float64)
QUERIES = np.array([[57, 83], [55, 77]], np.float64)


def one_head(array):
    return jnp.asarray(array, jnp.float32)[None, :, None]


def weighted_mean(scores, values):
    """Return softmax attention of scores [..., T, S] in float64."""
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True) @ values


@pytest.mark.parametrize(
    ("score", "expected"), [(dot_product, QUERIES @ KEYS.T), (scaled_dot_product, QUERIES @ KEYS.T / np.sqrt(2))]
)
@pytest.mark.parametrize("unit", [1, 0.05])  # at a small scale, the weights are far from one-hot
def test_worked_example_in_two_dimensions(score, expected, unit):
    out = dense(one_head(QUERIES * unit), one_head(KEYS * unit), one_head(VALUES), weighting=Weighting(score))
    np.testing.assert_allclose(out[0, :, 0], weighted_mean(expected * unit**2, VALUES), rtol=1e-5)


@pytest.mark.parametrize("unit", [1, 0.05])
def test_worked_example_with_additive_scores(unit):
    rng = np.random.default_rng(0)
    w_query, keys, v = rng.standard_normal((2, 6)), KEYS @ rng.standard_normal((2, 6)), rng.standard_normal((6, 1))
    params = {"query": {"kernel": w_query}, "score": {"kernel": v}}
    params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), params)
    score = partial(Additive().apply, {"params": params})
    out = dense(one_head(QUERIES * unit), one_head(keys * unit), one_head(VALUES), weighting=Weighting(score))
    scores = (np.tanh((QUERIES @ w_query)[:, None] * unit + keys * unit) @ v)[..., 0]
    np.testing.assert_allclose(out[0, :, 0], weighted_mean(scores, VALUES), rtol=1e-5)


@pytest.mark.parametrize("scale", [0.7, 9.0])
def test_cosine_scores_match_the_formula(scale):
    params = {"params": {"scale": jnp.full((1, 1), scale)}}
    query, key = one_head(QUERIES - 65)[:, :, :, None], one_head(KEYS - 65)
    cosines = Cosine().apply(params, query, key)[0, 0, 0]
    turned = np.arctan2(*(QUERIES - 65).T)[:, None] - np.arctan2(*(KEYS - 65).T)
    np.testing.assert_allclose(cosines, min(np.exp(scale), 100) * np.cos(turned), rtol=1e-4)
    np.testing.assert_allclose(Cosine().apply(params, query, 7 * key)[0, 0, 0], cosines, rtol=1e-5)
    assert np.isfinite(jax.grad(lambda key: Cosine().apply(params, query, key).sum())(0 * key)).all()


@pytest.mark.parametrize("size", [4, 64, 256])
def test_variance_of_scaled_dot_products_is_one(size):
    rng = np.random.default_rng(size)
    query, key = (jnp.asarray(rng.standard_normal((1, 300, 1, 1, size)), jnp.float32) for _ in range(2))
    key = key[:, :, :, 0]
    assert dot_product(query, key).var() == pytest.approx(size, rel=0.1)
    assert scaled_dot_product(query, key).var() == pytest.approx(1, rel=0.1)


def test_dense_attention_matches_masked_biased_softmax(normal):
    query, key, value = normal(2, 3, 4, 5), normal(2, 6, 2, 5), normal(2, 6, 2, 7)
    bias = normal(1, 4, 3, 6)
    mask = np.random.default_rng(0).random((2, 1, 3, 6)) < 0.6
    mask[..., 0] = True
    seen = []
    out = dense(query, key, value, Mask(allowed=jnp.asarray(mask), bias=bias), Weighting(sow=seen.append))
    for head in range(4):
        group = head // 2
        scores = np.einsum("btc,bsc->bts", query[:, :, head], key[:, :, group]) / np.sqrt(5) + bias[0, head]
        scores = np.where(mask[:, 0], scores, -np.inf)
        np.testing.assert_allclose(out[:, :, head], weighted_mean(scores, value[:, :, group]), atol=1e-5)
    np.testing.assert_allclose(seen[0].sum(-1), 1, atol=1e-6)
    assert (np.asarray(seen[0])[~np.broadcast_to(mask, (2, 4, 3, 6))] == 0).all()


def test_query_without_keys_gets_the_mean(normal):
    value = normal(1, 4, 1, 3)
    out = dense(normal(1, 2, 1, 5), normal(1, 4, 1, 5), value, Mask(keys=jnp.zeros((1, 4), bool)))
    np.testing.assert_allclose(out[0, 0, 0], value[0, :, 0].mean(axis=0), atol=1e-6)


@pytest.mark.parametrize(("batch", "length"), [(0, 4), (2, 0)])
@pytest.mark.parametrize("kv_heads", [2, 4])
def test_empty_batches_and_sequences(batch, length, kv_heads):
    query, key = jnp.ones((batch, length, 4, 3)), jnp.ones((batch, length, kv_heads, 3))
    assert dense(query, key, key, Mask(causal=True)).shape == query.shape


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_grouped_query_attention_equals_repeated_heads(kv_heads, variables, normal):
    x = normal(2, 5, 16)
    grouped = Attention(4, num_kv_heads=kv_heads, causal=True)
    params = variables(grouped, x)["params"]
    assert params["key"]["kernel"].shape == (16, kv_heads, 4)
    repeat = partial(jnp.repeat, repeats=4 // kv_heads, axis=-2)
    whole = params | {part: jax.tree.map(repeat, params[part]) for part in ("key", "value")}
    out, _ = grouped.apply({"params": params}, x)
    expected, _ = Attention(4, causal=True).apply({"params": whole}, x)
    np.testing.assert_allclose(out, expected, atol=1e-6)


def test_gradients_are_causal(variables, normal):
    x = normal(1, 5, 8)
    module = Attention(2, causal=True)
    params = variables(module, x)
    jacobian = jax.jacobian(lambda x: module.apply(params, x)[0][0].sum(-1))(x)[:, 0]
    reached = np.abs(jacobian).max(-1) > 0
    np.testing.assert_array_equal(reached, np.tril(np.ones((5, 5), bool)))


@pytest.mark.thorough
@tiered("window", [1, 3, 4, 6, 12], first=2)
def test_window_attention_matches_masked_attention(window, variables, normal):
    """Check inputs of 11 tokens with padding, which are divided into blocks if longer than two windows; a
    window of 12 has no effect.
    """
    x = normal(2, 11, 16)
    padding = jnp.arange(11) >= jnp.array([0, 4])[:, None]
    module = Attention(4, num_kv_heads=2, causal=True, window=window, rotary=rotary)
    params = variables(module, x)
    distance = jnp.arange(11)[:, None] - jnp.arange(11)
    mask = Mask(allowed=padding[:, None, None] & (distance < window) & (distance >= 0))

    def run(module, mask):
        def loss(x):
            out, state = module.apply(params, x, mask=mask, mutable=["intermediates"])
            out = jnp.where(padding[..., None], out[0], 0)
            return jnp.sin(out).sum(), (out, state["intermediates"]["attention"][0])

        (_, (out, weights)), slope = jax.jit(jax.value_and_grad(loss, has_aux=True))(x)
        return out, slope, weights

    expected = run(module.clone(window=None, causal=False), mask)
    actual = run(module, Mask(keys=padding))
    np.testing.assert_allclose(actual[0], expected[0], atol=1e-5)
    np.testing.assert_allclose(actual[1], expected[1], atol=1e-5)
    plain = run(module.clone(attend=dense), Mask(keys=padding))
    np.testing.assert_allclose(plain[0], expected[0], atol=1e-6)
    count = -(-11 // window)
    assert actual[2].shape == ((2 * count, 4, window, 2 * window) if 2 * window < 11 else (2, 4, 11, 11))


def test_work_of_window_attention_is_linear_in_length(normal):
    """Check that XLA counts 4 times the work for 4 times the number of tokens."""

    def work(length):
        query, key = normal(1, length, 2, 4), normal(1, length, 1, 4)
        attention = jax.jit(partial(windowed, mask=Mask(causal=True, window=16)))
        return attention.lower(query, key, key).compile().cost_analysis()["flops"]

    assert work(1024) == pytest.approx(4 * work(256), rel=0.02)


@pytest.mark.parametrize("with_bias", [True, False])
def test_window_with_a_bias_or_a_full_mask(with_bias, variables, normal):
    x, bias = normal(1, 9, 8), normal(1, 2, 9, 9)
    module = Attention(2, causal=True, window=3)
    params = variables(module, x)
    distance = jnp.arange(9)[:, None] - jnp.arange(9)
    window = ((distance < 3) & (distance >= 0))[None, None]
    mask = Mask(bias=bias) if with_bias else Mask(allowed=(bias > 0) | (distance == 0))
    actual, _ = module.apply(params, x, mask=mask)
    mask = mask.replace(allowed=window if with_bias else mask.allowed & window)
    expected, _ = module.clone(window=None).apply(params, x, mask=mask)
    np.testing.assert_allclose(actual, expected, atol=1e-5)


@pytest.mark.thorough
def test_window_of_jax_attention_matches(normal):
    """Check that `local_window_size`, as passed to cuDNN, has the same meaning in JAX's own implementation."""
    query, key, value = normal(1, 7, 4, 5), normal(1, 7, 2, 5), normal(1, 7, 2, 5)
    expected = windowed(query, key, value, Mask(causal=True, window=3))
    theirs = jax.nn.dot_product_attention(query, key, value, is_causal=True, local_window_size=(2, 0))
    np.testing.assert_allclose(theirs, expected, atol=1e-5)


def test_cross_attention_matches_reference(variables, normal):
    x, context = normal(2, 3, 8), normal(2, 5, 6)
    mask = jnp.arange(5) < jnp.array([[5], [2]])
    module = Attention(2, head_size=5)
    params = variables(module, x, context)["params"]
    out, cache = module.apply({"params": params}, x, context, mask=Mask(keys=mask))
    assert cache is None

    def project(part, inputs):
        return np.einsum("btd,dhc->bhtc", inputs, params[part]["kernel"]) + params[part]["bias"][:, None]

    scores = project("query", x) @ project("key", context).transpose(0, 1, 3, 2) / np.sqrt(5)
    heads = weighted_mean(np.where(mask[:, None, None], scores, -np.inf), project("value", context))
    expected = np.einsum("bhtc,hcd->btd", heads, params["out"]["kernel"]) + params["out"]["bias"]
    np.testing.assert_allclose(out, expected, atol=1e-5)


@pytest.mark.parametrize("chunks", [(6,), (3, 1, 2)])
@tiered(
    ("relative", "window"),
    [(None, None), (partial(RelativeKeys, max_distance=3), None), (None, 2)],
    first=lambda relative, window: relative is None,
)
def test_cached_equals_uncached(chunks, relative, window, variables, normal):
    x = normal(2, 6, 16)
    module = Attention(4, num_kv_heads=2, causal=True, window=window, rotary=rotary, relative=relative)
    params = variables(module, x)
    expected, _ = module.apply(params, x)
    cache = Cache.empty(1, 2, 8, 2, 4).layers[0]
    step, outs, start = jax.jit(lambda x, cache: module.apply(params, x, cache=cache)), [], 0
    for count in chunks:
        out, cache = step(x[:, start : start + count], cache)
        outs.append(out)
        start += count
    np.testing.assert_allclose(jnp.concatenate(outs, axis=1), expected, atol=1e-5)
    assert cache.length.tolist() == [6]


def test_mask_applies_to_the_cache(variables, normal):
    x, hidden = normal(1, 5, 8), jnp.arange(7) == 1
    module = Attention(2, causal=True)
    params = variables(module, x)
    expected, _ = module.apply(params, x, mask=Mask(keys=~hidden[None, :5]))
    cache = Cache.empty(1, 1, 7, 2, 4).layers[0]
    out, _ = module.apply(params, x, mask=Mask(keys=~hidden[None]), cache=cache)
    np.testing.assert_allclose(out, expected, atol=1e-5)


@pytest.mark.parametrize("score", [dot_product, Additive()])
def test_recorded_weights_are_the_softmax_of_scores(score, variables, normal):
    """Compare the weights sown by the module with the softmax of its scores."""
    x = normal(2, 4, 12)
    module = Attention(3, score=score)
    params = variables(module, x)
    _, state = module.apply(params, x, mutable=["intermediates"])
    query, key = (
        jnp.einsum("btd,dhc->bthc", x, params["params"][part]["kernel"]) + params["params"][part]["bias"]
        for part in ("query", "key")
    )
    if isinstance(score, Additive):
        score = partial(Additive().apply, {"params": params["params"]["score"]})
    expected = jax.nn.softmax(score(query[:, :, :, None], key)[:, :, 0])
    np.testing.assert_allclose(state["intermediates"]["attention"][0], expected, atol=1e-5)


def test_dropout_only_with_its_rng(variables, normal):
    x = normal(1, 8, 8)
    module = Attention(2, dropout=0.5)
    params = variables(module, x)
    apply = partial(module.apply, params, x)
    plain = Attention(2).apply(params, x)[0]
    np.testing.assert_array_equal(apply()[0], plain)
    dropped = [apply(rngs={"dropout": jax.random.key(seed)})[0] for seed in range(2)]
    assert (dropped[0] != dropped[1]).any()
    assert (dropped[0] != plain).any()


def test_bfloat16_parameters_and_inputs_give_bfloat16(variables, normal):
    x = normal(2, 5, 8)
    module = Attention(2, causal=True, rotary=rotary)
    params = variables(module, x)
    half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), (params, x))
    out, _ = module.apply(*half)
    assert out.dtype == jnp.bfloat16
    np.testing.assert_allclose(out.astype(jnp.float32), module.apply(params, x)[0], atol=0.05)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_heads": 3}, "width 8, 3 heads and 3 key/value heads do not fit"),
        ({"num_heads": 4, "num_kv_heads": 3}, "4 heads and 3 key/value heads do not fit"),
        ({"num_heads": 2, "window": 0}, "the attention window is 0 tokens: it must be at least 1"),
    ],
)
def test_invalid_settings_raise(settings, message, normal):
    with pytest.raises(ValueError, match=message):
        Attention(**settings).init(jax.random.key(0), normal(1, 3, 8))


def test_initial_parameters_do_not_depend_on_the_implementation(normal):
    x = normal(1, 9, 8)
    made = [Attention(2, causal=True, attend=attend).init(jax.random.key(0), x) for attend in IMPLEMENTATIONS.values()]
    for others in made[1:]:
        jax.tree.map(np.testing.assert_array_equal, others, made[0])


def test_attention_implementation_is_selected_by_name():
    with pytest.raises(ValueError, match=r"model.attend is 'fast'\. Available: auto, portable, dense"):
        build("gpt", attend="fast")
    assert build("gpt").portable() == build("gpt", attend="portable")
    assert build("gpt", attend="dense").portable() == build("gpt", attend="dense")
    assert build("detr", backbone={"name": "swin"}).portable().backbone == build("swin", attend="portable")


def test_portable_models_have_no_kernels():
    model, image = build("swin", image_size=28, depths=(1,), width=16, num_heads=(1,)), jnp.zeros((1, 28, 28, 3))
    shapes = jax.eval_shape(model.init, jax.random.key(0), image), image
    half = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16), shapes)
    actual = ["pallas_call" in str(jax.make_jaxpr(one.apply)(*half)) for one in (model, model.portable())]
    assert actual == [True, False]


def test_segments_attend_only_to_themselves(variables, normal):
    x, segments = normal(1, 6, 8), jnp.array([[0, 0, 1, 0, 1, 1]])
    module = Attention(2, causal=True)
    params = variables(module, x)
    actual, _ = module.apply(params, x, mask=Mask(segments=segments))
    for segment in (0, 1):
        rows = np.flatnonzero(segments[0] == segment)
        np.testing.assert_allclose(actual[:, rows], module.apply(params, x[:, rows])[0], atol=1e-5)


@pytest.mark.thorough
def test_gradient_of_masked_softmax_matches_jax(normal):
    """Check rows with and without keys; without keys the weights do not depend on the scores."""
    scores, cotangent = normal(1, 2, 4, 5), normal(1, 2, 4, 5)
    mask = jnp.array([[1, 1, 1, 1, 1], [1, 0, 1, 0, 0], [0, 0, 0, 0, 1], [0, 0, 0, 0, 0]], bool)[None, None]

    def plain(scores, mask):
        return jax.nn.softmax(jnp.where(mask, scores, jnp.finfo(jnp.float32).min))

    actual, expected = (jax.vjp(lambda s: f(s, mask), scores)[1](cotangent)[0] for f in (masked_softmax, plain))  # noqa: B023
    np.testing.assert_allclose(actual, expected, atol=1e-6)
    assert (actual[0, :, 3] == 0).all()


def test_causal_cross_attention_raises(normal):
    with pytest.raises(ValueError, match="attention to a context cannot be causal"):
        Attention(2, causal=True).init(jax.random.key(0), normal(1, 3, 4), normal(1, 5, 4))


def test_key_bias_can_be_omitted(normal):
    params = Attention(2, key_bias=False).init(jax.random.key(0), normal(1, 3, 4))["params"]
    assert {name for name in params if "bias" not in params[name]} == {"key"}


def test_query_init_applies_to_queries_only(normal):
    ones = jax.nn.initializers.ones
    params = Attention(2, kernel_init=ones, query_init=jax.nn.initializers.zeros).init(
        jax.random.key(0), normal(1, 3, 8)
    )
    means = {part: leaf["kernel"].mean() for part, leaf in params["params"].items() if part != "out"}
    assert means == {"query": 0, "key": 1, "value": 1}


def test_gradient_of_masked_softmax_under_vmap(normal):
    """Compare vectorized gradients, as in `jax.jacrev`, with single ones."""
    scores, cotangents = normal(64, 2, 4, 24), normal(38, 64, 2, 4, 24)
    pull = jax.jit(lambda cotangent: jax.vjp(lambda s: masked_softmax(s, None), scores)[1](cotangent)[0])
    together = jax.jit(jax.vmap(pull))(cotangents)
    for mine, cotangent in zip(together, cotangents):
        np.testing.assert_allclose(mine, pull(cotangent), rtol=0, atol=1e-6)
