"""Recurrent networks from English to German image captions, with attention or without.

    python launch.py --config=configs/seq2seq_multi30k.py:PATH
    python launch.py --config=configs/seq2seq_multi30k.py:PATH,fixed

PATH is the folder of Multi30k: train, val and test_2016_flickr, each .en.gz and .de.gz. After a comma stands
what the decoder reads: additive (Bahdanau's attention, the default), general or concat (Luong's), or fixed, the
encoder's last state.
"""

from ml_collections import ConfigDict

from configs import base


def get_config(argument: str = "data/multi30k") -> ConfigDict:
    """For the captions in a folder, perhaps with a comma and a kind of attention."""
    folder, _, attention = argument.partition(",")
    pair = f"{folder}/{{0}}.en.gz,{folder}/{{0}}.de.gz"
    config = base.get_config("seq2seq")
    config.model.cell = "gru"
    config.model.width = 256
    config.model.embed_width = 256
    config.model.attention = attention or "additive"
    config.model.dropout = 0.3

    config.data.source = f"pairs:{pair.format('train')}"
    config.data.validation_split = pair.format("val")
    config.data.test_split = pair.format("test_2016_flickr")
    config.data.tokenizer = "bpe"
    config.data.vocab_size = 8000
    config.data.sequence_length = 48
    config.data.batch_size = 128
    config.objective.name = "sequence_to_sequence"
    config.objective.label_smoothing = 0.1

    config.optimizer.learning_rate = 2e-3
    config.optimizer.warmup_steps = 500
    config.optimizer.end_factor = 0.05

    config.total_epochs = 20.0
    config.log_every_steps = 50
    config.evaluate_every_epochs = 4.0
    config.save_every_epochs = 1.0
    config.checkpoint.best = "validation/bleu"
    config.checkpoint.best_is_highest = True
    config.sampling.prompt = "A man in a red shirt is riding a bicycle."
    config.sampling.num_samples = 1
    config.sampling.max_new_tokens = 47
    config.sampling.temperature = 0.0
    config.sampling.num_beams = 5
    return config
