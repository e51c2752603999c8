"""Masked autoencoders and linear probes on them, resampled position embeddings, and image distillation."""

import contextlib
import dataclasses
import shutil
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from scipy.special import log_softmax

import lineage
from lineage.configs import cli
from lineage.configs.adoption import adopt, config_of
from lineage.configs.run import Init
from lineage.data import Facts
from lineage.models import Model, convert
from lineage.models.convert import companions
from lineage.models.deit import DeiT
from lineage.models.mae import MAE
from lineage.models.vit import ViT
from lineage.report.run import write_report
from lineage.tasks.image_classification import DistilledImageClassification
from lineage.train import loop
from lineage.train import pretrained as initial
from lineage.train.experiment import Experiment
from lineage.train.preparation import jit_step
from lineage.train.reading import read_variables
from lineage.train.step import TrainState
from tests.tiers import tiered
from tests.train.conftest import without_report

ONE = {"devices": jax.devices()[:1]}
MASKED = {"model.depth": 1, "model.decoder_depth": 1, "model.decoder_width": 8, "model.decoder_num_heads": 2}
MASKED |= {"model.patch_size": 2, "task.mask_rate": 0.75, "task.name": "masked_autoencoding", "total_steps": 12}
MASKED |= {"evaluate_every_steps": 6}
TUNED = {"model.depth": 1, "model.patch_size": 2, "model.pooling": "token", "model.position": "mae"}


@pytest.fixture(scope="module")
def pretrained(tiny, tmp_path_factory):
    """Train a masked autoencoder on a few digits; return its workdir and last evaluation."""
    workdir = tmp_path_factory.mktemp("mae")
    return workdir, loop.train(tiny("mae", MASKED), workdir, **ONE)


@pytest.mark.thorough
def test_run_saves_reconstructions(pretrained):
    workdir, actual = pretrained
    assert actual["test/loss"] < 1.1
    steps = {path.stem: np.load(path) for path in sorted((workdir / "artifacts").glob("painted_*.npz"))}
    assert list(steps) == ["painted_000000006", "painted_000000012"]
    first, last = steps.values()
    assert last["painted"].shape == (6, 8, 8, 1)
    np.testing.assert_array_equal(first["masked"], last["masked"])
    seen = np.isclose(last["masked"], last["image"], atol=1e-5)
    assert seen.mean(axis=(1, 2, 3)).min() >= 0.25
    assert (first["painted"] != last["painted"]).any()
    np.testing.assert_allclose(last["painted"][seen], last["image"][seen], atol=1e-5)
    page = write_report(workdir).read_text()
    assert "Masked images" in page
    assert "step 12" in page
    assert (workdir / "report" / "painted.png").exists()


def test_mask_rate_of_a_model_folder_is_that_of_the_task(tmp_path):
    model = MAE(image_size=8, patch_size=2, depth=1, width=8, num_heads=2, decoder_depth=0, mask_rate=0.5)
    inputs = jnp.zeros((1, 8, 8, 3)), jnp.arange(16)[None]
    convert.save(tmp_path, model, jax.jit(model.init)(jax.random.key(0), *inputs))
    loaded = lineage.load(tmp_path, task="masked_autoencoding")
    assert loaded.experiment.task.mask_rate == loaded.experiment.model.mask_rate == 0.5
    with pytest.raises(ValueError, match=r"model\.decoder_depth is 0: it must be at least 1 to recon"):
        loaded.predict([np.zeros((8, 8, 3), np.uint8)])

    config, _ = cli.load("finetune:masked_autoencoding")
    assert config.task.mask_rate == 0.75  # as in the paper
    cli.override(config, {"init.path": str(tmp_path)})
    assert config.task.mask_rate == 0.5
    resumed, _ = cli.load("finetune:masked_autoencoding")
    resumed.init.path = str(tmp_path)
    adopt(resumed, saved=config.to_dict())
    assert resumed.task.mask_rate == 0.5
    adopt(resumed, typed=["task.mask_rate"], saved=config.to_dict() | {"task": {"mask_rate": 0.25}})
    assert resumed.task.mask_rate == 0.5


