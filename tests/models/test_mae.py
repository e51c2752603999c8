from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lineage import models
from lineage.models.jaxpr_costs import flops
from lineage.models.layers.position import resample, sincos_2d
from lineage.models.mae import MAE
from lineage.models.vit import ViT
from tests.tolerance import assert_close

SIZES = {"image_size": 8, "patch_size": 2, "channels": 1, "depth": 2, "width": 16, "num_heads": 2}
TINY = MAE(**SIZES, decoder_depth=1, decoder_width=8, decoder_num_heads=2)


@pytest.fixture(scope="module")
def painted():
    """Return images, noise, random parameters, and a compiled function of images and noise."""
    rng = np.random.default_rng(0)
    image, noise = rng.standard_normal((2, 8, 8, 1)).astype(np.float32), rng.random((2, 16)).astype(np.float32)
    shapes = jax.eval_shape(TINY.init, jax.random.key(0), image, noise)
    variables = jax.tree.map(lambda x: 0.3 * rng.standard_normal(x.shape).astype(np.float32), shapes)
    run = jax.jit(lambda image, noise: TINY.apply(variables, image, noise, mutable=["intermediates"]))
    return image, noise, variables, run


def pixels_of(patches):
    """Return a mask of images that is True in the pixels of the selected patches [B, 16]."""
    grid = np.asarray(patches).reshape(-1, 4, 1, 4, 1, 1)
    return np.broadcast_to(grid, (len(grid), 4, 2, 4, 2, 1)).reshape(-1, 8, 8, 1)


def test_encoder_gets_a_quarter_of_the_patches(painted):
    """Check that the patches with the least noise are visible, and that masked patches have no effect."""
    image, noise, _, run = painted
    (predicted, hidden), sown = run(image, noise)
    assert predicted.shape == (2, 16, 4)
    np.testing.assert_array_equal(hidden, noise > np.sort(noise)[:, 3:4])
    assert sown["intermediates"]["embedding"][0].shape == (2, 1 + 4, 16)
    assert sown["intermediates"]["decoder_embedding"][0].shape == (2, 1 + 16, 8)
    other = np.where(pixels_of(hidden), image + 1, image)
    np.testing.assert_array_equal(run(other, noise)[0][0], predicted)
    other = np.where(pixels_of(hidden), image, image + np.arange(8).reshape(8, 1))
    assert np.abs(run(other, noise)[0][0] - predicted).min(axis=(0, 2)).max() > 1e-3


def test_number_of_visible_patches_is_rounded_down():
    inputs = jnp.zeros((1, 8, 8, 1)), jnp.zeros((1, 16), jnp.int32)
    for rate, seen in ((0.75, 4), (0.6, 6), (0.9, 1)):
        model = TINY.clone(mask_rate=rate, decoder_depth=0)
        tokens, hidden = jax.eval_shape(partial(model.init_with_output, jax.random.key(0)), *inputs)[0]
        assert tokens.shape == (1, 1 + seen, 16)
        assert hidden.shape == (1, 16)
    with pytest.raises(ValueError, match=r"mask_rate is 0\.95: it must leave at least one of 16 patches"):
        TINY.clone(mask_rate=0.95).init(jax.random.key(0), *inputs)


def test_targets_are_normalized_patches(painted):
    image, _, variables, _ = painted
    patch = image[1, 4:6, 2:4, 0].ravel()  # row 2, column 1
    raw = TINY.clone(normalized=False).apply(variables, jnp.asarray(image), method="target")
    np.testing.assert_array_equal(raw[1, 9], patch)
    actual = TINY.apply(variables, jnp.asarray(image), method="target")
    np.testing.assert_allclose(actual[1, 9], (patch - patch.mean()) / np.sqrt(patch.var(ddof=1) + 1e-6), rtol=1e-5)


def test_target_of_a_constant_patch_is_zero(painted):
    target = TINY.apply(painted[2], jnp.full((1, 8, 8, 1), 0.7), method="target")
    np.testing.assert_allclose(target, 0, atol=1e-3)


