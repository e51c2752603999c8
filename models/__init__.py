"""Model architectures; `build` constructs one by name."""

from typing import Any

from lineage.configs.registry import load_all
from lineage.models.base import MODELS, HiddenStates, Layers, Model, hidden_states
from lineage.models.kernels.devices import visited_blocks
from lineage.models.kernels.vocabulary import Targets, TokenLosses
from lineage.models.layers.placement import EXAMPLES, TOKENS, gathering, num_parts

MODELS.base = Model
load_all(__name__, __path__)


def build(name: str, variant: str | None = None, **settings: Any) -> Model:
    """Construct an architecture by its name.

    Args:
        name: a key of `MODELS`.
        variant: key of `VARIANTS`, the sets of default settings of the class; None: the defaults of the fields.
        settings: fields of the class. None counts as not given; a dictionary is the description of another model.

    Raises:
        ValueError: a name, a variant or a setting is unknown, a value is not allowed, or a setting is missing.
    """
    return MODELS.build(name, variant, **settings)
