"""Image classification."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lineage.metrics.states import Confusion
from lineage.models import Model
from lineage.tasks import mixup as mixing
from lineage.tasks.attention import attention_of_images
from lineage.tasks.base import TASKS, Batch, Pictures, Result, Smoothing, Weight
from lineage.tasks.images import LabeledImageTask, to_pixels
from lineage.tasks.losses import class_loss, probabilities, smoothed, sums

MISTAKES = 24  # number of the most confident mistakes in the report


@TASKS.register("image_classification")
@dataclass(frozen=True)
class ImageClassification(LabeledImageTask):
    """Predict the class of an image.

    Attributes:
        label_smoothing: probability mass of the target that is spread evenly over all classes, in training only
            (arXiv 1512.00567, section 7).
        mixup: parameter a of the distribution Beta(a, a) of the mixing ratio (mixup, arXiv 1710.09412); 0 disables it.
        cutmix: parameter a of the distribution Beta(a, a) of the area of pasted boxes (CutMix, arXiv 1905.04899); 0
            disables it. With both mixup and CutMix, each is applied with probability 1/2.
        binary: whether to use a binary cross-entropy per class (multi-label targets); a mixed image has the classes of
            both images (arXiv 2110.00476, section 2).
    """

    needs = ("classes",)

    label_smoothing: Smoothing = 0.0
    mixup: Weight = 0.0
    cutmix: Weight = 0.0
    binary: bool = False

    def loss(self, model: Model, batch: Batch) -> Result:
        """Return the cross-entropy of `label` [B], or of soft labels [B, V], where `mask` [B] is True."""
        label, mask, image = batch["label"], batch["mask"], batch["image"]
        mixed = model.has_rng("dropout") and bool(self.mixup or self.cutmix)
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

    def pictures(self, context: Any, variables: Any, split: Any) -> Pictures:
        """Return the confusion matrix, the most confident mistakes and attention weights."""
        model, facts, first = context.model, split.facts, split.batches[0]
        names = np.asarray(facts.class_names)
        ask = jax.jit(lambda variables, image: jax.nn.softmax(model.apply(variables, image).astype(jnp.float32)))
        confusion = Confusion.empty(len(names))
        mistakes: list[tuple[float, np.ndarray, int, int]] = []
        for batch in split.batches:
            chances = np.asarray(ask(variables, batch["image"]))
            predictions = chances.argmax(axis=-1)
            confusion = confusion.update(*map(jnp.asarray, (predictions, batch["label"], batch["mask"])))
            for i in np.flatnonzero((predictions != batch["label"]) & batch["mask"]):
                mistakes.append((chances[i].max(), batch["image"][i], batch["label"][i], predictions[i]))
            mistakes = sorted(mistakes, key=lambda mistake: -mistake[0])[:MISTAKES]
        found: Pictures = {f"confusion_{split.name}": {"counts": np.asarray(confusion.counts), "class_names": names}}
        if mistakes:
            probability, image, label, prediction = map(np.stack, zip(*mistakes))
            arrays = {"label": label, "prediction": prediction, "probability": probability, "class_names": names}
            found[f"mistakes_{split.name}"] = {"image": to_pixels(image, facts), **arrays}
        return found | attention_of_images(model, variables, first["image"], lambda image: to_pixels(image, facts))
