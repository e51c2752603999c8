"""Masked autoencoding of images."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from lineage.configs.registry import Range
from lineage.data import Examples, ExampleSource, Facts, Images, Tokenizer
from lineage.data.examples.masking import PATTERNS, MaskPatches
from lineage.models import Model
from lineage.tasks.base import TASKS, Batch, MaskRate, Pictures, Result, Sizes, Task
from lineage.tasks.images import LabeledImageTask, first_images, to_pixels
from lineage.tasks.losses import sums

PICTURES = 6  # number of images in a snapshot


@TASKS.register("masked_autoencoding")
@dataclass(frozen=True)
class MaskedAutoencoding(LabeledImageTask):
    """Reconstruct the masked patches of an image from the visible ones (MAE, arXiv 2111.06377).

    Attributes:
        mask_rate: fraction of the patches that is masked; must equal `model.mask_rate` if that is set.
        masking: mask sampling: "random", "block" (block-wise) or "grid" (one of every four patches is kept).
        patch_size: height and width of a patch, in pixels; None: `model.patch_size`.
    """

    has_snapshots = True
    needs = ("patches",)
    arguments = ("image", "noise")
    arrays = LabeledImageTask.arrays | {"noise": "int32 B P"}

    mask_rate: MaskRate = 0.75
    masking: Literal[*PATTERNS] = "random"
    patch_size: Annotated[int | None, Range(1)] = None

    def adapt(self, model: Mapping[str, Any]) -> Task:
        if (rate := model.get("mask_rate")) not in (None, self.mask_rate):
            raise ValueError(f"model.mask_rate is {rate} and task.mask_rate {self.mask_rate}: they must be equal.")
        return self if self.patch_size is not None else replace(self, patch_size=model.get("patch_size"))

    def model_options(self) -> dict[str, Any]:
        return super().model_options() | {"mask_rate": self.mask_rate}

    def examples(self, content: Images, tokenizer: Tokenizer | None, seed: int) -> Examples:
        if self.patch_size is None:
            raise ValueError("task.patch_size is None and the model has no patch_size: set task.patch_size.")
        unmasked = super().examples(content, tokenizer, seed)
        return replace(unmasked, train_transform=self._masked(unmasked.train_transform))

    def evaluation_transform(self, facts: Facts) -> MaskPatches:
        return self._masked(super().evaluation_transform(facts))

    def _masked(self, images):
        return MaskPatches(images, self.patch_size, self.mask_rate, self.masking)

    def axes(self, sizes: Sizes) -> dict[str, int]:
        axes, side = super().axes(sizes), sizes.model.patch_size
        return axes | {"P": axes["height"] // side * (axes["width"] // side)}

    def loss(self, model: Model, batch: Batch) -> Result:
        """Return the mean squared error of the patches that `noise` [B, P] masks, where `mask` [B] is True."""
        predicted, hidden = model(batch["image"], batch["noise"])
        errors = jnp.square(predicted.astype(jnp.float32) - model.target(batch["image"])).mean(axis=-1)
        return sums(errors, hidden & batch["mask"][:, None])

    def outputs(self, model: Model, batch: Batch) -> Any:
        """Return the images with masked patches, and with reconstructed patches."""
        return model.pictures(batch["image"], batch["noise"])

    def predict(self, outputs: Any, inputs: ExampleSource, facts: Facts) -> list[dict[str, Any]]:
        masked, painted = (np.rint(255 * to_pixels(images, facts)).astype(np.uint8) for images in outputs)
        return [{"masked": visible, "reconstructed": whole} for visible, whole in zip(masked, painted)]

    def snapshot(self, context: Any, variables: Any, split: Any) -> Pictures:
        """Return some images [N, h, w, c]: original, masked and reconstructed."""
        batch = first_images(split, PICTURES)
        image, noise = batch["image"], batch["noise"]
        masked, painted = _reconstructed(context.model, variables, image, noise)
        arrays = {"image": image, "masked": masked, "painted": painted}
        return {"painted": {name: to_pixels(np.asarray(array), split.facts) for name, array in arrays.items()}}


@partial(jax.jit, static_argnums=0)
def _reconstructed(model, variables, image, noise):
    return model.apply(variables, image, noise, method="pictures")
