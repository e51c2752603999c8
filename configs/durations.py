"""Conversion of config durations to steps."""

import math
from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict

from lineage.configs.schema import UNITS


def steps(
    section: Mapping[str, Any] | ConfigDict,
    name: str,
    *,
    batch_size: int,
    examples_per_epoch: int | None = None,
    total_steps: int | None = None,
    default: int | None = None,
) -> int:
    """Convert the duration `name`, set as `name_steps`, `_epochs`, `_examples` or `_percent`, to steps.

    Fractions of a step are rounded up. Percentages are of `total_steps`, which itself has none.
    """
    values = {unit: value for unit in UNITS if (value := section.get(f"{name}_{unit}")) is not None}
    if not values and default is not None:
        return default
    if len(values) != 1:
        known = [key for unit in values or UNITS if (key := f"{name}_{unit}") in section]
        raise ValueError(f"exactly one of {', '.join(known)} must be set.")
    ((unit, value),) = values.items()
    if value < 0:
        raise ValueError(f"{name}_{unit} is {value}: a duration cannot be negative.")
    if unit == "steps":
        return int(value)
    if unit == "percent":
        return _up(value / 100 * total_steps)
    if unit == "epochs" and examples_per_epoch is None:
        raise ValueError(f"{name}_epochs requires the size of the data set, which is unknown here.")
    examples = value * examples_per_epoch if unit == "epochs" else value
    return _up(examples / batch_size)


def _up(number: float) -> int:
    """Round up to an integer, except for floating-point noise (7 / 100 * 100 is 7)."""
    return math.ceil(round(number, 6))
