"""Base class of optimizers: weight decay, clipping, freezing and learning rates by layer."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import optax

from lineage.configs.registry import Natural, Registry, check_expressions, check_matches, check_ranges, matches
from lineage.models import Model
from lineage.models.quantization import Inputs
from lineage.train.adapters import adapted_path
from lineage.train.optimizer.schedules import LearningRate, NonNegative

OPTIMIZERS = Registry("optimizer")


class Setting(NamedTuple):
    """Context in which an optimizer is created; see `Optimizer.make`."""

    learning_rate: LearningRate
    model: Model | None
    inputs: Callable[[], Inputs]

    def own_axes(self, path: str, leaf: Any) -> tuple[int, ...]:
        """Return the axes of a parameter, counted from the end; of stacked layers, those of one layer."""
        stacked = self.model is not None and isinstance(self.model.layer_of(path), range)
        return tuple(range(stacked - leaf.ndim, 0))

    def matrix(self, path: str, leaf: Any) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """Return the input and the output axes of a parameter, or of one of its stacked layers, if it is a matrix.

        They are counted from the end. Those of attention are several, heads and channels; a convolution is a matrix for
        each pixel of its kernel. The result is None for biases and other vectors.
        """
        axes = self.own_axes(path, leaf)
        if len(axes) < 2 or path.endswith("bias"):
            return None
        inputs = self.inputs().get(path)
        return (inputs, tuple(axis for axis in axes if axis not in inputs)) if inputs else ((-2,), (-1,))


@dataclass(frozen=True)
class Optimizer:
    """Base class of optimizers: weight decay, gradient clipping, freezing and layer-wise learning rates.

    Attributes:
        weight_decay: decoupled weight decay, multiplied by the learning rate (arXiv 1711.05101).
        no_decay: regular expressions; parameters whose path matches one have no weight decay. An expression need not
            match the number at the end of a path such as `bias_0`. The default matches biases, the scales of norms and
            the factors of SVF.
        clip_norm: maximum global norm of the gradient, for clipping; 0 disables it.
        frozen: regular expressions; parameters whose path matches one are not trained: they have no gradients, updates,
            moments or weight decay, and do not count in the gradient's norm.
        frozen_layers: number of initial layers, in the order of `Model.layer_of`, that are not trained, along with the
            parameters before them. A loop over layers (see `model.unroll`) still computes the backward pass of all
            its layers, unless all are frozen.
        layer_decay: ratio of each layer's learning rate to that of the next one, in the order of `Model.layer_of`; the
            heads have the full learning rate (arXiv 2003.10555). 0: all layers have the same learning rate.
        lr_multipliers: (regular expression, factor) pairs; the first expression that matches a parameter's path scales
            its learning rate.
    """

    estimates_rate: ClassVar[bool] = False  # whether the schedule's learning rate is a factor of an estimate

    weight_decay: NonNegative = 0.0
    no_decay: tuple[str, ...] = ("bias$", "scale$")
    clip_norm: NonNegative = 1.0
    frozen: tuple[str, ...] = ()
    frozen_layers: Natural = 0
    layer_decay: NonNegative = 0.0
    lr_multipliers: tuple[tuple[str, float], ...] = ()

    def __post_init__(self):
        check_ranges("optimizer", self)
        check_expressions("optimizer.no_decay", self.no_decay)
        check_expressions("optimizer.frozen", self.frozen)
        check_expressions("optimizer.lr_multipliers", self.lr_multipliers, paired=True)
        for pattern, factor in self.lr_multipliers:
            if not (isinstance(factor, int | float) and factor >= 0):
                raise ValueError(f"optimizer.lr_multipliers has {factor!r} for {pattern!r}: it must be 0 or more.")

    def rule(self, setting: Setting) -> optax.GradientTransformation:
        """Return the update rule, before weight decay and learning rates."""
        raise ValueError(f"The optimizer {type(self).__name__} must have the method rule.")

    def make(
        self, learning_rate: LearningRate, model: Model | None = None, inputs: Callable[[], Inputs] | None = None
    ) -> optax.GradientTransformation:
        """Return the transformation of gradients into updates.

        Args:
            learning_rate: learning rate of each step.
            model: needed by `layer_decay`, `frozen_layers` and Muon.
            inputs: function that returns the input axes of the model's matrices, see `models.quantization`; needed by
                Muon. None: the last axis but one.
        """
        if self.layer_decay or self.frozen_layers:
            self._check_layers(model)
        clipped = [optax.clip_by_global_norm(self.clip_norm)] if self.clip_norm else []
        setting = Setting(learning_rate, model, cache(inputs or dict))
        optimizer = optax.chain(*clipped, *self.transforms(setting))
        optimizer, part = optax.with_extra_args_support(optimizer), partial(self.trained, model=model)

        def update(updates, state, params=None, **extra):
            new, state = optimizer.update(part(updates), state, part(params), **extra)
            return merged(new, jax.tree.map(jnp.zeros_like, updates)), state

        return optax.GradientTransformationExtraArgs(lambda params: optimizer.init(part(params)), update)

    def trained(self, params: Any, model: Model | None = None) -> Any:
        """Return the trained part of the parameters, or of a tree of their shapes; see `merged`.

        `optax.MaskedNode` replaces frozen parameters, and the trained layers replace stacked layers of which some are
        frozen. `frozen_layers` needs the model. ValueError is raised if all parameters are frozen.
        """
        check_matches("optimizer.frozen", self.frozen, paths_of(params))

        def part(path, leaf):
            if matches(self.frozen, path):
                return optax.MaskedNode()
            if not self.frozen_layers:
                return leaf
            layer = model.layer_of(adapted_path(path))
            layers = layer if isinstance(layer, range) else [layer]
            kept = sum(layer > self.frozen_layers for layer in layers)
            if kept in (0, len(layers)):
                return leaf if kept else optax.MaskedNode()
            return leaf[-kept:]

        kept = map_paths(part, params)
        if not jax.tree.leaves(kept):
            options = f"optimizer.frozen is {self.frozen} and optimizer.frozen_layers {self.frozen_layers}"
            raise ValueError(f"{options}: they leave no parameter to train.")
        return kept

    def transforms(self, setting: Setting) -> list[optax.GradientTransformation]:
        """Return the update rule, followed by weight decay and learning rates."""
        rate, rule = optax.scale_by_learning_rate(setting.learning_rate), self.rule(setting)
        if not isinstance(rule, optax.GradientTransformation):
            returned = f"The method rule of {type(self).__name__} returns a {type(rule).__name__}"
            raise ValueError(f"{returned}: it must be an optax.GradientTransformation.")
        return [rule, *self.decay(), *self.multipliers(setting), rate]

    def decay(self) -> list[optax.GradientTransformation]:
        """Return the weight decay, if any."""
        return [optax.add_decayed_weights(self.weight_decay, self.is_decayed)] if self.weight_decay else []

    def decays(self, path: str, _: Any = None) -> bool:
        """Return whether the parameter with a path has weight decay."""
        return not any(matches(self.no_decay, name) for name in (path, re.sub("_[0-9]+$", "", path)))

    def is_decayed(self, params: Any) -> Any:
        """Return for each parameter whether it has weight decay."""
        return map_paths(self.decays, params)

    def multipliers(self, setting: Setting) -> list[optax.GradientTransformation]:
        """Return the learning-rate multipliers of layers and of parameters, if any."""
        parts = []
        if self.layer_decay:
            parts.append(_scale_by_layer(setting.model, self.layer_decay))
        if self.lr_multipliers:
            parts.append(optax.stateless(lambda updates, params: map_paths(self._multiplied, updates)))
        return parts

    def _multiplied(self, path, leaf):
        return leaf * next((factor for pattern, factor in self.lr_multipliers if re.search(pattern, path)), 1.0)

    def _check_layers(self, model):
        if model is None:
            raise ValueError("optimizer.layer_decay and optimizer.frozen_layers need the model.")
        if self.layer_decay and not model.num_layers:
            raise ValueError(
                f"optimizer.layer_decay is {self.layer_decay}: it must be 0, because the model {type(model).__name__} "
                "has no layer_groups, which name its layers."
            )
        if self.frozen_layers > model.num_layers:
            raise ValueError(
                f"optimizer.frozen_layers is {self.frozen_layers}: it must be at most {model.num_layers}, the model's "
                "layers."
            )


OPTIMIZERS.base = Optimizer


def map_paths(function: Callable[..., Any], tree: Any, *rest: Any) -> Any:
    """Return a tree of function(path, leaf, ...), where a path is like "stack/layers/mlp/up/kernel".

    Other arguments are the parts of other trees at the same place.
    """
    return jax.tree_util.tree_map_with_path(
        lambda path, *leaves: function(jax.tree_util.keystr(path, simple=True, separator="/"), *leaves), tree, *rest
    )


def paths_of(tree: Any) -> list[str]:
    """Return the paths of the leaves of a tree, as `map_paths` names them."""
    return jax.tree.leaves(map_paths(lambda path, _: path, tree))


def check_layers(model: Model, params: Any, need_all: bool) -> None:
    """Raise ValueError if the `layer_groups` of a model do not fit its parameters.

    Args:
        params: all parameters of the model, or a tree of their shapes.
        need_all: whether all groups must have parameters, for what depends on the number of layers.
    """
    name, paths = f"layer_groups of the model {type(model).__name__}", paths_of(params)
    for path, leaf in zip(paths, jax.tree.leaves(params)):
        layer = model.layer_of(path)
        if isinstance(layer, range) and leaf.shape[:1] != (len(layer),):
            given = f"the first axis of {path} has size {len(layer)}, but its shape is {leaf.shape}"
            raise ValueError(f"The {name} say that {given}: set `stacked=False`, or another `count`.")
    if need_all:
        check_matches(f"the {name}", (group.path for group in model.layer_groups if group.count), paths)


def merged(part: Any, params: Any) -> Any:
    """Return a tree of parameters with `part`, a tree from `Optimizer.trained`, in place of its trained part."""

    def put(new, old):
        if isinstance(new, optax.MaskedNode):
            return old
        return new if new.shape == old.shape else jnp.concatenate([old[: -len(new)], new])

    return jax.tree.map(put, part, params, is_leaf=lambda leaf: isinstance(leaf, optax.MaskedNode))


def _scale_by_layer(model, decay):
    heads = model.num_layers + 1

    def scale(path, leaf):
        layer = model.layer_of(adapted_path(path))
        if isinstance(layer, range):  # stacked layers, the last ones if some are frozen: a vector of factors
            layers = jnp.arange(layer.stop - len(leaf), layer.stop)
            factors = decay ** (heads - layers).astype(jnp.float32)
            return leaf * factors.reshape(-1, *[1] * (leaf.ndim - 1))
        return leaf * decay ** (heads - layer)

    return optax.stateless(lambda updates, params: map_paths(scale, updates))
