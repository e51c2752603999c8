"""A small Llama on the source text of Python's standard library, which comes with every Python.

    python launch.py --config=configs/llama_stdlib.py

Data, size and steps are those of gpt_stdlib.py. Two heads share keys and values, so the cache is half of GPT's.
"""

from ml_collections import ConfigDict

from configs import base


def get_config() -> ConfigDict:
    config = base.get_config("llama")
    config.model.depth = 4
    config.model.num_heads = 4
    config.model.num_kv_heads = 2
    config.model.width = 192
    config.model.hidden = 512
    config.model.tied = True
    config.model.unroll = 4

    config.data.source = "stdlib"
    config.data.tokenizer = "bpe"
    config.data.vocab_size = 2048
    config.data.sequence_length = 128
    config.data.batch_size = 16
    config.data.evaluation_batch_size = 64
    config.data.max_bytes = 8_000_000
    config.objective.name = "causal_lm"

    config.optimizer.learning_rate = 2e-3
    config.optimizer.end_factor = 0.1
    config.optimizer.warmup_percent = 5.0
    config.optimizer.b2 = 0.99
    config.optimizer.weight_decay = 0.1

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
