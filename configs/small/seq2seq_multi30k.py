"""Recurrent networks that translate image captions to German, with or without attention.

    lineage train --config=seq2seq_multi30k:PATH
    lineage train --config=seq2seq_multi30k:PATH,fixed

PATH and the data are those of `transformer_multi30k`. The second argument selects the attention: `additive` (Bahdanau,
default), `general` or `concat` (Luong), or `fixed` (none: the decoder is conditioned on the last encoder state).
"""

from lineage.configs import base
from lineage.configs.small import transformer_multi30k


def get_config(argument: str = "data/multi30k") -> base.ConfigDict:
    """Return the config for "FOLDER" or "FOLDER,ATTENTION"."""
    folder, _, attention = argument.partition(",")
    config = transformer_multi30k.get_config(folder)
    base.replace(config, model="seq2seq")
    config.model.update(cell="gru", width=256, embed_width=256, attention=attention or "additive", dropout=0.3)
    config.update(total_epochs=8.0, evaluate_every_epochs=4.0)
    return config
