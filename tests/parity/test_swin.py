"""Swin and Swin V2 match `transformers`."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers

from lineage.models import convert, swin
from tests.tiers import tiered
from tests.tolerance import assert_close

CLASSES = {
    "swin": (transformers.SwinConfig, transformers.SwinForImageClassification, transformers.SwinModel),
    "swinv2": (transformers.Swinv2Config, transformers.Swinv2ForImageClassification, transformers.Swinv2Model),
}
# version, depths, window, grid of patches at image_size, grid of the images
CASES = [
    ("swin", [2, 3], 3, 8, (7, 11)),  # shifted and padded; merged from an odd grid
    ("swin", [3], 4, 4, (4, 10)),  # one window high, so not shifted, although it is three windows wide
    ("swinv2", [3, 1], 3, 8, (7, 11)),
    ("swinv2", [1, 2], 5, 9, (18, 13)),  # feature maps of 9 and 4: windows of 5 and 4, the latter not shifted
    ("swinv2", [2], 3, 16, (5, 2)),  # a feature map smaller than a window is shifted nevertheless
]


def reference_of(seed, randomize, kind, depths, window, side, without_classifier=False, **settings):
    rng = np.random.default_rng(seed)
    heads = [int(rng.integers(1, 4)) for _ in depths]
    patch = int(rng.choice([2, 3]))
    make, classifier, bare = CLASSES[kind]
    config = make(
        image_size=side * patch,
        patch_size=patch,
        num_channels=int(rng.choice([1, 3])),
        embed_dim=6 * int(rng.integers(1, 3)),
        depths=depths,
        num_heads=heads,
        window_size=window,
        mlp_ratio=float(rng.choice([1.5, 2.0, 4.0])),
        hidden_act=["gelu", "relu", "gelu_new", "silu"][seed % 4],
        layer_norm_eps=float(rng.choice([1e-5, 1e-2])),
        attn_implementation="eager",
        **({} if without_classifier else {"num_labels": int(rng.integers(2, 7))}),
        **settings,
    )
    return randomize((bare if without_classifier else classifier)(config), seed)


def images_of(reference, seed, grid, missing=1):
    """Return images for a grid of patches, the last of which are incomplete."""
    config = reference.config
    size = [n * config.patch_size - missing for n in grid]
    images = np.random.default_rng(seed + 100).standard_normal((2, *size, config.num_channels)).astype(np.float32)
    return jnp.asarray(images), torch.tensor(images.transpose(0, 3, 1, 2))


@tiered(("seed", "case"), [*enumerate(CASES)], ids=map(str, CASES), first=lambda seed, case: seed == 2)
def test_logits_hidden_states_and_gradients_match(seed, case, randomize, ours, gradients, assert_same_gradients):
    *sizes, grid = case
    trained = {"pretrained_window_sizes": [4, 0]} if seed == 3 else {}
    reference = reference_of(seed, randomize, *sizes, **trained)
    images, theirs = images_of(reference, seed, grid)
    model, variables = ours(reference)
    assert (model.depths, model.epsilon) == (tuple(case[1]), reference.config.layer_norm_eps)
    assert model.trained_windows == tuple(trained.get("pretrained_window_sizes", ()))

    body, expected_hidden = getattr(reference, case[0]), []
    body.embeddings.register_forward_hook(lambda _, args, out: expected_hidden.append(out[0]))
    for stage in body.encoder.layers:
        for block in stage.blocks:
            block.register_forward_hook(lambda _, args, out: expected_hidden.append(out[0]))
    body.layernorm.register_forward_hook(lambda _, args, out: expected_hidden.append(out))
    logits = reference(theirs).logits
    weights = np.random.default_rng(seed).standard_normal(logits.shape).astype(np.float32)
    (logits.tanh() * torch.tensor(weights)).sum().backward()

    def loss(params):
        look = {"mutable": ["intermediates"], "capture_intermediates": lambda module, _: module.name == "norm"}
        out, state = model.apply({"params": params}, images, **look)
        return (jnp.tanh(out) * weights).sum(), (out, state["intermediates"])

    grads, (out, seen) = jax.jit(jax.grad(loss, has_aux=True))(variables["params"])
    assert_close(out, logits.detach().numpy())
    hidden = [seen["embedding"][0]]
    for stage in range(len(model.depths)):
        hidden += list(seen[f"stacks_{stage}"]["layers"]["hidden"][0])
    hidden += seen["norm"]["__call__"]
    assert len(hidden) == len(expected_hidden) == sum(model.depths) + 2
    for mine, other in zip(hidden, expected_hidden):
        assert_close(np.ravel(mine), other.detach().numpy().ravel())
    assert_same_gradients(grads, gradients(reference), relative=1e-5)


@pytest.mark.thorough
@tiered("kind", CLASSES)
def test_feature_maps_and_a_model_without_a_classifier(kind, randomize, ours, exported):
    reference = reference_of(2, randomize, kind, [2, 1], 3, 8, without_classifier=True)
    images, theirs = images_of(reference, 2, (10, 7))
    embedded, size = reference.embeddings(theirs)
    told = {"output_hidden_states": True, "output_hidden_states_before_downsampling": True}
    maps = reference.encoder(embedded, size, **told).reshaped_hidden_states[1:]
    model, variables = ours(reference)
    actual = jax.jit(partial(model.apply, method="features"))(variables, images)
    assert [mine.shape[1:3] for mine in actual] == [(10, 7), (5, 4)]
    for mine, other in zip(actual, maps, strict=True):
        assert_close(mine, other.permute(0, 2, 3, 1).detach().numpy())

    pooled = reference(theirs).pooler_output.detach().numpy()
    assert_close(jax.jit(model.apply)(variables, images), pooled)
    assert_close(exported(model, variables, CLASSES[kind][1])(theirs).logits.detach().numpy(), pooled)


def test_feature_map_smaller_than_a_window_matches_a_smaller_window(randomize, ours):
    """Compare with a reference that has smaller windows and the used part of the table, because the reference
    itself fails.
    """
    reference = reference_of(3, randomize, "swin", [2], 3, 3)
    images, theirs = images_of(reference, 3, (3, 7))
    model, variables = ours(reference)
    larger = model.clone(window=5)
    relative = variables["params"]["stacks_0"]["layers"]["attention"]["attention"]["relative"]
    depth, _, heads = relative["table"].shape
    table = np.full((depth, 9, 9, heads), np.nan, np.float32)
    table[:, 2:7, 2:7] = relative["table"].reshape(depth, 5, 5, heads)
    relative["table"] = table.reshape(depth, 81, heads)
    out = jax.jit(larger.apply)(variables, images)
    assert_close(out, reference(theirs).logits.detach().numpy())


@tiered(("version", "kind"), [("v1", "swin"), ("v2", "swinv2")])
def test_export_round_trip(version, kind, round_trip):
    model = swin.Swin(
        num_classes=3, image_size=12, patch_size=2, channels=2, depths=(1, 2), width=12, num_heads=(3, 2), window=2,
        version=version, mlp_ratio=2.0, activation="gelu_tanh", stochastic_depth=0.3,
    )  # fmt: skip
    images = np.random.default_rng(0).standard_normal((2, 11, 16, 2)).astype(np.float32)
    actual, expected = round_trip(model, CLASSES[kind][1], pixel_values=images)
    assert_close(actual, expected.logits)


@pytest.mark.parametrize("sizes", [{}, {"window": 2}, {"version": "v2"}], ids=str)
def test_export_of_windows_larger_than_a_feature_map_raises(sizes, tmp_path):
    """Check feature maps of 4 and 2 tokens: version 1 of the reference cannot be applied to them with windows of 4."""
    settings = {"image_size": 7, "patch_size": 2, "depths": (1, 1), "num_heads": (1, 2), "width": 8, "window": 4}
    model = swin.Swin(num_classes=2, **settings | sizes)
    variables = jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, 7, 7, 3)))
    if sizes:
        convert.save(tmp_path, model, variables)
        kind = "swin" if model.version == "v1" else "swinv2"
        CLASSES[kind][1].from_pretrained(tmp_path)(torch.zeros((1, 3, 7, 7)))  # raises no error
        return
    with pytest.raises(ValueError, match=r"window is 4, but .* 2 x 2 .*: `transformers` needs windows .* feature map"):
        convert.save(tmp_path, model, variables)
