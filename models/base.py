"""Base classes of the architectures: fields, outputs, layer order, sharding rules and hidden states."""

import dataclasses
import inspect
import math
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar, Literal, NamedTuple

import flax.linen as nn
import jax.numpy as jnp
from flax.traverse_util import flatten_dict
from jaxtyping import Array, Float

from lineage.configs.registry import INHERITED, Registry, check_ranges
from lineage.models.fields import Activation, Count, Image, Natural, Rate
from lineage.models.layers.block import Stack
from lineage.models.layers.position import resample

MODELS = Registry("model")

# A regular expression of paths, and the mesh axes of the last dimensions; several axes may share a dimension.
ShardingRule = tuple[str, tuple[str | tuple[str, ...] | None, ...]]
# A regular expression of paths, and a function (table, shape) -> the table for another resolution.
ResampleRule = tuple[str, Callable[[Any, tuple[int, ...]], Any]]


class Layers(NamedTuple):
    """Consecutive layers of a model.

    Attributes:
        path: path of their parameters, such as "encoder_stack/layers".
        count: number of layers.
        side: part of the model that they belong to.
        stacked: whether their parameters are stacked along a leading axis; otherwise there is one set of parameters.
        first, last: regular expressions of further parameters that are assigned to the first and to the last of these
            layers, such as a preceding projection and a final norm.
    """

    path: str
    count: int
    side: Literal["encoder", "decoder", "backbone"] = "encoder"
    stacked: bool = True
    first: str = ""
    last: str = ""

    @property
    def places(self) -> int:
        """Number of positions in the layer order; layers with shared parameters count once."""
        return self.count if self.stacked else 1


class HiddenStates(NamedTuple):
    """Hidden states and attention weights of a forward pass.

    Attributes:
        embedding: inputs of the first layer of the "encoder" and of the "decoder", [B, T, D].
        layers: outputs of their layers, from the first to the last, [B, T, D] each; image models may have feature
            maps [B, rows, columns, D].
        attention: attention weights [B, H, T, S] of the layers of the "encoder", of the "decoder", and of the decoder's
            cross-attention, "cross".
    """

    embedding: dict[str, Array]
    layers: dict[str, tuple[Array, ...]]
    attention: dict[str, tuple[Array, ...]]


