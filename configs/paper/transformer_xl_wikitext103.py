"""The standard Transformer-XL (151M parameters) on WikiText-103, after arXiv 1901.02860. It has not been run.

The parameters are those of the words, which are the output's too (110M), and of 16 layers (41M). The paper's adaptive
softmax is left out: all 267,735 words have logits in every step. data.source and the splits are the data set's files.
"""

from ml_collections import ConfigDict

from lineage.configs import base


def get_config() -> ConfigDict:
    config = base.get_config("transformer_xl")
    config.model.update(variant="standard", vocab_size=267_735, max_length=150, memory_length=150, dropout=0.1)
    config.data.source = "text:wikitext-103/wiki.train.tokens"
    config.data.update(validation_split="wikitext-103/wiki.valid.tokens", test_split="wikitext-103/wiki.test.tokens")
    config.data.update(tokenizer="words", vocab_size=267_735, sequence_length=150, order="stream", batch_size=60)
    config.data.update(evaluation_batch_size=10, cache_dir="outputs/wikitext103_tokens")
    config.objective.name = "causal_lm"
    config.optimizer.name = "adamw"  # without weight decay: Adam
    config.optimizer.update(learning_rate=2.5e-4, clip_norm=0.25)
    config.update(total_steps=200_000, log_every_steps=100, evaluate_every_steps=4000, save_every_steps=4000)
    config.checkpoint.best = "validation/loss"
    return config
