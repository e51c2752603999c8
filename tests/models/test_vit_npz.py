"""The .npz layout of google-research/vision_transformer: names, shapes and outputs."""

import os

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import softmax

from lineage import models
from lineage.models import convert
from lineage.models.convert import vit_npz
from lineage.models.vit import ViT

B16 = {  # ViT-B_16.npz of ImageNet-21k
    "cls": (1, 1, 768),
    "embedding/bias": (768,),
    "embedding/kernel": (16, 16, 3, 768),
    "head/bias": (21843,),
    "head/kernel": (768, 21843),
    "pre_logits/bias": (768,),
    "pre_logits/kernel": (768, 768),
    "Transformer/posembed_input/pos_embedding": (1, 197, 768),
    "Transformer/encoder_norm/bias": (768,),
    "Transformer/encoder_norm/scale": (768,),
}
LAYER = {
    "LayerNorm_0/bias": (768,),
    "LayerNorm_0/scale": (768,),
    "LayerNorm_2/bias": (768,),
    "LayerNorm_2/scale": (768,),
    "MlpBlock_3/Dense_0/bias": (3072,),
    "MlpBlock_3/Dense_0/kernel": (768, 3072),
    "MlpBlock_3/Dense_1/bias": (768,),
    "MlpBlock_3/Dense_1/kernel": (3072, 768),
    "MultiHeadDotProductAttention_1/key/bias": (12, 64),
    "MultiHeadDotProductAttention_1/key/kernel": (768, 12, 64),
    "MultiHeadDotProductAttention_1/out/bias": (768,),
    "MultiHeadDotProductAttention_1/out/kernel": (12, 64, 768),
    "MultiHeadDotProductAttention_1/query/bias": (12, 64),
    "MultiHeadDotProductAttention_1/query/kernel": (768, 12, 64),
    "MultiHeadDotProductAttention_1/value/bias": (12, 64),
    "MultiHeadDotProductAttention_1/value/kernel": (768, 12, 64),
}
SMALL = {768: 12, 3072: 20, 12: 3, 64: 4, 16: 2, 197: 10, 21843: 5}  # sizes of a smaller file
SIZES = {"width": 8, "num_heads": 2, "mlp_dim": 12, "activation": "gelu_tanh", "epsilon": 1e-6}


def small(rng):
    """Return the arrays of a smaller file with 11 layers, so that layer 10 must follow layer 9."""
    names = B16 | {f"Transformer/encoderblock_{n}/{name}": shape for n in range(11) for name, shape in LAYER.items()}
    return {
        name: (0.4 * rng.standard_normal([SMALL.get(size, size) for size in shape])).astype(np.float32)
        for name, shape in names.items()
    }


def says(arrays, images):
    """Return the logits of the published model, computed from its arrays by name."""

    def norm(x, name):
        x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-6)
        return x * arrays[f"{name}/scale"] + arrays[f"{name}/bias"]

    def dense(x, name):
        return x @ arrays[f"{name}/kernel"] + arrays[f"{name}/bias"]

    size = 2
    rows = [
        [np.einsum("bpqc,pqcd->bd", images[:, y : y + size, x : x + size], arrays["embedding/kernel"])]
        for y in range(0, 6, size)
        for x in range(0, 6, size)
    ]
    x = np.concatenate(rows).transpose(1, 0, 2) + arrays["embedding/bias"]
    x = np.concatenate([np.repeat(arrays["cls"], len(images), 0), x], 1)
    x = x + arrays["Transformer/posembed_input/pos_embedding"]
    for n in range(11):
        block = f"Transformer/encoderblock_{n}/"
        part = f"{block}MultiHeadDotProductAttention_1/"
        y = norm(x, f"{block}LayerNorm_0")
        query, key, value = (
            np.einsum("btd,dhc->bhtc", y, arrays[f"{part}{name}/kernel"]) + arrays[f"{part}{name}/bias"][:, None]
            for name in ("query", "key", "value")
        )
        weights = softmax(query @ key.swapaxes(2, 3) / np.sqrt(4), axis=-1)
        x = x + np.einsum("bhtc,hcd->btd", weights @ value, arrays[f"{part}out/kernel"]) + arrays[f"{part}out/bias"]
        y = dense(norm(x, f"{block}LayerNorm_2"), f"{block}MlpBlock_3/Dense_0")
        y = 0.5 * y * (1 + np.tanh(np.sqrt(2 / np.pi) * (y + 0.044715 * y**3)))
        x = x + dense(y, f"{block}MlpBlock_3/Dense_1")
    return dense(np.tanh(dense(norm(x, "Transformer/encoder_norm")[:, 0], "pre_logits")), "head")


