"""A small BigBird: masked language modeling on 1,024 tokens of Python's standard library.

    lineage train --config=bigbird_stdlib

Each of the 16 blocks of 64 tokens attends to 6 blocks: itself, its two neighbors, the first, the last and a random one.
"""

from lineage.configs import base
from lineage.configs.small import bert_stdlib


def get_config() -> base.ConfigDict:
    config = bert_stdlib.get_config()
    base.replace(config, model="bigbird", task="masked_lm", tokenizer="bpe")
    config.model.update(depth=4, num_heads=4, width=128, num_segments=0, num_random_blocks=1, dropout=0.0, unroll=4)
    config.tokenizer.vocab_size = 2048
    config.task.sequence_length = 1024
    config.loader.update(batch_size=4, evaluation_batch_size=8)  # as many tokens as in bert_stdlib
    return config