def test_positions_of_both_stacks_are_resampled(painted):
    """Check, with all parameters 0, that tokens equal the resampled position embeddings of 4x4 patches."""
    zeros = jax.tree.map(jnp.zeros_like, painted[2])
    apply = partial(TINY.clone(mask_rate=0.0).apply, mutable=["intermediates"])
    _, sown = jax.jit(apply)(zeros, jnp.zeros((1, 12, 8, 1)), jnp.arange(24.0)[None])
    for name, width in (("embedding", 16), ("decoder_embedding", 8)):
        expected = resample(jnp.asarray(sincos_2d(4, 4, width)), (4, 4), (6, 4))
        np.testing.assert_allclose(sown["intermediates"][name][0][0, 1:], expected, atol=1e-6)


@pytest.mark.parametrize("normalized", [True, False])
def test_reconstructions(normalized, painted):
    """Check that visible patches are unchanged, and that masked ones are gray in one image and predicted in the
    other.
    """
    image, noise, variables, run = painted
    model = TINY.clone(normalized=normalized)
    masked, painting = jax.jit(partial(model.apply, method="pictures"))(variables, image, noise)
    (predicted, hidden), _ = run(image, noise)
    unseen = pixels_of(hidden)
    assert_close(masked, np.where(unseen, 0, image))
    assert_close(np.where(unseen, 0, painting), np.where(unseen, 0, image))
    row = int(np.flatnonzero(hidden[0])[0])
    y, x = 2 * (row // 4), 2 * (row % 4)
    patch, expected = image[0, y : y + 2, x : x + 2, 0], np.asarray(predicted[0, row])
    if normalized:
        expected = expected * np.sqrt(patch.var(ddof=1) + 1e-6) + patch.mean()
    np.testing.assert_allclose(painting[0, y : y + 2, x : x + 2, 0].ravel(), expected, atol=1e-4)


def test_encoder_without_noise_matches_vit(painted):
    image, _, variables, _ = painted
    vit = ViT(num_classes=0, **SIZES, position="mae")
    params = jax.eval_shape(vit.init, jax.random.key(0), image)["params"]
    params = {name: variables["params"][name] for name in params}
    np.testing.assert_array_equal(jax.jit(TINY.apply)(variables, image), jax.jit(vit.apply)({"params": params}, image))


@pytest.mark.parametrize(
    ("variant", "patch", "encoder", "count"),
    # facebook/vit-mae-base, -large and -huge also count 197 or 257 positions of the encoder and decoder widths.
    [
        ("B", 16, 86_567_656 - 769_000 - 197 * 768, 111_907_840 - 197 * 1280),
        ("L", 16, 304_326_632 - 1_025_000 - 197 * 1024, 329_541_888 - 197 * 1536),
        ("H", 14, 632_045_800 - 1_281_000 - 257 * 1280, 657_074_508 - 257 * 1792),
    ],
)
def test_parameter_counts_match_published_checkpoints(variant, patch, encoder, count):
    model = models.build("mae", variant, image_size=224, patch_size=patch)
    inputs = jnp.zeros((1, 224, 224, 3)), jnp.zeros((1, (224 // patch) ** 2))
    shapes = jax.eval_shape(model.init, jax.random.key(0), *inputs)["params"]
    sizes = {name: sum(leaf.size for leaf in jax.tree.leaves(part)) for name, part in shapes.items()}
    assert sum(sizes.values()) == count
    assert sum(size for name, size in sizes.items() if name[:4] not in ("deco", "mask")) == encoder


def test_flops_of_the_large_encoder():
    """Check ViT-L/16 with three quarters of the patches masked: the layers process 49 + 1 tokens."""
    model = models.build("mae", "L", image_size=224, decoder_depth=0)
    inputs = jax.ShapeDtypeStruct((1, 224, 224, 3), jnp.float32), jax.ShapeDtypeStruct((1, 196), jnp.float32)
    variables = jax.eval_shape(model.init, jax.random.key(0), *inputs)
    actual = {noise: flops(model.apply, variables, *inputs[: 1 + noise])["model"] for noise in (0, 1)}
    for noise, tokens in ((0, 197), (1, 50)):
        layers = 24 * (12 * 1024**2 * tokens + 2 * 1024 * tokens**2)
        assert actual[noise] == 2 * (layers + 196 * 768 * 1024)
    assert 3.9 < actual[0] / actual[1] < 4.1
