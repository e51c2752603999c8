"""A small T5 that translates, classifies and summarizes, with a prefix for each task.

    lineage train --config=t5_multitask

Dates of twelve locales are translated to ISO 8601, and classified by their language; functions of Python's standard
library are summarized by the first line of their documentation. Each task is a text-to-text problem of one mixture
(arXiv 1910.10683, sections 2.4 and 3.5.2), and has its own evaluation, such as `validation_iso/exact_match`.
"""

from lineage.configs import base


def get_config() -> base.ConfigDict:
    config = base.get_config("t5", "sequence_to_sequence", "mixture", tokenizer="bpe")
    config.source.parts = (
        {"source": "cldr", "name": "iso", "prefix": "translate to ISO 8601: "},
        {"source": "cldr", "name": "language", "prefix": "language: ", "languages": True},
        {"source": "stdlib", "name": "summary", "prefix": "summarize: "},
    )
    config.source.limit = 10_000
    config.tokenizer.vocab_size = 2048
    config.model.update(depth=2, width=128, num_heads=4, head_size=32, mlp_dim=512, unroll=2)
    config.task.update(sequence_length=96, start_token="pad")
    config.loader.update(batch_size=32, evaluation_batch_size=128)
    config.schedule.update(learning_rate=2e-3, warmup_percent=10.0)
    config.optimizer.b2 = 0.98
    config.update(total_steps=3000, log_every_steps=20, evaluate_every_steps=3000, save_every_steps=500)
    config.sampling.update(prompt="translate to ISO 8601: 21 novembre 2026", num_samples=1, max_new_tokens=24)
    config.sampling.temperature = 0.0
    return config
