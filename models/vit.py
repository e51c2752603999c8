"""The Vision Transformer (arXiv 2010.11929): an image as a sequence of patches through a pre-norm encoder."""

import math
from functools import partial
from typing import Annotated, ClassVar, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from lineage.configs.registry import Range
from lineage.models.base import MODELS, ImageModel, Layers, ResampleRule, StackModel, resample_grid, resample_line
from lineage.models.fields import Count, Counts, Epsilon, Image, Implementation, Natural, Rate, Size
from lineage.models.kernels.compiler import row_major
from lineage.models.layers import ACTIVATIONS, Attention, BatchNorm, Block, Dropout, LayerNorm, Mlp, PatchEmbed
from lineage.models.layers.position import Learned, Learned2D, RelativeKeys, resample, sincos_2d
from lineage.models.resnet import WIDTHS, ResNet


@MODELS.register("vit")
class ViT(ImageModel, StackModel):
    """An image classifier.

    Images may have another size than `image_size`: position tables are resampled to their grid.

    Attributes:
        position: the paper's choices "none", "1d" (learned), "2d" (learned rows and columns) and "relative" (appendix
            D.4), or fixed ones: "sincos2d" (arXiv 2205.01580) or "mae" (arXiv 2111.06377, resampled as learned ones).
        pooling: "token" uses a class token, "gap" averages the patches, "map" attends to them (arXiv 2106.04560),
            "tokens" does not pool, which is for features, not for tasks with classes.
        head: "linear", for fine-tuning; "mlp", with a tanh layer before it, for pre-training; or "probe", with a batch
            norm without scale and bias before it, for a linear probe (arXiv 2111.06377, appendix A.1).
        hybrid: number of blocks of each stage of a ResNet, such as (3, 4, 9), whose feature map is split into patches
            (section 3.1); (): the image is split. `patch_size` is in pixels of the image in both cases.
        num_registers: number of learned tokens without positions that are removed from the output (arXiv 2309.16588).
        layer_scale: initial value of a learned vector that multiplies the output of each sublayer (arXiv 2103.17239);
            0 disables it.
        qk_norm: whether LayerNorm is applied to the queries and keys of each head (arXiv 2302.05442, section 2.1).
        epsilon: constant added to the variance; 1e-6 in the checkpoints of the paper, 1e-12 in `transformers`.
        dropout: rate on embeddings, hidden layers and the output of each sublayer.
        attention_dropout: rate on the attention weights; 0 in the paper (appendix B.1).
        stochastic_depth: probability of skipping a sublayer of the last layer; it grows linearly from 0.
    """

    VARIANTS: ClassVar = {
        "mu": {"depth": 4, "width": 64, "num_heads": 4},
        "Ti": {"depth": 12, "width": 192, "num_heads": 3},
        "S": {"depth": 12, "width": 384, "num_heads": 6},
        "B": {"depth": 12, "width": 768, "num_heads": 12},
        "L": {"depth": 24, "width": 1024, "num_heads": 16},
        "H": {"depth": 32, "width": 1280, "num_heads": 16},
    }
    patch_size: Count = 16
    depth: Count = 12
    width: Count = 768
    num_heads: Count = 12
    mlp_dim: Size = None
    position: Literal["none", "1d", "2d", "relative", "sincos2d", "mae"] = "1d"
    pooling: Literal["token", "gap", "map", "tokens"] = "token"
    head: Literal["linear", "mlp", "probe"] = "linear"
    hybrid: Counts = ()
    num_registers: Natural = 0
    layer_scale: Annotated[float, Range(0)] = 0.0
    qk_norm: bool = False
    epsilon: Epsilon = 1e-6
    attention_dropout: Rate = 0.0
    stochastic_depth: Rate = 0.0
    attend: Implementation = "auto"

    SPECIAL = ("class_token",)  # tokens before the patches, with positions

    input_parameters = "^(backbone|class_token|distillation_token|patch_embed|registers|table)"

    @property
    def image_attention(self) -> Literal["class_token", "patches"]:
        return "class_token" if self.pooling == "token" else "patches"

    @property
    def layer_groups(self) -> tuple[Layers, ...]:
        return (Layers("stack/layers", self.depth, last="^norm/"),)

    @property
    def resample_rules(self) -> tuple[ResampleRule, ...]:
        return (("(^|/)table/(row|column)$", resample_line), ("(^|/)table/table$", resample_grid))

    @property
    def computed(self) -> dict[str, np.ndarray]:
        if self.position != "mae":
            return {}
        special = len(self.SPECIAL) if self.pooling == "token" else 0
        return {"table/table": np.pad(sincos_2d(self.side, self.side, self.width), ((special, 0), (0, 0)))}

    @property
    def side(self) -> int:
        """Number of rows and of columns of patches in an image of `image_size`."""
        return self.image_size // self.patch_size

    def setup(self):
        sublayers = self._sublayers(self.width, self.num_heads, self.mlp_dim)
        stride = stride_of(self.hybrid)
        if self.patch_size % stride:
            raise ValueError(f"patch_size is {self.patch_size}: it must be a multiple of {stride}.")
        if self.image_size < self.patch_size:
            raise ValueError(f"image_size is {self.image_size}: it must be at least patch_size, {self.patch_size}.")
        self.patch_embed = PatchEmbed(self.patch_size // stride, self.width)
        if self.hybrid:
            sizes = {"channels": self.channels, "depths": self.hybrid, "widths": WIDTHS[: len(self.hybrid)]}
            self.backbone = ResNet(num_classes=0, **sizes, norm="group", padding="same", epsilon=1e-6)
        names = self.SPECIAL if self.pooling == "token" else ()
        self.special = [self.param(name, nn.initializers.zeros, (self.width,)) for name in names]
        if self.num_registers:
            self.registers = self.param("registers", nn.initializers.normal(0.02), (self.num_registers, self.width))
        if self.position == "1d":
            self.table = Learned(self.side**2 + len(names), self.width)
        elif self.position == "2d":
            self.table = Learned2D(self.side, self.side, self.width)
        self.embed_dropout = Dropout(self.dropout)
        self.stack = self._stack(sublayers, self.depth)
        self.norm = sublayers["norm"]()
        if self.pooling == "map":
            self.attention_pool = AttentionPool(**sublayers)
        if self.head == "mlp":
            self.pre_logits = nn.Dense(self.width)
        elif self.head == "probe":
            self.probe_norm = BatchNorm(1e-6, use_affine=False)
        if self.num_classes:
            self.classifier = nn.Dense(self.num_classes, kernel_init=nn.initializers.zeros)

    def _sublayers(self, width, num_heads, hidden):
        """Return constructors of the attention, the MLP and the norms of a block."""
        norm = partial(LayerNorm, epsilon=self.epsilon)
        distance = self.side**2 - (self.pooling != "token")
        relative = partial(RelativeKeys, max_distance=distance) if self.position == "relative" else None
        options = {"dropout": self.attention_dropout, "attend": self.attend, "relative": relative}
        attention = partial(Attention, num_heads=num_heads, qk_norm=norm if self.qk_norm else None, **options)
        init, activation = nn.initializers.normal(1e-6), ACTIVATIONS[self.activation]
        mlp = partial(Mlp, hidden or 4 * width, activation, dropout=self.dropout, bias_init=init)
        return {"attention": attention, "mlp": mlp, "norm": norm}

    def _stack(self, sublayers, depth):
        block = partial(Block, **sublayers, dropout=self.dropout, layer_scale=self.layer_scale)
        return self.new_stack(block, depth, stochastic_depth=self.stochastic_depth)

    @property
    def outputs(self) -> tuple[str, ...]:
        return ("features",) if self.pooling == "tokens" else super().outputs

    def __call__(self, image: Image) -> Float[Array, "B *P V"]:
        """Return logits of the classes, or features [B, D] without a classifier; of each token without pooling.

        Raise ValueError if the image cannot be divided into patches, or has another number of channels.
        """
        x = self.pool(self.encode(image))
        if self.head == "mlp":
            x = jnp.tanh(self.pre_logits(x))
        elif self.head == "probe":
            x = self.probe_norm(x)
        return self.classifier(x) if self.num_classes else x

    def encode(self, image: Image, seen: Int[Array, "B S"] | None = None) -> Float[Array, "B P D"]:
        """Return the normalized output tokens: the class token, if there is one, then the patches in row order.

        The image may have any size that divides into patches. `seen` are the indices of the patches to encode, if not
        all of them.
        """
        self.check_channels(image)
        x = self.patch_embed(self.backbone.features(image)[-1] if self.hybrid else image)
        batch, *grid, width = x.shape
        places, table = self._positions(tuple(grid))
        x = x.reshape(batch, math.prod(grid), width) + jnp.asarray(table, x.dtype)
        if seen is not None:
            x = tokens_at(x, seen)
        first = [token + place for token, place in zip(self.special, places)]
        first += [*self.registers] if self.num_registers else []
        if first:
            first = jnp.broadcast_to(jnp.stack(first).astype(x.dtype), (batch, len(first), width))
            x = jnp.concatenate([first, x], axis=1)
        x = self.embed_dropout(x)
        x = row_major(x) if self.attend == "auto" else x
        self.sow("intermediates", "embedding", x)
        x = self.norm(self.stack(x)[0])
        special, patches = x[:, : len(self.special)], x[:, len(self.special) + self.num_registers :]
        return jnp.concatenate([special, patches], axis=1) if self.num_registers else x

    def pool(self, tokens: Float[Array, "B P D"]) -> Float[Array, "B *P D"]:
        """Pool the output tokens of each image; `pooling` "tokens" returns them."""
        if self.pooling in ("token", "tokens"):
            return tokens[:, 0] if self.pooling == "token" else tokens
        return tokens.mean(axis=1) if self.pooling == "gap" else self.attention_pool(tokens)

    def _positions(self, grid):
        """Return the positions of the special tokens [n, D], and of the patches of a grid (rows, columns)."""
        special = len(self.special)
        places = np.zeros((special, self.width), np.float32)
        if self.position in ("none", "relative"):
            return places, np.zeros((1, self.width), np.float32)
        if self.position == "sincos2d":
            return places, sincos_2d(*grid, self.width, endpoint=True)
        table = sincos_2d(self.side, self.side, self.width) if self.position == "mae" else self.table()
        if self.position == "1d":
            places, table = table[:special], table[special:]
        return places, self._resampled(table, grid)

    def _resampled(self, table, grid):
        """Resample a table of the grid of `image_size` to another grid."""
        trained = (self.side, self.side)
        return table if tuple(grid) == trained else resample(jnp.asarray(table), trained, tuple(grid))


class AttentionPool(nn.Module):
    """Pooling by attention of a learned query, and a residual MLP: the MAP head of arXiv 2106.04560."""

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


def stride_of(hybrid: tuple[int, ...]) -> int:
    """Return the stride, in pixels of the image, of the feature map that is split into patches; see `ViT.hybrid`."""
    return 2 ** (len(hybrid) + 1) if hybrid else 1


def tokens_at(x: Float[Array, "B P D"], indices: Int[Array, "B S"]) -> Float[Array, "B S D"]:
    """Return the tokens at indices that differ within an example, so that no two gradients have to be added."""
    return jax.vmap(lambda x, indices: x.at[indices].get(mode="promise_in_bounds", unique_indices=True))(x, indices)
