"""Recurrent networks with attention on WMT 2014 English to German. Not run yet.

    pip install -e '.[prepare]'
    tfds build wmt14_translate/de-en --file_format=array_record
    lineage train --config=seq2seq_wmt14
    lineage train --config=seq2seq_wmt14:luong_local

The variants are rnnencdec and rnnsearch (arXiv 1409.0473: 1,000 hidden units, word vectors of size 620, batches of 80
sentences of at most 50 words, Adadelta), luong and luong_local (arXiv 1508.04025: four layers of 1,000 cells, dropout
0.2, input feeding, SGD). The papers have vocabularies of 30,000 and 50,000 words. Here both languages share a
vocabulary of 32,000 subwords, and all variants are trained with AdamW and a cosine schedule.
"""

from lineage.configs import base


def get_config(variant: str = "rnnsearch") -> base.ConfigDict:
    """Return the config of a variant of `models.seq2seq`."""
    config = base.get_config("seq2seq", "sequence_to_sequence", "tfds:wmt14_translate/de-en", tokenizer="bpe")
    config.model.update(variant=variant, vocab_size=32_000)
    config.source.text_key = "en,de"
    config.tokenizer.vocab_size = 32_000
    config.task.sequence_length = 50
    config.loader.batch_size = 80 if variant.startswith("rnn") else 128
    config.schedule.update(learning_rate=5e-4, warmup_steps=4000)
    config.optimizer.clip_norm = 1.0
    config.update(precision="bfloat16", total_epochs=6.0, log_every_steps=100, evaluate_every_epochs=1.0)
    config.save_every_steps = 5000
    config.checkpoint.best = "validation/bleu"
    config.sampling.update(max_new_tokens=50, temperature=0.0, num_beams=12)
    return config
