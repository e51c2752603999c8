"""The Transformer from English to German on WMT 2014, after the recipe of arXiv 1706.03762. It has not been run.

    python launch.py --config=configs/transformer_wmt14.py:base --config.data.data_dir=DIR

`base` or `big`. The data are TFDS's wmt14_translate/de-en, prepared under data.data_dir; one vocabulary of 37,000 for
both languages, all embeddings shared. The paper's batches have about 25,000 tokens on either side, and it reports 27.3
and 28.4 BLEU on newstest2014 (tokenised, which is not sacreBLEU's), of an average of the last checkpoints; here it is
a moving average.
"""

from ml_collections import ConfigDict

from configs import base


def get_config(variant: str = "base") -> ConfigDict:
    """The recipe for a size."""
    big = variant == "big"
    config = base.get_config("transformer")
    config.model.variant = variant
    config.model.vocab_size = 37_000
    config.model.max_length = 256
    config.model.dropout = 0.3 if big else 0.1

    config.data.source = "tfds:wmt14_translate/de-en"
    config.data.task = "pairs"
    config.data.text_key = "en,de"
    config.data.tokenizer = "bpe_words"
    config.data.vocab_size = 37_000
    config.data.sequence_length = 256
    config.data.buckets = (16, 24, 32, 48, 64, 96, 128)
    config.data.batch_size = 896  # of 28 tokens on average
    config.data.evaluation_batch_size = 64
    config.data.workers = 4
    config.objective.name = "sequence_to_sequence"
    config.objective.label_smoothing = 0.1

    config.optimizer.learning_rate = 1.0
    config.optimizer.schedule = "transformer"
    config.optimizer.warmup_steps = 4000
    config.optimizer.b2 = 0.98
    config.optimizer.epsilon = 1e-9
    config.optimizer.clip_norm = 0.0
    config.ema_decay = 0.999
    config.precision = "bfloat16"

    config.total_steps = 300_000 if big else 100_000
    config.log_every_steps = 100
    config.evaluate_every_steps = 5000
    config.save_every_steps = 1000
    config.checkpoint.best = "validation/bleu"
    config.checkpoint.best_is_highest = True
    config.sampling.prompt = "The cat sat on the mat."
    config.sampling.num_samples = 1
    config.sampling.max_new_tokens = 200
    config.sampling.temperature = 0.0
    config.sampling.num_beams = 4
    config.sampling.length_penalty = 0.6
    return config
