"""DistilBERT (arXiv 1910.01108): half of a small BERT's layers, taught by the whole, on the text that it learned from.

python launch.py --config=configs/bert_stdlib.py
python launch.py --config=configs/distilbert_stdlib.py:runs/bert_stdlib
"""

from ml_collections import ConfigDict

from configs import base, bert_stdlib


def get_config(teacher: str = "runs/bert_stdlib") -> ConfigDict:
    config = bert_stdlib.get_config()
    config.model = base.bert("distilbert")
    config.model.update(depth=1, num_heads=2, width=128, num_segments=0, head="masked_lm", dropout=0.0)
    config.data.task = "masked_tokens"
    config.objective.name = "distillation"
    config.teacher = teacher
    config.init.path = teacher
    config.init.layers = (0,)  # every other one
    return config
