"""A small ELMo, language models of both directions, on the source text of Python's standard library.

    python launch.py --config=configs/elmo_stdlib.py

Perplexity is the mean of both directions'.
"""

from ml_collections import ConfigDict

from configs import base


def get_config() -> ConfigDict:
    config = base.get_config("elmo")
    config.model.variant = "small"
    config.model.hidden = 256
    config.model.dropout = 0.0

    config.data.source = "stdlib"
    config.data.tokenizer = "bpe"
    config.data.vocab_size = 2048
    config.data.sequence_length = 64
    config.data.batch_size = 32
    config.data.evaluation_batch_size = 64
    config.data.max_bytes = 4_000_000
    config.objective.name = "bidirectional_lm"

    config.optimizer.learning_rate = 4e-3
    config.optimizer.warmup_percent = 5.0

    config.total_steps = 1000
    config.log_every_steps = 10
    config.evaluate_every_steps = 500
    config.save_every_steps = 500
    config.checkpoint.best = "validation/loss"
    return config
