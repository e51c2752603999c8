"""DETR matches `transformers`: outputs, matching, losses and gradients."""

import json
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file, save_file
from transformers.loss import loss_for_object_detection

from lineage.models import convert, detr, resnet
from lineage.tasks import matching
from lineage.tasks.object_detection import ObjectDetection
from tests.tolerance import assert_close

KINDS = 3


def reference_of(seed, randomize):
    backbone = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", out_features=["stage2"]
    )
    config = transformers.DetrConfig(
        backbone_config=backbone,
        use_timm_backbone=False,
        d_model=24,
        num_queries=6,
        num_labels=KINDS,
        encoder_layers=1 + seed,
        decoder_layers=2,
        encoder_ffn_dim=20,
        decoder_ffn_dim=20,
        encoder_attention_heads=2 + seed,
        decoder_attention_heads=2 + seed,
        activation_function=["relu", "gelu"][seed],
        attn_implementation="eager",
    )
    reference = randomize(transformers.DetrForObjectDetection(config), seed)
    generator = torch.Generator().manual_seed(seed)
    for name, buffer in reference.named_buffers():
        if "normalization" in name:
            buffer.copy_(0.5 + torch.rand(buffer.shape, generator=generator))
    for parameter in reference.parameters():  # the reference freezes its backbone
        parameter.requires_grad_(True)
    return reference


def batch_of(seed, size=(44, 37), most=4):
    """Return a batch in which the second image is padded and the third has no objects, and its pixel mask."""
    rng = np.random.default_rng(seed + 10)
    counts, extent = np.array([most, 2, 0]), np.float32([[1, 1], [0.75, 23 / 37], [1, 1]])
    rows, columns = (np.arange(n) + 0.5 < extent[:, i, None] * n for i, n in enumerate(size))
    pixels = rows[:, :, None] & columns[:, None]
    image = rng.standard_normal((3, *size, 3)).astype(np.float32) * pixels[..., None]
    center, sides = rng.uniform(0.3, 0.7, (3, most, 2)), rng.uniform(0.1, 0.5, (3, most, 2))
    return {
        "image": image,
        "extent": extent,
        "boxes": np.concatenate([center, sides], axis=-1).astype(np.float32),
        "classes": rng.integers(0, KINDS, (3, most)).astype(np.int32),
        "boxes_mask": np.arange(most) < counts[:, None],
        "mask": np.ones(3, bool),
    }, pixels


def outputs_of(reference, batch, pixels):
    """Return the outputs of the reference for every decoder layer, its losses and matching."""
    layers = []
    for layer in reference.model.decoder.layers:
        layer.register_forward_hook(lambda _, args, out: layers.append(out))
    inputs = torch.tensor(batch["image"].transpose(0, 3, 1, 2)), torch.tensor(pixels).long()
    out = reference(*inputs)
    hidden = reference.model.decoder.layernorm(torch.stack(layers))
    logits, boxes = reference.class_labels_classifier(hidden), reference.bbox_predictor(hidden).sigmoid()
    torch.testing.assert_close(logits[-1], out.logits)
    labels = [
        {"class_labels": torch.tensor(kinds[real]).long(), "boxes": torch.tensor(found[real])}
        for kinds, found, real in zip(batch["classes"], batch["boxes"], batch["boxes_mask"])
    ]
    reference.config.auxiliary_loss = True
    loss, losses, _ = loss_for_object_detection.ForObjectDetectionLoss(
        logits[-1], labels, "cpu", boxes[-1], reference.config, logits, boxes
    )
    reference.config.auxiliary_loss = False  # with it, the reference normalizes the inputs of decoder layers
    matcher = loss_for_object_detection.HungarianMatcher(1, 5, 2)
    chosen = [matcher({"logits": a, "pred_boxes": b}, labels) for a, b in zip(logits, boxes)]
    return logits, boxes, loss, losses, chosen


