"""A small Swin Transformer on scikit-learn's 8x8 handwritten digits.

    lineage train --config=swin_digits

Each pixel is a token: four windows of 4x4 tokens in the first stage, shifted in its second block, and one window in the
second stage.
"""

from lineage.configs import base
from lineage.configs.small import vit_digits


def get_config() -> base.ConfigDict:
    config = vit_digits.get_config()
    base.replace(config, model="swin")
    config.model.update(variant="mu", patch_size=1, stochastic_depth=0.1, unroll=2)
    return config
