"""A small Transformer that converts dates of twelve locales to ISO 8601.

lineage train --config=transformer_cldr
"""

from lineage.configs import base


def get_config() -> base.ConfigDict:
    config = base.get_config("transformer", "sequence_to_sequence", "cldr", tokenizer="characters")
    config.model.update(depth=2, width=64, num_heads=4, mlp_dim=256, dropout=0.0, unroll=2)
    config.task.sequence_length = 40
    config.loader.update(batch_size=64, evaluation_batch_size=256)
    config.schedule.update(learning_rate=2e-3, warmup_percent=10.0)
    config.optimizer.b2 = 0.98
    config.update(total_steps=1500, log_every_steps=10, evaluate_every_steps=500, save_every_steps=500)
    config.checkpoint.best = "validation/exact_match"
    config.sampling.update(prompt="21 novembre 2026", num_samples=1, max_new_tokens=11, temperature=0.0)
    return config