@pytest.fixture(params=[0, pytest.param(1, marks=pytest.mark.thorough)])
def both(request, randomize, ours):
    reference = reference_of(request.param, randomize)
    batch, pixels = batch_of(request.param)
    model, variables = ours(reference)
    return reference, model, variables, batch, pixels


def test_outputs_losses_matching_and_gradients_match(both, gradients, assert_same_gradients, monkeypatch):
    reference, model, variables, batch, pixels = both
    encoded = []
    for layer in reference.model.encoder.layers:
        layer.register_forward_hook(lambda _, args, out: encoded.append(out))
    _, _, expected, losses, chosen = outputs_of(reference, batch, pixels)
    expected.backward()
    match, choices = matching.match, []

    def watched(cost, real):
        jax.debug.callback(lambda choice: choices.append(np.asarray(choice)), choice := match(cost, real))
        return choice

    monkeypatch.setattr(matching, "match", watched)

    def loss(params, batch):
        apply = nn.apply(ObjectDetection().loss, model, mutable=["intermediates"])
        (total, weight, aux), seen = apply(variables | {"params": params}, batch)
        return total / weight, (aux, seen["intermediates"])

    step = jax.jit(jax.value_and_grad(loss, has_aux=True))
    (value, (aux, seen)), grads = step(variables["params"], jax.tree.map(jnp.asarray, batch))
    jax.effects_barrier()
    real = pixels[:, [44 * i // 6 for i in range(6)]][:, :, [37 * i // 5 for i in range(5)]].reshape(3, -1)
    for mine, theirs in zip(seen["encoder_stack"]["layers"]["hidden"][0], encoded, strict=True):
        assert_close(mine[real], theirs.detach().numpy()[real])

    np.testing.assert_allclose(value, expected.item(), rtol=2e-6)
    np.testing.assert_allclose(aux["loss"].compute(), expected.item(), rtol=2e-6)
    names = {"class_loss": "loss_ce", "box_loss": "loss_bbox", "giou_loss": "loss_giou"}
    for mine, theirs in (names | {"cardinality_error": "cardinality_error"}).items():
        np.testing.assert_allclose(aux[mine].compute(), losses[theirs].item(), rtol=1e-5, err_msg=mine)
    ours_chosen = {tuple(choice.reshape(-1)) for choice in choices}
    theirs_chosen = set()
    for layer in chosen:
        queries = np.full(batch["boxes_mask"].shape, model.num_queries)
        for row, (query, target) in enumerate(layer):
            queries[row, target] = query
        theirs_chosen.add(tuple(queries.reshape(-1)))
    assert ours_chosen == theirs_chosen

    def trained(tree):
        """Return all parameters except the norms of the backbone, which are constants in the reference."""
        leaves = {jax.tree_util.keystr(path): value for path, value in jax.tree_util.tree_leaves_with_path(tree)}
        return {path: value for path, value in leaves.items() if not ("backbone" in path and "norm" in path)}

    assert_same_gradients(trained(grads), trained(gradients(reference)))


def test_outputs_of_every_layer_match(both):
    reference, model, variables, batch, pixels = both
    with torch.no_grad():
        logits, boxes, *_ = outputs_of(reference, batch, pixels)
    found = jax.jit(model.apply)(variables, batch["image"], pixels)
    for mine, theirs in zip(found, (logits, boxes)):
        assert_close(mine, theirs.numpy())


SIZES = {"depth": 1, "decoder_depth": 2, "width": 16, "num_heads": 2, "mlp_dim": 12, "num_queries": 3}


@pytest.mark.thorough
def test_export_round_trip(round_trip, tmp_path):
    backbone = resnet.ResNet(num_classes=0, depths=(1, 1), widths=(8, 16), stem_width=4, bottleneck=False, frozen=True)
    model = detr.DETR(backbone=backbone, num_classes=4, **SIZES)
    image = np.random.default_rng(0).standard_normal((2, 40, 33, 3)).astype(np.float32)
    (logits, boxes), expected = round_trip(model, transformers.DetrForObjectDetection, center=0.1, pixel_values=image)
    assert_close(logits[-1], expected.logits)
    assert_close(boxes[-1], expected.pred_boxes)

    other = model.clone(norm_placement="pre")
    with pytest.raises(ValueError, match="and norm_placement 'post'"):
        convert.save(tmp_path, other, jax.eval_shape(other.init, jax.random.key(0), image))
    config = tmp_path / "exported" / "config.json"
    config.write_text(config.read_text().replace('"layer_type"', '"hidden_act": "gelu", "layer_type"'))
    with pytest.raises(ValueError, match="backbone_config has hidden_act 'gelu'"):
        convert.load(config.parent)


@pytest.mark.thorough
def test_pre_norm_encoder_has_a_final_norm():
    backbone = resnet.ResNet(num_classes=0, depths=(1,), widths=(8,), stem_width=4, bottleneck=False)
    model = detr.DETR(backbone=backbone, num_classes=4, norm_placement="pre", **SIZES)
    image = np.ones((1, 20, 20, 3), np.float32)
    image[:, :9] = 0
    variables = jax.jit(model.init)(jax.random.key(0), image)
    memory = jax.jit(partial(model.apply, method="encode"))(variables, image)
    np.testing.assert_allclose(memory.mean(axis=-1), 0, atol=1e-5)
    np.testing.assert_allclose(memory.var(axis=-1), 1, atol=1e-3)


@pytest.mark.thorough
def test_backbone_with_timm_names(tmp_path, monkeypatch):
    """Check names as in the files of facebook/detr-resnet-50."""
    monkeypatch.setitem(resnet.ResNet.VARIANTS, "50", SMALL := {"depths": (1, 2), "widths": (8, 16), "stem_width": 4})
    model = detr.DETR(backbone=resnet.ResNet(num_classes=0, **SMALL, frozen=True), num_classes=4, **SIZES)
    variables = jax.jit(model.init)(jax.random.key(0), np.zeros((1, 40, 33, 3), np.float32))
    convert.save(tmp_path, model, variables)
    config = json.loads((tmp_path / "config.json").read_text()) | {"backbone_config": None, "use_timm_backbone": True}
    tensors, body = load_file(tmp_path / "model.safetensors"), "model.backbone.conv_encoder.model."
    back = {"embedder.embedder.convolution": "conv1", "embedder.embedder.normalization": "bn1"}
    for stage, block in ((0, 0), (1, 0), (1, 1)):
        there, here = f"encoder.stages.{stage}.layers.{block}.", f"layer{stage + 1}.{block}."
        for i in range(3):
            back[f"{there}layer.{i}.convolution"] = f"{here}conv{i + 1}"
            back[f"{there}layer.{i}.normalization"] = f"{here}bn{i + 1}"
        back[f"{there}shortcut.convolution"] = f"{here}downsample.0"
        back[f"{there}shortcut.normalization"] = f"{here}downsample.1"
    renamed = {
        f"{body}{back[part]}.{end}" if name.startswith(body) else name: value
        for name, value in tensors.items()
        for part, _, end in [name.removeprefix(body).rpartition(".")]
    }
    assert {f"{body}{name}" for name in ("bn1.running_var", "layer2.0.downsample.0.weight")} < set(renamed)
    save_file(renamed, tmp_path / "model.safetensors")
    for found in (config | {"backbone": "resnet50"}, config | {"backbone_config": {"model_type": "timm_backbone"}}):
        (tmp_path / "config.json").write_text(json.dumps(found))
        again, restored = convert.load(tmp_path)
        assert again == model
        jax.tree.map(np.testing.assert_array_equal, restored, variables)
    (tmp_path / "config.json").write_text(json.dumps(config | {"backbone": "resnet34d"}))
    with pytest.raises(ValueError, match="backbone is 'resnet34d': it must be resnet18, resnet50 or resnet101"):
        convert.load(tmp_path)
