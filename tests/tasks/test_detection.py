"""Object detection: loss with micro-batches, several devices and empty images; average precision; runs on `shapes`."""

import json

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from lineage import models
from lineage.configs.run import Init, Run
from lineage.data.sources import shapes
from lineage.models import convert
from lineage.models.detr import DETR
from lineage.models.resnet import ResNet
from lineage.models.vit import ViT
from lineage.tasks.image_classification import ImageClassification
from lineage.tasks.object_detection import ObjectDetection
from lineage.train import loop, pretrained
from lineage.train.experiment import Experiment
from lineage.train.sharding import make_mesh, on_mesh, to_mesh
from lineage.train.step import init_state, make_train_step

ONE = {"devices": jax.devices()[:1]}
BACKBONE = {"depths": (1, 1), "widths": (8, 16), "stem_width": 8, "bottleneck": False, "norm": "group", "groups": 2}
SIZES = {"depth": 1, "decoder_depth": 2, "width": 16, "num_heads": 2, "mlp_dim": 16, "num_queries": 4}
TINY = (
    {f"model.backbone.{name}": value for name, value in BACKBONE.items()}
    | {f"model.{name}": value for name, value in SIZES.items()}
    | {
        "source": "shapes",
        "source.image_size": 16,
        "task.image_size": 16,
        "task.max_boxes": 3,
        "task.name": "object_detection",
    }
)


def batch_of(size=8):
    rng = np.random.default_rng(0)
    center, sides = rng.uniform(0.3, 0.7, (size, 3, 2)), rng.uniform(0.1, 0.5, (size, 3, 2))
    return {
        "image": rng.standard_normal((size, 16, 16, 3)).astype(np.float32),
        "extent": np.ones((size, 2), np.float32),
        "boxes": np.concatenate([center, sides], axis=-1).astype(np.float32),
        "classes": rng.integers(0, 4, (size, 3)).astype(np.int32),
        "boxes_mask": np.arange(3) < (np.arange(size) % 4)[:, None],
        "mask": np.ones(size, bool),
    }


@pytest.fixture(scope="module")
def one_step():
    """Return a small model, its initial state, and a function that makes a training step for `grad_accum_steps`."""
    model = models.build("detr", backbone={"name": "resnet", **BACKBONE}, num_classes=4, dropout=0.0, **SIZES)
    optimizer = optax.sgd(1e-3)
    batch = jax.tree.map(jnp.asarray, batch_of())
    state = jax.jit(lambda: init_state(model, optimizer, ObjectDetection().loss, batch, seed=0))()

    def make(accumulate):
        return jax.jit(make_train_step(model, ObjectDetection().loss, optimizer, Run(grad_accum_steps=accumulate)))

    return model, state, make


@pytest.mark.slow
def test_accumulation_and_sharding_match_a_single_device(one_step):
    """Check micro-batches with different numbers of objects: one has all images with one or three."""
    _, state, make = one_step
    whole, metrics = make(1)(state, jax.tree.map(jnp.asarray, batch_of()))
    parts, metrics_of_parts = make(2)(state, to_mesh(batch_of(), make_mesh(4, devices=jax.devices()[:4])))
    for one, other in zip(*map(jax.tree.leaves, (whole.params, parts.params)), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-6)
        assert np.isfinite(one).all()
    assert any((a != b).any() for a, b in zip(*map(jax.tree.leaves, (state.params, whole.params))))
    assert {"class_loss_layer_1", "box_loss_layer_1", "giou_loss_layer_1"} < set(metrics)  # of the first layer
    for name, value in metrics.items():
        np.testing.assert_allclose(value, metrics_of_parts[name], rtol=1e-5, err_msg=name)

    empty = jax.tree.map(jnp.asarray, batch_of() | {"boxes_mask": np.zeros((8, 3), bool)})
    _, metrics = make(1)(state, empty)
    assert np.isfinite(metrics["loss"])
    assert np.isfinite(metrics["gradient_norm"])


@pytest.mark.thorough
def test_gradients_of_the_backbone_match_if_tokens_are_split():
    """Check a mesh whose context axis splits the tokens: XLA must not split the rows of images in the same way."""
    backbone = {"name": "resnet", **BACKBONE}
    model = models.build("detr", backbone=backbone, num_classes=4, dropout=0.0, **SIZES | {"num_heads": 4})
    batch = batch_of() | {"image": np.random.default_rng(1).standard_normal((8, 32, 32, 3)).astype(np.float32)}
    arrays, mesh = jax.tree.map(jnp.asarray, batch), make_mesh(1, context=2, tensor=2, devices=jax.devices()[:4])
    state = jax.jit(lambda: init_state(model, optax.sgd(1.0), ObjectDetection().loss, arrays, seed=0))()
    step = make_train_step(model, ObjectDetection().loss, optax.sgd(1.0), Run())
    sharded = jax.jit(on_mesh(step, mesh, model.sharding_rules, False))
    parts, whole = sharded(state, to_mesh(batch, mesh))[0].params, jax.jit(step)(state, arrays)[0].params
    for one, other in zip(*map(jax.tree.leaves, (whole["backbone"], parts["backbone"])), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-4 * np.abs(one).max())


