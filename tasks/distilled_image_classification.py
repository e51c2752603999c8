"""Image classification with a teacher."""

from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
import optax

from lineage.metrics.classification import correct
from lineage.models import Model
from lineage.tasks.base import TASKS, Batch, Result, Weight
from lineage.tasks.image_classification import ImageClassification, mixed
from lineage.tasks.losses import divergence, smoothed, weighted


@TASKS.register("distilled_image_classification")
@dataclass(frozen=True)
class DistilledImageClassification(ImageClassification):
    """Image classification with distillation (DeiT, arXiv 2012.12877).

    One head is trained on the labels, with label smoothing, the other on the predictions of a teacher, which is applied
    to the mixed images.

    Attributes:
        temperature: distillation temperature; 0: hard distillation, with the most probable class of the teacher as the
            label.
        weights: weights of the label loss and of the distillation loss.
    """

    needs = ("distilled_classes",)
    needs_teacher = True
    losses = ("label", "teacher")
    binary: ClassVar[bool] = False  # not an option

    temperature: Weight = 0.0
    weights: tuple[float, ...] = (0.5, 0.5)

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

        The label is `label` [B], or `target` [B, V] of mixed images. Accuracy is that of the mean of both heads.
        """
        ours, logits = model.heads(batch["image"])
        label, mask, theirs = batch["label"], batch["mask"], batch["teacher_logits"]
        if logits.shape != theirs.shape:
            raise ValueError(f"model.num_classes is {logits.shape[-1]}: the teacher's is {theirs.shape[-1]}.")
        target = smoothed(model, batch.get("target", jax.nn.one_hot(label, ours.shape[-1])), self.label_smoothing)
        parts = {
            "label_loss": optax.softmax_cross_entropy(ours.astype(jnp.float32), target),
            "teacher_loss": divergence(theirs, logits, self.temperature),
        }
        right = {"accuracy": correct(ours + logits, label), "teacher_accuracy": correct(theirs, label)}
        return weighted(self.weights, parts, mask, **right)