class Model(nn.Module):
    """Base class of the architectures, which are constructed with keyword arguments.

    An architecture adds itself to `models.MODELS`; see `configs.registry.Registry` for `VARIANTS` and `FROM_DATA`.
    The attributes below are not dataclass fields; subclasses override them by class attributes, properties or fields.

    Attributes:
        outputs: kinds of the outputs, for tasks to check: "features", "classes", "distilled_classes", "patches",
            "objects", "next_token", "both_directions", "target_tokens", or the name of a head.
        image_attention: for a model whose attention weights are between all patches of an image, in row order: whether
            the first token is a class token, whose attention a report shows ("class_token"), or not ("patches").
        uses_batch_statistics: whether norms average over all tokens of a batch, so that padding must be masked.
        space_first: whether texts begin with a space when they are tokenized, like the words in the middle of a text.
        num_segments: number of segments with an embedding; 0: there are no segment embeddings.
        computes_loss: whether `__call__` accepts `targets` and then returns their losses instead of logits, see
            `kernels.vocabulary.token_losses`.
        depth: number of layers, L.
        width: size of the hidden states, D.
        num_heads: number of attention heads, H.
        mlp_dim: width of the hidden layer of the MLPs, F; None: 4 D.
        patch_size: side of a patch, in pixels.
        vocab_size: number of tokens, V.
        max_length: length of the longest sequence, in tokens; a model without this key has no limit.
        epsilon: constant added to the variance in every norm.
        attend: attention implementation: "auto" chooses a fast kernel for the platform that runs the program (TPU, or
            NVIDIA GPU in 16-bit precision); "portable" is the same program everywhere; "dense" computes all weights.
        input_parameters: regular expression of the parameters before the first layer.
        head_parameters: regular expression of the parameters whose purpose depends on `outputs`; "": none.
        attention_path: path of the attention weights that a layer sows.
    """

    VARIANTS: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    FROM_DATA: ClassVar[tuple[str, ...]] = ()

    outputs = ("features",)
    image_attention = None
    uses_batch_statistics = False
    space_first = False
    num_segments = 0
    computes_loss = False
    depth = 0
    width = 0
    patch_size = 1
    max_length = None
    attend = "auto"
    input_parameters = "^(embed|position|segment)"
    head_parameters = ""
    attention_path = "attention/attention"

    def __init_subclass__(cls, **kwargs: Any):
        super().__init_subclass__(kw_only=True, **kwargs)

    def __post_init__(self):
        super().__post_init__()
        check_ranges("model", self)

    @property
    def settings(self) -> dict[str, Any]:
        """The fields by name."""
        names = (field.name for field in dataclasses.fields(self) if field.name not in INHERITED)
        return {name: getattr(self, name) for name in names}

    @property
    def data_options(self) -> dict[str, Any]:
        """The fields that the data determine unless the config sets them; None for fields that the model lacks."""
        names = ("num_classes", "image_size", "channels", "vocab_size", "pad_id", "max_length")
        return {name: self.settings.get(name) for name in names}

    @property
    def is_decoder(self) -> bool:
        """True if the model generates text, with the methods `encode`, `init_cache` and `decode`."""
        return hasattr(self, "init_cache")

    @property
    def has_heads(self) -> bool:
        """True if the task determines the field `head`, which chooses the outputs; "none": the hidden states."""
        return "head" in self.FROM_DATA

    def accepts(self, argument: str) -> bool:
        """Return whether `__call__` has an argument of this name.

        Tasks ask for "own_rate", the probability of scheduled sampling, and "segments" (with "positions"), for rows of
        several texts.
        """
        return argument in inspect.signature(self.__call__).parameters

    @property
    def layer_groups(self) -> tuple[Layers, ...]:
        """The layers, in the order of computation."""
        return ()

    @property
    def num_layers(self) -> int:
        """Number of positions in the layer order, see `layer_of`."""
        return sum(group.places for group in self.layer_groups)

    def layer_of(self, path: str) -> int | range:
        """Return the layer that a parameter belongs to, for layer-wise learning rates and for freezing.

        The layer is 0 before the first layer (embeddings), 1 to `num_layers` for the layers, and `num_layers` + 1 after
        the last one (heads). A range means that the parameter has these layers along its first axis.

        The order is that of timm's `group_matcher` if timm has the architecture: a norm at the end of a stack belongs
        to its last layer, a projection between two stacks to the layer after it. An encoder's layers come before its
        decoder's.
        """
        layer = 1
        for group in self.layer_groups:
            if re.search(f"(^|/){group.path}/", path):
                return range(layer, layer + group.count) if group.stacked else layer
            if group.first and re.search(group.first, path):
                return layer
            layer += group.places
            if group.last and re.search(group.last, path):
                return layer - 1
        return 0 if re.search(self.input_parameters, path) else layer

    @property
    def sharding_rules(self) -> tuple[ShardingRule, ...]:
        """Placement of the parameters on the mesh; the first rule whose expression is found in a path applies.

        Attention heads and hidden units are split over "tensor" (arXiv 1909.08053), the other side of each matrix over
        "fsdp". Other kernels, those of convolutions among them, are split by their outputs.
        """
        return (
            ("(query|key|value)/kernel", ("fsdp", "tensor", None)),
            ("(query|key|value)/bias", ("tensor", None)),
            ("attention/out/kernel", ("tensor", None, "fsdp")),
            ("(up|gate)/kernel", ("fsdp", "tensor")),
            ("(up|gate)/bias", ("tensor",)),
            ("down/kernel", ("tensor", "fsdp")),
            ("embed/table", ("tensor", "fsdp")),
            ("kernel|table", (None, "fsdp")),
        )

    @property
    def resample_rules(self) -> tuple[ResampleRule, ...]:
        """Position tables that can be resampled for another resolution, see `resampled`."""
        return ()

    @property
    def computed(self) -> dict[str, Any]:
        """Arrays that the model computes and a related model learns, by the path of the learned parameter."""
        return {}

    def resampled(self, path: str, table: Any, shape: tuple[int, ...]) -> Any:
        """Return another model's parameter for this model, whose parameter has `shape`.

        Only the position tables of `resample_rules` change, and only if all but the number of positions agrees.
        """
        if table.shape != shape and table.ndim == len(shape) and table.shape[-1] == shape[-1]:
            for pattern, function in self.resample_rules:
                if re.search(pattern, path):
                    return function(table, shape)
        return table

    def check_length(self, length: int) -> None:
        """Raise ValueError if the model has no positions for this number of tokens."""
        if self.max_length is not None and length > self.max_length:
            raise ValueError(f"a sequence of {length} tokens is longer than the model's {self.max_length}, max_length.")

    def portable(self) -> "Model":
        """Return the model without kernels for particular platforms."""
        return self.clone(attend="portable") if self.attend == "auto" and "attend" in self.settings else self

    def states_from(self, sown: Mapping[str, tuple[Any, ...]]) -> HiddenStates:
        """Collect the hidden states from the intermediates sown by a forward pass; see `hidden_states`."""
        states = HiddenStates({}, {}, {})
        for group in self.layer_groups:
            if group.side == "backbone":
                continue
            for name in (f"{group.side}_embedding", "embedding"):
                if name in sown:
                    states.embedding.setdefault(group.side, sown[name][0])
            for arrays, key, path in (
                (states.layers, group.side, "hidden"),
                (states.attention, group.side, self.attention_path),
                (states.attention, "cross", "cross_attention/attention"),
            ):
                if values := sown.get(f"{group.path}/{path}"):
                    arrays[key] = (*arrays.get(key, ()), *values[0])
        return states