def test_logits_match_the_published_code(tmp_path):
    rng = np.random.default_rng(0)
    arrays, images = small(rng), rng.standard_normal((2, 6, 6, 3)).astype(np.float32)
    np.savez(tmp_path / "there.npz", **arrays)
    model, variables = convert.load(tmp_path / "there.npz")
    assert (model.depth, model.image_size, model.num_classes, model.head) == (11, 6, 5, "mlp")
    actual = jax.jit(model.apply)(variables, images)
    np.testing.assert_allclose(actual, says(arrays, images), rtol=1e-4, atol=1e-5)
    vit_npz.save(tmp_path / "here.npz", model, variables)
    with np.load(tmp_path / "here.npz") as written:
        assert set(written) == set(arrays)
        for name, array in arrays.items():
            np.testing.assert_array_equal(written[name], array)


def test_names_and_shapes_match_the_published_file(tmp_path, monkeypatch):
    """Check names and shapes of the pre-trained ViT-B/16, without values."""
    model = models.build("vit", "B", num_classes=21_843, head="mlp", activation="gelu_tanh", epsilon=1e-6)
    shapes = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 224, 224, 3)))
    written = {}
    monkeypatch.setattr(np, "savez", lambda path, **arrays: written.update(arrays))
    hollow = jax.tree.map(lambda x: np.broadcast_to(np.float32(0), x.shape), shapes)
    vit_npz.save(tmp_path / "b16.npz", model, hollow)
    layers = {f"Transformer/encoderblock_{n}/{name}": shape for n in range(12) for name, shape in LAYER.items()}
    assert {name: array.shape for name, array in written.items()} == B16 | layers


