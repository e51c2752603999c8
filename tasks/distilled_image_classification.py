"""Image classification with a teacher."""

from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
import optax

from lineage.metrics.classification import correct
from lineage.models import Model
from lineage.tasks.base import TASKS, Batch, Result, check_range, check_weights
from lineage.tasks.images import Classification
from lineage.tasks.losses import divergence, smoothed, weighted
from lineage.tasks.mixup import mixed


@TASKS.register("distilled_image_classification")
@dataclass(frozen=True)
class DistilledImageClassification(Classification):
    """Predict the class of an image with one head, and what a teacher says of it with another (DeiT, arXiv 2012.12877).

    Attributes:
        temperature: 0 makes the teacher's likeliest class the label of its head; above, its probabilities are the
            targets, of logits divided by the temperature.
        weights: of the loss of the label, and of that of the teacher.
        label_smoothing: fraction of the label's target that is spread evenly over all classes, in training only.
        mixup: a of the Beta(a, a) by which images are mixed in training, before the teacher sees them; 0 is none.
        cutmix: a of the Beta(a, a) by which boxes of other images are pasted in, before the teacher sees them.
    """

    needs: ClassVar[tuple[str, ...]] = ("distilled_classes",)
    needs_teacher: ClassVar[bool] = True

    temperature: float = 0.0
    weights: tuple[float, ...] = (0.5, 0.5)
    label_smoothing: float = 0.0
    mixup: float = 0.0
    cutmix: float = 0.0

    def __post_init__(self):
        super().__post_init__()
        check_range("temperature", self.temperature)
        check_weights(self.weights, ("label", "teacher"))
        check_range("label_smoothing", self.label_smoothing, below=1)
        check_range("mixup", self.mixup)
        check_range("cutmix", self.cutmix)

    def prepare(self, key: jax.Array, batch: Batch, model: Model) -> Batch:
        if not (self.mixup or self.cutmix):
            return batch
        return mixed(key, batch, model.num_classes, self.mixup, self.cutmix)

    def teach(self, teacher: Model, batch: Batch) -> Batch:
        return {"teacher_logits": self.forward(teacher, batch)}

    def loss(self, model: Model, batch: Batch) -> Result:
        """The weighted sum of two losses of images [B, h, w, c]; accuracy is that of both heads' mean.

        One head learns the `label` [B], or the probabilities of the classes `target` [B, V], the other what the
        teacher said, `teacher_logits` [B, V] (arXiv 2012.12877, section 4).

        Raises:
            ValueError: the teacher has another number of classes.
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
