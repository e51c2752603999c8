"""A small BigBird that guesses hidden tokens in texts of 1,024 tokens: Python's standard library.

    python launch.py --config=bigbird_stdlib

16 blocks of 64 tokens, of which each sees 6: itself, its neighbours, the ends and a random one.
"""

from ml_collections import ConfigDict

from lineage.configs import base
from lineage.configs.small import bert_stdlib


def get_config() -> ConfigDict:
    config = bert_stdlib.get_config()
    config.model = ConfigDict(base.MODELS["bigbird"]())
    config.model.update(depth=4, num_heads=4, width=128, head="masked_lm", num_segments=0, num_random_blocks=1)
    config.model.update(dropout=0.0, unroll=4)
    config.data.update(task="masked_tokens", tokenizer="bpe", vocab_size=2048, sequence_length=1024)
    config.data.batch_size = 4  # tokens are as many as in bert_stdlib.py
    config.data.evaluation_batch_size = 8
    config.objective.name = "masked_lm"
    return config
