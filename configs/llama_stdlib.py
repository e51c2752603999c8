"""A small Llama on the source text of Python's standard library, as gpt_stdlib.py trains a GPT: same data, size, steps.

    python launch.py --config=configs/llama_stdlib.py

Two heads share keys and values, so the cache is half of GPT's.
"""

from ml_collections import ConfigDict

from configs import base, gpt_stdlib


def get_config() -> ConfigDict:
    config = gpt_stdlib.get_config()
    config.model = ConfigDict(base.MODELS["llama"]())
    config.model.depth = 4
    config.model.num_heads = 4
    config.model.num_kv_heads = 2
    config.model.width = 192
    config.model.hidden = 512
    config.model.tied = True
    config.model.unroll = 4
    return config
