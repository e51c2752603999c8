"""Image classification, with or without a teacher."""

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Key

from lineage.configs.registry import Rate
from lineage.data import Examples, ExampleSource, Facts, Images, Tokenizer
from lineage.metrics.classification import correct
from lineage.metrics.states import Confusion
from lineage.models import Model
from lineage.tasks.attention import IMAGES, attention_of_images
from lineage.tasks.base import TASKS, Batch, Pictures, Result, Weight, Weights
from lineage.tasks.images import CheckedExamples, LabeledImageTask, first_images, to_pixels
from lineage.tasks.losses import class_loss, divergence, probabilities, smoothed, sums, weighted
from lineage.tasks.prediction import probabilities_of, ranked

MISTAKES = 24  # number of the most confident mistakes in the report
MAX_CLASSES = 1000  # maximum number of classes of a confusion matrix, whose size is quadratic


@TASKS.register("image_classification")
@dataclass(frozen=True)
class ImageClassification(LabeledImageTask):
    """Predict the class of an image.

    Attributes:
        label_smoothing: probability mass spread evenly over all classes, in training (arXiv 1512.00567, section 7).
        mixup: parameter a of the distribution Beta(a, a) of the mixing ratio (mixup, arXiv 1710.09412); 0 disables it.
        cutmix: parameter a of the distribution Beta(a, a) of the area of pasted boxes (CutMix, arXiv 1905.04899); 0
            disables it. With both mixup and CutMix, each is applied with probability 1/2.
        binary: whether to use a binary cross-entropy per class (multi-label targets); a mixed image has the classes of
            both images (arXiv 2110.00476, section 2).
    """

    needs = ("classes",)

    label_smoothing: Rate = 0.0
    mixup: Weight = 0.0
    cutmix: Weight = 0.0
    binary: bool = False

    @property
    def problem_type(self) -> str:
        return "multi_label_classification" if self.binary else ""

    def examples(self, content: Images, tokenizer: Tokenizer | None, seed: int) -> Examples:
        """Return the examples, without evaluation splits without labels (-1), such as the test split of ImageNet."""
        parts = content.splits.items()
        kept = [
            (name, part) for name, part in parts if name == "train" or not len(part) or np.any(part[0]["label"] != -1)
        ]
        splits = {name: CheckedLabels(part, name, len(content.class_names)) for name, part in kept}
        return super().examples(content._replace(splits=splits), tokenizer, seed)

    def loss(self, model: Model, batch: Batch) -> Result:
        """Return the cross-entropy of `label` [B], or of soft labels [B, V], where `mask` [B] is True."""
        mask, image, target = batch["mask"], batch["image"], probabilities(batch["label"], model.num_classes)
        label = target.argmax(axis=-1)
        if model.has_rng("dropout") and (self.mixup or self.cutmix):
            if len(image) == 1:
                raise ValueError("mixup and cutmix need at least 2 examples in each batch, or micro-batch.")
            key = model.make_rng("dropout")
            image, target = mixed(key, image, target, self.mixup, self.cutmix, self.binary)
        logits = model(image).astype(jnp.float32)
        loss, means = class_loss(logits, smoothed(model, target, self.label_smoothing), label, self.binary)
        return sums(loss, mask, means)

    def predict(self, outputs: Any, inputs: ExampleSource, facts: Facts) -> list[dict[str, Any]]:
        return ranked(probabilities_of(outputs, self.binary), facts.class_names)

    def pictures(self, context: Any, variables: Any, split: Any) -> Pictures:
        """Return the confusion matrix of at most `MAX_CLASSES`, the most confident mistakes and attention weights."""
        model, facts = context.model, split.facts
        names = np.asarray(facts.class_names)
        predict = jax.jit(model.apply)
        confusion = Confusion.empty(len(names)) if len(names) <= MAX_CLASSES else None
        mistakes: list[tuple[float, np.ndarray, int, int]] = []
        for batch in split.batches:
            logits = np.asarray(predict(variables, batch["image"]))
            scores = probabilities_of(logits, self.binary)[:, : len(names)]  # the model may have more classes
            predictions = scores.argmax(axis=-1)
            if confusion is not None:
                confusion = confusion.update(*map(jnp.asarray, (predictions, batch["label"], batch["mask"])))
            for i in np.flatnonzero((predictions != batch["label"]) & batch["mask"]):
                mistakes.append((scores[i].max(), batch["image"][i], batch["label"][i], predictions[i]))
            mistakes = sorted(mistakes, key=lambda mistake: -mistake[0])[:MISTAKES]
        artifacts: Pictures = {}
        if confusion is not None:
            artifacts[f"confusion_{split.name}"] = {"counts": np.asarray(confusion.counts), "class_names": names}
        if mistakes:
            probability, image, label, prediction = map(np.stack, zip(*mistakes))
            arrays = {"label": label, "prediction": prediction, "probability": probability, "class_names": names}
            artifacts[f"mistakes_{split.name}"] = {"image": to_pixels(image, facts), **arrays}
        return artifacts | attention_of_images(model, variables, first_images(split, IMAGES)["image"], facts)


