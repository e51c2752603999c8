"""Optimizers and learning-rate schedules, from optax; their fields are the keys of the config's sections."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import optax

from lineage.configs.registry import Range, Registry, check_ranges
from lineage.configs.run import check_patterns as check_expressions
from lineage.models import Model

LearningRate = Callable[[Any], Any]  # of a step, counted from 0
NonNegative = Annotated[float, Range(0)]
Decay = Annotated[float, Range(0, below=1)]

SCHEDULES = Registry("schedule")
OPTIMIZERS = Registry("optimizer")


@dataclass(frozen=True)
class Schedule:
    """Learning rate of each step: a linear warm-up from 0, then a decay.

    Attributes:
        learning_rate: peak of the learning rate.
        warmup_steps, warmup_epochs, warmup_examples: length of the warm-up, which is part of the run, in one unit.
        warmup_percent: the same in percent of the run.
    """

    learning_rate: NonNegative = 1e-3
    warmup_steps: Annotated[int | None, Range(0)] = None
    warmup_epochs: Annotated[float | None, Range(0)] = None
    warmup_examples: Annotated[int | None, Range(0)] = None
    warmup_percent: Annotated[float | None, Range(0)] = None

    def __post_init__(self):
        check_ranges("schedule", self)

    def make(self, total_steps: int, warmup_steps: int = 0, width: int = 512) -> LearningRate:
        """Return the learning rate as a function of the step, for a run of `total_steps` and a model of width D."""
        decay = self.decay(max(total_steps - warmup_steps, 1), max(warmup_steps, 1))
        if not warmup_steps:
            return decay
        rise = optax.linear_schedule(self.learning_rate / warmup_steps, self.learning_rate, warmup_steps - 1 or 1)
        return optax.join_schedules([rise, decay], [warmup_steps])

    def decay(self, steps: int, warmup_steps: int) -> LearningRate:
        """Return the learning rate after the warm-up, counted from its end."""
        raise NotImplementedError


@SCHEDULES.register("constant")
@dataclass(frozen=True)
class Constant(Schedule):
    """Constant learning rate after the warm-up."""

    def decay(self, steps: int, warmup_steps: int) -> LearningRate:
        return optax.constant_schedule(self.learning_rate)


@dataclass(frozen=True)
class _Falling(Schedule):
    """Decay to a part of the peak.

    Attributes:
        end_factor: ratio of the learning rate of the step after the last one to the peak.
    """

    end_factor: NonNegative = 0.0


@SCHEDULES.register("cosine")
@dataclass(frozen=True)
class Cosine(_Falling):
    """Half a period of a cosine after the warm-up (arXiv 1608.03983)."""

    def decay(self, steps: int, warmup_steps: int) -> LearningRate:
        return optax.cosine_decay_schedule(self.learning_rate, steps, alpha=self.end_factor)


@SCHEDULES.register("linear")
@dataclass(frozen=True)
class Linear(_Falling):
    """Linear decay after the warm-up."""

    def decay(self, steps: int, warmup_steps: int) -> LearningRate:
        return optax.linear_schedule(self.learning_rate, self.learning_rate * self.end_factor, steps)


@SCHEDULES.register("rsqrt")
@dataclass(frozen=True)
class InverseSquareRoot(Schedule):
    """Decay as 1 / sqrt(step) after the warm-up (arXiv 1910.10683)."""

    def decay(self, steps: int, warmup_steps: int) -> LearningRate:
        return lambda n: self.learning_rate * jnp.sqrt(warmup_steps / (jnp.maximum(n, 0) + warmup_steps))


@SCHEDULES.register("transformer")
@dataclass(frozen=True)
class TransformerSchedule(Schedule):
    """width^-0.5 min(n^-0.5, n warmup^-1.5) for n = step + 1 (arXiv 1706.03762, equation 3), times `learning_rate`."""

    def make(self, total_steps: int, warmup_steps: int = 0, width: int = 512) -> LearningRate:
        if not width:
            raise ValueError("schedule.name is 'transformer', but the model has no single width.")
        warmup, scale = max(warmup_steps, 1), self.learning_rate
        return lambda n: scale * width**-0.5 * jnp.minimum((n + 1.0) ** -0.5, (n + 1.0) * warmup**-1.5)


@dataclass(frozen=True)
class Optimizer:
    """Base class of optimizers: weight decay, gradient clipping, freezing and layer-wise learning rates.

    Attributes:
        weight_decay: decoupled weight decay, multiplied by the learning rate (arXiv 1711.05101).
        no_decay: no weight decay for parameters in whose path one of these regular expressions is found.
        clip_norm: maximum global norm of the gradient, for clipping; 0 disables it.
        frozen: parameters in whose path one of these regular expressions is found are not trained.
        frozen_layers: number of the first layers, in the order of `Model.layer_of`, that are not trained. Neither are
            the parameters before them.
        layer_decay: ratio of each layer's learning rate to the next one's; the heads have the whole learning rate
            (arXiv 2003.10555). 0 gives all layers the same.
        lr_multipliers: (regular expression, factor) pairs; the first expression found in a parameter's path scales its
            learning rate.
    """

    weight_decay: NonNegative = 0.0
    no_decay: tuple[str, ...] = ("bias$", "scale$")
    clip_norm: NonNegative = 1.0
    frozen: tuple[str, ...] = ()
    frozen_layers: Annotated[int, Range(0)] = 0
    layer_decay: NonNegative = 0.0
    lr_multipliers: tuple[tuple[str, float], ...] = ()

    def __post_init__(self):
        check_ranges("optimizer", self)
        check_expressions("optimizer.no_decay", self.no_decay)
        check_expressions("optimizer.frozen", self.frozen)
        check_expressions("optimizer.lr_multipliers", self.lr_multipliers, paired=True)

    def rule(self) -> optax.GradientTransformation:
        """Return the update rule, before weight decay and learning rates."""
        raise NotImplementedError

    def make(self, learning_rate: LearningRate, model: Model | None = None) -> optax.GradientTransformation:
        """Return the transformation of gradients into updates; `layer_decay` and `frozen_layers` need the model."""
        parts = [optax.clip_by_global_norm(self.clip_norm)] if self.clip_norm else []
        parts.append(self.rule())
        if self.weight_decay:
            decayed = partial(map_paths, lambda path, _: not _found(self.no_decay, path))
            parts.append(optax.add_decayed_weights(self.weight_decay, decayed))
        if self.layer_decay or self.frozen_layers:
            parts.append(_scale_by_layer(model, self.layer_decay or 1.0, self.frozen_layers))
        if self.lr_multipliers:
            parts.append(_scale_by_path(self.lr_multipliers))
        parts.append(optax.scale_by_learning_rate(learning_rate))
        optimizer = optax.chain(*parts)
        if not self.frozen:
            return optimizer
        return optax.partition({"trained": optimizer, "frozen": optax.set_to_zero()}, self._labels)

    def _labels(self, params):
        check_patterns(self.frozen, params)
        return map_paths(lambda path, _: "frozen" if _found(self.frozen, path) else "trained", params)


@OPTIMIZERS.register("adamw")
@dataclass(frozen=True)
class AdamW(Optimizer):
    """Adam (arXiv 1412.6980) with decoupled weight decay.

    Attributes:
        b1, b2: decay of the first and of the second moment.
        epsilon: added to the root of the second moment.
    """

    b1: Decay = 0.9
    b2: Decay = 0.999
    epsilon: NonNegative = 1e-8

    def rule(self) -> optax.GradientTransformation:
        return optax.scale_by_adam(self.b1, self.b2, self.epsilon)


@dataclass(frozen=True)
class _Momentum(Optimizer):
    """An optimizer with momentum.

    Attributes:
        b1: momentum; 0 turns it off.
    """

    b1: Decay = 0.9


@OPTIMIZERS.register("sgd")
@dataclass(frozen=True)
class SGD(_Momentum):
    """Stochastic gradient descent with momentum."""

    def rule(self) -> optax.GradientTransformation:
        return optax.trace(self.b1) if self.b1 else optax.identity()


@OPTIMIZERS.register("adafactor")
@dataclass(frozen=True)
class Adafactor(_Momentum):
    """Adafactor: factored second moments, and updates clipped by parameter (arXiv 1804.04235)."""

    def rule(self) -> optax.GradientTransformation:
        return optax.chain(
            optax.scale_by_factored_rms(decay_rate=0.8),
            optax.clip_by_block_rms(1.0),
            optax.ema(self.b1, debias=False) if self.b1 else optax.identity(),
        )


@OPTIMIZERS.register("lion")
@dataclass(frozen=True)
class Lion(_Momentum):
    """Lion: updates by the sign of the momentum (arXiv 2302.06675).

    Attributes:
        b1: weight of the momentum in the update.
        b2: decay of the momentum.
    """

    b2: Decay = 0.999

    def rule(self) -> optax.GradientTransformation:
        return optax.scale_by_lion(self.b1, self.b2)


@OPTIMIZERS.register("lars")
@dataclass(frozen=True)
class LARS(_Momentum):
    """SGD with updates of matrices in proportion to the matrices' norms (arXiv 1708.03888)."""

    def rule(self) -> optax.GradientTransformation:
        return optax.chain(
            optax.masked(
                optax.scale_by_trust_ratio(trust_coefficient=0.001), partial(jax.tree.map, lambda leaf: leaf.ndim > 1)
            ),
            optax.trace(self.b1),
        )


