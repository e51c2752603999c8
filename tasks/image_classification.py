"""Image classification."""

from dataclasses import dataclass
from typing import ClassVar

import jax.numpy as jnp

from lineage.models import Model
from lineage.tasks import mixup as mixing
from lineage.tasks.base import TASKS, Batch, Result, check_range
from lineage.tasks.images import Classification
from lineage.tasks.losses import class_loss, probabilities, smoothed, sums


@TASKS.register("image_classification")
@dataclass(frozen=True)
class ImageClassification(Classification):
    """Predict the class of an image, by the cross-entropy of its label.

    Attributes:
        label_smoothing: fraction of the target that is spread evenly over all classes (arXiv 1512.00567, section 7);
            in training only, so that evaluations compare.
        mixup: a of the Beta(a, a) by which images and labels are mixed in training (arXiv 1710.09412); 0 is none.
        cutmix: a of the Beta(a, a) by which boxes of other images are pasted in (arXiv 1905.04899); with `mixup`,
            either happens as often; 0 is none.
        binary: whether each class is there or not by itself; where images are mixed, the classes of both are there
            (arXiv 2110.00476, section 2).
    """

    needs: ClassVar[tuple[str, ...]] = ("classes",)

    label_smoothing: float = 0.0
    mixup: float = 0.0
    cutmix: float = 0.0
    binary: bool = False

    def __post_init__(self):
        super().__post_init__()
        check_range("label_smoothing", self.label_smoothing, below=1)
        check_range("mixup", self.mixup)
        check_range("cutmix", self.cutmix)

    def loss(self, model: Model, batch: Batch) -> Result:
        """Cross-entropy of `label` [B] given `image` [B, h, w, c], over the examples whose `mask` [B] is True.

        Labels may be soft: the probability of each class, [B, V].

        Raises:
            ValueError: images are to be mixed, but there is one alone.
        """
        label, mask, image = batch["label"], batch["mask"], batch["image"]
        training = model.has_rng("dropout")
        mixed = training and bool(self.mixup or self.cutmix)
        if mixed:
            if len(image) == 1:
                raise ValueError("mixup and cutmix need at least 2 examples in a batch, or in its accumulated parts.")
            pixels, share = mixing.kept(model.make_rng("dropout"), image.shape[1:3], self.mixup, self.cutmix)
            image = mixing.mix(image, pixels.astype(image.dtype))
        logits = model(image).astype(jnp.float32)
        target = probabilities(label, logits.shape[-1])
        label = target.argmax(axis=-1)
        if mixed:
            target = jnp.maximum(target, jnp.roll(target, 1, axis=0)) if self.binary else mixing.mix(target, share)
        loss, means = class_loss(logits, smoothed(model, target, self.label_smoothing), label, self.binary)
        return sums(loss, mask, means)
