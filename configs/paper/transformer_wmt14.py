"""The Transformer on WMT 2014 English to German (arXiv 1706.03762). Not run yet.

    pip install -e '.[prepare]'
    tfds build wmt14_translate/de-en --file_format=array_record
    lineage train --config=transformer_wmt14:base

The argument is `base` or `big`. The data are wmt14_translate/de-en of TFDS, with a vocabulary of 37,000 and all
embeddings shared by both languages. The paper uses batches of about 25,000 tokens per side and averages the last
checkpoints, for which there is a moving average here. It reports 27.3 and 28.4 BLEU on newstest2014, tokenized, which
is not comparable with sacreBLEU.
"""

from lineage.configs import base


def get_config(variant: str = "base") -> base.ConfigDict:
    big = variant == "big"
    parts = {"source": "tfds:wmt14_translate/de-en", "tokenizer": "bpe_words", "schedule": "transformer"}
    config = base.get_config("transformer", "sequence_to_sequence", **parts)
    config.model.update(variant=variant, vocab_size=37_000, max_length=256, dropout=0.3 if big else 0.1, unroll=6)
    config.source.text_key = "en,de"
    config.tokenizer.vocab_size = 37_000
    config.task.update(sequence_length=256, label_smoothing=0.1)
    config.loader.update(buckets=(16, 24, 32, 48, 64, 96, 128), evaluation_batch_size=64, workers=4)
    config.loader.batch_size = 896  # pairs of 28 tokens per side on average
    config.schedule.warmup_steps = 4000
    config.optimizer.update(b2=0.98, epsilon=1e-9, clip_norm=0.0)
    config.update(ema_decay=0.999, precision="bfloat16", total_steps=300_000 if big else 100_000, log_every_steps=100)
    config.update(evaluate_every_steps=5000, save_every_steps=1000)
    config.checkpoint.best = "validation/bleu"
    config.sampling.update(prompt="The cat sat on the mat.", num_samples=1, max_new_tokens=200, temperature=0.0)
    config.sampling.update(num_beams=4, length_penalty=0.6, length_offset=5)  # of GNMT
    return config
