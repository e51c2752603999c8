"""DETR (arXiv 2005.12872): each object query attends to an image's features and predicts a class and a box."""

import math
from functools import partial
from typing import ClassVar, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from lineage.models.base import MODELS, ImageModel, Layers, Model, ResampleRule, StackModel
from lineage.models.fields import Activation, Count, Image, Implementation, Rate, Size
from lineage.models.layers import ACTIVATIONS, Attention, Block, LayerNorm, Learned, Linear, Mask, Mlp


class PositionedAttention(Attention):
    """Attention with positions added to the inputs of queries and keys, but not of values (figure 10)."""

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "B T D"],
        context: Float[Array, "B S D"] | None = None,
        *,
        mask: Mask | None = None,
        embedded: Float[Array, "#B T D"],
        context_embedded: Float[Array, "#B S D"] | None = None,
        **_,
    ) -> tuple[Float[Array, "B T D"], None]:
        """Return the output, and None in place of a cache; without a context, keys and values come from x.

        `embedded` are the position embeddings of x, `context_embedded` those of the context.
        """
        queries = x + embedded
        if context is None:
            heads = self.project(queries, queries, x)
        else:
            heads = self.project(queries, context + context_embedded, context)
        return self.combine(*heads, mask or Mask(), x.shape[-1]), None


