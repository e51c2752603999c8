"""Recurrent networks from English to German image captions, with attention or without.

    python launch.py --config=seq2seq_multi30k:PATH
    python launch.py --config=seq2seq_multi30k:PATH,fixed

PATH is as in transformer_multi30k.py, whose data and recipe these are. After a comma stands what the decoder reads:
additive (Bahdanau's attention, the default), general or concat (Luong's), or fixed, the encoder's last state.

On one core each of a CPU (x86-64 with AVX-512): 31.0 BLEU on test_2016 with additive attention, in 24 min of training,
and 18.2 with a fixed vector, in 16 min.
"""

from ml_collections import ConfigDict

from lineage.configs import base
from lineage.configs.small import transformer_multi30k


def get_config(argument: str = "data/multi30k") -> ConfigDict:
    """Return the recipe for the captions in a folder, after which may stand a comma and a kind of attention."""
    folder, _, attention = argument.partition(",")
    config = transformer_multi30k.get_config(folder)
    base.replace(config, model="seq2seq")
    config.model.update(cell="gru", width=256, embed_width=256, attention=attention or "additive", dropout=0.3)
    config.update(total_epochs=8.0, evaluate_every_epochs=4.0)
    return config
