"""Mixup and CutMix, soft labels, the binary cross-entropy and distillation."""

import functools
from types import SimpleNamespace

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

from lineage.configs.run import Run
from lineage.data import ExampleSource, Facts
from lineage.models import Model
from lineage.tasks import image_classification
from lineage.tasks.image_classification import ImageClassification, mix, mixing_ratios
from lineage.tasks.losses import class_loss, divergence, sums, weighted
from lineage.train.step import TrainState, make_train_step


@functools.cache
def keys():
    return jax.random.split(jax.random.key(0), 400)


BOTH = {"mixup": 0.8, "cutmix": 1.0}


def draws(size=(12, 10), mixup=0.0, cutmix=0.0):
    pixels, share = jax.jit(jax.vmap(lambda key: mixing_ratios(key, size, mixup, cutmix)))(keys())
    return np.asarray(pixels)[..., 0], np.asarray(share)


def test_mixup_weight_is_at_least_one_half():
    pixels, share = draws(mixup=0.8)
    np.testing.assert_array_equal(pixels, np.broadcast_to(pixels[:, :1, :1], pixels.shape))
    np.testing.assert_allclose(share, pixels[:, 0, 0], rtol=1e-6)
    assert 0.5 <= share.min() < 0.52
    assert share.max() > 0.98


def test_cutmix_removes_a_random_box():
    pixels, share = draws((40, 30), cutmix=1.0)
    assert set(np.unique(pixels)) == {0, 1}
    lost = pixels == 0
    area, height, width = lost.sum((1, 2)), lost.any(2).sum(1), lost.any(1).sum(1)
    np.testing.assert_array_equal(area, height * width)
    np.testing.assert_allclose(share, 1 - area / 1200, atol=1e-6)
    assert (lost.mean(0) > 0.08).all()  # every pixel can be in the box
    assert lost[:, 20, 15].mean() == pytest.approx(0.5, abs=0.08)  # the center, with the mean area as probability
    # Boxes that are not clipped at the edges have the aspect ratio of the image.
    inner = ~(lost[:, 0].any(1) | lost[:, -1].any(1) | lost[:, :, 0].any(1) | lost[:, :, -1].any(1)) & (area > 200)
    np.testing.assert_allclose((height / width)[inner], 4 / 3, atol=0.2)
    assert share.max() > 0.98
    assert share.min() < 0.2


def test_mixup_and_cutmix_are_equally_frequent():
    pixels, _ = draws(**BOTH)
    cut = (pixels == 0).any((1, 2))
    assert 0.4 < cut.mean() < 0.6
    assert set(np.unique(pixels[cut])) == {0, 1}
    mixed = (pixels > 0) & (pixels < 1)
    assert (mixed.all((1, 2)) | cut | (pixels == 1).all((1, 2))).all()


class Areas(Model):
    """Model that returns the log of the area of each class; channel c is 1 where class c is."""

    num_classes: int = 3

    @nn.compact
    def __call__(self, image):
        bias = self.param("bias", nn.initializers.zeros, (image.shape[-1],))
        return jnp.log(image.mean((1, 2)) + 1e-30) + bias


@pytest.mark.thorough
@pytest.mark.parametrize("options", [{"mixup": 0.8}, {"cutmix": 1.0}, BOTH], ids=["mixup", "cutmix", "both"])
def test_label_weights_match_pixel_weights(options):
    label = jnp.array([0, 1, 2, 1])
    image = jnp.broadcast_to(jax.nn.one_hot(label, 3)[:, None, None], (4, 9, 7, 3))
    batch = {"image": image, "label": label, "mask": jnp.array([True, True, True, False])}

    def loss(bias, key):
        apply = nn.apply(ImageClassification(**options).loss, Areas())
        return apply({"params": {"bias": bias}}, batch, rngs={"dropout": key})[0]

    # Predicting the fraction of pixels of each class is optimal: the gradient is zero.
    losses, gradients = jax.jit(jax.vmap(jax.value_and_grad(loss), (None, 0)))(jnp.zeros(3), keys()[:50])
    np.testing.assert_allclose(gradients, 0, atol=1e-5)
    assert losses.max() > 1  # the labels are mixed


