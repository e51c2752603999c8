"""BERT from scratch: masked words and next sentences (arXiv 1810.04805). Not run yet.

    hf download wikimedia/wikipedia --repo-type=dataset --include="20231101.en/*" --local-dir=wikipedia
    hf download google-bert/bert-base-uncased tokenizer.json --local-dir=bert-base-uncased
    lineage train --config=bert_pretrain:base

The argument is `base` or `large`. The text is English Wikipedia (the paper also uses BooksCorpus). The tokenizer is the
published one of bert-base-uncased; tokenizer=wordpiece with tokenizer.vocab_size and tokenizer.lowercase trains one
instead. The paper uses sequences of 128 tokens for the first 90% of the steps; run that phase separately and continue
from its checkpoint.
"""

from lineage.configs import base


def get_config(variant: str = "base") -> base.ConfigDict:
    tokenizer = "bert-base-uncased/tokenizer.json"
    source = "parquet:wikipedia/20231101.en"
    config = base.get_config("bert", "sentence_pair_pretraining", source, tokenizer=tokenizer, schedule="linear")
    config.model.update(variant=variant, vocab_size=30_522, max_length=512, unroll=12)
    config.model.remat = None if variant == "base" else "dots"
    config.task.update(sequence_length=512, cache_dir="outputs/wikipedia_tokens")
    config.source.validation_fraction = 0.002
    config.loader.update(batch_size=256, workers=4)
    config.schedule.update(learning_rate=1e-4, warmup_steps=10_000)
    config.optimizer.update(epsilon=1e-6, weight_decay=0.01, clip_norm=1.0)
    config.update(precision="bfloat16", total_steps=1_000_000, log_every_steps=100, evaluate_every_steps=10_000)
    config.save_every_steps = 5000
    config.checkpoint.best = "validation/loss"
    return config
