"""Recurrent networks with attention that convert dates of twelve locales to ISO 8601.

    lineage train --config=seq2seq_cldr
    lineage sweep --config=seq2seq_cldr

The sweep varies the scheduled-sampling probability of a model without attention that is too small for the task.
"""

from collections.abc import Iterator

from lineage.configs import base
from lineage.configs.small import transformer_cldr
from lineage.configs.sweeps import axis, product


def get_config() -> base.ConfigDict:
    config = transformer_cldr.get_config()
    base.replace(config, model="seq2seq")
    config.model.update(cell="gru", width=64, embed_width=32, attention="additive")
    config.schedule.update(learning_rate=5e-3, warmup_percent=5.0)
    config.optimizer.b2 = 0.999
    config.total_steps = 1000
    return config


def sweep() -> Iterator[dict]:
    """Sweep over the scheduled-sampling probability."""
    small = [{"model.attention": "fixed", "model.width": 32, "total_steps": 600}]
    return product(small, axis("task.scheduled_sampling", (0.0, 0.5, 0.9)))