def given(logits, label, mask=None):
    """Return a batch whose images are the logits."""
    mask = jnp.ones(len(label), bool) if mask is None else mask
    return {"image": jnp.asarray(logits)[:, None, :, None], "label": jnp.asarray(label), "mask": mask}


class Scores(Model):
    """Model that returns the image as logits."""

    num_classes: int

    @nn.compact
    def __call__(self, image):
        return image[:, 0, :, 0] + self.param("bias", nn.initializers.zeros, ())


def found(batch, rngs=None, **options):
    apply = jax.jit(nn.apply(ImageClassification(**options).loss, Scores(num_classes=batch["image"].shape[2])))
    return apply({"params": {"bias": jnp.zeros(())}}, batch, rngs=rngs)


def test_soft_labels_and_binary_cross_entropy_match_pytorch():
    random = np.random.default_rng(0)
    logits, hard = random.normal(size=(6, 12)).astype(np.float32), random.integers(0, 12, 6)
    soft = random.dirichlet(np.full(12, 0.3), 6).astype(np.float32)
    label = soft[0].argmax()
    logits[0, label] = np.sort(np.delete(logits[0], label))[-5] - 1e-3  # five other classes are more probable
    mask = jnp.arange(6) < 5
    torch_logits, torch_soft = torch.tensor(logits[:5]), torch.tensor(soft[:5])
    loss, weight, aux = found(given(logits, soft, mask))
    expected = torch.nn.functional.cross_entropy(torch_logits, torch_soft, reduction="sum")
    assert (float(loss), float(weight)) == (pytest.approx(expected.item(), rel=1e-5), 5)
    assert aux["accuracy"].compute() == pytest.approx((logits.argmax(1) == soft.argmax(1))[:5].mean())
    ranks = (np.argsort(-logits) == soft.argmax(1)[:, None]).argmax(1)
    assert aux["top_5_accuracy"].compute() == pytest.approx((ranks < 5)[:5].mean())
    assert [("top_5_accuracy" in found(given(logits[:, :size], soft[:, :size]))[2]) for size in (10, 11)] == [
        False,
        True,
    ]
    hot = np.eye(12, dtype=np.float32)[hard]
    assert float(found(given(logits, hot))[0]) == float(found(given(logits, hard))[0])
    binary = torch.nn.functional.binary_cross_entropy_with_logits
    loss = found(given(logits, soft, mask), binary=True)[0]
    assert float(loss) == pytest.approx(5 * binary(torch_logits, torch_soft).item(), rel=1e-5)
    smooth = 0.9 * hot[:5] + 0.1 / 12
    loss = found(given(logits, hard, mask), {"dropout": keys()[0]}, binary=True, label_smoothing=0.1)[0]
    assert float(loss) == pytest.approx(5 * binary(torch_logits, torch.tensor(smooth)).item(), rel=1e-5)


@pytest.mark.parametrize("binary", [False, True])
def test_errors_in_reports_have_the_probabilities_of_predictions(binary, monkeypatch):
    monkeypatch.setattr(image_classification, "attention_of_images", lambda *_: {})
    logits, task = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32), ImageClassification(binary=binary)
    facts = Facts(class_names=("a", "b", "c"), mean=(0.0,), std=(1.0,))
    split = SimpleNamespace(name="test", batches=[given(logits, (logits.argmax(1) + 1) % 3)], facts=facts)
    context, variables = SimpleNamespace(model=Scores(num_classes=3)), {"params": {"bias": jnp.zeros(())}}
    errors = task.pictures(context, variables, split)["mistakes_test"]
    expected = [max(row["probabilities"].values()) for row in task.predict(logits, ExampleSource(), facts)]
    np.testing.assert_allclose(errors["probability"], sorted(expected)[::-1], rtol=1e-6)


