"""BART from scratch: text infilling and sentence permutation, after arXiv 1910.13461. It has not been run.

    python launch.py --config=configs/bart_pretrain.py:large --config.data.data_dir=DIR

`base` or `large`. The data are a TFDS data set with the feature `text`, prepared under data.data_dir; the README says
how to store one. The tokenizer is the published one of bart-large. The paper says neither the learning rate nor the
warm-up: these are RoBERTa's of the same sizes (arXiv 1907.11692), whose batch it follows, and whose 160 GB of text
OpenWebText stands for here. Windows of 512 tokens take no notice of where a text ends.
"""

from ml_collections import ConfigDict

from configs import base


def get_config(variant: str = "large") -> ConfigDict:
    """The recipe for a size."""
    config = base.get_config("bart")
    config.model.variant = variant
    config.model.vocab_size = 50_265
    config.model.max_length = 1024
    config.model.dropout = 0.1
    config.model.attention_dropout = 0.1
    config.model.remat = "full"

    config.data.source = "tfds:openwebtext"
    config.data.train_split = "train[:99%]"
    config.data.validation_split = "train[99%:]"
    config.data.task = "denoising"
    config.data.noise = "permute_sentences | infill(0.3, 3)"
    config.data.tokenizer = "bart-large/tokenizer.json"
    config.data.sequence_length = 512
    config.data.batch_size = 8000
    config.data.evaluation_batch_size = 256
    config.data.cache_dir = "runs/openwebtext_tokens_bart"
    config.data.workers = 8
    config.objective.name = "sequence_to_sequence"

    config.optimizer.learning_rate = 4e-4 if variant == "large" else 6e-4
    config.optimizer.schedule = "linear"
    config.optimizer.warmup_steps = 30_000 if variant == "large" else 24_000
    config.optimizer.b2 = 0.98
    config.optimizer.epsilon = 1e-6
    config.optimizer.weight_decay = 0.01
    config.precision = "bfloat16"
    config.accumulate = 20

    config.total_steps = 500_000
    config.log_every_steps = 100
    config.evaluate_every_steps = 5000
    config.save_every_steps = 1000
    config.checkpoint.best = "validation/loss"
    return config
