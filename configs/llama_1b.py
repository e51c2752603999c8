"""Llama of the size of Llama 3.2 1B from scratch on a tenth of C4. It has not been run.

The data are a TFDS data set with the feature `text`, prepared under data.data_dir; the README says how to store one.
The tokenizer is trained on them; data.tokenizer may be the path of a published `tokenizer.json` instead.
"""

from ml_collections import ConfigDict

from configs import base


def get_config() -> ConfigDict:
    config = base.get_config("llama")
    config.model.variant = "llama3.2-1b"
    config.model.vocab_size = 32_000
    config.model.max_length = 2048
    config.model.rope_scaling = "default"  # it never trained on shorter sequences
    config.model.remat = "full"

    config.data.source = "tfds:c4/en"
    config.data.train_split = "train[:10%]"
    config.data.validation_split = "validation[:1%]"
    config.data.tokenizer = "bpe"
    config.data.vocab_size = 32_000
    config.data.sequence_length = 2048
    config.data.batch_size = 512  # a million tokens
    config.data.evaluation_batch_size = 64
    config.data.cache_dir = "runs/c4_tokens"
    config.data.workers = 4
    config.objective.name = "causal_lm"

    config.optimizer.learning_rate = 3e-4
    config.optimizer.end_factor = 0.1
    config.optimizer.warmup_steps = 2000
    config.optimizer.b2 = 0.95
    config.optimizer.weight_decay = 0.1
    config.optimizer.clip_norm = 1.0
    config.precision = "bfloat16"
    config.accumulate = 4
    config.mesh.data = 1
    config.mesh.fsdp = -1

    config.total_steps = 20_000
    config.log_every_steps = 100
    config.evaluate_every_steps = 1000
    config.save_every_steps = 1000
    config.checkpoint.best = "validation/loss"
    config.sampling.num_samples = 2
    return config