def test_binary_targets_have_both_classes_of_a_mixed_image(monkeypatch):
    monkeypatch.setattr(jax.random, "beta", lambda key, a, b: jnp.float32(0.7))
    random = np.random.default_rng(0)
    logits, label = random.normal(size=(4, 5)).astype(np.float32), np.array([0, 1, 1, 4])
    target = np.array([[1, 0, 0, 0, 1], [1, 1, 0, 0, 0], [0, 1, 0, 0, 0], [0, 1, 0, 0, 1]], np.float32)
    mixed = 0.7 * logits + 0.3 * np.roll(logits, 1, axis=0)
    expected = torch.nn.functional.binary_cross_entropy_with_logits(torch.tensor(mixed), torch.tensor(target))
    loss = found(given(logits, label), {"dropout": keys()[0]}, binary=True, mixup=0.2)[0]
    assert float(loss) == pytest.approx(4 * expected.item(), rel=1e-5)


@pytest.mark.parametrize("temperature", [1.0, 3.0])
def test_divergence_matches_pytorch(temperature):
    teacher, student = np.random.default_rng(0).normal(size=(2, 4, 3, 7)).astype(np.float32)
    log_p, log_q = (torch.log_softmax(torch.tensor(x) / temperature, -1) for x in (teacher, student))
    expected = torch.nn.functional.kl_div(log_q, log_p, log_target=True, reduction="none").sum(-1) * temperature**2
    found = divergence(jnp.asarray(teacher), jnp.asarray(student), temperature)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    hard = torch.nn.functional.cross_entropy(
        torch.tensor(student).reshape(12, 7), torch.tensor(teacher.argmax(-1)).reshape(12), reduction="none"
    )
    found = divergence(jnp.asarray(teacher), jnp.asarray(student), 0.0)
    np.testing.assert_allclose(found.reshape(12), hard, rtol=1e-5)


def test_weighted_losses_are_reported_one_by_one():
    losses = {"first": jnp.array([1.0, 2.0, 5.0]), "second": jnp.array([0.5, 4.0, 7.0])}
    total, weight, aux = weighted((2.0, 0.25), losses, jnp.array([True, True, False]), accuracy=jnp.ones(3))
    assert (float(total), float(weight)) == (7.125, 2)
    means = {name: float(state.compute()) for name, state in aux.items()}
    assert means == {"loss": 3.5625, "first": 1.5, "second": 2.25, "accuracy": 1.0}


@pytest.mark.thorough
def test_accumulated_loss_matches_micro_batches():
    random = np.random.default_rng(0)
    batch = given(random.normal(size=(8, 5)).astype(np.float32), random.integers(0, 5, 8), jnp.arange(8) != 3)
    objective, optimizer = ImageClassification(**BOTH).loss, optax.sgd(1.0)
    params = {"bias": jnp.zeros(())}
    state = TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params), {}, None)
    step = jax.jit(make_train_step(Scores(num_classes=5), objective, optimizer, Run(seed=5, grad_accum_steps=2)))
    rng = jax.random.fold_in(jax.random.key(5), 0)
    parts = [
        found({name: value[i::2] for name, value in batch.items()}, {"dropout": jax.random.fold_in(rng, i)}, **BOTH)
        for i in range(2)
    ]
    (a, a_weight, _), (b, b_weight, _) = parts
    assert (a_weight, b_weight) == (4, 3)
    assert float(step(state, batch)[1]["loss"]) == pytest.approx(float(a + b) / 7, rel=1e-5)


def test_mix_uses_the_next_example():
    values = jnp.arange(6.0).reshape(3, 2)
    np.testing.assert_allclose(mix(values, jnp.float32(0.75))[1], 0.75 * values[1] + 0.25 * values[0])


@pytest.mark.parametrize("shape", [(2, 1), (2, 1, 3), (1, 3), (3,)])
def test_logits_of_another_shape_are_refused(shape):
    target, label = jnp.eye(3)[:2], jnp.arange(2)
    with pytest.raises(ValueError, match=r"^The model returns logits of shape .*: it must be \(2, 3\)\.$"):
        class_loss(jnp.zeros(shape), target, label, binary=False)


def test_another_loss_among_the_metrics_is_refused():
    loss, mask = jnp.ones(2), jnp.ones(2, bool)
    with pytest.raises(ValueError, match="have the key 'loss', which is the loss itself"):
        sums(loss, mask, {"loss": jnp.zeros(2)})
