"""BigBird (arXiv 2007.14062): BERT for long texts, with block-sparse attention.

A block attends to its neighbors (local context), the first and the last block (global tokens), and random blocks, which
keep the path between any two blocks short. Time and memory are linear in the length.
"""

from typing import Annotated, ClassVar, Literal

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from lineage.configs.registry import Needs
from lineage.models.base import MODELS
from lineage.models.bert import BERT
from lineage.models.fields import Activation, Count, Natural
from lineage.models.layers import ACTIVATIONS, Attention, BlockSparse, Mask


class BlockSparseAttention(Attention):
    """Self-attention with a block-sparse pattern that differs between layers."""

    @nn.compact
    def __call__(
        self, x: Float[Array, "B T D"], *, mask: Mask | None = None, pattern: BlockSparse | None = None, **inputs
    ) -> tuple[Float[Array, "B T D"], None]:
        """Return the output, and None in place of a cache; without a pattern, use full attention."""
        if pattern is None:
            return super().__call__(x, mask=mask, **inputs)
        attend = pattern if self.attend == "auto" else pattern.gathered
        return self.combine(*self.project(x, x, x), mask or Mask(), x.shape[-1], attend), None


@MODELS.register("bigbird")
class BigBird(BERT):
    """BERT with block-sparse attention in sequences of more than 5 + 2 R blocks; shorter ones use full attention.

    Attributes:
        attention_type: "block_sparse", or "original_full" for attention between all tokens in sequences of any length.
        block_size: number of tokens in a block; the last block may have fewer.
        num_random_blocks: number R of random blocks that a block attends to, in addition to its neighbors and the ends.
        random_blocks: "seeded": blocks drawn for each layer among those that are not attended to otherwise;
            "first": the first block, R times, as in evaluation mode of the reference implementation.
        seed: random seed of "seeded".
    """

    VARIANTS: ClassVar = {name: BERT.VARIANTS[name] for name in ("base", "large")}

    vocab_size: Count = 50_358
    max_length: Count = 4096
    head: Literal["none", "pooler", "masked_lm", "pretraining", "classification", "token_classification", "choice"] = (
        "pretraining"
    )
    activation: Activation = "gelu_tanh"
    attention_type: Literal["block_sparse", "original_full"] = "block_sparse"
    block_size: Annotated[Count, Needs("attention_type", ("block_sparse",))] = 64
    num_random_blocks: Annotated[Natural, Needs("attention_type", ("block_sparse",))] = 3
    random_blocks: Annotated[Literal["seeded", "first"], Needs("attention_type", ("block_sparse",))] = "seeded"
    seed: Annotated[Natural, Needs("random_blocks", ("seeded",))] = 0

    attention = BlockSparseAttention
    dropout_first = True

    @property
    def pooler_activation(self):
        return ACTIVATIONS[self.activation] if self.head == "classification" else jnp.tanh

    def each_layer(self, length: int) -> dict | None:
        """Return the pattern of each layer's attention, or None for full attention."""
        if self.attention_type == "original_full" or length <= (5 + 2 * self.num_random_blocks) * self.block_size:
            return None
        blocks = -(-length // self.block_size)
        others = random_blocks(self.depth, blocks, self.num_random_blocks, self.seed)
        others = np.zeros_like(others) if self.random_blocks == "first" else others
        return {"pattern": BlockSparse(others, self.block_size)}


def random_blocks(depth: int, blocks: int, count: int, seed: int) -> Int[np.ndarray, "L N R"]:
    """Draw `count` other blocks that each block between the ends attends to, in each layer."""
    if blocks < 5 + count:
        raise ValueError(f"{blocks} blocks are too few for num_random_blocks={count}: at least {5 + count} are needed.")
    index = np.arange(blocks)
    attended = np.abs(index[1:-1, None] - index) < 2
    attended[:, [0, -1]] = True
    draws = np.random.default_rng(seed).random((depth, *attended.shape))
    return np.argsort(np.where(attended, 2, draws), axis=-1)[..., :count]
