"""BigBird base (128M parameters) pre-trained on texts of 4,096 tokens, after arXiv 2007.14062. It has not been run.

The data are the books of PG-19, a TFDS data set with the feature `book_text`, prepared under data.data_dir; the README
says how to store one.
"""

from ml_collections import ConfigDict

from lineage.configs import base


def get_config() -> ConfigDict:
    config = base.get_config("bigbird")
    config.model.update(variant="base", vocab_size=50_358, max_length=4096, num_segments=2, head="masked_lm")
    config.model.remat = "dots"
    config.data.update(source="tfds:pg19", task="masked_tokens", text_key="book_text", tokenizer="bpe")
    config.data.update(vocab_size=50_358, sequence_length=4096, batch_size=256, evaluation_batch_size=64)
    config.data.update(cache_dir="outputs/longdoc_tokens", workers=4)
    config.objective.name = "masked_lm"
    config.optimizer.update(learning_rate=1e-4, schedule="linear", warmup_steps=10_000, weight_decay=0.01)
    config.precision = "bfloat16"
    config.mesh.update(data=1, fsdp=-1)
    config.update(total_steps=500_000, log_every_steps=100, evaluate_every_steps=5000, save_every_steps=5000)
    config.checkpoint.best = "validation/loss"
    return config
