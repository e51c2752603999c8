"""The masked autoencoder matches `transformers` for given noise."""

import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers

from lineage.configs import cli
from lineage.data import Facts
from lineage.models.mae import MAE
from lineage.tasks.masked_autoencoding import MaskedAutoencoding
from lineage.train import pretrained
from lineage.train.experiment import Experiment
from tests.tiers import tiered
from tests.tolerance import assert_close


def reference_of(seed, randomize, cls=transformers.ViTMAEForPreTraining):
    rng = np.random.default_rng(seed)
    heads, decoder_heads = (int(n) for n in rng.integers(1, 4, 2))
    patch = int(rng.choice([1, 2, 3]))
    config = transformers.ViTMAEConfig(
        hidden_size=heads * int(rng.choice([4, 8])),
        num_hidden_layers=int(rng.integers(1, 4)),
        num_attention_heads=heads,
        intermediate_size=int(rng.integers(5, 40)),
        hidden_act=["gelu", "relu", "gelu_new"][seed % 3],
        layer_norm_eps=float(rng.choice([1e-12, 1e-6, 1e-2])),
        image_size=patch * int(rng.integers(3, 6)),
        patch_size=patch,
        num_channels=3,
        decoder_num_attention_heads=decoder_heads,
        decoder_hidden_size=decoder_heads * int(rng.choice([4, 12])),
        decoder_num_hidden_layers=int(rng.integers(1, 3)),
        decoder_intermediate_size=int(rng.integers(5, 40)),
        mask_ratio=float(rng.choice([0.75, 0.6, 0.3])),
        norm_pix_loss=bool(seed % 2),
        attn_implementation="eager",
    )
    return with_tables(randomize(cls(config), seed))


