"""Regression of texts and of pairs of texts."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import jax.numpy as jnp
import numpy as np

from lineage.data import LabeledTexts
from lineage.metrics.states import Correlation
from lineage.models import Model
from lineage.tasks.base import TASKS, Batch, Result
from lineage.tasks.losses import sums
from lineage.tasks.text_classification import LabeledTextTask


@TASKS.register("text_regression")
@dataclass(frozen=True)
class TextRegression(LabeledTextTask):
    """Predict a number for a text or a pair of texts, with the squared error as the loss."""

    arrays = LabeledTextTask.arrays | {"label": "float32 B"}
    evaluators = ("loss", "spearman")
    label_smoothing: ClassVar[float] = 0.0  # not an option

    def labels(self, content: Mapping[str, LabeledTexts]) -> tuple[dict[str, np.ndarray], tuple[str, ...]]:
        try:
            labels = {name: np.array(part.labels, np.float32) for name, part in content.items()}
        except ValueError as error:
            raise ValueError(f"The labels must be numbers: {error}.") from None
        for name, values in labels.items():
            if not np.isfinite(values).all():
                raise ValueError(f"The labels must be finite: one of the {name} split is not.")
        return labels, ()

    def loss(self, model: Model, batch: Batch) -> Result:
        """Return the squared error of the only output of the model from `label` [B], where `mask` [B] is True."""
        values, label, mask = self.forward(model, batch), batch["label"], batch["mask"]
        if values.shape[-1] != 1:
            raise ValueError(f"model.num_classes is {values.shape[-1]}: it must be 1, a regression has one output.")
        values = values[..., 0].astype(jnp.float32)
        return sums((values - label) ** 2, mask, pearson=Correlation.empty().update(values, label, mask))
