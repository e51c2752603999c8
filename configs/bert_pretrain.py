"""BERT from scratch: hidden words and next sentences, after the recipe of arXiv 1810.04805. It has not been run.

    python launch.py --config=configs/bert_pretrain.py:base --config.data.data_dir=DIR

`base` or `large`. The text is English Wikipedia (the paper also has BooksCorpus), prepared under data.data_dir. The
tokenizer is the published one of bert-base-uncased; data.tokenizer=wordpiece with data.vocab_size and data.lowercase
trains one instead. The paper has sequences of 128 tokens in the first 90% of the steps: run these first, then go on.
"""

from ml_collections import ConfigDict

from configs import base


def get_config(variant: str = "base") -> ConfigDict:
    """The recipe for a size."""
    config = base.get_config("bert")
    config.model.variant = variant
    config.model.head = "pretraining"
    config.model.vocab_size = 30_522
    config.model.max_length = 512
    config.model.remat = "dots"

    config.data.source = "tfds:wiki40b/en"
    config.data.task = "next_sentence"
    config.data.tokenizer = "bert-base-uncased/tokenizer.json"
    config.data.sequence_length = 512
    config.data.batch_size = 256
    config.data.cache_dir = "runs/wiki40b_tokens"
    config.data.workers = 4
    config.objective.name = "pretraining"

    config.optimizer.learning_rate = 1e-4
    config.optimizer.schedule = "linear"
    config.optimizer.warmup_steps = 10_000
    config.optimizer.epsilon = 1e-6
    config.optimizer.weight_decay = 0.01
    config.optimizer.clip_norm = 1.0
    config.precision = "bfloat16"

    config.total_steps = 1_000_000
    config.log_every_steps = 100
    config.evaluate_every_steps = 10_000
    config.save_every_steps = 5000
    config.checkpoint.best = "validation/loss"
    return config
