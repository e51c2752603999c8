"""The Vision Transformer (arXiv 2010.11929): an image as a sequence of patches through a pre-norm encoder."""

from functools import partial
from typing import Literal

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float

from models.layers.attention import Attention
from models.layers.block import Block, Stack
from models.layers.embed import PatchEmbed
from models.layers.mlp import ACTIVATIONS, Mlp
from models.layers.norm import LayerNorm
from models.layers.position import Learned, Learned2D, RelativeKeys, resample, sincos_2d

VARIANTS = {
    "mu": {"depth": 4, "width": 64, "num_heads": 4},
    "Ti": {"depth": 12, "width": 192, "num_heads": 3},
    "S": {"depth": 12, "width": 384, "num_heads": 6},
    "B": {"depth": 12, "width": 768, "num_heads": 12},
    "L": {"depth": 24, "width": 1024, "num_heads": 16},
    "H": {"depth": 32, "width": 1280, "num_heads": 16},
}


class ViT(nn.Module):
    """An image classifier.

    An image of another size than `image_size` is welcome: learned position tables are resampled to its grid.

    Attributes:
        num_classes: V; 0 leaves the classifier out and returns the features that it would see.
        image_size, patch_size, channels: of the images, in pixels; tables are made for image_size.
        depth, width, num_heads, hidden: L, D, H and F; hidden None is 4 D.
        position: the paper's choices "none", "1d" (learned), "2d" (learned rows and columns) and "relative" (appendix
            D.4), or fixed "sincos2d" (arXiv 2205.01580).
        pooling: "token" reads a class token, "gap" averages the patches, "map" attends to them (arXiv 2106.04560).
        head: "linear", for fine-tuning, or "mlp" with a tanh layer before it, for pre-training.
        activation, epsilon: of the blocks; the paper's checkpoints have 1e-6, `transformers` 1e-12.
        dropout, stochastic_depth: rates on what the parts add, and of skipping them.
        remat, unroll: see `Stack`.
        implementation: see `Attention`.
    """

    num_classes: int = 1000
    image_size: int = 224
    patch_size: int = 16
    channels: int = 3
    depth: int = 12
    width: int = 768
    num_heads: int = 12
    hidden: int | None = None
    position: Literal["none", "1d", "2d", "relative", "sincos2d"] = "1d"
    pooling: Literal["token", "gap", "map"] = "token"
    head: Literal["linear", "mlp"] = "linear"
    activation: str = "gelu"
    epsilon: float = 1e-12
    dropout: float = 0.0
    stochastic_depth: float = 0.0
    remat: Literal["dots", "full"] | None = None
    unroll: int = 1
    implementation: Literal["xla", "cudnn"] = "xla"

    def setup(self):
        side = self.image_size // self.patch_size
        tokens = side * side + (self.pooling == "token")
        norm = partial(LayerNorm, epsilon=self.epsilon)
        attention = partial(
            Attention,
            num_heads=self.num_heads,
            dropout=self.dropout,
            implementation=self.implementation,
            relative=partial(RelativeKeys, max_distance=tokens - 1) if self.position == "relative" else None,
        )
        mlp = partial(
            Mlp,
            hidden=self.hidden or 4 * self.width,
            activation=ACTIVATIONS[self.activation],
            dropout=self.dropout,
            bias_init=nn.initializers.normal(1e-6),
        )
        block = partial(Block, attention=attention, mlp=mlp, norm=norm, dropout=self.dropout)
        self.patch_embed = PatchEmbed(self.patch_size, self.width)
        if self.pooling == "token":
            self.class_token = self.param("class_token", nn.initializers.zeros, (self.width,))
        if self.position == "1d":
            self.table = Learned(tokens, self.width)
        elif self.position == "2d":
            self.table = Learned2D(side, side, self.width)
        self.embed_dropout = nn.Dropout(self.dropout)
        self.stack = Stack(
            block, self.depth, stochastic_depth=self.stochastic_depth, remat=self.remat, unroll=self.unroll
        )
        self.norm = norm()
        if self.pooling == "map":
            self.attention_pool = AttentionPool(attention, mlp, norm)
        if self.head == "mlp":
            self.pre_logits = nn.Dense(self.width)
        if self.num_classes:
            self.classifier = nn.Dense(self.num_classes, kernel_init=nn.initializers.zeros)

    def __call__(self, image: Float[Array, "B height width channels"]) -> Float[Array, "B V"]:
        """Logits of the classes (or the features [B, D] without a classifier).

        Raises:
            ValueError: the image does not divide into patches, or has other channels than the model.
        """
        x = self.pool(self.encode(image))
        if self.head == "mlp":
            x = jnp.tanh(self.pre_logits(x))
        return self.classifier(x) if self.num_classes else x

    def encode(self, image: Float[Array, "B height width channels"]) -> Float[Array, "B P D"]:
        """The normalised output tokens: the class token first, if there is one, then the patches in row order."""
        if image.shape[-1] != self.channels:
            raise ValueError(f"the image has {image.shape[-1]} channels, the model {self.channels}.")
        patches = self.patch_embed(image)
        batch, *grid, width = patches.shape
        x = patches.reshape(batch, -1, width)
        token, patch = self._positions(tuple(grid))
        x = x if patch is None else x + jnp.asarray(patch, x.dtype)
        if self.pooling == "token":
            first = self.class_token if token is None else self.class_token + token
            first = jnp.broadcast_to(first.astype(x.dtype), (batch, 1, width))
            x = jnp.concatenate([first, x], axis=1)
        x = self.embed_dropout(x, deterministic=not self.has_rng("dropout"))
        self.sow("intermediates", "embedding", x)
        x, _ = self.stack(x)
        return self.norm(x)

    def pool(self, tokens: Float[Array, "B P D"]) -> Float[Array, "B D"]:
        """One vector of an image from its output tokens."""
        if self.pooling == "token":
            return tokens[:, 0]
        return tokens.mean(axis=1) if self.pooling == "gap" else self.attention_pool(tokens)

    def _positions(self, grid):
        """What is added to the class token and to the patches of a grid (rows, columns); None adds nothing."""
        side = self.image_size // self.patch_size
        if self.position == "sincos2d":
            return None, sincos_2d(*grid, self.width, endpoint=True)
        if self.position not in ("1d", "2d"):
            return None, None
        table, token = self.table(), None
        if self.position == "1d" and self.pooling == "token":
            token, table = table[0], table[1:]
        return token, table if grid == (side, side) else resample(table, (side, side), grid)


class AttentionPool(nn.Module):
    """A learned query attends to the tokens, then a residual feed-forward layer: the MAP head of arXiv 2106.04560."""

    attention: partial
    mlp: partial
    norm: partial

    @nn.compact
    def __call__(self, tokens: Float[Array, "B P D"]) -> Float[Array, "B D"]:
        batch, _, width = tokens.shape
        query = self.param("query", nn.initializers.xavier_uniform(), (1, width)).astype(tokens.dtype)
        query = jnp.broadcast_to(query, (batch, 1, width))
        x, _ = self.attention(relative=None, name="attention")(query, tokens)
        x = x + self.mlp(name="mlp")(self.norm(name="norm")(x))
        return x[:, 0]
