"""Predicted classes as JSON objects."""

from collections import Counter
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
    """Return the most probable class as `label`, and the probabilities in descending order, at most 2 x `TOP`.

    Among the probabilities, a name of several classes is followed by the number of the class, such as "crane (134)".
    """
    count = TOP if probabilities.shape[-1] > 2 * TOP else probabilities.shape[-1]
    labels = [names[number] if number < len(names) else str(number) for number in range(probabilities.shape[-1])]
    times = Counter(labels)
    keys = [f"{label} ({number})" if times[label] > 1 else label for number, label in enumerate(labels)]
    predictions = []
    for row, order in zip(probabilities, np.argsort(-probabilities, axis=-1, kind="stable")[:, :count].tolist()):
        ranking = {keys[number]: probability for number, probability in zip(order, row[order].tolist())}
        predictions.append({"label": labels[order[0]], "probabilities": ranking})
    return predictions