@pytest.mark.thorough
def test_invalid_weights_and_too_many_objects_raise(one_step):
    model, state, _ = one_step
    batch = jax.tree.map(jnp.asarray, batch_of(2))
    with pytest.raises(ValueError, match=r"task\.weights is \(1\.0, 2\.0\): it must have 3, for class, distance"):
        ObjectDetection(weights=(1.0, 2.0))
    for name in ("boxes", "classes", "boxes_mask"):
        batch[name] = jnp.repeat(batch[name], 2, axis=1)
    with pytest.raises(ValueError, match=r"task\.max_boxes is 6: it must be at most model\.num_queries, 4"):
        jax.eval_shape(nn.apply(lambda model: ObjectDetection().loss(model, batch), model), state.variables())


@pytest.mark.slow
def test_evaluation_covers_the_whole_split_and_report_shows_boxes(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(shapes, "SIZES", {"train": 30, "validation": 7, "test": 7})
    draw = shapes.DrawnShapes.__getitem__

    def draw_three(self, index):
        return {name: value if name == "image" else value[:3] for name, value in draw(self, index).items()}

    monkeypatch.setattr(shapes.DrawnShapes, "__getitem__", draw_three)
    more = TINY | {"total_steps": 2, "model.num_classes": 40}  # the data have 4 classes
    config = tiny("detr", more | {"loader.evaluation_batch_size": 4})
    metrics = loop.train(config, tmp_path, **ONE)
    assert set(metrics) >= {f"{split}/{name}" for split in ("validation", "test") for name in ("loss", "ap", "ap_50")}
    assert json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])["test/ap"] == metrics["test/ap"]
    page = (tmp_path / "report.html").read_text()
    assert all(f"{what}, validation" in page for what in ("Objects", "Precision and recall"))
    curves = np.load(tmp_path / "artifacts/precision_test.npz")["precision"]
    assert curves.mean() == pytest.approx(metrics["test/ap"], nan_ok=True)
    config = tiny("detr", more | {"loader.evaluation_batch_size": 7})
    experiment = Experiment(config, tmp_path, ONE["devices"])
    assert experiment.evaluation()(experiment.restore().variables(average=True)) == pytest.approx(metrics, rel=1e-5)


class Plain(models.Model):
    outputs = ("classes",)


def test_incompatible_models_and_tasks_raise(tiny):
    with pytest.raises(ValueError, match="'object_detection' needs a model with the outputs objects: ViT has classes"):
        ObjectDetection().check_model(ViT(num_classes=8))
    with pytest.raises(ValueError, match="'image_classification' needs a model with the outputs classes: DETR has obj"):
        ImageClassification().check_model(DETR(backbone=ResNet()))
    with pytest.raises(ValueError, match="The model Plain has no field channels, which 'image_classification' needs"):
        ImageClassification().check_model(Plain())
    experiment = Experiment(tiny("detr", TINY | {"evaluators.knn": "knn"}), **ONE)
    with pytest.raises(ValueError, match="'object_detection' has no features: probes need a task of labeled images"):
        experiment.evaluation()
    with pytest.raises(ValueError, match="the backbone is a ViT: it must be one with feature maps"):
        jax.eval_shape(DETR(backbone=ViT(num_classes=0)).init, jax.random.key(0), jnp.zeros((1, 224, 224, 3)))
    with pytest.raises(ValueError, match="width is 18: it must be a multiple of 4"):
        jax.eval_shape(DETR(backbone=ResNet(), width=18).init, jax.random.key(0), jnp.zeros((1, 224, 224, 3)))


@pytest.mark.thorough
def test_backbone_is_initialized_from_a_classifier(tiny, tmp_path):
    like = {"norm": "batch", "num_classes": 5, "channels": 3}
    classifier = models.build("resnet", **BACKBONE | like)
    variables = jax.jit(classifier.init)(jax.random.key(5), jnp.zeros((1, 16, 16, 3)))
    variables = jax.tree.map(lambda x: x + 0.5, variables)
    convert.save(tmp_path, classifier, variables)
    changes = {"model.backbone.norm": "batch", "model.backbone.frozen": True}
    experiment = Experiment(tiny("detr", TINY | changes), **ONE)
    state = jax.jit(experiment.make_state)()
    found, said = pretrained.start_from(state, experiment.model, Init(str(tmp_path), rename=(("^", "backbone/"),)))
    assert "not used: backbone" in said  # the classifier
    for kind in ("params", "statistics"):
        ours = found.variables()[kind]["backbone"]
        jax.tree.map(np.testing.assert_array_equal, ours, {name: variables[kind][name] for name in ours})
    jax.tree.map(np.testing.assert_array_equal, found.params["box_0"], state.params["box_0"])
