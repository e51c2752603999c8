"""Optimizers with update rules of optax; their fields are the keys of the config's section `optimizer`."""

from dataclasses import dataclass
from functools import partial

import jax
import optax

from lineage.configs.registry import Rate
from lineage.train.optimizer.base import OPTIMIZERS, Optimizer, Setting
from lineage.train.optimizer.schedules import NonNegative


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
        b1: momentum; 0 disables it.
    """

    b1: Rate = 0.9


@OPTIMIZERS.register("sgd")
@dataclass(frozen=True)
class SGD(_Momentum):
    """Stochastic gradient descent with momentum."""

    def rule(self, setting: Setting) -> optax.GradientTransformation:
        return optax.trace(self.b1) if self.b1 else optax.identity()


@OPTIMIZERS.register("adafactor")
@dataclass(frozen=True)
class Adafactor(_Momentum):
    """Adafactor: factored second moments, and update clipping per parameter (arXiv 1804.04235)."""

    def rule(self, setting: Setting) -> optax.GradientTransformation:
        momentum = optax.ema(self.b1, debias=False) if self.b1 else optax.identity()
        return optax.chain(optax.scale_by_factored_rms(decay_rate=0.8), optax.clip_by_block_rms(1.0), momentum)


@OPTIMIZERS.register("lion")
@dataclass(frozen=True)
class Lion(_Momentum):
    """Lion: updates by the sign of the momentum (arXiv 2302.06675).

    Attributes:
        b1: weight of the momentum in the update.
        b2: decay of the momentum.
    """

    b2: Rate = 0.999

    def rule(self, setting: Setting) -> optax.GradientTransformation:
        return optax.scale_by_lion(self.b1, self.b2)


@OPTIMIZERS.register("lars")
@dataclass(frozen=True)
class LARS(_Momentum):
    """LARS: SGD with layer-wise adaptive learning rates for matrices (arXiv 1708.03888)."""

    def rule(self, setting: Setting) -> optax.GradientTransformation:
        trust = optax.scale_by_trust_ratio(trust_coefficient=0.001)
        matrices = partial(jax.tree.map, lambda leaf: leaf.ndim > 1)
        return optax.chain(optax.masked(trust, matrices), optax.trace(self.b1))
