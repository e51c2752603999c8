"""Embeddings of tokens and of image patches."""

from collections.abc import Callable

import flax.linen as nn
from jaxtyping import Array, Float, Int, Num

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


def split(image: Num[Array, "B height width C"], size: int) -> Num[Array, "B rows columns {size} {size} C"]:
    """Split an image into square patches of this size; raise ValueError if that is not possible."""
    batch, height, width, channels = image.shape
    if height % size or width % size:
        raise ValueError(f"image {height}x{width} cannot be divided into patches of {size}x{size} pixels.")
    return image.reshape(batch, height // size, size, width // size, size, channels).swapaxes(2, 3)


def join(patches: Float[Array, "B rows columns size size C"]) -> Float[Array, "B height width C"]:
    """Return the image of these patches, the inverse of `split`."""
    batch, rows, columns, size, _, channels = patches.shape
    return patches.swapaxes(2, 3).reshape(batch, rows * size, columns * size, channels)


def patches(image: Float[Array, "B height width channels"], size: int) -> Float[Array, "B rows columns F"]:
    """Return the pixels of each square patch of `size` rows and columns, in the order row, column, channel."""
    x = split(image, size)
    return x.reshape(*x.shape[:3], size * size * x.shape[-1])


class PatchEmbed(nn.Module):
    """Linear projection of each square patch of an image: a convolution whose stride is its kernel size."""

    patch_size: int
    width: int

    @nn.compact
    def __call__(self, image: Float[Array, "B height width channels"]) -> Float[Array, "B rows columns D"]:
        return Linear((self.width,), name="projection")(patches(image, self.patch_size))
