"""BigBird base, pre-trained on texts of 4,096 tokens (arXiv 2007.14062). Not run yet.

    pip install -e '.[prepare]'
    tfds build pg19 --file_format=array_record
    lineage train --config=bigbird_longdoc

The model has 128M parameters. The data are the books of PG-19 from TFDS; the tokenizer is trained on them.
"""

from lineage.configs import base


def get_config() -> base.ConfigDict:
    config = base.get_config("bigbird", "masked_lm", "tfds:pg19", tokenizer="bpe", schedule="linear")
    config.model.update(variant="base", vocab_size=50_358, max_length=4096, num_segments=2, unroll=12)
    config.source.text_key = "book_text"
    config.tokenizer.vocab_size = 50_358
    config.task.update(sequence_length=4096, cache_dir="outputs/longdoc_tokens")
    config.loader.update(batch_size=256, evaluation_batch_size=64, workers=4)
    config.schedule.update(learning_rate=1e-4, warmup_steps=10_000)
    config.optimizer.weight_decay = 0.01
    config.update(precision="bfloat16", total_steps=500_000, log_every_steps=100, evaluate_every_steps=5000)
    config.save_every_steps = 5000
    config.mesh.update(data=1, fsdp=-1)
    config.checkpoint.best = "validation/loss"
    return config
