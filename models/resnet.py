"""Residual networks (arXiv 1512.03385), including those of Big Transfer (BiT, arXiv 1912.11370).

The stride of a bottleneck is in its 3x3 convolution, as in common implementations, not in the first 1x1 as in the
paper. BiT has group norm, standardized kernels (arXiv 1903.10520) and pre-activation (arXiv 1603.05027).
"""

from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from lineage.configs.registry import Needs
from lineage.models.base import MODELS, HiddenStates, ImageModel, Layers
from lineage.models.fields import Count, Counts, Epsilon, Image
from lineage.models.kernels.compiler import convolve, max_pool
from lineage.models.layers.norm import BatchNorm, standardize

WIDTHS = (256, 512, 1024, 2048)
BIT = {"norm": "group", "preactivation": True}


@MODELS.register("resnet")
class ResNet(ImageModel):
    """An image classifier, for images of any size.

    Attributes:
        depths: number of blocks of each stage; each stage but the first halves the resolution.
        widths: number of output channels of each stage.
        stem: "imagenet" is a 7x7 convolution and max pooling, to a quarter of the resolution; "small" is a 3x3
            convolution at full resolution.
        stem_width: channels of the stem.
        bottleneck: whether blocks are 1x1, 3x3 and 1x1 convolutions with a quarter of the channels inside, or two 3x3.
        preactivation: whether norm and activation come before each convolution instead of after it.
        norm: "batch", or "group" with standardized kernels.
        groups: number of groups of the group norm.
        frozen: whether the batch norm uses its running statistics in training too, without updating them.
        padding: "symmetric" as in PyTorch, or "same" as in TensorFlow, with extra pixels on the right and the bottom.
    """

    VARIANTS: ClassVar = {
        "18": {"depths": (2, 2, 2, 2), "widths": (64, 128, 256, 512), "bottleneck": False},
        "50": {"depths": (3, 4, 6, 3), "widths": WIDTHS},
        "101": {"depths": (3, 4, 23, 3), "widths": WIDTHS},
        "bit50": {"depths": (3, 4, 6, 3), "widths": WIDTHS, **BIT},
        "bit101": {"depths": (3, 4, 23, 3), "widths": WIDTHS, **BIT},
    }
    depths: Counts = (3, 4, 6, 3)
    widths: Counts = WIDTHS
    stem: Literal["imagenet", "small"] = "imagenet"
    stem_width: Count = 64
    bottleneck: bool = True
    preactivation: bool = False
    norm: Literal["batch", "group"] = "batch"
    groups: Annotated[Count, Needs("norm", ("group",))] = 32
    frozen: Annotated[bool, Needs("norm", ("batch",))] = False
    padding: Literal["symmetric", "same"] = "symmetric"
    epsilon: Epsilon = 1e-5

    input_parameters = "^(stem_conv|outer_norm)/"

    @property
    def layer_groups(self) -> tuple[Layers, ...]:
        paths = [f"stages_{stage}_{i}" for stage, depth in enumerate(self.depths) for i in range(depth)]
        last = "^outer_norm/" if self.preactivation else ""
        return tuple(Layers(path, 1, stacked=False, last=last if path == paths[-1] else "") for path in paths)

    def states_from(self, sown: Mapping[str, Any]) -> HiddenStates:
        layers = tuple(sown[f"{group.path}/hidden"][0] for group in self.layer_groups)
        return HiddenStates({"encoder": sown["embedding"][0]}, {"encoder": layers}, {})

    def setup(self):
        if len(self.depths) != len(self.widths):
            raise ValueError(f"depths {self.depths} and widths {self.widths} must have the same length.")
        norm = partial(BatchNorm, epsilon=self.epsilon, frozen=self.frozen)
        if self.norm == "group":
            norm = partial(nn.GroupNorm, self.groups, epsilon=self.epsilon, use_fast_variance=False)
        conv = partial(Conv, standardized=self.norm == "group", padding=self.padding)
        block = partial(Residual, conv, norm, bottleneck=self.bottleneck, preactivation=self.preactivation)
        self.stem_conv = conv(self.stem_width, *((7, 2) if self.stem == "imagenet" else (3, 1)))
        strides = (1, *[2] * (len(self.widths) - 1))  # of the first block of each stage
        sizes = zip(self.widths, strides, self.depths)
        self.stages = [[block(width, stride if i == 0 else 1) for i in range(depth)] for width, stride, depth in sizes]
        self.outer_norm = norm()  # of the stem, or of the last stage
        if self.num_classes:
            self.classifier = nn.Dense(self.num_classes, kernel_init=nn.initializers.normal(0.01))

    def encode(self, image: Image) -> Float[Array, "B h w D"]:
        """Return the feature map of the last stage, after the activation."""
        x = self.features(image)[-1]
        return nn.relu(self.outer_norm(x)) if self.preactivation else x

    def features(self, image: Image) -> tuple[Float[Array, "B _ _ _"], ...]:
        """Return the feature map of each stage; raise ValueError if the image has another number of channels."""
        self.check_channels(image)
        x = self.stem_conv(image)
        x = x if self.preactivation else nn.relu(self.outer_norm(x))
        if self.stem == "imagenet":
            x = max_pool(jnp.pad(x, _pads(x, 3, 2, self.padding)))
        self.sow("intermediates", "embedding", x)
        maps = []
        for stage in self.stages:
            for block in stage:
                x = block(x)
            # Otherwise, XLA may split the rows over the context axis, as DETR splits its tokens. With a tensor axis
            # too, jaxlib 0.10.2 then multiplies gradients of kernels by the size of that axis.
            x = nn.with_logical_constraint(x, ("batch", None, None, None))
            maps.append(x)
        return tuple(maps)


