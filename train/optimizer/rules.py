"""Optimizers with update rules of optax; their fields are the keys of the config's section `optimizer`."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from lineage.configs.registry import Rate
from lineage.train.optimizer.base import OPTIMIZERS, Optimizer, Setting, map_paths
from lineage.train.optimizer.schedules import NonNegative

MIN_FACTORED = 128  # minimum number of inputs and of outputs of a matrix whose second moments are factored


@OPTIMIZERS.register("adamw")
@dataclass(frozen=True)
class AdamW(Optimizer):
    """Adam (arXiv 1412.6980) with decoupled weight decay.

    Attributes:
        b1, b2: decay rates of the first and the second moment.
        epsilon: constant added to the root of the second moment.
    """

    b1: Rate = 0.9
    b2: Rate = 0.999
    epsilon: NonNegative = 1e-8

    def rule(self, setting: Setting) -> optax.GradientTransformation:
        return optax.scale_by_adam(self.b1, self.b2, self.epsilon)


@dataclass(frozen=True)
class _Momentum(Optimizer):
    """Optimizer with momentum.

    Attributes:
        momentum: decay rate of the momentum; 0 disables it.
    """

    momentum: Rate = 0.9


@OPTIMIZERS.register("sgd")
@dataclass(frozen=True)
class SGD(_Momentum):
    """Stochastic gradient descent with momentum."""

    def rule(self, setting: Setting) -> optax.GradientTransformation:
        return optax.trace(self.momentum) if self.momentum else optax.identity()


class FactoredState(NamedTuple):
    """Number of steps, and for each parameter (means over outputs, means over inputs) of its squared gradients.

    Parameters that are not factored have one array of all squared gradients.
    """

    count: Any
    moments: Any


@OPTIMIZERS.register("adafactor")
@dataclass(frozen=True)
class Adafactor(_Momentum):
    """Adafactor: factored second moments, and update clipping per matrix or vector (arXiv 1804.04235, algorithm 4).

    Matrices with at least 128 inputs and outputs are factored, those of attention and of stacked layers among them.
    Learning rates are not relative to the scale of a parameter.
    """

    def rule(self, setting: Setting) -> optax.GradientTransformation:
        factored = _scale_by_factored_moments(setting)
        return optax.chain(factored, optax.ema(self.momentum, debias=False)) if self.momentum else factored


def _scale_by_factored_moments(setting):
    def averaged_axes(path, leaf):
        """Return the axes over which each of the stored moments is averaged."""
        inputs, outputs = setting.matrix(path, leaf) or ((), ())
        sizes = (math.prod(leaf.shape[axis] for axis in axes) for axes in (inputs, outputs))
        return (outputs, inputs) if min(sizes) >= MIN_FACTORED else ((),)

    def means(path, leaf):
        return tuple(leaf.mean(axes, keepdims=True) for axes in averaged_axes(path, leaf))

    def init(params):
        moments = map_paths(lambda path, leaf: means(path, jnp.zeros_like(leaf)), params)
        return FactoredState(jnp.zeros((), jnp.int32), moments)

    def update(updates, state, params=None):
        decay = 1 - (state.count + 1.0) ** -0.8

        def moments(path, gradient, old):
            new = means(path, gradient**2 + 1e-30)
            return tuple(decay * before + (1 - decay) * now for before, now in zip(old, new))

        def scaled(path, gradient, moments):
            for moment in moments:
                gradient = gradient * jax.lax.rsqrt(moment)
            if len(moments) == 2:
                inputs, _ = setting.matrix(path, gradient)
                gradient = gradient * jnp.sqrt(moments[0].mean(inputs, keepdims=True))
            size = jnp.sqrt(jnp.mean(gradient**2, setting.own_axes(path, gradient), keepdims=True))
            return gradient / jnp.maximum(1.0, size)

        new = map_paths(moments, updates, state.moments)
        return map_paths(scaled, updates, new), FactoredState(state.count + 1, new)

    return optax.GradientTransformation(init, update)


@OPTIMIZERS.register("lion")
@dataclass(frozen=True)
class Lion(Optimizer):
    """Lion: updates by the sign of the momentum (arXiv 2302.06675).

    Attributes:
        b1: weight of the momentum in the update.
        b2: decay of the momentum.
    """

    b1: Rate = 0.9
    b2: Rate = 0.99

    def rule(self, setting: Setting) -> optax.GradientTransformation:
        return optax.scale_by_lion(self.b1, self.b2)


@dataclass(frozen=True)
class _LayerWise(Optimizer):
    """Optimizer that adds the weight decay and then scales each layer's parameters by their trust ratios.

    A trust ratio is the norm of a parameter divided by that of its update, or 1 if one of them is 0.
    """

    def transforms(self, setting: Setting) -> list[optax.GradientTransformation]:
        rate = optax.scale_by_learning_rate(setting.learning_rate)
        return [self.rule(setting), *self.multipliers(setting), rate]

    def trust(
        self, setting: Setting, scaled: Callable[[str, Any], Any], coefficient: float = 1.0
    ) -> optax.GradientTransformation:
        """Multiply the updates of parameters for which `scaled(path, leaf)` is true by coefficient x trust ratio."""

        def change(path, update, param):
            if not scaled(path, param):
                return update
            axes = setting.own_axes(path, param)
            param_norm, update_norm = (jnp.sqrt(jnp.sum(leaf**2, axes, keepdims=True)) for leaf in (param, update))
            usable = (param_norm > 0) & (update_norm > 0)
            return update * jnp.where(usable, coefficient * param_norm / jnp.where(usable, update_norm, 1), 1)

        return optax.stateless(lambda updates, params: map_paths(change, updates, params))


@OPTIMIZERS.register("lars")
@dataclass(frozen=True)
class LARS(_LayerWise, _Momentum):
    """LARS: SGD with adaptive learning rates for the matrices of each layer (arXiv 1708.03888).

    The update is the momentum times the current learning rate, as in PyTorch and in the code of MAE. In algorithm 1 of
    the paper, each gradient is multiplied by the learning rate of its step before it is added to the momentum.

    Attributes:
        weight_decay: added to the gradient before its norm and the momentum are computed.
    """

    def rule(self, setting: Setting) -> optax.GradientTransformation:
        return optax.chain(*self.decay(), self.trust(setting, setting.matrix, 0.001), optax.trace(self.momentum))


@OPTIMIZERS.register("lamb")
@dataclass(frozen=True)
class LAMB(_LayerWise, AdamW):
    """LAMB: Adam with adaptive learning rates for the parameters of each layer (arXiv 1904.00962, algorithm 2).

    As in the authors' code, the updates of parameters without weight decay (`no_decay`) are those of Adam.

    Attributes:
        weight_decay: added to Adam's update before its norm is computed.
    """

    epsilon: NonNegative = 1e-6

    def rule(self, setting: Setting) -> optax.GradientTransformation:
        return optax.chain(super().rule(setting), *self.decay(), self.trust(setting, self.decays))
