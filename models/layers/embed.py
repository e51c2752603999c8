"""Embeddings of tokens and of image patches."""

from collections.abc import Callable

import flax.linen as nn
from jaxtyping import Array, Float, Int

from lineage.models.kernels.vocabulary import Targets, TokenLosses, token_losses
from lineage.models.layers.linear import Linear, product
from lineage.models.layers.placement import gathered
from lineage.models.layers.quantized import dequantized, take_rows


class Embed(nn.Module):
    """Table of token vectors, which can also be the output projection.

    With `scale`, vectors are multiplied by sqrt(D) (arXiv 1706.03762, section 3.4).
    """

    vocab_size: int
    width: int
    scale: bool = False
    table_init: Callable = nn.initializers.normal(0.02)

    def setup(self):
        table = self.param("table", self.table_init, (self.vocab_size, self.width))
        self.table = gathered(self, "table", table)

    def __call__(self, tokens: Int[Array, "*B"]) -> Float[Array, "*B D"]:
        vectors = take_rows(self.table, tokens)
        return vectors * self.width**0.5 if self.scale else vectors

    def logits(self, x: Float[Array, "*B D"]) -> Float[Array, "*B V"]:
        """Return the inner product of each vector with every row of the table."""
        return product(x.reshape(-1, self.width), self.table.T).reshape(*x.shape[:-1], self.vocab_size)

    def losses(self, x: Float[Array, "B T D"], targets: Targets) -> TokenLosses:
        """Return the losses of `logits(x)`, without an array of all logits."""
        return token_losses(x, dequantized(self.table.T).T, None, targets)


def patches(image: Float[Array, "B height width channels"], size: int) -> Float[Array, "B rows columns F"]:
    """Return the pixels of each square patch of `size` rows and columns, in the order row, column, channel."""
    batch, height, width, channels = image.shape
    if height % size or width % size:
        raise ValueError(f"image {height}x{width} does not divide into patches of {size}x{size} pixels.")
    grid = image.reshape(batch, height // size, size, width // size, size, channels)
    return grid.transpose(0, 1, 3, 2, 4, 5).reshape(batch, height // size, width // size, -1)


class PatchEmbed(nn.Module):
    """Linear projection of each square patch of an image: a convolution whose stride is its kernel size."""

    patch_size: int
    width: int

    @nn.compact
    def __call__(self, image: Float[Array, "B height width channels"]) -> Float[Array, "B rows columns D"]:
        return Linear((self.width,), name="projection")(patches(image, self.patch_size))