class Conv(nn.Module):
    """Convolution with a square kernel and without bias; see `ResNet` for the padding.

    If `standardized`, the kernel of each output channel has mean 0 and variance 1 (arXiv 1903.10520).
    """

    features: int
    size: int
    stride: int = 1
    padding: str = "symmetric"
    standardized: bool = False

    @nn.compact
    def __call__(self, x: Float[Array, "B height width channels"]) -> Float[Array, "B h w D"]:
        init = nn.initializers.variance_scaling(2.0, "fan_out", "normal")
        kernel = self.param("kernel", init, (self.size, self.size, x.shape[-1], self.features))
        if self.standardized:
            rows = standardize(kernel.reshape(-1, self.features).T.astype(jnp.float32), None, None, 1e-8)
            kernel = rows.T.reshape(kernel.shape).astype(kernel.dtype)
        x, kernel = nn.dtypes.promote_dtype(x, kernel)
        return convolve(x, kernel, self.stride, _pads(x, self.size, self.stride, self.padding)[1:3])


def _pads(x, size, stride, padding):
    """Return the padding before and after each axis of x [B, h, w, c]."""
    pads = [(size // 2, size // 2)] * 2
    if padding == "same":
        pads = jax.lax.padtype_to_pads(x.shape[1:3], (size,) * 2, (stride,) * 2, "SAME")
    return [(0, 0), *pads, (0, 0)]


class Residual(nn.Module):
    """Residual block: convolutions added to the input, which is projected where the shape changes; see `ResNet`."""

    conv: partial
    norm: partial
    width: Count
    stride: int
    bottleneck: bool
    preactivation: bool

    @nn.compact
    def __call__(self, x: Float[Array, "B height width channels"]) -> Float[Array, "B h w D"]:
        sizes = [(3, self.width, self.stride), (3, self.width, 1)]
        if self.bottleneck:
            inner = self.width // 4
            sizes = [(1, inner, 1), (3, inner, self.stride), (1, self.width, 1)]
        branch, projected = x, x.shape[-1] != self.width or self.stride != 1
        for i, (size, width, stride) in enumerate(sizes):
            norm = self.norm(name=f"norm_{i}")
            if self.preactivation:
                branch = nn.relu(norm(branch))
            if projected and not i:
                x = self.conv(self.width, 1, self.stride, name="shortcut")(branch)
            branch = self.conv(width, size, stride, name=f"conv_{i}")(branch)
            if not self.preactivation:
                branch = norm(branch)
                branch = nn.relu(branch) if i < len(sizes) - 1 else branch
        if self.preactivation:
            x = x + branch
        else:
            x = nn.relu((self.norm(name="shortcut_norm")(x) if projected else x) + branch)
        self.sow("intermediates", "hidden", x)
        return x
