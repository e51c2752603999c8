"""A small BigBird that guesses hidden tokens in texts of 1,024 tokens: Python's standard library.

    python launch.py --config=configs/bigbird_stdlib.py

16 blocks of 64 tokens, of which each sees 6: itself, its neighbours, the ends and a random one.
"""

from ml_collections import ConfigDict

from configs import base


def get_config() -> ConfigDict:
    config = base.get_config("bigbird")
    config.model.depth = 4
    config.model.num_heads = 4
    config.model.width = 128
    config.model.head = "masked_lm"
    config.model.num_segments = 0
    config.model.num_random_blocks = 1
    config.model.dropout = 0.0
    config.model.unroll = 4

    config.data.source = "stdlib"
    config.data.task = "masked_tokens"
    config.data.tokenizer = "bpe"
    config.data.vocab_size = 2048
    config.data.sequence_length = 1024
    config.data.batch_size = 4  # tokens are as many as in bert_stdlib.py
    config.data.evaluation_batch_size = 8
    config.data.max_bytes = 8_000_000
    config.objective.name = "masked_lm"

    config.optimizer.learning_rate = 2e-3
    config.optimizer.warmup_percent = 10.0
    config.optimizer.b2 = 0.98
    config.optimizer.weight_decay = 0.01

    config.total_steps = 1500
    config.log_every_steps = 10
    config.evaluate_every_steps = 500
    config.save_every_steps = 500
    config.checkpoint.best = "validation/loss"
    return config
