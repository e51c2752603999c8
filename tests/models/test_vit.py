from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lineage.models.resnet import ResNet
from lineage.models.vit import ViT
from tests.tiers import tiered
from tests.tolerance import assert_close

TINY = ViT(num_classes=5, image_size=8, patch_size=2, channels=1, depth=2, width=16, num_heads=2)


def patches(image):
    return np.asarray(image).reshape(len(image), 4, 2, 4, 2).transpose(0, 1, 3, 2, 4).reshape(len(image), 16, 2, 2)


def image_of(patches):
    rows = patches.reshape(len(patches), 4, 4, 2, 2).transpose(0, 1, 3, 2, 4)
    return jnp.asarray(rows.reshape(len(patches), 8, 8, 1))


@tiered("pooling", ["token", "gap", "map"])
def test_patch_order_does_not_matter_without_positions(pooling, variables, normal):
    image = normal(2, 8, 8, 1)
    order = np.random.default_rng(0).permutation(16)
    shuffled = image_of(patches(image)[:, order])
    model = TINY.clone(position="none", pooling=pooling)
    params = variables(model, image)

    @jax.jit
    def run(x):
        tokens = model.apply(params, x, method="encode")
        return tokens[:, -16:], model.apply(params, tokens, method="pool")

    before, after = run(image), run(shuffled)
    assert_close(after[0], before[0][:, order])
    assert_close(after[1], before[1])


@tiered("position", ["1d", "2d", "relative", "sincos2d", "mae"], first=2)
def test_patch_order_matters_with_positions(position, variables, normal):
    image = normal(2, 8, 8, 1)
    shuffled = image_of(patches(image)[:, np.random.default_rng(0).permutation(16)])
    model = TINY.clone(position=position)
    params = variables(model, image)
    apply = jax.jit(model.apply)
    assert jnp.abs(apply(params, shuffled) - apply(params, image)).max() > 1e-3


@pytest.mark.parametrize("position", ["none", "1d", "2d", "relative", "sincos2d", "mae"])
@tiered("pooling", ["token", "gap", "map"])
def test_other_resolutions(position, pooling, variables, normal):
    model = TINY.clone(position=position, pooling=pooling)
    params = variables(model, normal(1, 8, 8, 1))
    assert jax.eval_shape(model.apply, params, normal(3, 4, 12, 1)).shape == (3, 5)
    if pooling == "map":  # the pooling query has no position
        assert set(params["params"]["attention_pool"]["attention"]) == {"query", "key", "value", "out"}


def test_pooling_and_heads_match_the_formulas(variables, normal):
    image = normal(2, 8, 8, 1)
    for pooling in ("token", "gap"):
        model = TINY.clone(pooling=pooling, head="mlp")
        params = variables(model, image)
        tokens = jax.jit(partial(model.apply, method="encode"))(params, image)
        assert tokens.shape == (2, 17 if pooling == "token" else 16, 16)
        x = tokens[:, 0] if pooling == "token" else tokens.mean(axis=1)
        weights = params["params"]
        x = np.tanh(x @ weights["pre_logits"]["kernel"] + weights["pre_logits"]["bias"])
        features = jax.jit(model.clone(num_classes=0).apply)(params, image)
        assert_close(features, x)
        expected = x @ weights["classifier"]["kernel"] + weights["classifier"]["bias"]
        assert_close(jax.jit(model.apply)(params, image), expected)


def test_pooling_tokens_returns_all_patches(variables, normal):
    image = normal(2, 8, 8, 1)
    model = TINY.clone(pooling="tokens")
    params = variables(model, image)
    tokens = jax.jit(partial(model.apply, method="encode"))(params, image)
    assert tokens.shape == (2, 16, 16)
    np.testing.assert_array_equal(jax.jit(model.clone(num_classes=0).apply)(params, image), tokens)
    weights = params["params"]["classifier"]
    expected = tokens @ weights["kernel"] + weights["bias"]
    assert_close(jax.jit(model.apply)(params, image), expected)


def test_registers_affect_outputs_but_are_not_returned(variables, normal):
    image = normal(2, 8, 8, 1)
    model = TINY.clone(num_registers=3)
    params = variables(model, image)
    encode = jax.jit(partial(model.apply, method="encode", mutable=["intermediates"]))
    tokens, sown = encode(params, image)
    assert tokens.shape == (2, 17, 16)
    assert sown["intermediates"]["embedding"][0].shape == (2, 20, 16)
    np.testing.assert_array_equal(sown["intermediates"]["embedding"][0][:, 1:4], [params["params"]["registers"]] * 2)
    params["params"]["registers"] = params["params"]["registers"] + normal(3, 16)
    assert jnp.abs(encode(params, image)[0] - tokens).min() > 0


