"""A small Llama on Python's standard library, comparable to gpt_stdlib.

    lineage train --config=llama_stdlib

The data, the size and the number of steps are those of `gpt_stdlib`. Each key/value head is shared by two query heads,
so the cache is half as large as that of GPT.
"""

from lineage.configs import base
from lineage.configs.small import gpt_stdlib


def get_config() -> base.ConfigDict:
    config = gpt_stdlib.get_config()
    base.replace(config, model="llama")
    config.model.update(depth=4, num_heads=4, num_kv_heads=2, width=192, mlp_dim=512, tied=True, unroll=4)
    return config