@pytest.mark.thorough
def test_hybrid_feature_map_matches_the_published_code(tmp_path, normal):
    """Check R50+ViT: standardized kernels, norms after convolutions, and the padding of TensorFlow."""
    model = ViT(num_classes=3, image_size=32, patch_size=8, depth=1, hybrid=(1, 2), **SIZES)
    image = normal(2, 32, 32, 3)
    shapes = jax.eval_shape(model.init, jax.random.key(0), image)
    variables = jax.tree.map(lambda x: normal(*x.shape), shapes)
    vit_npz.save(tmp_path / "r.npz", model, variables)
    again, restored = convert.load(tmp_path / "r.npz")
    assert again == model
    jax.tree.map(np.testing.assert_array_equal, restored, variables)
    with np.load(tmp_path / "r.npz") as file:
        arrays = dict(file)
    assert arrays["embedding/kernel"].shape == (1, 1, 512, 8)
    assert arrays["block2/unit2/conv3/kernel"].shape == (1, 1, 128, 512)

    def layer(x, conv, norm, stride=1):
        kernel = arrays[f"{conv}/kernel"]
        kernel = (kernel - kernel.mean((0, 1, 2))) / (kernel.std((0, 1, 2)) + 1e-5)
        x = jax.lax.conv_general_dilated(x, kernel, (stride,) * 2, "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        groups = x.reshape(*x.shape[:3], 32, -1)
        mean, variance = (statistic(groups, axis=(1, 2, 4), keepdims=True) for statistic in (jnp.mean, jnp.var))
        x = ((groups - mean) / jnp.sqrt(variance + 1e-6)).reshape(x.shape)
        return x * arrays[f"{norm}/scale"] + arrays[f"{norm}/bias"]

    x = nn.max_pool(nn.relu(layer(image, "conv_root", "gn_root", 2)), (3, 3), (2, 2), "SAME")
    for unit, stride, projected in (("block1/unit1", 1, True), ("block2/unit1", 2, True), ("block2/unit2", 1, False)):
        short = layer(x, f"{unit}/conv_proj", f"{unit}/gn_proj", stride) if projected else x
        for i in (1, 2, 3):
            x = layer(x, f"{unit}/conv{i}", f"{unit}/gn{i}", stride if i == 2 else 1)
            x = nn.relu(x + short if i == 3 else x)
    actual = jax.jit(lambda variables: model.bind(variables).backbone.features(image)[-1])(variables)
    np.testing.assert_allclose(actual, x, rtol=1e-3, atol=1e-3)


def test_file_without_class_token_and_head(tmp_path, variables, normal):
    model = ViT(num_classes=0, image_size=8, patch_size=4, channels=1, depth=2, pooling="gap", **SIZES)
    params = variables(model, normal(1, 8, 8, 1))
    vit_npz.save(tmp_path / "gap.npz", model, params)
    again, restored = convert.load(tmp_path / "gap.npz")
    assert again == model
    jax.tree.map(np.testing.assert_array_equal, restored, params)


def test_numbers_of_16_bits(tmp_path):
    arrays = small(np.random.default_rng(0))
    for dtype in (jnp.bfloat16, np.float16):
        np.savez(tmp_path / "half.npz", **{name: array.astype(dtype) for name, array in arrays.items()})
        _, variables = convert.load(tmp_path / "half.npz")
        np.testing.assert_array_equal(variables["params"]["class_token"], arrays["cls"][0, 0].astype(dtype))


def test_invalid_files_raise(tmp_path, variables, normal):
    arrays = small(np.random.default_rng(0))
    np.savez(tmp_path / "hybrid.npz", **arrays, **{"conv_root/kernel": np.zeros((7, 7, 3, 64))})
    with pytest.raises(ValueError, match=r"hybrid\.npz is another model: conv_root/kernel is missing, unexpected"):
        convert.load(tmp_path / "hybrid.npz")
    kernel = "Transformer/encoderblock_0/MlpBlock_3/Dense_1/kernel"
    np.savez(tmp_path / "turned.npz", **arrays | {kernel: arrays[kernel].T})
    with pytest.raises(ValueError, match=rf"turned\.npz is another model: {kernel} is missing, .* of another shape"):
        convert.load(tmp_path / "turned.npz")
    np.savez(tmp_path / "wild.npz", **arrays | {"cls": np.full_like(arrays["cls"], np.inf)})
    with pytest.raises(ValueError, match=r"wild\.npz: tensor cls has values that are not finite"):
        convert.load(tmp_path / "wild.npz")
    np.savez(tmp_path / "other.npz", a=np.zeros(3))
    with pytest.raises(ValueError, match=r"other\.npz is not a ViT: 'embedding/kernel'"):
        convert.load(tmp_path / "other.npz")
    np.savez(tmp_path / "none.npz", **arrays | {"Transformer/posembed_input/pos_embedding": np.zeros((1, 0, 8))})
    with pytest.raises(ValueError, match=r"none\.npz is not a ViT: isqrt\(\) argument must be nonnegative"):
        convert.load(tmp_path / "none.npz")
    np.savez_compressed(tmp_path / "bomb.npz", **arrays, bomb=np.zeros(120_000_000, np.uint8))
    with pytest.raises(ValueError, match=r"bomb\.npz is not an \.npz file: it has .* bytes for arrays of 120,"):
        convert.load(tmp_path / "bomb.npz")
    (tmp_path / "text.npz").write_text("text")
    np.save(tmp_path / "array.npy", np.zeros(3))
    (tmp_path / "array.npy").rename(tmp_path / "array.npz")
    os.mkfifo(tmp_path / "pipe.npz")
    for name in ("text", "array", "pipe"):
        with pytest.raises(ValueError, match=rf"{name}\.npz is not an \.npz file"):
            convert.load(tmp_path / f"{name}.npz")
    model = ViT(num_classes=2, image_size=8, patch_size=4, channels=1, depth=2, width=8, num_heads=2)
    with pytest.raises(ValueError, match=r"the \.npz layout has no such model: .* 'gelu_tanh'"):
        vit_npz.save(tmp_path / "exact.npz", model, variables(model, normal(1, 8, 8, 1)))
