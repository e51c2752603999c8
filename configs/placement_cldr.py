"""Where the norms of a Transformer stand, and what a warm-up is for (arXiv 2002.04745), on dates of twelve locales.

    python launch.py --config=configs/placement_cldr.py --sweep

Four runs of equal length: norms after each part or before it, with a warm-up of the learning rate and without.
"""

from ml_collections import ConfigDict

from configs import transformer_cldr


def get_config() -> ConfigDict:
    config = transformer_cldr.get_config()
    config.model.depth = 6
    config.model.unroll = 1
    config.optimizer.learning_rate = 3e-3
    config.optimizer.schedule = "linear"

    config.total_steps = 300
    config.evaluate_every_steps = 300
    config.save_every_steps = 300
    config.checkpoint.best = ""
    config.sampling.num_samples = 0
    return config


def sweep():
    for placement in ("post", "pre"):
        for warmup in (25.0, 0.0):
            yield {"model.placement": placement, "optimizer.warmup_percent": warmup}
