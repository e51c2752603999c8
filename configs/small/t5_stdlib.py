"""A small T5 that fills in spans of the source text of Python's standard library.

    lineage train --config=t5_stdlib

15% of the tokens are removed, in spans of 3 tokens on average.
"""

from lineage.configs import base
from lineage.configs.small import bert_stdlib


def get_config() -> base.ConfigDict:
    config = bert_stdlib.get_config()
    base.replace(config, model="t5", task="span_corruption", tokenizer="bpe")
    config.model.update(depth=2, width=128, num_heads=4, head_size=32, mlp_dim=512, unroll=2)
    config.task.sequence_length = 64
    config.tokenizer.vocab_size = 2048
    return config
