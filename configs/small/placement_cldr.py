"""Post-norm and pre-norm Transformers, with and without warm-up (arXiv 2002.04745).

    lineage sweep --config=placement_cldr

The task is to convert dates of twelve locales. Four runs of equal length: post-norm and pre-norm, each with and without
learning-rate warm-up.
"""

from lineage.configs import base
from lineage.configs.small import transformer_cldr
from lineage.configs.sweeps import axis, product


def get_config() -> base.ConfigDict:
    config = transformer_cldr.get_config()
    config.model.update(depth=6, width=32, mlp_dim=128, unroll=1)
    config.loader.batch_size = 32
    config.schedule.learning_rate = 5e-3
    base.choose(config, "schedule", "linear")
    config.update(total_steps=300, evaluate_every_steps=300, save_every_steps=300)
    config.checkpoint.best = ""
    config.sampling.num_samples = 0
    return config


def sweep():
    return product(axis("schedule.warmup_percent", (0.0, 25.0)), axis("model.norm_placement", ("post", "pre")))
