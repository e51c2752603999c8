"""Attention weights of a trained model, for the report."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from lineage.data import Facts, Tokenizer
from lineage.models import Model, hidden_states
from lineage.tasks.base import Pictures
from lineage.tasks.images import to_pixels

IMAGES, TOKENS = 6, 32  # maximum number of images, and of tokens of a text
MAX_BYTES = 1 << 29  # of the weights of all images, half of what a report reads


def attention_weights(model: Model, variables: Mapping[str, Any], *inputs: np.ndarray) -> dict[str, np.ndarray]:
    """Return the attention weights [L, B, H, T, S] of the "encoder", the "decoder" and "cross"-attention.

    For a model with only an encoder or only a decoder, the key is "attention". {} if a weight is not finite.
    """
    run = jax.jit(lambda variables, *inputs: hidden_states(model, variables, *inputs))
    layers = run(variables, *inputs).attention
    names = {} if len(layers) > 1 else {"encoder": "attention", "decoder": "attention"}
    arrays = {names.get(name, name): np.stack(weights).astype(np.float32) for name, weights in layers.items()}
    return arrays if all(np.isfinite(weights).all() for weights in arrays.values()) else {}


def attention_of_images(model: Model, variables: Mapping[str, Any], image: np.ndarray, facts: Facts) -> Pictures:
    """Return the attention weights of each layer for some images; {} if the model does not record them.

    There are fewer images if the weights of all would be too large for a report, {} if those of one are.
    """
    image = image[:IMAGES]
    weights = attention_weights(model, variables, image).get("attention") if model.image_attention else None
    if weights is None:
        return {}
    count = min(len(image), MAX_BYTES // weights[:, 0].nbytes)
    if not count:
        return {}
    image, weights = image[:count], weights[:, :count]
    rows, columns = (size // model.patch_size for size in image.shape[1:3])
    arrays = {"image": to_pixels(image, facts), "weights": weights, "grid": (rows, columns)}
    return {"attention_image": arrays | {"has_class_token": model.image_attention == "class_token"}}


def attention_of_texts(
    model: Model, variables: Mapping[str, Any], batch: Mapping[str, np.ndarray], tokenizer: Tokenizer
) -> Pictures:
    """Return the attention weights of each layer for the first tokens of a text, or of an input and its target.

    If an example has several texts [B, N, T], the weights are those of the first one.
    """
    masks = {"inputs": batch.get("inputs_mask"), "tokens": batch.get("tokens_mask", batch["mask"])}
    first = {name: mask.reshape(-1, mask.shape[-1])[0] for name, mask in masks.items() if name in batch}
    lengths = {name: np.flatnonzero(mask)[-1] + 1 for name, mask in first.items()}
    texts = {
        name: batch[name].reshape(-1, batch[name].shape[-1])[:1, : min(length, TOKENS)]
        for name, length in lengths.items()
    }
    weights = attention_weights(model, variables, *texts.values())
    if not weights:
        return {}
    pieces = {name: np.asarray([tokenizer.decode([token]) for token in ids[0]]) for name, ids in texts.items()}
    return {"attention_text": pieces | {name: values[:, 0] for name, values in weights.items()}}
