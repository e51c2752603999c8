"""Optimizers of a small GPT on Python's standard library, each with three learning rates.

    lineage sweep --config=optimizers_stdlib

The runs differ in nothing else but the schedule, which is constant for the schedule-free optimizer.
"""

from collections.abc import Iterator
from typing import Any

from ml_collections import ConfigDict

from lineage.configs.small import gpt_stdlib

# Middle learning rates; Prodigy multiplies its own estimate by them.
RATES = {
    "adamw": 2e-3,
    "muon": 2e-3,
    "ademamix": 1e-3,
    "sophia": 1e-3,
    "prodigy": 1.0,
    "schedule_free_adamw": 4e-3,
}


def get_config() -> ConfigDict:
    config = gpt_stdlib.get_config()
    config.checkpoint.best = ""
    config.sampling.num_samples = 0
    return config


def sweep() -> Iterator[dict[str, Any]]:
    for name, rate in RATES.items():
        schedule = "constant" if name == "schedule_free_adamw" else "wsd"
        for factor in (0.5, 1.0, 2.0):
            yield {"optimizer.name": name, "schedule.name": schedule, "schedule.learning_rate": factor * rate}
