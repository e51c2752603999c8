"""The standard Transformer-XL on WikiText-103 (arXiv 1901.02860). Not run yet.

    hf download Salesforce/wikitext --repo-type=dataset --include="wikitext-103-v1/*" --local-dir=wikitext
    lineage train --config=transformer_xl_wikitext103

The 151M parameters are the word embeddings, shared with the adaptive softmax (110M), and 16 layers (41M). An end of
text follows each line, as in the paper.
"""

from lineage.configs import base


def get_config() -> base.ConfigDict:
    config = base.get_config("transformer_xl", "causal_lm", "parquet:wikitext/wikitext-103-v1", tokenizer="words")
    config.model.update(variant="standard", vocab_size=267_735, max_length=150, memory_length=150, dropout=0.1)
    config.model.cutoffs = (20_000, 40_000, 200_000)
    config.tokenizer.vocab_size = 267_735
    config.task.update(sequence_length=150, cache_dir="outputs/wikitext103_tokens")
    config.loader.update(order="stream", batch_size=60, evaluation_batch_size=10)
    config.schedule.learning_rate = 2.5e-4
    config.optimizer.clip_norm = 0.25  # and no weight decay: Adam
    config.update(precision="bfloat16", total_steps=200_000, log_every_steps=100, evaluate_every_steps=4000)
    config.save_every_steps = 4000
    config.checkpoint.best = "validation/loss"
    return config
