"""Swin Transformers, versions 1 (arXiv 2103.14030) and 2 (arXiv 2111.09883).

Attention is within windows, which every other block shifts, on feature maps of decreasing resolution. The cost is
linear in the number of pixels.
"""

import math
from functools import partial
from typing import Annotated, ClassVar, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from lineage.configs.registry import Needs
from lineage.models.base import MODELS, ImageModel, Layers, ResampleRule, StackModel, resample_grid
from lineage.models.fields import Count, Counts, Epsilon, Image, Implementation, Naturals, Positions, Positive, Rate
from lineage.models.layers import Attention, Block, Dropout, LayerNorm, Linear, Mask, PatchEmbed, dot_product
from lineage.models.layers.attend import Queries
from lineage.models.layers.embed import join, split
from lineage.models.layers.mlp import ACTIVATIONS, Mlp
from lineage.models.layers.quantized import take_rows

INIT = nn.initializers.normal(0.02)
SIZES = {
    "T": {"depths": (2, 2, 6, 2), "width": 96, "num_heads": (3, 6, 12, 24)},
    "S": {"depths": (2, 2, 18, 2), "width": 96, "num_heads": (3, 6, 12, 24)},
    "B": {"depths": (2, 2, 18, 2), "width": 128, "num_heads": (4, 8, 16, 32)},
    "L": {"depths": (2, 2, 18, 2), "width": 192, "num_heads": (6, 12, 24, 48)},
}