def with_tables(reference):
    """Set the sin-cos tables of the published checkpoints, which transformers 5.23 initializes to zero."""
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            if "pos" in name:
                side, width = math.isqrt(parameter.shape[1]), parameter.shape[2]
                turns = [10_000 ** -(i / (width // 4)) for i in range(width // 4)]
                rows = [[0.0] * width]
                for y in range(side):
                    for x in range(side):
                        rows.append([f(at * turn) for at in (x, y) for f in (math.sin, math.cos) for turn in turns])
                parameter.copy_(torch.tensor([rows]))
    return reference


def inputs_of(reference, seed):
    config, rng = reference.config, np.random.default_rng(seed + 100)
    image = rng.standard_normal((2, config.image_size, config.image_size, 3)).astype(np.float32)
    noise = rng.random((2, (config.image_size // config.patch_size) ** 2)).astype(np.float32)
    theirs = {"pixel_values": torch.tensor(image.transpose(0, 3, 1, 2)), "noise": torch.tensor(noise)}
    return (jnp.asarray(image), jnp.asarray(noise)), theirs


@tiered("seed", range(3))
def test_loss_reconstruction_hidden_states_and_gradients_match(
    seed, randomize, ours, gradients, assert_same_gradients, watched
):
    reference = reference_of(seed, randomize)
    (image, noise), theirs = inputs_of(reference, seed)
    model, variables = ours(reference)
    assert (model.mask_rate, model.normalized) == (reference.config.mask_ratio, reference.config.norm_pix_loss)
    encoder, decoder = watched(reference.vit.layers), watched(reference.decoder.decoder_layers)
    expected = reference(**theirs)
    expected.loss.backward()

    painting = {"mutable": ["intermediates"], "capture_intermediates": lambda module, _: module.name == "decoder_head"}
    batch = {"image": image, "noise": noise, "mask": jnp.ones(2, bool)}

    def loss(params):
        (total, weight, _), state = nn.apply(MaskedAutoencoding().loss, model, **painting)({"params": params}, batch)
        return total / weight, state["intermediates"]

    (value, seen), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(variables["params"])
    np.testing.assert_allclose(value, expected.loss.item(), rtol=1e-5)
    assert_close(seen["decoder_head"]["__call__"][0], expected.logits.detach().numpy())
    states = [seen["embedding"][0], *seen["stack"]["layers"]["hidden"][0]]
    states += [seen["decoder_embedding"][0], *seen["decoder_stack"]["layers"]["hidden"][0]]
    for mine, other in zip(states, encoder + decoder, strict=True):
        assert_close(mine, other.detach().numpy())
    for parameter in reference.parameters():
        if parameter.grad is None:  # the tables are required in a folder
            parameter.grad = parameter.detach().clone()
    assert_same_gradients(grads, gradients(reference))


def test_encoder_without_masking(randomize, ours, exported):
    reference = reference_of(5, randomize, transformers.ViTMAEModel)
    inputs, theirs = inputs_of(reference, 5)
    model, variables = ours(reference)
    assert model.decoder_depth == 0
    expected = reference(**theirs)
    tokens, hidden = jax.jit(model.apply)(variables, *inputs)
    assert_close(tokens, expected.last_hidden_state.detach().numpy())
    np.testing.assert_array_equal(hidden, expected.mask.numpy())
    again = exported(model, variables, transformers.ViTMAEModel)(**theirs).last_hidden_state.detach().numpy()
    assert_close(again, tokens)


def test_export_round_trip(round_trip):
    model = MAE(
        image_size=12, patch_size=3, depth=2, width=24, num_heads=3, mlp_dim=20, normalized=True, decoder_depth=1,
        decoder_width=16, decoder_num_heads=2, decoder_mlp_dim=10, mask_rate=0.5,
    )  # fmt: skip
    rng = np.random.default_rng(3)
    image, noise = rng.standard_normal((2, 12, 12, 3)).astype(np.float32), rng.random((2, 16)).astype(np.float32)
    (actual, _), expected = round_trip(model, transformers.ViTMAEForPreTraining, pixel_values=image, noise=noise)
    assert_close(actual, expected.logits)


def test_folder_with_other_tables_raises(randomize, ours):
    reference = reference_of(0, randomize)
    with torch.no_grad():
        reference.decoder.decoder_pos_embed.zero_()  # as in a newly initialized model
    with pytest.raises(ValueError, match=r"tensor decoder\.decoder_pos_embed differs from the constant that the model"):
        ours(reference)


@pytest.mark.thorough
@pytest.mark.parametrize("larger", [0, 2])
def test_classifiers_have_the_positions_of_the_masked_autoencoder(larger, randomize, tmp_path):
    """Check that they start with its table, resampled to the size of the images, and with its layers."""
    reference = reference_of(1, randomize)
    reference.save_pretrained(tmp_path)
    size = reference.config.image_size + larger * reference.config.patch_size
    config, _ = cli.load("finetune:image_classification")
    given = {"init.path": str(tmp_path), "source": "folder:images", "task.image_size": size}
    cli.override(config, given | {"total_steps": 1, "total_epochs": None})
    facts = Facts(num_classes=3, image_size=(size, size), channels=3)
    experiment = Experiment(config, None, jax.devices()[:1], saved_facts=facts)
    pretrained.check(experiment)
    state, message = pretrained.start_from(
        experiment.abstract_state, experiment.model, experiment.run.init, jax.jit(experiment.make_state)
    )
    assert "; new: classifier; not used: decoder_" in message
    params = {name: value for name, value in state.params.items() if name != "classifier"}
    images = np.random.default_rng(0).normal(size=(2, size, size, 3)).astype(np.float32)
    features = experiment.model.clone(num_classes=0).apply({"params": params}, jnp.asarray(images))
    reference.vit.config.mask_ratio = 0.0
    with torch.no_grad():
        expected = reference.vit(torch.tensor(images).permute(0, 3, 1, 2), interpolate_pos_encoding=True)
    assert_close(features, expected.last_hidden_state[:, 0])
