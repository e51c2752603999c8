"""A small BART: text infilling and sentence permutation of Python's standard library.

    lineage train --config=bart_stdlib

30% of the tokens are removed, in spans of 3 tokens on average, each replaced by one mask token.
"""

from lineage.configs import base
from lineage.configs.small import t5_stdlib


def get_config() -> base.ConfigDict:
    config = t5_stdlib.get_config()
    base.replace(config, model="bart", task="denoising")
    config.model.update(depth=2, width=128, num_heads=4, unroll=2)
    config.task.sequence_length = 64
    return config