def map_paths(function: Callable[[str, Any], Any], tree: Any) -> Any:
    """Return a tree of function(path, leaf), where a path is like "stack/layers/mlp/up/kernel"."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: function(jax.tree_util.keystr(path, simple=True, separator="/"), leaf), tree
    )


def check_patterns(patterns: Sequence[str], tree: Any) -> None:
    """Raise ValueError for a regular expression that is found in no path of the tree."""
    paths = jax.tree.leaves(map_paths(lambda path, _: path, tree))
    for pattern in patterns:
        if not any(re.search(pattern, path) for path in paths):
            raise ValueError(f"the pattern {pattern!r} matches no parameter; a path is, for example, {paths[-1]!r}.")


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
        if isinstance(layer, range):  # of several layers in one array: the factors are a vector along its first axis
            layers = jnp.arange(layer.start, layer.stop)
            factors = jnp.where(layers <= frozen, 0, decay ** (heads - layers).astype(jnp.float32))
            return leaf * factors.reshape(-1, *[1] * (leaf.ndim - 1))
        return leaf * (0 if frozen and layer <= frozen else decay ** (heads - layer))

    return optax.stateless(lambda updates, params: map_paths(scale, updates))


def _scale_by_path(lr_multipliers):
    def scale(path, leaf):
        return leaf * next((factor for pattern, factor in lr_multipliers if re.search(pattern, path)), 1.0)

    return optax.stateless(lambda updates, params: map_paths(scale, updates))
