"""A small Transformer-XL on the source text of Python's standard library, with its memory and without.

    python launch.py --config=configs/transformer_xl_stdlib.py
    python launch.py --config=configs/transformer_xl_stdlib.py --sweep --workdir=runs/transformer_xl

The sweep is the paper's ablation: segments of 64 tokens that see the 64 before, or know nothing of each other.
"""

from ml_collections import ConfigDict

from configs import base


def get_config() -> ConfigDict:
    config = base.get_config("transformer_xl")
    config.model.depth = 4
    config.model.num_heads = 4
    config.model.width = 128
    config.model.hidden = 512
    config.model.memory_length = 64
    config.model.unroll = 4

    config.data.source = "stdlib"
    config.data.tokenizer = "bpe"
    config.data.vocab_size = 2048
    config.data.sequence_length = 64
    config.data.order = "stream"
    config.data.batch_size = 32
    config.data.max_bytes = 8_000_000
    config.objective.name = "causal_lm"

    config.optimizer.learning_rate = 1e-3
    config.optimizer.end_factor = 0.1
    config.optimizer.warmup_percent = 10.0
    config.optimizer.b2 = 0.99

    config.total_steps = 1500
    config.log_every_steps = 10
    config.evaluate_every_steps = 500
    config.save_every_steps = 500
    config.checkpoint.best = "validation/loss"
    config.sampling.prompt = "def "
    config.sampling.num_samples = 2
    config.sampling.max_new_tokens = 96
    config.sampling.temperature = 0.8
    return config


def sweep():
    for length in (64, 0):
        yield {"model.memory_length": length}
