"""What the batches of an objective look like, before there are any data."""

from collections.abc import Mapping

import jax.numpy as jnp

from lineage.tasks.objectives import Batch

_WINDOWS = {"tokens": "T", "targets": "T", "mask": "T"}
_HIDDEN = {"tokens": "T", "tokens_mask": "T", "places": "M", "targets": "M", "mask": "M"}
_ENCODED = {"tokens": "T", "segments": "T", "tokens_mask": "T"}
# objective -> its arrays, and the axes of each after the batch's: height, width and channels of an image, P patches,
# N objects; S tokens of an input, T of what is read or written, M of them hidden
TEXTS = {
    "bidirectional_lm": _WINDOWS,
    "causal_lm": _WINDOWS,
    "classification": _ENCODED | {"label": "", "mask": ""},
    "distillation": _HIDDEN,
    "masked_lm": _HIDDEN,
    "pretraining": _HIDDEN | {"segments": "T", "label": ""},
    "reinforcement": _WINDOWS,
    "regression": _ENCODED | {"label": "", "mask": ""},
    "sequence_to_sequence": _WINDOWS | {"inputs": "S", "inputs_mask": "S"},
    "span_extraction": _ENCODED | {"start": "", "end": "", "mask": ""},
    "tagging": _ENCODED | {"targets": "T", "mask": "T"},
}
_LABELLED = {"image": "hwc", "label": "", "mask": ""}
IMAGES = {
    "classification": _LABELLED,
    "distilled_classification": _LABELLED,
    "masked_reconstruction": _LABELLED | {"noise": "P"},
    "detection": {"image": "hwc", "mask": "", "boxes": "N4", "extent": "2", "classes": "N", "boxes_mask": "N"},
}
_NUMBERS = {"image", "boxes", "extent"}  # what is no number of a class, of a token or of a place


def zeros(arrays: Mapping[str, str], batch_size: int, sizes: Mapping[str, int], numbered: bool = False) -> Batch:
    """Arrays of zeros, masks that are True; where examples are `numbered`, their label is a number and no class."""
    batch = {}
    for name, axes in arrays.items():
        shape = (batch_size, *(int(axis) if axis.isdigit() else sizes[axis] for axis in axes))
        number = name in _NUMBERS or (numbered and name == "label")
        kind = bool if name.endswith("mask") else jnp.float32 if number else jnp.int32
        batch[name] = jnp.full(shape, name == "extent" or kind is bool, kind)
    return batch
