"""A small BERT: masked LM and next-sentence prediction on Python's standard library.

lineage train --config=bert_stdlib
"""

from lineage.configs import base


def get_config() -> base.ConfigDict:
    config = base.get_config("bert", "sentence_pair_pretraining", "stdlib", tokenizer="wordpiece")
    config.model.update(variant="tiny", dropout=0.0, unroll=2)
    config.tokenizer.vocab_size = 4096
    config.task.sequence_length = 64
    config.loader.update(batch_size=64, evaluation_batch_size=256)
    config.source.max_bytes = 8_000_000
    config.schedule.update(learning_rate=2e-3, warmup_percent=10.0)
    config.optimizer.update(b2=0.98, weight_decay=0.01)
    config.update(total_steps=1500, log_every_steps=10, evaluate_every_steps=500, save_every_steps=500)
    config.checkpoint.best = "validation/loss"
    return config
