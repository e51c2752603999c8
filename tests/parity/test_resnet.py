"""ResNet and BiT match `transformers` in evaluation and training."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from flax.traverse_util import flatten_dict
from safetensors.numpy import save

from lineage.models import convert, resnet
from tests.tiers import tiered
from tests.tolerance import assert_close

KINDS = {"bottleneck": "resnet", "basic": "resnet", "preactivation": "bit", "same": "bit"}


def reference_of(kind, seed, randomize, **kwargs):
    rng = np.random.default_rng(seed)
    widths = [8 * int(n) for n in rng.choice(np.arange(1, 5), 2, replace=False)]
    if KINDS[kind] == "bit":  # the first block of BiT always has a projection
        widths = [32 * int(n) for n in rng.choice(np.arange(2, 5), 2)]
    settings = {
        "num_channels": int(rng.choice([1, 3])),
        "embedding_size": int(rng.choice([16, 24] if KINDS[kind] == "resnet" else [32])),
        "hidden_sizes": widths,
        "depths": rng.permutation([1, 2]).tolist(),
        "num_labels": int(rng.integers(2, 6)),
    }
    if kind == "same":
        settings |= {"layer_type": "bottleneck", "global_padding": "SAME", "embedding_dynamic_padding": True}
    else:
        settings |= {"layer_type": kind}
    if KINDS[kind] == "bit":
        config, cls = transformers.BitConfig(**settings, num_groups=4), transformers.BitForImageClassification
    else:
        config, cls = transformers.ResNetConfig(**settings), transformers.ResNetForImageClassification
    reference = randomize(cls(config), seed)
    generator = torch.Generator().manual_seed(seed)
    for name, buffer in reference.named_buffers():
        if "running" in name:
            buffer.copy_(1 + 0.2 * torch.rand(buffer.shape, generator=generator))
    return reference


def images_of(reference, size=(45, 38)):
    """Return images for which no input of a ReLU is so close to 0 that rounding determines its sign."""
    images = np.random.default_rng(6).standard_normal((3, *size, reference.config.num_channels)).astype(np.float32)
    return jnp.asarray(images), torch.tensor(images.transpose(0, 3, 1, 2))


@pytest.mark.parametrize("training", [False, True])
@tiered(("kind", "seed"), [(kind, seed) for kind in KINDS for seed in range(2)], first=lambda kind, seed: seed == 0)
def test_outputs_gradients_and_statistics_match(
    kind, seed, training, randomize, ours, gradients, assert_same_gradients
):
    if training and KINDS[kind] == "bit":
        pytest.skip("it has no statistics")
    reference = reference_of(kind, seed, randomize).train(training)
    images, theirs = images_of(reference)
    model, variables = ours(reference)
    expected = reference(theirs, output_hidden_states=True)
    weights = np.random.default_rng(seed).standard_normal(expected.logits.shape).astype(np.float32)
    (expected.logits.tanh() * torch.tensor(weights)).sum().backward()

    def loss(params):
        out, state = model.apply(
            variables | {"params": params},
            images,
            mutable=["intermediates", "statistics"] if training else ["intermediates"],
            capture_intermediates=lambda module, name: name == "features",
        )
        return (jnp.tanh(out) * weights).sum(), (out, state)

    grads, (out, state) = jax.jit(jax.grad(loss, has_aux=True))(variables["params"])
    maps = state["intermediates"]["features"][0]
    assert_close(out, expected.logits.detach().numpy())
    assert len(maps) == len(model.depths)
    for mine, other in zip(maps, expected.hidden_states[1:], strict=True):
        other = other.detach().numpy().transpose(0, 2, 3, 1)
        np.testing.assert_allclose(mine, other, rtol=0, atol=5e-6 * max(1, np.abs(other).max()))
    if training:  # the running statistics of the reference were updated
        after = flatten_dict(ours(reference)[1]["statistics"], sep="/")
        for path, value in flatten_dict(state["statistics"], sep="/").items():
            np.testing.assert_allclose(value, after[path], rtol=1e-5, atol=1e-6, err_msg=path)
    assert_same_gradients(grads, gradients(reference))


def test_frozen_statistics_are_used_and_kept(randomize, ours):
    reference = reference_of("basic", 3, randomize)
    images, theirs = images_of(reference)
    model, variables = ours(reference, frozen=True)
    out, state = jax.jit(lambda v: model.apply(v, images, mutable=["statistics"]))(variables)
    assert_close(out, reference(theirs).logits.detach().numpy())
    jax.tree.map(np.testing.assert_array_equal, state["statistics"], variables["statistics"])


@tiered(
    "settings",
    [
        {"bottleneck": False, "num_classes": 3},
        {"num_classes": 0},
        {"norm": "group", "preactivation": True, "groups": 2, "num_classes": 2},
        {"norm": "group", "padding": "same", "groups": 2, "num_classes": 0},
    ],
)
def test_export_round_trip(settings, round_trip):
    model = resnet.ResNet(depths=(1, 2), widths=(32, 64), stem_width=8, channels=2, **settings)
    images = np.random.default_rng(0).standard_normal((2, 33, 40, 2)).astype(np.float32)
    name = "ResNet" if model.norm == "batch" else "Bit"
    cls = getattr(transformers, name + ("ForImageClassification" if model.num_classes else "Model"))
    actual, out = round_trip(model, cls, center=0.2, pixel_values=images)
    expected = out.logits if model.num_classes else out.pooler_output.flatten(1)
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)


def test_export_of_unsupported_models_raises(tmp_path):
    model = resnet.ResNet(stem="small", depths=(1,), widths=(8,))
    variables = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 8, 8, 3)))
    with pytest.raises(ValueError, match="the stem 'imagenet' and epsilon 1e-5"):
        convert.save(tmp_path, model, variables)
    transformers.BitConfig(global_padding="VALID").save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(save({}))
    with pytest.raises(ValueError, match=r"BiT with .*'VALID'.* is not supported"):
        convert.load(tmp_path)


@pytest.mark.parametrize("changes", [{"padding": "same"}, {"preactivation": True}, {"norm": "group"}])
def test_export_of_unsupported_blocks_names_their_options(changes, tmp_path):
    model = resnet.ResNet(depths=(1,), widths=(128,), **changes)
    params = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 32, 32, 3)))
    with pytest.raises(ValueError, match="norm 'batch', padding 'symmetric' and no preactivation, and BiTs with"):
        convert.save(tmp_path, model, params)


@pytest.mark.parametrize("widths", [(32, 48), (32, 64), (8, 64)])
def test_export_of_a_bit_with_other_widths_than_the_reference_raises(widths, tmp_path):
    """Check widths that the reference rounds, and a first block without a projection, which it would draw randomly."""
    model = resnet.ResNet(depths=(1, 1), widths=widths, stem_width=32, norm="group", preactivation=True, groups=2)
    variables = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 33, 33, 3)))
    with pytest.raises(ValueError, match="`transformers` needs multiples of 32 as the widths of a BiT, and a first"):
        convert.save(tmp_path, model, variables)
