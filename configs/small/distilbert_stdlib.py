"""DistilBERT (arXiv 1910.01108): a small BERT distilled into half of its layers.

lineage train --config=bert_stdlib
lineage train --config=distilbert_stdlib:outputs/bert_stdlib
"""

from lineage.configs import base
from lineage.configs.small import bert_stdlib


def get_config(teacher: str = "outputs/bert_stdlib") -> base.ConfigDict:
    config = bert_stdlib.get_config()
    base.replace(config, model="distilbert", task="masked_lm_distillation")
    config.model.update(depth=1, num_heads=2, width=128, num_segments=0, dropout=0.0)
    config.task.sequence_length = 64
    config.teacher = teacher
    config.init.update(path=teacher, layers=(0,))  # every other layer
    return config
