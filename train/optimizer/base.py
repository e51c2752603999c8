"""Base class of optimizers: weight decay, clipping, freezing and learning rates by layer."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from lineage.configs.registry import Natural, Registry, check_expressions, check_matches, check_ranges
from lineage.models import Model
from lineage.models.quantization import Inputs
from lineage.train.optimizer.schedules import LearningRate, NonNegative

OPTIMIZERS = Registry("optimizer")


class Setting(NamedTuple):
    """Context in which an optimizer is created; see `Optimizer.make`."""

    learning_rate: LearningRate
    model: Model | None
    inputs: Callable[[], Inputs] | None


@dataclass(frozen=True)
class Optimizer:
    """Base class of optimizers: weight decay, gradient clipping, freezing and layer-wise learning rates.

    Attributes:
        weight_decay: decoupled weight decay, multiplied by the learning rate (arXiv 1711.05101).
        no_decay: regular expressions; parameters whose path matches one have no weight decay.
        clip_norm: maximum global norm of the gradient, for clipping; 0 disables it.
        frozen: regular expressions; parameters whose path matches one are not trained.
        frozen_layers: number of initial layers, in the order of `Model.layer_of`, that are not trained, along with the
            parameters before them.
        layer_decay: ratio of each layer's learning rate to that of the next layer; the heads have the full learning
            rate (arXiv 2003.10555). 0: all layers have the same learning rate.
        lr_multipliers: (regular expression, factor) pairs; the first expression that matches a parameter's path scales
            its learning rate.
    """

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
        raise NotImplementedError

    def make(
        self, learning_rate: LearningRate, model: Model | None = None, inputs: Callable[[], Inputs] | None = None
    ) -> optax.GradientTransformation:
        """Return the transformation of gradients into updates.

        Args:
            learning_rate: learning rate of each step.
            model: needed by `layer_decay`, `frozen_layers` and Muon.
            inputs: function that returns the input axes of the model's matrices, see `models.quantization`; needed by
                Muon.
        """
        clipped = [optax.clip_by_global_norm(self.clip_norm)] if self.clip_norm else []
        optimizer = optax.chain(*clipped, *self.transforms(Setting(learning_rate, model, inputs)))
        if not self.frozen:
            return optimizer
        return optax.partition({"trained": optimizer, "frozen": optax.set_to_zero()}, self._labels)

    def transforms(self, setting: Setting) -> list[optax.GradientTransformation]:
        """Return the update rule, followed by weight decay and learning rates."""
        decay = [optax.add_decayed_weights(self.weight_decay, self.is_decayed)] if self.weight_decay else []
        rate = optax.scale_by_learning_rate(setting.learning_rate)
        return [self.rule(setting), *decay, *self.multipliers(setting), rate]

    def is_decayed(self, params: Any) -> Any:
        """Return for each parameter whether it has weight decay."""
        return map_paths(lambda path, _: not _found(self.no_decay, path), params)

    def multipliers(self, setting: Setting) -> list[optax.GradientTransformation]:
        """Return the learning-rate multipliers of layers and of parameters, if any."""
        parts = []
        if self.layer_decay or self.frozen_layers:
            parts.append(_scale_by_layer(setting.model, self.layer_decay or 1.0, self.frozen_layers))
        if self.lr_multipliers:
            parts.append(optax.stateless(lambda updates, params: map_paths(self._multiplied, updates)))
        return parts

    def _multiplied(self, path, leaf):
        return leaf * next((factor for pattern, factor in self.lr_multipliers if re.search(pattern, path)), 1.0)

    def _labels(self, params):
        check_matches("optimizer.frozen", self.frozen, paths_of(params))
        return map_paths(lambda path, _: "frozen" if _found(self.frozen, path) else "trained", params)


def map_paths(function: Callable[[str, Any], Any], tree: Any) -> Any:
    """Return a tree of function(path, leaf), where a path is like "stack/layers/mlp/up/kernel"."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: function(jax.tree_util.keystr(path, simple=True, separator="/"), leaf), tree
    )


def paths_of(tree: Any) -> list[str]:
    """Return the paths of the leaves of a tree, as `map_paths` names them."""
    return jax.tree.leaves(map_paths(lambda path, _: path, tree))


def _found(patterns, path):
    return any(re.search(pattern, path) for pattern in patterns)


def _scale_by_layer(model, decay, frozen):
    if model is None:
        raise ValueError("optimizer.layer_decay and optimizer.frozen_layers need the model.")
    heads = model.num_layers + 1
    if frozen >= heads:
        raise ValueError(f"optimizer.frozen_layers is {frozen}: it must be at most {heads - 1}, the model's layers.")

    def scale(path, leaf):
        layer = model.layer_of(path)
        if isinstance(layer, range):  # stacked layers: the factors are a vector along the first axis
            layers = jnp.arange(layer.start, layer.stop)
            factors = jnp.where(layers <= frozen, 0, decay ** (heads - layers).astype(jnp.float32))
            return leaf * factors.reshape(-1, *[1] * (leaf.ndim - 1))
        return leaf * (0 if frozen and layer <= frozen else decay ** (heads - layer))

    return optax.stateless(lambda updates, params: map_paths(scale, updates))
