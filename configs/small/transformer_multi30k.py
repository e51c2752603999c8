"""A small Transformer that translates image captions from English to German.

    lineage train --config=transformer_multi30k:PATH

PATH is the folder of Multi30k: train, val and test_2016_flickr, each as .en.gz and .de.gz. Both languages share one
vocabulary and all embeddings, as in the Transformer-Tiny of arXiv 2105.14462. Its recipe (4 post-norm layers of width
128, dropout 0.3, learning rate 0.005, 2,000 warm-up steps) needs more epochs than fit into an hour; this model is wider
and pre-norm.
"""

from lineage.configs import base


def get_config(folder: str = "data/multi30k") -> base.ConfigDict:
    pair = f"{folder}/{{0}}.en.gz,{folder}/{{0}}.de.gz"
    config = base.get_config("transformer", "sequence_to_sequence", f"pairs:{pair.format('train')}", tokenizer="bpe")
    config.model.update(variant="tiny", depth=3, width=256, mlp_dim=512, norm_placement="pre", dropout=0.2, unroll=3)
    config.source.update(validation_path=pair.format("val"), test_path=pair.format("test_2016_flickr"))
    config.tokenizer.vocab_size = 4000
    config.task.update(sequence_length=64, label_smoothing=0.1)
    config.loader.update(buckets=(14, 16, 18, 21, 25, 32), batch_size=128)
    config.schedule.update(learning_rate=1.5e-3, warmup_steps=400)
    config.optimizer.b2 = 0.98
    config.update(ema_decay=0.995, total_epochs=20.0, log_every_steps=50, evaluate_every_epochs=5.0)
    config.save_every_epochs = 1.0
    config.checkpoint.best = "validation/bleu"
    config.sampling.update(prompt="A man in a red shirt is riding a bicycle.", num_samples=1, max_new_tokens=63)
    config.sampling.update(temperature=0.0, num_beams=5)
    return config
