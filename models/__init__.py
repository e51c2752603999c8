"""The architectures by name, see `build`, and what they share."""

from typing import Any

from lineage.models import (
    albert,
    bart,
    bert,
    bigbird,
    deit,
    detr,
    distilbert,
    electra,
    elmo,
    gpt,
    llama,
    mae,
    resnet,
    roberta,
    seq2seq,
    swin,
    t5,
    transformer,
    transformer_xl,
    vit,
)
from lineage.models.base import HiddenStates, Layers, Model, hidden_states
from lineage.models.registry import MODELS

__all__ = ["MODELS", "HiddenStates", "Layers", "Model", "build", "hidden_states"]


def build(name: str, variant: str | None = None, **settings: Any) -> Model:
    """Construct an architecture by its name.

    Args:
        name: a key of `MODELS`.
        variant: a key of the class's `VARIANTS`, which gives what `settings` do not; None is the class's defaults.
        settings: fields of the class. None counts as not given; a dictionary is a model of its own.

    Raises:
        ValueError: the name, the variant, a setting or one of its choices is unknown (the message names the nearest),
            or a setting is missing.
    """
    return MODELS.build(name, variant, **settings)