@MODELS.register("swin")
class Swin(ImageModel, StackModel):
    """An image classifier, and a backbone: see `features`.

    Images may have any size: feature maps are padded to whole windows with zeros, which are attended to, as in the
    reference. If a feature map is not larger than a window, windows are not shifted, and the window is as wide as its
    shorter side (`transformers` fails if it is smaller). Version 2 decides this by the feature map of an image of
    `image_size`, because its biases depend on the size of the window.

    Attributes:
        depths: number of layers of each stage; a stage has half the resolution and twice the width of the one before.
        width: size of the hidden states of the first stage, D.
        num_heads: number of attention heads of each stage.
        window: side of a window, in tokens.
        version: "v2" has cosine attention, biases computed from the logarithms of the offsets, and norms of the
            sublayers' outputs.
        trained_windows: for each stage, the side of the windows with which version 2's biases were trained; 0 or ():
            that of the current windows.
        mlp_ratio: ratio of the width of the hidden layer of an MLP to that of its input, F / D.
        epsilon: constant added to the variance in the blocks; it is 1e-5 for patches and merged patches.
        dropout: rate on embeddings, attention weights, hidden layers and the output of each sublayer.
        stochastic_depth: probability of skipping a sublayer of the last layer; it grows linearly from 0.
    """

    VARIANTS: ClassVar = {
        "mu": {"depths": (2, 2), "width": 32, "num_heads": (2, 4), "window": 4},
        **SIZES,
        **{f"V2-{name}": sizes | {"version": "v2", "window": 8} for name, sizes in SIZES.items()},
    }
    patch_size: Count = 4
    depths: Counts = (2, 2, 6, 2)
    width: Count = 96
    num_heads: Counts = (3, 6, 12, 24)
    window: Count = 7
    version: Literal["v1", "v2"] = "v1"
    trained_windows: Annotated[Naturals, Needs("version", ("v2",))] = ()
    mlp_ratio: Positive = 4.0
    epsilon: Epsilon = 1e-5
    stochastic_depth: Rate = 0.0
    attend: Implementation = "auto"

    input_parameters = "^(patch_embed|embed_norm)/"
    attention_path = "attention/attention/attention"

    @property
    def layer_groups(self) -> tuple[Layers, ...]:
        stages = [Layers(f"stacks_{i}/layers", n, first=f"^merges_{i - 1}/") for i, n in enumerate(self.depths)]
        return (*stages[:-1], stages[-1]._replace(last="^norm/"))

    @property
    def resample_rules(self) -> tuple[ResampleRule, ...]:
        return (("attention/attention/relative/table$", _resampled_offsets),)

    def setup(self):
        stages, second = len(self.depths), self.version == "v2"
        trained = self.trained_windows or (0,) * stages
        if not stages == len(self.num_heads) == len(trained):
            given = f"depths {self.depths}, num_heads {self.num_heads} and trained_windows {trained}"
            raise ValueError(f"{given} must have one value for each stage.")
        rates = np.split(np.linspace(0, self.stochastic_depth, sum(self.depths)), np.cumsum(self.depths))
        norm = partial(LayerNorm, epsilon=self.epsilon)
        parts = {"dropout": self.dropout, "kernel_init": INIT, "out_init": INIT}

        def stack(i):
            attention = partial(Attention, num_heads=self.num_heads[i], attend=self.attend, **parts)
            if second:
                bias = partial(ContinuousBias, trained[i])
                attention = partial(attention, score=Cosine(parent=None), key_bias=False, relative=bias)
            else:
                attention = partial(attention, relative=partial(RelativeTable, self.window))
            block = partial(
                Block,
                attention=partial(WindowAttention, attention),
                mlp=partial(Mlp, int(self.mlp_ratio * self.width * 2**i), ACTIVATIONS[self.activation], **parts),
                norm=norm,
                norm_placement="branch" if second else "pre",
                dropout=self.dropout,
            )
            skip = {"first_rate": rates[i][0], "stochastic_depth": rates[i][-1]}
            return self.new_stack(block, self.depths[i], **skip)

        self.patch_embed = PatchEmbed(self.patch_size, self.width)
        self.embed_norm = LayerNorm(1e-5)
        self.embed_dropout = Dropout(self.dropout)
        self.merges = [PatchMerge(norm_first=not second) for _ in range(stages - 1)]
        self.stacks = [stack(i) for i in range(stages)]
        self.norm = norm()
        if self.num_classes:
            self.classifier = nn.Dense(self.num_classes, kernel_init=nn.initializers.zeros)

    def encode(self, image: Image) -> Float[Array, "B rows columns D"]:
        """Return the normalized feature map of the last stage."""
        return self.norm(self.features(image)[-1])

    def features(self, image: Image) -> tuple[Float[Array, "B _ _ _"], ...]:
        """Return the feature maps [B, rows, columns, D] of all stages, from the finest to the coarsest."""
        self.check_channels(image)
        x = self.embed_norm(self.patch_embed(pad(image, self.patch_size)))
        x = self.embed_dropout(x)
        self.sow("intermediates", "embedding", x)
        maps = []
        for i, stack in enumerate(self.stacks):
            x = self.merges[i - 1](x) if i else x
            batch, *grid, width = x.shape
            side = min(grid) if self.version == "v1" else max(self.image_size // self.patch_size // 2**i, 1)
            options = {"grid": tuple(grid), "window": min(self.window, side)}
            if side > self.window:  # an input, so that the loop over layers has one block for both kinds
                options["each"] = {"shift": jnp.arange(self.depths[i]) % 2 * (self.window // 2)}
            x = stack(x.reshape(batch, math.prod(grid), width), **options)[0].reshape(x.shape)
            maps.append(x)
        return tuple(maps)


class WindowAttention(nn.Module):
    """Attention of each token of a feature map to those in its window, by a module that `attention` constructs."""

    attention: partial

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "B T D"],
        *,
        grid: tuple[int, int],
        window: int,
        shift: Int[Array, ""] | None = None,
        **inputs,
    ) -> tuple[Float[Array, "B T D"], None]:
        """Return the output for each token, and None in place of a cache.

        Tokens are in row order of a feature map of `grid` (rows, columns). `shift` moves the windows down and to the
        right: the feature map is rolled, and tokens that share a window only for this reason are masked out.
        """
        batch, _, width = x.shape
        x = pad(x.reshape(batch, *grid, width), window)
        if shift is not None:
            row, column = (jnp.arange(size) >= size - shift for size in x.shape[1:3])
            region = windows((2 * row[:, None] + column)[None, ..., None], window)
            inputs["mask"] = Mask(segments=jnp.tile(region[..., 0], (batch, 1)))
            x = jnp.roll(x, -shift, axis=(1, 2))
        rows, columns = (size // window for size in x.shape[1:3])
        out, cache = self.attention(name="attention")(windows(x, window), **inputs)
        x = join(out.reshape(batch, rows, columns, window, window, width))
        if shift is not None:
            x = jnp.roll(x, shift, axis=(1, 2))
        return x[:, : grid[0], : grid[1]].reshape(batch, math.prod(grid), width), cache


class Cosine(nn.Module):
    """Score cos(q, k) times a learned scale of each head (arXiv 2111.09883, section 3.3)."""

    @nn.compact
    def __call__(self, query: Float[Array, "B T K G C"], key: Float[Array, "B S K C"]) -> Float[Array, "B K G T S"]:
        def unit(x):
            x = x.astype(jnp.float32)
            return x * jax.lax.rsqrt(jnp.maximum(jnp.square(x).sum(axis=-1, keepdims=True), 1e-24))

        scale = self.param("scale", nn.initializers.constant(math.log(10)), query.shape[2:4])
        return dot_product(unit(query) * jnp.exp(jnp.minimum(scale, math.log(100)))[..., None], unit(key))


class RelativeTable(nn.Module):
    """Learned bias of each head for each offset within a window (arXiv 2103.14030, equation 4)."""

    window: Count

    @nn.compact
    def __call__(self, query: Queries, positions: Positions, keys: int) -> Float[Array, "1 H {keys} {keys}"]:
        shape = ((2 * self.window - 1) ** 2, query.shape[2])
        return between_tokens(self.param("table", INIT, shape), math.isqrt(keys))


class ContinuousBias(nn.Module):
    """Bias of each head, computed by a small MLP from the logarithm of the offset (arXiv 2111.09883, section 3.3).

    Offsets are relative to `trained_window`, the side of the window in training; 0: the current one.
    """

    trained_window: int = 0

    @nn.compact
    def __call__(self, query: Queries, positions: Positions, keys: int) -> Float[Array, "1 H {keys} {keys}"]:
        window = math.isqrt(keys)
        offset = np.mgrid[1 - window : window, 1 - window : window].reshape(2, -1).T
        offset = 8 * offset / max((self.trained_window or window) - 1, 1)
        offset = np.sign(offset) * np.log2(1 + np.abs(offset)) / np.log2(8)
        hidden = nn.relu(Linear((512,), name="hidden")(jnp.asarray(offset, query.dtype)))
        return between_tokens(16 * nn.sigmoid(Linear((query.shape[2],), use_bias=False, name="out")(hidden)), window)


class PatchMerge(nn.Module):
    """Merging of 2x2 tokens into one of twice the width, with a norm before or after the projection."""

    norm_first: bool

    @nn.compact
    def __call__(self, x: Float[Array, "B rows columns D"]) -> Float[Array, "B _ _ 2*D"]:
        x, width = split(pad(x, 2), 2).swapaxes(3, 4), x.shape[-1]
        x = x.reshape(*x.shape[:3], 4 * width)  # upper left, lower left, upper right, lower right
        norm = LayerNorm(1e-5, name="norm")
        project = Linear((2 * width,), use_bias=False, kernel_init=INIT, name="projection")
        return project(norm(x)) if self.norm_first else norm(project(x))


def _resampled_offsets(tables, shape):
    """Resample tables of offsets [L, N, H] to another window, unless the numbers of layers or heads differ."""
    same = (len(tables), tables.shape[2]) == (shape[0], shape[2])
    return jnp.stack([resample_grid(table, shape[1:]) for table in tables]) if same else tables


def pad(x: Float[Array, "B rows columns D"], multiple: int) -> Float[Array, "B _ _ D"]:
    """Pad a feature map with zeros, below and to the right, to multiples of a number of rows and columns."""
    return jnp.pad(x, [(0, 0), *((0, -size % multiple) for size in x.shape[1:3]), (0, 0)])


def windows(x: Array, side: int) -> Array:
    """Split a feature map [B, rows, columns, D] into the tokens of its windows [B x windows, side x side, D]."""
    return split(x, side).reshape(-1, side * side, x.shape[-1])


def between_tokens(values: Float[Array, "N H"], window: int) -> Float[Array, "1 H T T"]:
    """Return the value of each pair of tokens of a window, from a table of the values of all offsets."""
    side = math.isqrt(len(values))
    position = np.mgrid[:window, :window].reshape(2, -1)
    row, column = position[:, :, None] - position[:, None] + side // 2
    return take_rows(values, row * side + column).transpose(2, 0, 1)[None]
