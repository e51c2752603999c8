"""A small BART that restores the source text of Python's standard library: spans filled in, sentences put in order.

    python launch.py --config=configs/bart_stdlib.py

30% of the tokens are taken out, in spans of three on average, each of which leaves one mask.
"""

from ml_collections import ConfigDict

from configs import base


def get_config() -> ConfigDict:
    config = base.get_config("bart")
    config.model.depth = 2
    config.model.width = 128
    config.model.num_heads = 4
    config.model.unroll = 2

    config.data.source = "stdlib"
    config.data.task = "denoising"
    config.data.noise = "permute_sentences | infill(0.3, 3)"
    config.data.tokenizer = "bpe"
    config.data.vocab_size = 2048
    config.data.sequence_length = 64
    config.data.batch_size = 64
    config.data.evaluation_batch_size = 256
    config.data.max_bytes = 8_000_000
    config.objective.name = "sequence_to_sequence"

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
