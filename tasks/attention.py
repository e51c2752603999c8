"""Attention weights of a trained model, as the report shows them."""

from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
import numpy as np
from flax.traverse_util import flatten_dict

from lineage.data import Tokenizer
from lineage.tasks.base import Pictures

IMAGES, TOKENS = 6, 32  # of which attention weights are kept
# Where attention weights are sown, and what attends to what.
SOWN = {
    "stack/layers/attention/attention": "attention",
    "encoder_stack/layers/attention/attention": "encoder",
    "decoder_stack/layers/attention/attention": "decoder",
    "decoder_stack/layers/cross_attention/attention": "cross",
    "attention": "cross",  # of the recurrent Seq2Seq, in one layer
}


def attention_weights(model: nn.Module, variables: Mapping[str, Any], *inputs: np.ndarray) -> dict[str, np.ndarray]:
    """Return the attention weights [L, B, H, T, S] that a model sows, by the names of `SOWN`."""
    look = jax.jit(lambda variables, *inputs: model.apply(variables, *inputs, mutable=["intermediates"])[1])
    sown = flatten_dict(look(variables, *inputs).get("intermediates", {}), sep="/")
    found = {name: np.asarray(sown[path][0], np.float32) for path, name in SOWN.items() if path in sown}
    return {name: weights if weights.ndim == 5 else weights[None] for name, weights in found.items()}


def attention_of_images(
    model: nn.Module, variables: Mapping[str, Any], image: np.ndarray, to_pixels: Callable[[np.ndarray], np.ndarray]
) -> Pictures:
    """Return what the tokens of some images attend to in each layer; {} where the model sows no such weights."""
    image = image[:IMAGES]
    weights = attention_weights(model, variables, image).get("attention")
    if weights is None:
        return {}
    rows, columns = (size // model.patch_size for size in image.shape[1:3])
    has_class_token = weights.shape[-1] > rows * columns and model.pooling == "token"
    arrays = {"image": to_pixels(image), "weights": weights, "has_class_token": has_class_token}
    return {"attention_image": arrays | {"grid": (rows, columns)}}


def attention_of_texts(
    model: nn.Module, variables: Mapping[str, Any], batch: Mapping[str, np.ndarray], tokenizer: Tokenizer
) -> Pictures:
    """Return what the first tokens of a text, or of an input and its target, attend to in each layer."""
    real = {"inputs": batch.get("inputs_mask"), "tokens": batch.get("tokens_mask", batch["mask"])}
    texts = {name: batch[name][:1, :TOKENS][:, mask[0, :TOKENS]] for name, mask in real.items() if name in batch}
    weights = attention_weights(model, variables, *texts.values())
    if not weights:
        return {}
    pieces = {name: np.asarray([tokenizer.decode([token]) for token in ids[0]]) for name, ids in texts.items()}
    return {"attention_text": pieces | {name: values[:, 0] for name, values in weights.items()}}
