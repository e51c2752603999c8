"""Predicted classes as JSON objects."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float
from scipy.special import expit, softmax

TOP = 5  # number of candidates in a prediction; up to twice as many classes are all listed


def probabilities_of(logits: Float[np.ndarray, "N V"], binary: bool) -> Float[np.ndarray, "N V"]:
    """Return the probabilities of classes; with `binary`, independently for each class."""
    logits = logits.astype(np.float32)
    return expit(logits) if binary else softmax(logits, axis=-1)


def ranked(probabilities: Float[np.ndarray, "N V"], names: Sequence[str]) -> list[dict[str, Any]]:
    """Return the most probable class as `label`, and the probabilities in descending order, at most 2 x `TOP`."""
    count = TOP if probabilities.shape[-1] > 2 * TOP else probabilities.shape[-1]
    predictions = []
    for row, order in zip(probabilities, np.argsort(-probabilities, axis=-1, kind="stable")[:, :count].tolist()):
        labels = [names[number] if number < len(names) else str(number) for number in order]
        predictions.append({"label": labels[0], "probabilities": dict(zip(labels, row[order].tolist()))})
    return predictions
