"""Predicted classes as JSON objects."""

import numpy as np

from lineage.tasks.prediction import ranked


def test_classes_of_the_same_name_keep_their_probabilities():
    # In ImageNet's labels, "crane" is the bird and the machine; a class without a name is named after its number.
    (row,) = ranked(np.array([[0.05, 0.6, 0.1, 0.2, 0.05]]), ["4", "crane", "dog", "crane"])
    assert row["label"] == "crane"
    expected = {"crane (1)": 0.6, "crane (3)": 0.2, "dog": 0.1, "4 (0)": 0.05, "4 (4)": 0.05}
    assert row["probabilities"] == expected
    assert list(row["probabilities"]) == list(expected)


def test_other_classes_are_named_without_their_numbers():
    (row,) = ranked(np.array([[0.25, 0.75]]), ["no", "yes"])
    assert row == {"label": "yes", "probabilities": {"yes": 0.75, "no": 0.25}}