class CheckedLabels(CheckedExamples):
    """Labeled images of a split; labels that are not class indices raise ValueError on access."""

    def take(self, indices: np.ndarray) -> dict[str, Any]:
        examples = self.source.take(indices)
        labels = np.asarray(examples["label"])
        if labels.dtype.kind not in "iu" or labels.ndim != 1:
            kind = f"{labels.dtype} {list(labels.shape)}"
            raise ValueError(f"The split {self.split!r} has labels {kind}: they must be integers [N].")
        if len(wrong := np.flatnonzero((labels < 0) | (labels >= self.num_classes))):
            label, where = labels[wrong[0]], f"Example {indices[wrong[0]]} of the split {self.split!r}"
            given = "no label (-1)" if label == -1 else f"the label {label}"
            raise ValueError(f"{where} has {given}: labels must be from 0 to {self.num_classes - 1}.")
        return {**examples, "label": labels.astype(np.int32)}


@TASKS.register("distilled_image_classification")
@dataclass(frozen=True)
class DistilledImageClassification(ImageClassification):
    """Image classification with distillation (DeiT, arXiv 2012.12877).

    One head is trained on the labels, with label smoothing, the other on the teacher's predictions for mixed images.

    Attributes:
        temperature: distillation temperature; 0: hard distillation, with the teacher's most probable class as label.
        weights: weights of the label loss and of the distillation loss.
    """

    needs = ("distilled_classes",)
    needs_teacher = True
    losses = ("label", "teacher")
    binary: ClassVar[bool] = False  # not an option

    temperature: Weight = 0.0
    weights: Weights = (0.5, 0.5)

    def prepare(self, key: jax.Array, batch: Batch, model: Model) -> Batch:
        if not (self.mixup or self.cutmix):
            return batch
        target = jax.nn.one_hot(batch["label"], model.num_classes)
        image, target = mixed(key, batch["image"], target, self.mixup, self.cutmix)
        return batch | {"image": image, "target": target}

    def teach(self, teacher: Model, batch: Batch) -> Batch:
        return {"teacher_logits": self.forward(teacher, batch)}

    def loss(self, model: Model, batch: Batch) -> Result:
        """Return the weighted sum of the label loss and the distillation loss (section 4).

        The label is `label` [B], or `target` [B, V] of mixed images. The accuracy is for the mean of both heads.
        """
        logits, distilled = model.heads(batch["image"])
        label, mask, teacher = batch["label"], batch["mask"], batch["teacher_logits"]
        if distilled.shape != teacher.shape:
            raise ValueError(f"model.num_classes is {distilled.shape[-1]}: the teacher's is {teacher.shape[-1]}.")
        target = smoothed(model, batch.get("target", jax.nn.one_hot(label, logits.shape[-1])), self.label_smoothing)
        losses = {
            "label_loss": optax.softmax_cross_entropy(logits.astype(jnp.float32), target),
            "teacher_loss": divergence(teacher, distilled, self.temperature),
        }
        accuracies = {"accuracy": correct(logits + distilled, label), "teacher_accuracy": correct(teacher, label)}
        return weighted(self.weights, losses, mask, **accuracies)


@partial(jax.jit, static_argnums=(3, 4, 5))
def mixed(
    key: Key[Array, ""],
    image: Float[Array, "B height width channels"],
    target: Float[Array, "B V"],
    mixup: float,
    cutmix: float,
    binary: bool = False,
) -> tuple[Float[Array, "B height width channels"], Float[Array, "B V"]]:
    """Mix each image and its target with those of the next example, by mixup or CutMix (see `mixing_ratios`)."""
    pixels, mean = mixing_ratios(key, image.shape[1:3], mixup, cutmix)
    both = jnp.maximum(target, jnp.roll(target, 1, axis=0))
    return mix(image, pixels.astype(image.dtype)), both if binary else mix(target, mean)


def mixing_ratios(
    key: Key[Array, ""], size: tuple[int, int], mixup: float, cutmix: float
) -> tuple[Float[Array, "height width 1"], Float[Array, ""]]:
    """Return the mixing ratio of each pixel, drawn once per batch, and its mean, the ratio of labels.

    If both `mixup` and `cutmix` are above 0, each is applied with probability 1/2 (DeiT, arXiv 2012.12877).

    Args:
        mixup: parameter a of Beta(a, a), from which x is drawn; the ratio of all pixels is the larger of x and 1 - x
            (arXiv 1710.09412).
        cutmix: parameter a of Beta(a, a), the fraction of the image outside of a box whose center is uniform; the
            pixels in the box are replaced (arXiv 1905.04899, section 3.1).
    """
    ratio, in_box = jnp.float32(1), jnp.zeros((*size, 1), bool)
    if mixup:
        ratio = jax.random.beta(key, mixup, mixup)
        ratio = jnp.maximum(ratio, 1 - ratio)
    if cutmix:
        keys = jax.random.split(jax.random.fold_in(key, 1), 3)
        side = jnp.sqrt(1 - jax.random.beta(keys[0], cutmix, cutmix))
        center = jax.random.uniform(keys[1], (2,))
        row, column = (
            jnp.abs((jnp.arange(length) + 0.5) / length - middle) < side / 2 for length, middle in zip(size, center)
        )
        in_box = (row[:, None] & column)[..., None]
        if mixup:
            cut = jax.random.bernoulli(keys[2])
            ratio, in_box = jnp.where(cut, 1, ratio), in_box & cut
    pixels = jnp.where(in_box, 0, ratio)
    return pixels, pixels.mean()


def mix(values: Float[Array, "B *N"], ratio: Float[Array, "..."]) -> Float[Array, "B *N"]:
    """Return the weighted mean of each example's values and the next one's."""
    return ratio * values + (1 - ratio) * jnp.roll(values, 1, axis=0)