def test_qk_norm_makes_attention_scale_invariant(variables, normal):
    """Check that scaling queries and keys has no effect with `qk_norm`, and has one without."""
    image = normal(2, 8, 8, 1)
    change = {}
    for qk_norm in (False, True):
        model = TINY.clone(qk_norm=qk_norm, epsilon=1e-12)
        params = variables(model, image)
        apply = jax.jit(model.apply)
        before = apply(params, image)
        query = params["params"]["stack"]["layers"]["attention"]["query"]
        params["params"]["stack"]["layers"]["attention"]["query"] = jax.tree.map(lambda x: 3 * x, query)
        change[qk_norm] = jnp.abs(apply(params, image) - before).max()
    assert change[True] < 1e-4
    assert change[False] > 1e-2


def test_probe_normalizes_features_without_parameters(normal):
    image = normal(6, 8, 8, 1)
    model = TINY.clone(head="probe", num_classes=3)
    variables = jax.jit(model.init)(jax.random.key(0), image)
    params = variables["params"] | {"classifier": {"kernel": normal(16, 3), "bias": normal(3)}}
    assert "probe_norm" not in params
    run = jax.jit(partial(model.apply, mutable=["statistics"]))
    logits, after = run(variables | {"params": params}, image)
    features = jax.jit(TINY.clone(num_classes=0).apply)({"params": params}, image)
    scaled = (features - features.mean(axis=0)) / jnp.sqrt(features.var(axis=0) + 1e-6)
    expected = scaled @ params["classifier"]["kernel"] + params["classifier"]["bias"]
    np.testing.assert_allclose(logits, expected, atol=1e-4)
    np.testing.assert_allclose(after["statistics"]["probe_norm"]["mean"], 0.1 * features.mean(axis=0), atol=1e-6)


def test_hybrid_is_a_vit_on_a_feature_map(variables, normal):
    image = normal(2, 32, 32, 3)
    model = TINY.clone(image_size=32, patch_size=16, channels=3, hybrid=(1, 1), depth=1)
    params = variables(model, image, std=0.1)
    backbone = ResNet(num_classes=0, depths=(1, 1), widths=(256, 512), norm="group", padding="same", epsilon=1e-6)
    front = {"params": params["params"]["backbone"]}
    features = jax.jit(lambda image: backbone.apply(front, image, method="features")[-1])(image)
    assert features.shape == (2, 4, 4, 512)
    rest = {"params": {name: value for name, value in params["params"].items() if name != "backbone"}}
    plain = TINY.clone(image_size=4, patch_size=2, channels=512, depth=1)
    expected = jax.jit(plain.apply)(rest, features)
    assert_close(jax.jit(model.apply)(params, image), expected)
    with pytest.raises(ValueError, match="patch_size is 12: "):
        model.clone(patch_size=12).init(jax.random.key(0), image)


def test_model_without_classes_has_no_classifier(normal):
    params = jax.eval_shape(TINY.clone(num_classes=0).init, jax.random.key(0), normal(1, 8, 8, 1))["params"]
    assert "classifier" not in params
    assert "pre_logits" not in params


def test_initial_logits_are_zero(normal):
    image = normal(2, 8, 8, 1)
    logits, _ = jax.jit(TINY.init_with_output)(jax.random.key(0), image)
    np.testing.assert_array_equal(logits, 0)


def test_dropout_and_stochastic_depth_need_their_rng(variables, normal):
    image = normal(2, 8, 8, 1)
    params = variables(TINY, image)
    plain = jax.jit(TINY.apply)(params, image)
    for settings in ({"dropout": 0.3}, {"attention_dropout": 0.3}, {"stochastic_depth": 0.9}):
        model = TINY.clone(**settings)
        np.testing.assert_array_equal(jax.jit(model.apply)(params, image), plain)
        dropped = jax.jit(partial(model.apply, rngs={"dropout": jax.random.key(0)}))(params, image)
        assert (dropped != plain).any()


def test_bfloat16_parameters_and_images_give_bfloat16_logits(variables, normal):
    image = normal(2, 8, 8, 1)
    for position in ("1d", "relative"):
        model = TINY.clone(position=position)
        params = variables(model, image, std=0.1)
        logits = jax.jit(model.apply)(*jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), (params, image)))
        assert logits.dtype == jnp.bfloat16
        np.testing.assert_allclose(logits.astype(jnp.float32), jax.jit(model.apply)(params, image), atol=0.05)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((1, 8, 8, 3), "the image has 3 channels: the model needs 1"),
        ((1, 8, 7, 1), "image 8x7 cannot be divided into patches of 2x2 pixels"),
    ],
)
def test_invalid_settings_raise(shape, message):
    with pytest.raises(ValueError, match=message):
        TINY.init(jax.random.key(0), jnp.zeros(shape))


def test_images_smaller_than_a_patch_are_refused():
    with pytest.raises(ValueError, match="image_size is 2: it must be at least patch_size, 4"):
        TINY.clone(image_size=2, patch_size=4).init(jax.random.key(0), jnp.zeros((1, 8, 8, 1)))
