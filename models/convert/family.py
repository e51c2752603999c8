"""Mapping between our parameters and the tensors of reference checkpoints."""

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import flax.linen as nn
import numpy as np

from lineage.configs.atomic import MAX_JSON, regular

# Name in `transformers` -> our name; the first of several is written.
ACTIVATIONS = {"relu": "relu", "gelu": "gelu", "gelu_python": "gelu", "silu": "silu", "swish": "silu"}
ACTIVATIONS |= dict.fromkeys(("gelu_new", "gelu_pytorch_tanh", "gelu_fast"), "gelu_tanh")

# Fields of most encoders -> our settings, and the defaults of BERT and ViT.
ENCODER = {
    "num_hidden_layers": ("depth", 12),
    "hidden_size": ("width", 768),
    "num_attention_heads": ("num_heads", 12),
    "intermediate_size": ("mlp_dim", 3072),
    "hidden_act": ("activation", "gelu"),
    "layer_norm_eps": ("epsilon", 1e-12),
}


class Rule(NamedTuple):
    """Correspondence of one tensor of the reference, or one of every layer, to our parameters.

    In the name of a tensor, `*` stands for the index of the layer; our parameter then has a leading layer axis.
    """

    reference: str  # name of the tensor
    ours: str | tuple[str, ...]  # path of the parameter, or of several that are stacked along the layout's axis `n`
    layout: str = ""  # the reference's axes -> ours, such as "(H C) D -> D H C"; "" if they are the same

    def places(self, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[tuple[str, tuple[str, ...], Any]]:
        """Yield the name of each tensor, the paths of its parameters, and its index along their layer axis."""
        paths = (self.ours,) if isinstance(self.ours, str) else self.ours
        for layer in range(shapes[paths[0]][0]) if "*" in self.reference else [...]:
            yield self.reference.replace("*", str(layer)), paths, layer


class Family:
    """Correspondence of a `model_type` of `transformers` to one of our models; subclasses are added by `register`.

    Several fields of `config.json` may correspond to one setting of ours; they must then agree. In our model, the pairs
    of `tied` tensors are one parameter, unless there is a rule for the first of the pair, which a file may omit.
    """

    model: str  # name in `models.MODELS`
    architectures: Sequence[str]  # allowed values of `architectures` in `config.json`; the first is the default
    prefix = ""  # prefix of the names of tensors, which files of a model without its head omit
    fields: Mapping[str, tuple[str, Any]]  # fields of `config.json` -> (our setting, the default if absent)
    synonyms: Mapping[str, str] = {}  # other names of fields in the reference (its `attribute_map`) -> the fields
    fixed: Mapping[str, Any] = {}  # fields -> the only value that our model supports
    causal: bool | None = False  # only supported value of `is_causal`, which sets the mask of all layers
    kind: Mapping[str, Any] = {}  # settings that distinguish the family from others with the same model
    sizes: Mapping[str, str] = {"H": "num_heads"}  # letters in layouts -> our settings that give their sizes
    tied: tuple[tuple[str, str], ...] = ()
    old: Mapping[str, str] = {}  # suffixes of tensor names -> the suffixes in old files
    unread = ""  # regular expression of tensors that may be in a file but are not read
    num_inputs = 1  # number of arrays of tokens that the model takes

    def value(self, model: nn.Module, setting: str) -> Any:
        """Return the value of a setting of a model for `config.json`."""
        value = getattr(model, setting)
        if setting == "activation":
            return next(theirs for theirs, ours in ACTIVATIONS.items() if ours == value)
        if setting == "mlp_dim":
            return model.mlp_size
        return model.depth if value is None and setting == "decoder_depth" else value

    def rules(self, model: nn.Module) -> list[Rule]:
        """Return the rules of a model; raise ValueError if the reference has no such model."""
        raise NotImplementedError

    def config(self, model: nn.Module) -> dict:
        """Return further fields of `config.json`; raise ValueError as `rules`."""
        return {}

    def settings(self, config: dict, architecture: str, names: Iterable[str]) -> dict:
        """Return further settings, from the config, its architecture and the names of the tensors."""
        return {}

    def settings_for(self, target: nn.Module | None, settings: Mapping[str, Any], names: Iterable[str]) -> dict:
        """Return the settings to override if the tensors initialize another model, `target`; None: they do not."""
        return {}

    def example(self, model: nn.Module) -> tuple[np.ndarray, ...]:
        """Return example inputs of a model."""
        return (np.zeros((1, 1), np.int32),) * self.num_inputs

    def fits(self, model: nn.Module) -> bool:
        """Return whether a model belongs to this family, where several families have the same model."""
        return all(getattr(model, name) == value for name, value in self.kind.items())

    def constants(self, model: nn.Module) -> dict[str, np.ndarray]:
        """Return the tensors that our model computes, by name; they are written, and verified when read."""
        return {}

    def additional(self, names: Iterable[str]) -> dict[str, np.ndarray]:
        """Return further tensors to write, given the names of the others; they must match `unread`."""
        return {}

    def ignored(self, model: nn.Module) -> str:
        """Return `unread` for a model."""
        return self.unread

    def other(self, name: str) -> str:
        """Return the name of a tensor in files with other names."""
        return name


FAMILIES: dict[str, Family] = {}  # by `model_type`


def register(model_type: str) -> Callable[[type[Family]], type[Family]]:
    """Return a class decorator that adds a family to `FAMILIES`."""

    def add(cls):
        FAMILIES[model_type] = cls()
        return cls

    return add


class ImageFamily(Family):
    """Family of a model of square images of one size."""

    sizes = {"H": "num_heads", "p": "patch_size", "q": "patch_size", "c": "channels"}

    def example(self, model: nn.Module) -> tuple[np.ndarray, ...]:
        return (np.zeros((1, model.image_size, model.image_size, model.channels), np.float32),)


def linear(reference: str, ours: str, layout: str = "F D -> D F") -> list[Rule]:
    """Return the rules of a PyTorch linear layer, whose weight is (out, in)."""
    return [Rule(f"{reference}.weight", f"{ours}/kernel", layout), Rule(f"{reference}.bias", f"{ours}/bias")]


def heads(reference: str, ours: str, number: str | int = "H") -> list[Rule]:
    """Return the rules of a PyTorch linear layer whose outputs are heads; `number` is their number or its letter."""
    bias = Rule(f"{reference}.bias", f"{ours}/bias", f"({number} C) -> {number} C")
    return [Rule(f"{reference}.weight", f"{ours}/kernel", f"({number} C) D -> D {number} C"), bias]


def norm(reference: str, ours: str) -> list[Rule]:
    """Return the rules of a LayerNorm."""
    return [Rule(f"{reference}.weight", f"{ours}/scale"), Rule(f"{reference}.bias", f"{ours}/bias")]


def attention(names: Sequence[str], after: str, ours: str, h: str | int = "H", inner: str = "") -> list[Rule]:
    """Return the rules of attention with `h` heads; `names` are query, key, value and output, `after` its LayerNorm.

    `inner` is the path of the projections below `ours`.
    """
    path = f"{ours}{inner}"
    return [
        *(rule for part, name in zip(("query", "key", "value"), names) for rule in heads(name, f"{path}/{part}", h)),
        *linear(names[3], f"{path}/out", f"D ({h} C) -> {h} C D"),
        *norm(after, f"{ours}_norm"),
    ]


def block(
    reference: str, ours: str, *, attended: Sequence[str], mlp: Sequence[str], norms: Sequence[str], **options
) -> list[Rule]:
    """Return the rules of a block at the path `ours`; the other arguments are names in the reference.

    With the prefix `reference`, they are the names of query, key, value and output, of the layers of the MLP, and of
    the LayerNorms of attention and MLP. `options` are `h` and `inner` of `attention`.
    """
    (up, down), (first, second) = ([f"{reference}{name}" for name in names] for names in (mlp, norms))
    return [
        *attention([f"{reference}{name}" for name in attended], first, f"{ours}/attention", **options),
        *linear(up, f"{ours}/mlp/up"),
        *linear(down, f"{ours}/mlp/down"),
        *norm(second, f"{ours}/mlp_norm"),
    ]


def read_json(path: Path) -> dict:
    """Return the object in a JSON file; raise FileNotFoundError or ValueError."""
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist.")
    regular(path, MAX_JSON)
    try:
        content = json.loads(path.read_text("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}.") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds a {type(content).__name__}: it must be a JSON object.")
    return content


def labels(model: nn.Module) -> dict:
    """Return the fields that name the classes."""
    names = [f"LABEL_{label}" for label in range(model.num_classes)]
    return {"id2label": dict(enumerate(names)), "label2id": {name: label for label, name in enumerate(names)}}


def num_labels(config: dict, architecture: str) -> int:
    """Return the number of classes, 0 for a model without a head; the reference omits its default, 2."""
    if architecture.endswith("Model"):
        return 0
    names = config.get("id2label")
    count = config.get("num_labels", 2 if names is None else len(names))
    if type(count) is not int or count < 0:
        raise ValueError(f"num_labels is {count!r}: it must be an integer of at least 0.")
    return count


def rearrange(array: np.ndarray, source: str, target: str, sizes: Mapping[str, int]) -> np.ndarray:
    """Return the array with its `source` axes in the order and grouping of `target`.

    "(a b)" is one axis that combines two, "3" an axis of size 3. `sizes` are the sizes of all axes but one of each
    group of `source`.
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