@MODELS.register("detr")
class DETR(StackModel):
    """An object detector for images of any size.

    Attributes:
        backbone: model with `features`, whose last feature map is used.
        num_classes: number of classes, V, without "no object", which is the last logit.
        image_size: side of the training images, in pixels; it is `task.image_size` that resizes them.
        num_queries: number of object queries, Q, the maximum number of objects in an image.
        mlp_dim: width of the hidden layer of the MLPs, F; None: 8 D.
        norm_placement: "post" normalizes the sum of a sublayer's input and output, "pre" the input of each sublayer and
            the output of the encoder. The output of the decoder is normalized in both cases.
        dropout: rate on attention weights, hidden layers and the output of each sublayer.
    """

    VARIANTS: ClassVar = {
        f"r{depth}": {"backbone": {"name": "resnet", "variant": depth, "num_classes": 0, "frozen": True}}
        for depth in ("50", "101")
    }
    FROM_DATA = ("num_classes", "image_size")

    backbone: Model
    num_classes: Count = 91
    image_size: Count = 800
    num_queries: Count = 100
    depth: Count = 6
    decoder_depth: Size = None
    width: Count = 256
    num_heads: Count = 8
    mlp_dim: Size = None
    activation: Activation = "relu"
    norm_placement: Literal["post", "pre"] = "post"
    dropout: Rate = 0.1
    attend: Implementation = "auto"

    outputs = ("objects",)

    @property
    def input_parameters(self) -> str:
        return self.backbone.input_parameters.replace("^", "^backbone/")

    @property
    def layer_groups(self) -> tuple[Layers, ...]:
        """The layers of the backbone, of the encoder and of the decoder, in this order."""
        groups = []
        for group in self.backbone.layer_groups:
            first, last = (pattern.replace("^", "^backbone/") for pattern in (group.first, group.last))
            groups.append(group._replace(path=f"backbone/{group.path}", side="backbone", first=first, last=last))
        patterns = {"first": "^queries/", "last": "^decoder_norm/"}
        encoder = Layers("encoder_stack/layers", self.depth, first="^projection/", last="^encoder_norm/")
        return (*groups, encoder, Layers("decoder_stack/layers", self.decoder_layers, "decoder", **patterns))

    @property
    def resample_rules(self) -> tuple[ResampleRule, ...]:
        return self.backbone.resample_rules

    @property
    def mlp_size(self) -> int:
        return self.mlp_dim or 8 * self.width

    @property
    def channels(self) -> int:
        return self.backbone.channels

    def portable(self) -> "DETR":
        return super().portable().clone(backbone=self.backbone.portable())

    def setup(self):
        if not (isinstance(self.backbone, ImageModel) and hasattr(self.backbone, "features")):
            name = type(self.backbone).__name__
            raise ValueError(f"the backbone is a {name}: it must be one with feature maps, such as resnet.")
        if self.width % 4:
            raise ValueError(f"width is {self.width}: it must be a multiple of 4, for sin and cos of rows and columns.")
        norm = partial(LayerNorm, epsilon=1e-5)
        attention = partial(PositionedAttention, num_heads=self.num_heads, dropout=self.dropout, attend=self.attend)
        mlp = partial(Mlp, self.mlp_size, ACTIVATIONS[self.activation], dropout=self.dropout)
        sublayers = {"attention": attention, "mlp": mlp, "norm": norm}
        block = partial(Block, **sublayers, norm_placement=self.norm_placement, dropout=self.dropout)
        self.projection = Linear((self.width,))
        self.queries = Learned(self.num_queries, self.width, stddev=1.0)
        self.encoder_stack = self.new_stack(block, self.depth)
        self.decoder_stack = self.new_stack(partial(block, cross_attention=attention), self.decoder_layers, every=True)
        if self.norm_placement == "pre":
            self.encoder_norm = norm()
        self.decoder_norm = norm()
        self.classifier = nn.Dense(self.num_classes + 1)
        self.box = [nn.Dense(self.width), nn.Dense(self.width), nn.Dense(4)]

    def __call__(
        self, image: Image, mask: Bool[Array, "B height width"] | None = None
    ) -> tuple[Float[Array, "L B Q V"], Float[Array, "L B Q 4"]]:
        """Return logits and boxes (center x, center y, width and height, relative to the image) of every decoder layer.

        The last layer's are the prediction; the others' are for auxiliary losses.

        Args:
            image: padded below and to the right.
            mask: True where a pixel belongs to the image, False where it is padding.
        """
        memory, mask, positions = self._encoded(image, mask)
        queries = jnp.broadcast_to(self.queries(), (image.shape[0], self.num_queries, self.width)).astype(memory.dtype)
        self.sow("intermediates", "decoder_embedding", queries)
        cross = {"embedded": queries, "context_embedded": positions}
        inputs = {"context": memory, "context_mask": Mask(keys=mask), "context_inputs": cross}
        x, _ = self.decoder_stack(jnp.zeros_like(queries), embedded=queries, **inputs)
        x = self.decoder_norm(x)
        box = x
        for layer in self.box[:-1]:
            box = nn.relu(layer(box))
        return self.classifier(x), jax.nn.sigmoid(self.box[-1](box).astype(jnp.float32))

    def encode(self, image: Image, mask: Bool[Array, "B height width"] | None = None) -> Float[Array, "B P D"]:
        """Return the encoder's output at the positions of the last feature map of the backbone, in row order."""
        return self._encoded(image, mask)[0]

    def _encoded(self, image, mask):
        """Return the encoder's output, its mask (True for positions in the image), and the position embeddings."""
        x = self.projection(self.backbone.features(image)[-1])
        batch, rows, columns, width = x.shape
        mask = jnp.ones(image.shape[:3], bool) if mask is None else mask
        # The nearest pixel above and to the left, as in the reference implementation.
        row, column = (jnp.arange(n) * size // n for n, size in zip((rows, columns), mask.shape[1:]))
        mask = mask[:, row[:, None], column]
        positions = sine(mask, width).reshape(batch, rows * columns, width).astype(x.dtype)
        x, mask = x.reshape(batch, rows * columns, width), mask.reshape(batch, rows * columns)
        self.sow("intermediates", "encoder_embedding", x)
        x, _ = self.encoder_stack(x, mask=Mask(keys=mask), embedded=positions)
        return self.encoder_norm(x) if self.norm_placement == "pre" else x, mask, positions


def sine(mask: Bool[Array, "B rows columns"], width: int) -> Float[Array, "B rows columns D"]:
    """Return interleaved sines and cosines of the row, in the first half of the width, and of the column.

    Rows and columns are counted from 1 over the positions where the mask is True, and scaled so that the last is 2 pi.
    """
    frequencies = 10_000.0 ** -(jnp.arange(0, width // 2, 2) * 2 / width)

    def half(axis):
        count = jnp.cumsum(mask.astype(jnp.float32), axis=axis)
        angle = 2 * math.pi * count / (jax.lax.index_in_dim(count, -1, axis) + 1e-6)
        angle = angle[..., None] * frequencies
        return jnp.stack([jnp.sin(angle), jnp.cos(angle)], axis=-1).reshape(*mask.shape, width // 2)

    return jnp.concatenate([half(1), half(2)], axis=-1)
