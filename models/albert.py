"""ALBERT (arXiv 1909.11942): BERT with shared layers and factorized embeddings.

The second task of "pretraining" is to predict whether two segments are in order (0) or swapped (1).
"""

from collections.abc import Callable
from functools import partial
from typing import ClassVar, Literal

import flax.linen as nn
import numpy as np
from jaxtyping import Array, Float

from lineage.models.base import MODELS, Layers
from lineage.models.bert import BERT, Classifier
from lineage.models.fields import Activation, Count


class GroupedStack(nn.Module):
    """Consecutive groups of layers, of sizes that are as equal as possible (section 4.4 of the paper).

    `stack` constructs a stack of a given number of layers with shared parameters.
    """

    stack: Callable[..., nn.Module]
    depth: Count
    num_groups: int

    def setup(self):
        if not 1 <= self.num_groups <= self.depth:
            raise ValueError(f"num_groups is {self.num_groups}: it must be at least 1 and at most depth, {self.depth}.")
        group_of = [int(layer / (self.depth / self.num_groups)) for layer in range(self.depth)]
        self.groups = [self.stack(int(size)) for size in np.bincount(group_of)]

    def __call__(self, x: Float[Array, "B T D"], **inputs) -> tuple[Float[Array, "B T D"], None]:
        """Return the last layer's output, and None in place of a cache; `inputs` go to all layers."""
        for group in self.groups:
            x, _ = group(x, **inputs)
        return x, None


@MODELS.register("albert")
class ALBERT(BERT):
    """BERT with L applications of one layer, or of a few different ones.

    Attributes:
        embed_width: E, the size of the embeddings, which are projected to D.
        num_groups: number of groups of consecutive layers that share their parameters.
    """

    VARIANTS: ClassVar = {
        "base": {"depth": 12, "width": 768, "num_heads": 12},
        "large": {"depth": 24, "width": 1024, "num_heads": 16},
        "xlarge": {"depth": 24, "width": 2048, "num_heads": 16},
        "xxlarge": {"depth": 12, "width": 4096, "num_heads": 64},
    }

    vocab_size: Count = 30_000
    head: Literal["none", "pooler", "masked_lm", "pretraining", Classifier] = "pretraining"
    activation: Activation = "gelu_tanh"
    embed_width: Count = 128
    num_groups: Count = 1

    @property
    def layer_groups(self) -> tuple[Layers, ...]:
        if self.num_groups == 1:
            return (Layers("stack/layers", self.depth, stacked=False),)
        return tuple(Layers(f"stack/groups_{group}/layers", 1, stacked=False) for group in range(self.num_groups))

    def make_stack(self, stack: Callable[..., nn.Module]) -> nn.Module:
        stack = partial(stack, share=True)
        return stack(self.depth) if self.num_groups == 1 else GroupedStack(stack, self.depth, self.num_groups)
