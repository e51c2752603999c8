"""Regression of texts and of pairs of texts."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from lineage.data import Examples, Facts, LabelledTexts, Tokenizer
from lineage.metrics.states import Correlation
from lineage.models import Model
from lineage.tasks.base import TASKS, Batch, Result, Spec, specs
from lineage.tasks.losses import sums
from lineage.tasks.text_classification import LabelledTextTask


@TASKS.register("text_regression")
@dataclass(frozen=True)
class TextRegression(LabelledTextTask):
    """Predict a number for a text or for a pair of texts, by the squared error."""

    def examples(self, content: Mapping[str, LabelledTexts], tokenizer: Tokenizer | None, seed: int) -> Examples:
        """Return rows of token ids with their numbers.

        Raises:
            ValueError: a label is no finite number.
        """
        try:
            labels = {name: np.array(part.labels, np.float32) for name, part in content.items()}
        except ValueError as error:
            raise ValueError(f"The labels must be numbers: {error}.") from None
        for name, values in labels.items():
            if not np.isfinite(values).all():
                raise ValueError(f"The labels must be finite: one of the {name} split is not.")
        return self.encoded(content, labels, tokenizer, (), 1)

    def target_spec(self, batch_size: int, length: int) -> Spec:
        return specs(jnp.float32, label=(batch_size,)) | specs(bool, mask=(batch_size,))

    def loss(self, model: Model, batch: Batch) -> Result:
        """Squared error of the model's one output from `label` [B], over the examples whose `mask` [B] is True.

        Raises:
            ValueError: the model has several outputs.
        """
        values, label, mask = self.forward(model, batch), batch["label"], batch["mask"]
        if values.shape[-1] != 1:
            raise ValueError(f"model.num_classes is {values.shape[-1]}: it must be 1, a regression has one output.")
        values = values[..., 0].astype(jnp.float32)
        return sums((values - label) ** 2, mask, pearson=Correlation.empty().update(values, label, mask))

    def evaluators(self) -> dict[str, dict[str, Any]]:
        return super().evaluators() | {"spearman": {"name": "spearman"}}

    def predict(self, outputs: Any, batch: dict[str, np.ndarray], facts: Facts) -> list[dict[str, Any]]:
        return [{"score": float(value)} for value in outputs[np.flatnonzero(batch["mask"]), 0]]
