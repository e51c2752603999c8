"""ALBERT (arXiv 1909.11942): BERT with shared layers and factorised embeddings.

The second task of "pretraining" is to tell whether two segments are in order (0) or swapped (1).
"""

from typing import ClassVar, Literal

from lineage.models.base import Activation
from lineage.models.bert import BERT
from lineage.models.registry import MODELS


@MODELS.register("albert")
class ALBERT(BERT):
    """BERT with one layer that is applied L times.

    Attributes:
        embed_width: E, the size of the embeddings, which are projected to D.
    """

    VARIANTS: ClassVar = {
        "base": {"depth": 12, "width": 768, "num_heads": 12},
        "large": {"depth": 24, "width": 1024, "num_heads": 16},
        "xlarge": {"depth": 24, "width": 2048, "num_heads": 16},
        "xxlarge": {"depth": 12, "width": 4096, "num_heads": 64},
    }

    vocab_size: int = 30_000
    head: Literal["none", "pooler", "masked_lm", "pretraining", "classification", "tagging", "span", "choice"] = (
        "pretraining"
    )
    activation: Activation = "gelu_tanh"
    embed_width: int = 128

    share = True