class StackModel(Model):
    """Base class of models that consist of stacks of blocks.

    Attributes:
        activation: activation function of the MLPs.
        dropout: rate on embeddings, attention weights and the output of each sublayer.
        remat: what the backward pass recomputes to save memory: nothing (None), all but the matrix products with
            weights ("dots"), or everything inside a block ("full").
        unroll: number of layers in each iteration of the loop over layers. A loop copies what the backward pass needs
            into arrays of all layers; `depth`, without a loop, is faster on TPUs and GPUs but compiles more slowly.
        decoder_depth: number of layers of the decoder; None: `depth`.
    """

    activation: Activation = "gelu"
    dropout: Rate = 0.0
    remat: Literal["dots", "full"] | None = None
    unroll: Count = 1

    decoder_depth = None

    @property
    def new_stack(self) -> Callable[..., Stack]:
        """Constructor of a `Stack` with the model's `remat` and `unroll`."""
        return partial(Stack, remat=self.remat, unroll=self.unroll)

    @property
    def mlp_size(self) -> int:
        """Width of the hidden layer of the MLPs, F."""
        return self.mlp_dim or 4 * self.width

    @property
    def decoder_layers(self) -> int:
        """Number of layers of the decoder."""
        return self.decoder_depth or self.depth


class ImageModel(Model):
    """Base class of image classifiers.

    Attributes:
        num_classes: number of classes, V; 0: no classifier, the model returns the features that are its input.
        image_size: side of the training images, in pixels; it is `task.image_size` that resizes them.
        channels: number of channels of the images.
    """

    FROM_DATA = ("num_classes", "image_size", "channels")

    num_classes: Natural = 1000
    image_size: Count = 224
    channels: Count = 3

    @property
    def outputs(self) -> tuple[str, ...]:
        return ("classes",) if self.num_classes else ("features",)

    def check_channels(self, image: Image) -> None:
        """Raise ValueError if the number of channels of the image is not that of the model."""
        if image.shape[-1] != self.channels:
            raise ValueError(f"the image has {image.shape[-1]} channels: the model needs {self.channels}.")

    def __call__(self, image: Image) -> Float[Array, "B V"]:
        """Return logits of the classes, or features [B, D] without a classifier."""
        x = self.encode(image).mean(axis=(1, 2))
        return self.classifier(x) if self.num_classes else x


def hidden_states(model: Model, variables: Mapping[str, Any], *inputs: Any, **options: Any) -> HiddenStates:
    """Return the hidden states and attention weights of a model on some inputs.

    >>> model = build("bert", "tiny", head="none")
    >>> tokens = jnp.ones((1, 8), jnp.int32)
    >>> variables = model.init(jax.random.key(0), tokens)
    >>> states = hidden_states(model, variables, tokens)
    >>> [layer.shape for layer in states.layers["encoder"]]
    [(1, 8, 128), (1, 8, 128)]
    >>> states.embedding["encoder"].shape, states.attention["encoder"][0].shape
    ((1, 8, 128), (1, 2, 8, 8))

    `inputs` and `options` are the arguments of `model.apply` after the variables.
    """
    _, state = model.apply(variables, *inputs, mutable=["intermediates"], **options)
    return model.states_from(flatten_dict(state.get("intermediates", {}), sep="/"))


def resample_line(table: Any, shape: tuple[int, ...]) -> Any:
    """Resample a position table [T, D] of a line to another length."""
    return resample(jnp.asarray(table), (len(table), 1), (shape[0], 1))


def resample_grid(table: Any, shape: tuple[int, ...]) -> Any:
    """Resample a position table [T, D] of special tokens and a square grid of patches to another size of the grid."""
    old = math.isqrt(len(table))
    special = len(table) - old**2
    new = math.isqrt(max(shape[0] - special, 0))
    if new**2 + special != shape[0]:
        return table
    return jnp.concatenate([table[:special], resample(jnp.asarray(table[special:]), (old, old), (new, new))])
