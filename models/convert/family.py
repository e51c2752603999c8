"""What a family's mapping is made of, and how a tensor goes through it: parameters here <-> tensors of a reference."""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import flax.linen as nn
import numpy as np

# Names of `transformers` -> ours; the first of several is written.
ACTIVATIONS = {
    "relu": "relu",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "silu": "silu",
    "swish": "silu",
}


class Rule(NamedTuple):
    """One tensor of the reference, or one of every layer.

    Attributes:
        reference: its name; `*` stands for the number of the layer, and our parameter has a leading layer axis then.
        ours: the parameter's path; several are packed in one tensor, along the layout's axis `n`.
        layout: the reference's axes -> ours, such as "(H C) D -> D H C"; without it they are the same.
    """

    reference: str
    ours: str | tuple[str, ...]
    layout: str = ""

    def places(self, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[tuple[str, tuple[str, ...], Any]]:
        """Each tensor's name, the parameters in it, and its index in them."""
        paths = (self.ours,) if isinstance(self.ours, str) else self.ours
        for layer in range(shapes[paths[0]][0]) if "*" in self.reference else [...]:
            yield self.reference.replace("*", str(layer)), paths, layer


@dataclass(frozen=True)
class Family:
    """How a `model_type` of `transformers` corresponds to one of our models.

    Attributes:
        model: the name in `models.MODELS`.
        architectures: what `config.json` may call it; the first if it says nothing.
        prefix: what the tensors of a model without its head leave out of their names.
        fields: fields of `config.json` -> (our setting, the default if absent). Fields of one setting must agree.
        fixed: fields with the only value that our model knows.
        rules: makes a model's table.
        config: (model) -> fields that no setting gives; raises ValueError for what the reference cannot express.
        settings: (config, architecture, names of tensors) -> settings that no field gives.
        sizes: letters in layouts -> our settings that give their sizes.
        example: makes a model's input, or the tuple of its inputs; a token unless told.
        fits: whether a model is one of this family, where several families have the same model.
        tied: pairs of tensors that are one for us, unless a rule has the first; a file may leave out the first.
        constants: makes the tensors of a model that are no parameters of ours, by name: written, and checked when read.
        ignored: pattern of tensors that carry nothing; or makes a model's.
        old: endings of tensors' names -> those in old files.
        other: the name that another file may have for a tensor.
    """

    model: str
    architectures: tuple[str, ...]
    prefix: str
    fields: Mapping[str, tuple[str, Any]]
    fixed: Mapping[str, Any]
    rules: Callable[[nn.Module], list[Rule]]
    config: Callable[[nn.Module], dict]
    settings: Callable[[dict, str, Mapping], dict] = lambda config, architecture, names: {}
    sizes: Mapping[str, str] = field(default_factory=lambda: {"H": "num_heads"})
    example: Callable[[nn.Module], np.ndarray | tuple[np.ndarray, ...]] = lambda model: np.zeros((1, 1), np.int32)
    fits: Callable[[nn.Module], bool] = lambda model: True
    tied: tuple[tuple[str, str], ...] = ()
    constants: Callable[[nn.Module], dict[str, np.ndarray]] = lambda model: {}
    ignored: str | Callable[[nn.Module], str] = ""
    old: Mapping[str, str] = field(default_factory=dict)
    other: Callable[[str], str] = lambda name: name


def linear(reference: str, ours: str, layout: str = "F D -> D F") -> list[Rule]:
    """A PyTorch linear layer, whose weight is (out, in)."""
    return [Rule(f"{reference}.weight", f"{ours}/kernel", layout), Rule(f"{reference}.bias", f"{ours}/bias")]


def heads(reference: str, ours: str, number: str | int = "H") -> list[Rule]:
    """A PyTorch linear layer that makes heads: as many as a letter of the family's `sizes` says, or a number."""
    bias = Rule(f"{reference}.bias", f"{ours}/bias", f"({number} C) -> {number} C")
    return [Rule(f"{reference}.weight", f"{ours}/kernel", f"({number} C) D -> D {number} C"), bias]


def norm(reference: str, ours: str) -> list[Rule]:
    """A LayerNorm."""
    return [Rule(f"{reference}.weight", f"{ours}/scale"), Rule(f"{reference}.bias", f"{ours}/bias")]


def attention(names: Sequence[str], after: str, ours: str, h: str = "H") -> list[Rule]:
    """Attention, whose query, key, value and output are called `names`, and the LayerNorm `after`; of `h` heads."""
    return [
        *(rule for part, name in zip(("query", "key", "value"), names) for rule in heads(name, f"{ours}/{part}", h)),
        *linear(names[3], f"{ours}/out", f"D ({h} C) -> {h} C D"),
        *norm(after, f"{ours}_norm"),
    ]


def block(
    reference: str, ours: str, *, attended: Sequence[str], mlp: Sequence[str], norms: Sequence[str], h: str = "H"
) -> list[Rule]:
    """A block at the path `ours`, whose parts' names follow `reference`: query, key, value and output; the two layers
    of the MLP; the LayerNorms of attention and MLP."""
    (up, down), (first, second) = ([f"{reference}{name}" for name in names] for names in (mlp, norms))
    return [
        *attention([f"{reference}{name}" for name in attended], first, f"{ours}/attention", h),
        *linear(up, f"{ours}/mlp/up"),
        *linear(down, f"{ours}/mlp/down"),
        *norm(second, f"{ours}/mlp_norm"),
    ]


def image(model: nn.Module) -> np.ndarray:
    """One image of the model's size."""
    return np.zeros((1, model.image_size, model.image_size, model.channels), np.float32)


def labels(model: nn.Module) -> dict:
    """The fields that name the classes."""
    names = [f"LABEL_{label}" for label in range(model.num_classes)]
    return {"id2label": dict(enumerate(names)), "label2id": {name: label for label, name in enumerate(names)}}


def num_labels(config: dict) -> int:
    """How many classes there are; the reference leaves out what is its default: two."""
    return config.get("num_labels", len(config.get("id2label", "01")))


def rearrange(array: np.ndarray, source: str, target: str, sizes: Mapping[str, int]) -> np.ndarray:
    """The array with its `source` axes in the order and grouping of `target`; "(a b)" is one axis, "3" one of size 3.

    `sizes` gives the sizes of all axes in a group of `source` but one.
    """
    source, target = ([group.strip("()").split() for group in re.findall(r"\(.*?\)|\S+", s)] for s in (source, target))
    source, target = ([[axis for axis in group if axis != "1"] for group in groups] for groups in (source, target))
    sizes = {axis: int(axis) for group in source for axis in group if axis.isdigit()} | dict(sizes)
    for group, size in zip(source, array.shape, strict=True):
        for axis in set(group) - set(sizes):
            sizes[axis] = size // math.prod(sizes[other] for other in group if other != axis)
    before, after = ([axis for group in groups for axis in group] for groups in (source, target))
    array = array.reshape([sizes[axis] for axis in before]).transpose([before.index(axis) for axis in after])
    return array.reshape([math.prod(sizes[axis] for axis in group) for group in target])
