"""A small Swin Transformer on scikit-learn's 8x8 handwritten digits.

    lineage train --config=swin_digits

Each pixel is a token. The first stage has four windows of 4x4 tokens, shifted in its second block; the second stage has
one window.
"""

from lineage.configs import base
from lineage.configs.small import vit_digits


def get_config() -> base.ConfigDict:
    config = vit_digits.get_config()
    base.replace(config, model="swin")
    config.model.update(variant="mu", patch_size=1, stochastic_depth=0.1, unroll=2)
    return config
