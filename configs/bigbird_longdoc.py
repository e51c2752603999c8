"""BigBird base (128M parameters) pre-trained on texts of 4,096 tokens, after arXiv 2007.14062. It has not been run.

The data are the books of PG-19, a TFDS data set with the feature `book_text`, prepared under data.data_dir; the README
says how to store one.
"""

from ml_collections import ConfigDict

from configs import base


def get_config() -> ConfigDict:
    config = base.get_config("bigbird")
    config.model.variant = "base"
    config.model.vocab_size = 50_358
    config.model.max_length = 4096
    config.model.num_segments = 2
    config.model.head = "masked_lm"
    config.model.remat = "dots"

    config.data.source = "tfds:pg19"
    config.data.task = "masked_tokens"
    config.data.text_key = "book_text"
    config.data.tokenizer = "bpe"
    config.data.vocab_size = 50_358
    config.data.sequence_length = 4096
    config.data.batch_size = 256
    config.data.evaluation_batch_size = 64
    config.data.cache_dir = "runs/longdoc_tokens"
    config.data.workers = 4
    config.objective.name = "masked_lm"

    config.optimizer.learning_rate = 1e-4
    config.optimizer.schedule = "linear"
    config.optimizer.warmup_steps = 10_000
    config.optimizer.weight_decay = 0.01
    config.precision = "bfloat16"
    config.mesh.data = 1
    config.mesh.fsdp = -1

    config.total_steps = 500_000
    config.log_every_steps = 100
    config.evaluate_every_steps = 5000
    config.save_every_steps = 5000
    config.checkpoint.best = "validation/loss"
    return config
