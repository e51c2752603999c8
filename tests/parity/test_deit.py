"""DeiT matches `transformers`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers

from lineage.models.deit import DeiT
from tests.tiers import tiered
from tests.tolerance import assert_close


def reference_of(seed, randomize, teacher="WithTeacher"):
    rng = np.random.default_rng(seed)
    heads, patch = int(rng.integers(1, 4)), int(rng.choice([2, 3]))
    config = transformers.DeiTConfig(
        hidden_size=heads * int(rng.choice([3, 8])),
        num_hidden_layers=int(rng.integers(1, 4)),
        num_attention_heads=heads,
        intermediate_size=int(rng.integers(5, 40)),
        hidden_act=["gelu", "relu", "gelu_new"][seed % 3],
        layer_norm_eps=float(rng.choice([1e-12, 1e-6, 1e-2])),
        image_size=patch * int(rng.integers(2, 5)),
        patch_size=patch,
        num_channels=int(rng.choice([1, 3])),
        num_labels=int(rng.integers(2, 7)),
        attn_implementation="eager",
    )
    return randomize(getattr(transformers, f"DeiTForImageClassification{teacher}")(config), seed)


def images_of(config, seed, rows=None, columns=None):
    """Return random images, with sides of the model or of the given numbers of patches."""
    size = [n * config.patch_size if n else config.image_size for n in (rows, columns)]
    images = np.random.default_rng(seed).standard_normal((2, *size, config.num_channels)).astype(np.float32)
    return jnp.asarray(images), torch.tensor(images.transpose(0, 3, 1, 2))


@tiered("seed", range(3))
def test_both_heads_hidden_states_and_gradients_match(seed, randomize, ours, gradients, assert_same_gradients):
    reference = reference_of(seed, randomize)
    images, theirs = images_of(reference.config, seed)
    model, variables = ours(reference)
    expected = reference(theirs, output_hidden_states=True)
    (expected.cls_logits.tanh() + 2 * expected.distillation_logits.tanh()).sum().backward()

    def loss(params):
        out, state = model.apply({"params": params}, images, method="heads", mutable=["intermediates"])
        return (jnp.tanh(out[0]) + 2 * jnp.tanh(out[1])).sum(), (out, state["intermediates"])

    grads, (out, seen) = jax.jit(jax.grad(loss, has_aux=True))(variables["params"])
    for mine, other in zip(out, (expected.cls_logits, expected.distillation_logits)):
        assert_close(mine, other.detach().numpy())
    hidden = [seen["embedding"][0], *seen["stack"]["layers"]["hidden"][0]]
    assert len(hidden) == len(expected.hidden_states)
    for mine, other in zip(hidden, expected.hidden_states):
        assert_close(mine, other.detach().numpy())
    assert_same_gradients(grads, gradients(reference))


def test_classifier_without_a_teacher(randomize, ours, exported):
    """Check a model with a distillation token whose only head is on the class token."""
    reference = reference_of(1, randomize, teacher="")
    images, theirs = images_of(reference.config, 1)
    model, variables = ours(reference)
    assert not model.distillation_head
    expected = reference(theirs, output_hidden_states=True)
    out, seen = jax.jit(lambda images: model.apply(variables, images, mutable=["intermediates"]))(images)
    np.testing.assert_allclose(out, expected.logits.detach().numpy(), rtol=0, atol=1e-5)
    seen = seen["intermediates"]
    hidden = [seen["embedding"][0], *seen["stack"]["layers"]["hidden"][0]]
    for mine, other in zip(hidden, expected.hidden_states, strict=True):
        np.testing.assert_allclose(mine, other.detach().numpy(), rtol=0, atol=1e-5)
    with pytest.raises(ValueError, match="distillation_head is False: the model has one head"):
        model.apply(variables, images, method="heads")

    exported(model, variables, type(reference), like=reference)


def test_mean_of_both_heads_at_another_resolution(randomize, ours):
    reference = reference_of(3, randomize)
    images, theirs = images_of(reference.config, 3, 3, 5)
    model, variables = ours(reference)
    expected = reference(theirs, interpolate_pos_encoding=True).logits.detach().numpy()
    assert_close(jax.jit(model.apply)(variables, images), expected)


def test_export_round_trip(round_trip):
    model = DeiT(num_classes=3, image_size=12, patch_size=3, channels=2, depth=2, width=24, num_heads=3, mlp_dim=30)
    images = np.random.default_rng(3).standard_normal((2, 12, 12, 2)).astype(np.float32)
    actual, expected = round_trip(model, transformers.DeiTForImageClassificationWithTeacher, pixel_values=images)
    assert_close(actual, expected.logits)