@pytest.mark.thorough
def test_linear_probe_trains_the_classifier_only(pretrained, tiny):
    workdir, _ = pretrained
    probe = {"model.head": "probe", "optimizer.frozen": ("^(?!classifier)",), "init.path": str(workdir)}
    experiment = Experiment(tiny("vit", TUNED | probe), **ONE)
    state, said = initial.start_from(jax.jit(experiment.make_state)(), experiment.model, experiment.run.init)
    assert said.endswith(
        "new: classifier, probe_norm; not used: decoder_embed, decoder_head, decoder_norm, decoder_stack, mask_token"
    )
    theirs = read_variables(workdir)["params"]
    for name in ("patch_embed", "class_token", "stack", "norm"):
        jax.tree.map(np.testing.assert_array_equal, state.params[name], theirs[name])
    before = jax.tree.map(np.array, state)  # the step donates its buffers
    after, _ = jit_step(experiment)(state, experiment.data.train[0])
    jax.tree.map(np.testing.assert_array_equal, dict(after.params, classifier=0), dict(before.params, classifier=0))
    assert (after.params["classifier"]["kernel"] != before.params["classifier"]["kernel"]).all()
    assert (after.collections["statistics"]["probe_norm"]["mean"] != 0).any()


@pytest.mark.thorough
@pytest.mark.parametrize(("old", "new"), [(8, 12), (12, 8)])
@tiered("kind", [ViT, DeiT])
def test_positions_are_resampled_to_another_grid(kind, old, new, tmp_path):
    """Compare with PyTorch without antialiasing; positions of special tokens are unchanged."""
    models = [
        kind(num_classes=3, image_size=size, patch_size=2, channels=1, depth=1, width=8, num_heads=2)
        for size in (old, new)
    ]
    theirs, ours = (
        jax.jit(model.init)(jax.random.key(model.image_size), jnp.zeros((1, model.image_size, model.image_size, 1)))
        for model in models
    )
    convert.save(tmp_path, models[0], theirs)
    state = TrainState(jnp.int32(0), ours["params"], None, {}, None)
    actual = initial.start_from(state, models[1], Init(str(tmp_path)))[0].params["table"]["table"]
    table, special = np.array(theirs["params"]["table"]["table"]), len(kind.SPECIAL)
    np.testing.assert_array_equal(actual[:special], table[:special])
    grid = torch.tensor(table[special:].T.reshape(1, 8, old // 2, old // 2))
    expected = torch.nn.functional.interpolate(grid, (new // 2, new // 2), mode="bicubic", align_corners=False)
    np.testing.assert_allclose(actual[special:].T, expected.numpy().reshape(8, -1), atol=1e-6)


@pytest.fixture(scope="module")
def teacher(tiny, tmp_path_factory):
    """Train a classifier with running statistics and return its workdir."""
    workdir = tmp_path_factory.mktemp("teacher")
    with pytest.MonkeyPatch.context() as patch:
        without_report(patch)
        loop.train(tiny("vit", {"model.depth": 1, "model.head": "probe", "total_steps": 3}), workdir, **ONE)
    return workdir


def test_teacher_logits_match_the_teacher(teacher, tiny):
    student = {"model.depth": 1, "model.patch_size": 4, "task.name": "distilled_image_classification"}
    experiment = Experiment(tiny("deit", student | {"teacher": str(teacher)}), **ONE)
    batch = jax.tree.map(jnp.asarray, experiment.data.splits["test"][0])
    variables = read_variables(teacher)
    assert (variables["statistics"]["probe_norm"]["mean"] != 0).any()
    model = Experiment(tiny("vit", {"model.depth": 1, "model.head": "probe"}), **ONE).model
    expected = jax.jit(model.apply)(jax.tree.map(jnp.asarray, variables), batch["image"])
    np.testing.assert_allclose(experiment.with_teacher(batch)["teacher_logits"], expected, atol=1e-5)
    state = jax.jit(experiment.make_state)()
    _, metrics = jit_step(experiment)(
        state, experiment.with_teacher(jax.tree.map(jnp.asarray, experiment.data.train[0]))
    )
    assert {"loss", "accuracy", "teacher_accuracy", "label_loss", "teacher_loss"} <= set(metrics)


@pytest.mark.thorough
def test_teacher_of_other_images_is_refused(teacher, tiny, tmp_path):
    student = {"model.depth": 1, "model.patch_size": 4, "task.name": "distilled_image_classification"}
    changes = student | {"teacher": str(teacher), "task.std": (0.3,)}
    with pytest.raises(ValueError, match=rf"^task.std is \(0.3,\): it must be \(.*, with which the teacher {teacher}"):
        Experiment(tiny("deit", changes), **ONE).check()
    shutil.copytree(teacher, copy := tmp_path / "copy")
    facts = Facts.load(copy / "facts.json")
    dataclasses.replace(facts, class_names=facts.class_names[::-1]).save(copy / "facts.json")
    with pytest.raises(ValueError, match=f"^class 0 is '0' in the data and '9' in the teacher {copy}: the classes"):
        Experiment(tiny("deit", student | {"teacher": str(copy)}), **ONE).check()
    Experiment(tiny("deit", student | {"teacher": str(teacher)}), **ONE).check()


@pytest.mark.thorough
def test_teacher_gets_the_mixed_images(teacher, tiny):
    student = {"model.depth": 1, "model.patch_size": 4, "task.name": "distilled_image_classification"}
    changes = student | {"teacher": str(teacher), "task.mixup": 0.8}
    experiment = Experiment(tiny("deit", changes), **ONE)
    plain = jax.tree.map(jnp.asarray, experiment.data.train[0])
    batch, other = experiment.with_teacher(plain, 3), experiment.with_teacher(plain, 4)
    assert (batch["image"] != other["image"]).any()
    image, label = (np.asarray(plain[name]) for name in ("image", "label"))
    share = np.asarray(batch["target"])[np.arange(8), label][label != np.roll(label, 1)][0]
    assert 0.5 <= share < 1
    expected = share * image + (1 - share) * np.roll(image, 1, axis=0)
    np.testing.assert_allclose(batch["image"], expected, atol=1e-6)
    classes = np.eye(10)[label]
    np.testing.assert_allclose(batch["target"], share * classes + (1 - share) * np.roll(classes, 1, axis=0), atol=1e-6)
    said = experiment.teacher(plain | {"image": batch["image"]})["teacher_logits"]
    np.testing.assert_array_equal(batch["teacher_logits"], said)
    evaluated = experiment.with_teacher(plain)
    assert "target" not in evaluated
    assert (evaluated["teacher_logits"] != said).any()
    _, metrics = jit_step(experiment)(jax.jit(experiment.make_state)(), batch)
    assert np.isfinite(metrics["loss"])
    assert jax.tree.map(jnp.shape, experiment.zeros(8)) == jax.tree.map(jnp.shape, batch)


class Heads(Model):
    """Model that returns fixed logits."""

    logits: Any

    def heads(self, image):
        return self.logits


@pytest.mark.parametrize("temperature", [0.0, 3.0])
def test_image_distillation_loss_matches_reference(temperature):
    rng = np.random.default_rng(0)
    ours, told, theirs = rng.standard_normal((3, 5, 4)).astype(np.float32)
    label, mask = rng.integers(0, 4, 5).astype(np.int32), np.arange(5) < 4
    batch = {"image": np.zeros((5, 1, 1, 1)), "label": label, "mask": mask, "teacher_logits": theirs}
    batch, model = jax.tree.map(jnp.asarray, batch), Heads(logits=(jnp.asarray(ours), jnp.asarray(told))).bind({})
    task = DistilledImageClassification(temperature=temperature, weights=(0.9, 0.1))
    loss, weight, aux = task.loss(model, batch)
    rows = np.arange(5)
    hard = -log_softmax(ours, axis=1)[rows, label]
    soft = -log_softmax(told, axis=1)[rows, theirs.argmax(1)]
    if temperature:
        target = log_softmax(theirs / 3, axis=1)
        soft = 9 * (np.exp(target) * (target - log_softmax(told / 3, axis=1))).sum(1)
    assert weight == 4
    np.testing.assert_allclose(loss, (0.9 * hard + 0.1 * soft)[:4].sum(), rtol=1e-5)
    target = rng.dirichlet(np.ones(4), 5).astype(np.float32)
    mixed = task.loss(model, batch | {"target": jnp.asarray(target)})
    hard = -(target * log_softmax(ours, axis=1)).sum(1)
    np.testing.assert_allclose(mixed[0], (0.9 * hard + 0.1 * soft)[:4].sum(), rtol=1e-5)
    right = ((ours + told) / 2).argmax(1) == label
    np.testing.assert_allclose(aux["accuracy"].compute(), right[:4].mean())
    assert set(aux) == {"loss", "accuracy", "teacher_accuracy", "label_loss", "teacher_loss"}
    batch["teacher_logits"] = batch["teacher_logits"][:, :3]
    with pytest.raises(ValueError, match=r"model\.num_classes is 4: the teacher's is 3\."):
        task.loss(model, batch)
    with pytest.raises(ValueError, match=r"task\.weights is \(1\.0,\): it must have 2, for label, teacher"):
        DistilledImageClassification(weights=(1.0,))


@pytest.mark.parametrize(
    ("model", "changes", "message"),
    [
        ("vit", {"task.name": "masked_autoencoding"}, "'masked_autoencoding' needs a model with the outputs patches"),
        ("vit", {"task.name": "causal_lm"}, "The source 'digits' provides images, not documents."),
        ("mae", {}, "'image_classification' needs a model with the outputs classes: MAE has patches"),
        ("vit", {"task.name": "distilled_image_classification"}, "needs a model with the outputs distilled"),
        ("mae", MASKED | {"task.name": "image_classification"}, "unknown config key 'task.mask_rate'"),
        ("mae", MASKED | {"task.patch_size": 4}, r"noise has shape \(4,\) in the data: it must be \(16,\)"),
        ("mae", MASKED | {"model.decoder_depth": 0}, "model.decoder_depth is 0: it must be at least 1 to recon"),
        ("mae", MASKED | {"model.mask_rate": 0.5}, r"model.mask_rate is 0\.5 and task.mask_rate 0\.75: they must be"),
        ("deit", {"model.pooling": "gap"}, "pooling is 'gap' and head 'linear': DeiT requires 'token' and 'linear'"),
        ("mae", MASKED | {"model.position": "relative"}, "model.position is 'relative'. Available: none, 1d, 2d"),
    ],
)
def test_invalid_options_raise(model, changes, message, tiny, tmp_path):
    with pytest.raises(ValueError, match=message):
        loop.train(tiny(model, {"model.patch_size": 2} | changes | {"model.depth": 1}), tmp_path, **ONE)


@pytest.mark.parametrize("problem", ["multi_label_classification", "regression", "single_label_classification"])
def test_distillation_has_one_class_per_image(problem, tmp_path):
    model = DeiT(num_classes=3, image_size=4, patch_size=2, depth=1, width=8, num_heads=1, mlp_dim=8)
    convert.save(tmp_path, model, model.init(jax.random.key(0), jnp.zeros((1, 4, 4, 3))))
    companions.save_labels(tmp_path, (), problem)
    task = "distilled_image_classification"
    wrong = {
        "multi_label_classification": f"{tmp_path} has classes with separate probabilities, which the task {task} does",
        "regression": f"{tmp_path}/config.json: problem_type is 'regression', which only the task text_regression",
    }
    with pytest.raises(ValueError, match=wrong[problem]) if problem in wrong else contextlib.nullcontext():
        config_of(tmp_path, task)
