"""GPT-2 small (124M parameters) from scratch on OpenWebText, after nanoGPT's recipe.

The data are a TFDS data set with the feature `text`, prepared under data.data_dir; the README says how to store one.
"""

from ml_collections import ConfigDict

from configs import base


def get_config() -> ConfigDict:
    config = base.get_config("gpt")
    config.model.variant = "small"
    config.model.vocab_size = 50_304  # 50,257 rounded up to a multiple of 128
    config.model.max_length = 1024
    config.model.remat = "dots"

    config.data.source = "tfds:openwebtext"
    config.data.train_split = "train[:99%]"
    config.data.validation_split = "train[99%:]"
    config.data.tokenizer = "bpe"
    config.data.vocab_size = 50_257
    config.data.sequence_length = 1024
    config.data.batch_size = 480  # half a million tokens
    config.data.cache_dir = "runs/openwebtext_tokens"
    config.data.workers = 4
    config.objective.name = "causal_lm"

    config.optimizer.learning_rate = 6e-4
    config.optimizer.end_factor = 0.1
    config.optimizer.warmup_steps = 2000
    config.optimizer.b2 = 0.95
    config.optimizer.weight_decay = 0.1
    config.optimizer.clip_norm = 1.0
    config.precision = "bfloat16"

    config.total_steps = 600_000
    config.log_every_steps = 100
    config.evaluate_every_steps = 2000
    config.save_every_steps = 2000
    config.checkpoint.best = "validation/loss"
    config.sampling.num_samples = 2
    return config
