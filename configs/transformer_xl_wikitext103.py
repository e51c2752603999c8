"""The standard Transformer-XL (151M parameters) on WikiText-103, after arXiv 1901.02860. It has not been run.

The parameters are those of the words, which are the output's too (110M), and of 16 layers (41M). The paper's adaptive
softmax is left out: all 267,735 words have logits in every step. data.source and the splits are the data set's files.
"""

from ml_collections import ConfigDict

from configs import base


def get_config() -> ConfigDict:
    config = base.get_config("transformer_xl")
    config.model.variant = "standard"
    config.model.vocab_size = 267_735
    config.model.max_length = 150
    config.model.memory_length = 150
    config.model.dropout = 0.1

    config.data.source = "text:wikitext-103/wiki.train.tokens"
    config.data.validation_split = "wikitext-103/wiki.valid.tokens"
    config.data.test_split = "wikitext-103/wiki.test.tokens"
    config.data.tokenizer = "words"
    config.data.vocab_size = 267_735
    config.data.sequence_length = 150
    config.data.order = "stream"
    config.data.batch_size = 60
    config.data.evaluation_batch_size = 10
    config.data.cache_dir = "runs/wikitext103_tokens"
    config.objective.name = "causal_lm"

    config.optimizer.name = "adamw"  # without weight decay: Adam
    config.optimizer.learning_rate = 2.5e-4
    config.optimizer.clip_norm = 0.25

    config.total_steps = 200_000
    config.log_every_steps = 100
    config.evaluate_every_steps = 4000
    config.save_every_steps = 4000
    config.checkpoint.best = "validation/loss"
    return config
