"""Recurrent networks with attention that convert dates of twelve locales to ISO 8601.

    python launch.py --config=seq2seq_cldr
    python launch.py sweep --config=seq2seq_cldr

On 2 busy CPU cores: 99.97% of the 3,630 test dates exactly right.

The sweep trains a model without attention that is too small for the task, in 600 steps, with more and more scheduled
sampling. On 2 busy CPU cores: with 0, 0.5 and 0.9 of its own tokens at the end of the training, its accuracy on the
test dates is 91.6%, 89.6% and 88.9% when it is given the right tokens, and 2.0, 1.8 and 1.1 points less when it goes
on from its own.
"""

from collections.abc import Iterator

from ml_collections import ConfigDict

from lineage.configs import base
from lineage.configs.small import transformer_cldr
from lineage.configs.sweeps import axis, product


def get_config() -> ConfigDict:
    config = transformer_cldr.get_config()
    base.replace(config, model="seq2seq")
    config.model.update(cell="gru", width=64, embed_width=32, attention="additive")
    config.schedule.learning_rate = 5e-3
    config.optimizer.b2 = 0.999
    config.schedule.warmup_percent = 5.0
    config.total_steps = 1000
    return config


def sweep() -> Iterator[dict]:
    """Compare amounts of scheduled sampling by how far the accuracy falls when the model reads its own predictions."""
    small = [{"model.attention": "fixed", "model.width": 32, "total_steps": 600}]
    return product(small, axis("task.scheduled_sampling", (0.0, 0.5, 0.9)))
