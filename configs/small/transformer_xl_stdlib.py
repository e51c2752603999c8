"""A small Transformer-XL on Python's standard library; a sweep with and without memory.

    lineage train --config=transformer_xl_stdlib
    lineage sweep --config=transformer_xl_stdlib --workdir=outputs/transformer_xl

The sweep is the ablation of the paper: segments of 64 tokens with and without attention to the previous 64 tokens.
"""

from lineage.configs import base
from lineage.configs.sweeps import axis


def get_config() -> base.ConfigDict:
    config = base.get_config("transformer_xl", "causal_lm", "stdlib", tokenizer="bpe")
    config.model.update(depth=4, num_heads=4, width=128, mlp_dim=512, memory_length=64, unroll=4)
    config.tokenizer.vocab_size = 2048
    config.task.sequence_length = 64
    config.loader.update(order="stream", batch_size=32)
    config.source.max_bytes = 8_000_000
    config.schedule.update(learning_rate=1e-3, end_factor=0.1, warmup_percent=10.0)
    config.optimizer.b2 = 0.99
    config.update(total_steps=1500, log_every_steps=10, evaluate_every_steps=500, save_every_steps=500)
    config.checkpoint.best = "validation/loss"
    config.sampling.update(prompt="def ", num_samples=2, max_new_tokens=96, temperature=0.8)
    return config


def sweep():
    return axis("model.memory_length", (64, 0))
