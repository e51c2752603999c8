"""ViT matches `transformers`."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import torch
import transformers

from lineage.models import convert, vit
from tests.tiers import tiered
from tests.tolerance import assert_close

SEEDS = range(4)


def reference_of(seed, randomize, cls=transformers.ViTForImageClassification, **kwargs):
    rng = np.random.default_rng(seed)
    heads = int(rng.integers(1, 5))
    patch = int(rng.choice([2, 3, 4]))
    labels = {"num_labels": int(rng.integers(2, 7))} if cls is transformers.ViTForImageClassification else {}
    config = transformers.ViTConfig(
        hidden_size=heads * int(rng.choice([3, 8, 10])),
        num_hidden_layers=int(rng.integers(1, 5)),
        num_attention_heads=heads,
        intermediate_size=int(rng.integers(5, 60)),
        hidden_act=["gelu", "relu", "gelu_new", "silu"][seed % 4],
        layer_norm_eps=float(rng.choice([1e-12, 1e-6, 1e-2])),
        image_size=patch * int(rng.integers(2, 5)),
        patch_size=patch,
        num_channels=int(rng.choice([1, 3])),
        attn_implementation="eager",
        **labels,
    )
    return randomize(cls(config, **kwargs), seed)


def images_of(reference, seed, rows=None, columns=None):
    """Return random images, with sides of the model or of the given numbers of patches."""
    config = reference.config
    size = [n * config.patch_size if n else config.image_size for n in (rows, columns)]
    images = np.random.default_rng(seed + 100).standard_normal((2, *size, config.num_channels)).astype(np.float32)
    return jnp.asarray(images), torch.tensor(images.transpose(0, 3, 1, 2))


@tiered("seed", SEEDS)
def test_logits_hidden_states_and_gradients_match(seed, randomize, ours, gradients, assert_same_gradients):
    reference = reference_of(seed, randomize)
    images, theirs = images_of(reference, seed)
    model, variables = ours(reference)
    assert model.depth == reference.config.num_hidden_layers
    assert model.epsilon == reference.config.layer_norm_eps
    assert model.num_classes == reference.config.num_labels

    expected = reference(theirs, output_hidden_states=True)
    weights = np.random.default_rng(seed).standard_normal(expected.logits.shape).astype(np.float32)
    (expected.logits.tanh() * torch.tensor(weights)).sum().backward()

    def loss(params):
        out, state = model.apply({"params": params}, images, mutable=["intermediates"])
        return (jnp.tanh(out) * weights).sum(), (out, state["intermediates"])

    grads, (out, seen) = jax.jit(jax.grad(loss, has_aux=True))(variables["params"])
    assert_close(out, expected.logits.detach().numpy())
    hidden = [seen["embedding"][0], *seen["stack"]["layers"]["hidden"][0]]
    assert len(hidden) == len(expected.hidden_states)
    for mine, other in zip(hidden, expected.hidden_states):
        assert_close(mine, other.detach().numpy())
    assert_same_gradients(grads, gradients(reference))


@tiered("grid", [(6, 6), (1, 2), (3, 5)])
def test_another_resolution(grid, randomize, ours):
    reference = reference_of(1, randomize)
    images, theirs = images_of(reference, 1, *grid)
    model, variables = ours(reference)
    expected = reference(theirs, interpolate_pos_encoding=True).logits.detach().numpy()
    assert_close(jax.jit(model.apply)(variables, images), expected)


@tiered("pooler", [True, False])
def test_model_without_a_classifier(pooler, randomize, ours, exported):
    reference = reference_of(2, randomize, transformers.ViTModel, add_pooling_layer=pooler)
    images, theirs = images_of(reference, 2)
    model, variables = ours(reference)
    expected = reference(theirs)
    tokens = expected.last_hidden_state.detach().numpy()
    features = expected.pooler_output.detach().numpy() if pooler else tokens[:, 0]
    assert_close(jax.jit(model.apply)(variables, images), features)
    encoded = jax.jit(partial(model.apply, method="encode"))(variables, images)
    assert_close(encoded, tokens)

    cls = transformers.ViTModel if pooler else transformers.ViTForImageClassification
    out = exported(model, variables, cls)(theirs)
    assert_close((out.pooler_output if pooler else out.logits).detach().numpy(), features)


@tiered("num_classes", [2, 5])
def test_export_round_trip(num_classes, round_trip):
    sizes = {"image_size": 12, "patch_size": 3, "channels": 2, "depth": 2, "width": 24, "num_heads": 3, "mlp_dim": 96}
    model = vit.ViT(num_classes=num_classes, **sizes, activation="gelu_tanh")
    images = np.random.default_rng(0).standard_normal((2, 12, 12, 2)).astype(np.float32)
    actual, expected = round_trip(model, transformers.ViTForImageClassification, pixel_values=images)
    assert expected.logits.shape == (2, num_classes)
    assert_close(actual, expected.logits)
    assert convert.FAMILIES["vit"].value(model.clone(mlp_dim=None), "mlp_dim") == 96


def test_registers_and_layer_scale_match(randomize):
    """Compare with DINOv2 with registers, whose weights are the same under other names."""
    config = transformers.Dinov2WithRegistersConfig(
        hidden_size=24, num_hidden_layers=2, num_attention_heads=3, mlp_ratio=2, image_size=8, patch_size=4,
        num_channels=3, num_register_tokens=3, layer_norm_eps=1e-3, attn_implementation="eager",
    )  # fmt: skip
    reference = randomize(transformers.Dinov2WithRegistersModel(config), 0)
    images, theirs = images_of(reference, 0)
    tensors = {name: tensor.detach().numpy() for name, tensor in reference.named_parameters()}

    def stacked(name):
        return np.stack([tensors[f"encoder.layer.{n}.{name}"] for n in range(2)])

    attention, body = {}, "embeddings.patch_embeddings.projection"
    for name in ("query", "key", "value"):
        kernel, bias = (stacked(f"attention.{name[0]}_proj.{kind}") for kind in ("weight", "bias"))
        attention[name] = {"kernel": kernel.swapaxes(1, 2).reshape(2, 24, 3, 8), "bias": bias.reshape(2, 3, 8)}
    kernel = stacked("attention.o_proj.weight").swapaxes(1, 2).reshape(2, 3, 8, 24)
    attention["out"] = {"kernel": kernel, "bias": stacked("attention.o_proj.bias")}
    layers = {"attention": attention, "attention_scale": stacked("layer_scale1.lambda1")}
    layers["mlp_scale"] = stacked("layer_scale2.lambda1")
    layers["mlp"] = {
        ours: {"kernel": stacked(f"mlp.{name}.weight").swapaxes(1, 2), "bias": stacked(f"mlp.{name}.bias")}
        for ours, name in (("up", "fc1"), ("down", "fc2"))
    }
    for ours, name in (("attention_norm", "norm1"), ("mlp_norm", "norm2")):
        layers[ours] = {"scale": stacked(f"{name}.weight"), "bias": stacked(f"{name}.bias")}
    kernel = tensors[f"{body}.weight"].transpose(2, 3, 1, 0).reshape(-1, 24)
    params = {
        "class_token": tensors["embeddings.cls_token"][0, 0],
        "registers": tensors["embeddings.register_tokens"][0],
        "table": {"table": tensors["embeddings.position_embeddings"][0]},
        "patch_embed": {"projection": {"kernel": kernel, "bias": tensors[f"{body}.bias"]}},
        "stack": {"layers": layers},
        "norm": {"scale": tensors["layernorm.weight"], "bias": tensors["layernorm.bias"]},
    }
    sizes = {"image_size": 8, "patch_size": 4, "depth": 2, "width": 24, "num_heads": 3, "mlp_dim": 48, "epsilon": 1e-3}
    model = vit.ViT(num_classes=0, **sizes, num_registers=3, layer_scale=1.0)
    actual = jax.jit(partial(model.apply, method="encode"))({"params": params}, images)
    expected = reference(theirs).last_hidden_state.detach().numpy()
    assert_close(actual, np.delete(expected, [1, 2, 3], axis=1))


@tiered("classes", [3, 0])
def test_ijepa_matches_average_pooling(classes, randomize, ours, exported):
    """Compare with I-JEPA in both directions: a ViT without a class token, whose patches are averaged."""
    config = transformers.IJepaConfig(
        hidden_size=24, num_hidden_layers=2, num_attention_heads=3, intermediate_size=48, image_size=8, patch_size=2,
        num_channels=1, layer_norm_eps=1e-3, attn_implementation="eager", num_labels=classes,
    )  # fmt: skip
    cls = transformers.IJepaForImageClassification if classes else transformers.IJepaModel
    reference = randomize(cls(config, **({} if classes else {"add_pooling_layer": False})), 0)
    images, theirs = images_of(reference, 0)
    model, variables = ours(reference)
    assert (model.pooling, model.num_classes, model.epsilon) == ("gap" if classes else "tokens", classes, 1e-3)
    expected, again = (
        (out.logits if classes else out.last_hidden_state).detach().numpy()
        for out in (reference(theirs), exported(model, variables, cls)(theirs))
    )
    assert_close(jax.jit(model.apply)(variables, images), expected)
    assert_close(again, expected)
