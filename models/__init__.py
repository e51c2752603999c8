"""Model architectures; `build` constructs one by name."""

from typing import Any

from lineage.configs.registry import load_all
from lineage.models.base import MODELS, HiddenStates, Layers, Model, hidden_states

load_all(__name__, __path__)


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
