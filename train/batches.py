"""What the batches of an objective look like, before there are any data."""

from collections.abc import Callable

import jax.numpy as jnp

from data import spans
from data.masking import count_masked
from train.objectives import Batch


def images(size: int, shape: tuple[int, int, int]) -> Batch:
    """Labelled images [h, w, c]."""
    return {
        "image": jnp.zeros((size, *shape), jnp.float32),
        "label": jnp.zeros(size, jnp.int32),
        "mask": jnp.ones(size, bool),
    }


def objects(size: int, shape: tuple[int, int, int], most: int) -> Batch:
    """Images [h, w, c] with the boxes of at most so many objects."""
    batch = {name: value for name, value in images(size, shape).items() if name != "label"}
    boxes = {"boxes": jnp.zeros((size, most, 4), jnp.float32), "extent": jnp.ones((size, 2), jnp.float32)}
    return batch | boxes | _tokens("classes", size, most) | _mask("boxes_mask", size, most)


def masked_images(size: int, shape: tuple[int, int, int], patch_size: int) -> Batch:
    """Images of which some patches are hidden."""
    patches = shape[0] // patch_size * (shape[1] // patch_size)
    return images(size, shape) | _tokens("noise", size, patches)


def windows(size: int, length: int, mask_rate: float) -> Batch:
    """Windows of a text."""
    return _tokens("tokens", size, length) | _tokens("targets", size, length) | _mask("mask", size, length)


def masked(size: int, length: int, mask_rate: float) -> Batch:
    """Windows of which some tokens are hidden."""
    chosen = count_masked(mask_rate, length)
    batch = _tokens("tokens", size, length) | _mask("tokens_mask", size, length) | _mask("mask", size, chosen)
    return batch | _tokens("places", size, chosen) | _tokens("targets", size, chosen)


def sentences(size: int, length: int, mask_rate: float) -> Batch:
    """Pairs of texts of which some tokens are hidden."""
    return masked(size, length, mask_rate) | _tokens("segments", size, length) | _tokens("label", size)


def corrupted(size: int, length: int, mask_rate: float) -> Batch:
    """Texts without some spans, and these."""
    inputs = _tokens("inputs", size, length) | _mask("inputs_mask", size, length)
    return inputs | windows(size, spans.lengths(mask_rate, length)[1], mask_rate)


def pairs(size: int, length: int, mask_rate: float) -> Batch:
    """Inputs and targets."""
    inputs = _tokens("inputs", size, length) | _mask("inputs_mask", size, length)
    return inputs | windows(size, length, mask_rate)


def labelled(size: int, length: int, mask_rate: float) -> Batch:
    """Texts or pairs of texts with classes."""
    return _encoded(size, length) | _tokens("label", size) | _mask("mask", size)


def numbered(size: int, length: int, mask_rate: float) -> Batch:
    """Texts or pairs of texts with numbers."""
    return labelled(size, length, mask_rate) | {"label": jnp.zeros(size, jnp.float32)}


def tagged(size: int, length: int, mask_rate: float) -> Batch:
    """Sentences with tags."""
    return _encoded(size, length) | _tokens("targets", size, length) | _mask("mask", size, length)


def answers(size: int, length: int, mask_rate: float) -> Batch:
    """Questions and texts with the places of answers."""
    return _encoded(size, length) | _tokens("start", size) | _tokens("end", size) | _mask("mask", size)


def _encoded(size, length):
    tokens = _tokens("tokens", size, length) | _tokens("segments", size, length)
    return tokens | _mask("tokens_mask", size, length)


def _tokens(name, *shape):
    return {name: jnp.zeros(shape, jnp.int32)}


def _mask(name, *shape):
    return {name: jnp.ones(shape, bool)}


# objective, or a task whose batches have other shapes -> zeros in the shapes of its batches of texts
OF_TEXTS: dict[str, Callable[[int, int, float], Batch]] = {
    "bidirectional_lm": windows,
    "causal_lm": windows,
    "classification": labelled,
    "distillation": masked,
    "masked_lm": masked,
    "pretraining": sentences,
    "span_corruption": corrupted,
    "regression": numbered,
    "sequence_to_sequence": pairs,
    "span_extraction": answers,
    "tagging": tagged,
}
