"""A small Transformer that reads dates as twelve locales write them, and writes them as ISO 8601 has them.

    python launch.py --config=configs/transformer_cldr.py

On 2 CPU cores: 99.6% of the 3,630 test dates exactly right.
"""

from ml_collections import ConfigDict

from configs import base


def get_config() -> ConfigDict:
    config = base.get_config("transformer")
    config.model.depth = 2
    config.model.width = 64
    config.model.num_heads = 4
    config.model.hidden = 256
    config.model.dropout = 0.0
    config.model.unroll = 2

    config.data.source = "cldr"
    config.data.tokenizer = "characters"
    config.data.sequence_length = 40
    config.data.batch_size = 64
    config.data.evaluation_batch_size = 256
    config.objective.name = "sequence_to_sequence"

    config.optimizer.learning_rate = 2e-3
    config.optimizer.warmup_percent = 10.0
    config.optimizer.b2 = 0.98

    config.total_steps = 1500
    config.log_every_steps = 10
    config.evaluate_every_steps = 500
    config.save_every_steps = 500
    config.checkpoint.best = "validation/exact_match"
    config.checkpoint.best_is_highest = True
    config.sampling.prompt = "21 novembre 2026"
    config.sampling.num_samples = 1
    config.sampling.max_new_tokens = 11
    config.sampling.temperature = 0.0
    return config
