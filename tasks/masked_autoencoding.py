"""Masked autoencoding of images."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np

from lineage.data import Examples, Facts, Images, Tokenizer
from lineage.data.examples.masking import MaskPatches
from lineage.models import Model
from lineage.tasks.base import TASKS, Batch, Pictures, Result, Spec, Task, check_range, check_rate, specs
from lineage.tasks.images import LabelledImageTask, to_pixels
from lineage.tasks.losses import sums

PICTURES = 6


@TASKS.register("masked_autoencoding")
@dataclass(frozen=True)
class MaskedAutoencoding(LabelledImageTask):
    """Reconstruct the hidden patches of an image from the visible ones (MAE, arXiv 2111.06377).

    Attributes:
        mask_rate: fraction of the patches that is hidden; also the model's, unless `model.mask_rate` is set.
        masking: which patches are hidden: "random", in "block"s, or all but one of four in a "grid".
        patch_size: side of a patch, in pixels; None is `model.patch_size`.
    """

    has_snapshots: ClassVar[bool] = True
    needs: ClassVar[tuple[str, ...]] = ("patches",)
    arguments: ClassVar[tuple[str, ...]] = ("image", "noise")

    mask_rate: float = 0.15
    masking: Literal["random", "block", "grid"] = "random"
    patch_size: int | None = None

    def __post_init__(self):
        super().__post_init__()
        check_rate("mask_rate", self.mask_rate)
        if self.patch_size is not None:
            check_range("patch_size", self.patch_size, 1)

    def adapt(self, model: Mapping[str, Any]) -> Task:
        return self if self.patch_size is not None else replace(self, patch_size=model.get("patch_size"))

    def model_options(self) -> dict[str, Any]:
        return super().model_options() | {"mask_rate": self.mask_rate}

    def examples(self, content: Images, tokenizer: Tokenizer | None, seed: int) -> Examples:
        """Return labelled images, with the order in which their patches are hidden.

        Raises:
            ValueError: neither the task nor the model has a patch size.
        """
        if self.patch_size is None:
            raise ValueError("task.patch_size is None and the model has no patch_size: set task.patch_size.")
        found = super().examples(content, tokenizer, seed)
        train, evaluation = (
            MaskPatches(images, self.patch_size, self.mask_rate, self.masking)
            for images in (found.train_transform, found.evaluation_transform)
        )
        return replace(found, train_transform=train, evaluation_transform=evaluation)

    def batch_spec(self, batch_size: int, model: Model, facts: Callable[[], Facts], length: int | None = None) -> Spec:
        spec = super().batch_spec(batch_size, model, facts, length)
        height, width = spec["image"].shape[1:3]
        patches = height // model.patch_size * (width // model.patch_size)
        return spec | specs(jnp.int32, noise=(batch_size, patches))

    def loss(self, model: Model, batch: Batch) -> Result:
        """Mean squared error of the predictions of the patches that `noise` [B, P] hides (section 3).

        Counted are those of the images whose `mask` [B] is True.
        """
        predicted, hidden = model(batch["image"], batch["noise"])
        errors = jnp.square(predicted.astype(jnp.float32) - model.target(batch["image"])).mean(axis=-1)
        return sums(errors, hidden & batch["mask"][:, None])

    def snapshot(
        self, model: Model, variables: Mapping[str, Any], batch: dict[str, np.ndarray], facts: Facts
    ) -> Pictures:
        """Return some images [N, h, w, c], without their hidden patches, and as the model reconstructs them."""
        image, noise = batch["image"][:PICTURES], batch["noise"][:PICTURES]
        masked, painted = _reconstructed(model, variables, image, noise)
        arrays = {"image": image, "masked": masked, "painted": painted}
        return {"painted": {name: to_pixels(np.asarray(array), facts) for name, array in arrays.items()}}


@partial(jax.jit, static_argnums=0)
def _reconstructed(model, variables, image, noise):
    return model.apply(variables, image, noise, method="pictures")
