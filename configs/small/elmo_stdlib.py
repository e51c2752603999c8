"""A small ELMo: forward and backward language models on Python's standard library.

    lineage train --config=elmo_stdlib

Perplexity is computed from the mean loss of both directions.
"""

from lineage.configs import base


def get_config() -> base.ConfigDict:
    config = base.get_config("elmo", "bidirectional_lm", "stdlib", tokenizer="bpe")
    config.model.update(variant="small", cell_dim=256, dropout=0.0)
    config.tokenizer.vocab_size = 2048
    config.task.sequence_length = 64
    config.loader.update(batch_size=32, evaluation_batch_size=64)
    config.source.max_bytes = 4_000_000
    config.schedule.update(learning_rate=4e-3, warmup_percent=5.0)
    config.update(total_steps=1000, log_every_steps=10, evaluate_every_steps=500, save_every_steps=500)
    config.checkpoint.best = "validation/loss"
    return config
