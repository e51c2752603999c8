"""Optimizers proposed since 2023: Muon, AdEMAMix, Sophia, Prodigy and schedule-free AdamW."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from optax import contrib
from optax.contrib import MuonDimensionNumbers

from lineage.configs.registry import Count, Natural, Positive, Range, Rate
from lineage.train.optimizer.base import OPTIMIZERS, Optimizer, Setting, map_paths, merged
from lineage.train.optimizer.rules import AdamW
from lineage.train.optimizer.schedules import LearningRate, NonNegative


@OPTIMIZERS.register("muon")
@dataclass(frozen=True)
class Muon(AdamW):
    """Muon: orthogonalized momentum for the matrices of the layers, AdamW for all other parameters (arXiv 2502.16982).

    AdamW also trains the matrices of embeddings and heads, and the parameters of adapters. As in optax, the bias of the
    Nesterov momentum is corrected, which changes the first steps; the original code and PyTorch do not correct it.

    Attributes:
        momentum: decay of the Nesterov momentum of matrices.
        iterations: number of Newton-Schulz iterations.
        rms: root mean square of the updates of matrices, so that the learning rates of AdamW apply; 0: scale the
            updates by sqrt(max(1, outputs / inputs)), as in the original code.
    """

    momentum: Rate = 0.95
    iterations: Count = 5
    rms: NonNegative = 0.2

    def rule(self, setting: Setting) -> optax.GradientTransformation:
        model, inputs = setting.model, setting.inputs()
        if model is None:
            raise ValueError("optimizer.name is 'muon': it needs the model and the axes of its matrices.")

        def inside(path):
            layer = model.layer_of(path)
            return path.endswith("/kernel") and (isinstance(layer, range) or 0 < layer <= model.num_layers)

        matrices = set(filter(inside, inputs))
        if not matrices:
            raise ValueError(
                "optimizer.name is 'muon', which needs matrices in the layers: the layer_groups of the model "
                f"{type(model).__name__} have no Linear of lineage.models.layers."
            )

        def axes(path, leaf):
            return MuonDimensionNumbers(*setting.matrix(path, leaf)) if path in matrices else None

        def sized(path, update):
            """Scale an orthogonal matrix according to its numbers of inputs and outputs."""
            reduced, kept = (math.prod(update.shape[axis] for axis in part) for part in setting.matrix(path, update))
            factor = self.rms * math.sqrt(max(reduced, kept)) if self.rms else math.sqrt(max(1, kept / reduced))
            return update * factor

        settings = {"weight_dimension_numbers": partial(map_paths, axes)}
        rule = contrib.scale_by_muon(ns_steps=self.iterations, beta=self.momentum, **settings)
        orthogonal = optax.chain(rule, optax.stateless(lambda updates, params: map_paths(sized, updates)))
        labels = partial(map_paths, lambda path, leaf: "matrices" if axes(path, leaf) else "others")
        return optax.partition({"matrices": orthogonal, "others": super().rule(setting)}, labels)


@OPTIMIZERS.register("ademamix")
@dataclass(frozen=True)
class AdEMAMix(AdamW):
    """AdEMAMix: Adam with a second, slow average of the gradients (arXiv 2409.03137).

    Attributes:
        b3: decay of the slow average.
        alpha: weight of the slow average.
        rise_steps: number of steps in which `alpha` and `b3` rise to their values, for stability (in the paper, all
            steps of the run); they have them from the last of these steps on. 0: constant values.
    """

    b3: Rate = 0.9999
    alpha: NonNegative = 5.0
    rise_steps: Natural = 0

    def rule(self, setting: Setting) -> optax.GradientTransformation:
        alpha, b3 = self.alpha, self.b3
        if self.rise_steps:
            alpha = optax.linear_schedule(self.alpha / self.rise_steps, self.alpha, self.rise_steps - 1 or 1)
            b3 = rising(self.b1, self.b3, self.rise_steps)
        return contrib.scale_by_ademamix(self.b1, self.b2, b3, alpha, self.epsilon)


def rising(first: float, last: float, steps: int) -> Callable[[Any], Any]:
    """Return the decay of a slow average whose half-life rises over some steps (arXiv 2409.03137, section 3).

    The decay is a function of the step, counted from 0, and has its last value in the last of these steps.
    """
    first, last = math.log(max(first, 1e-8)), math.log(max(last, 1e-8))

    def decay(n):
        done = jnp.minimum((n + 1) / steps, 1.0)
        return jnp.exp(first * last / ((1 - done) * last + done * first))

    return decay


@OPTIMIZERS.register("sophia")
@dataclass(frozen=True)
class Sophia(Optimizer):
    """Sophia-H: clipped updates, preconditioned by an estimate of the Hessian's diagonal (arXiv 2305.14342).

    Every `interval` steps, the diagonal is estimated by Hutchinson's method on the first micro-batch, at the cost of
    about two additional gradients. As in optax, updates use an estimate from the next step on, and the momentum has a
    bias correction; algorithm 3 of the paper does neither.

    Attributes:
        b1: decay of the momentum.
        b2: decay of the diagonal.
        gamma: factor of the diagonal; with larger values, fewer updates are clipped.
        epsilon: minimum of the diagonal times `gamma`.
        interval: number of steps between two estimates of the diagonal.
    """

    b1: Rate = 0.96
    b2: Rate = 0.99
    gamma: Positive = 0.01
    epsilon: Positive = 1e-12
    interval: Count = 10

    def rule(self, setting: Setting) -> optax.GradientTransformation:
        settings = {"update_interval": self.interval, "hessian_diagonal_fn": _hessian_diagonal()}
        rule = contrib.sophia(1.0, self.b1, self.b2, self.epsilon, weight_decay=0.0, gamma=self.gamma, **settings)
        return optax.chain(rule, optax.scale(-1.0))


def _hessian_diagonal():
    """Return Hutchinson's estimate r * H r for random signs r.

    H r is the derivative of the gradient along r: forward-mode differentiation supports loops of variable length.
    """

    def update(updates, state, params, *, obj_fn: Callable[[Any], Any], **_):
        key, subkey = jax.random.split(state.key)
        signs = optax.tree.random_like(subkey, params, jax.random.rademacher, dtype=jnp.float32)
        product = jax.jvp(jax.grad(obj_fn), (params,), (signs,))[1]
        return jax.tree.map(jnp.multiply, product, signs), contrib.HutchinsonState(key)

    return optax.GradientTransformationExtraArgs(contrib.hutchinson_estimator_diag_hessian().init, update)


@OPTIMIZERS.register("prodigy")
@dataclass(frozen=True)
class Prodigy(AdamW):
    """Prodigy: AdamW with an estimated learning rate (arXiv 2306.06101), multiplied by the schedule's, usually 1.

    Attributes:
        start: initial estimate of the learning rate, below the optimum.
        growth: factor of the estimates.
        safeguard_warmup: whether to exclude the warm-up factor from the estimation, so as not to slow it down.
    """

    estimates_rate = True

    start: Positive = 1e-6
    growth: Positive = 1.0
    safeguard_warmup: bool = True

    def transforms(self, setting: Setting) -> list[optax.GradientTransformation]:
        rate, options = setting.learning_rate, {"estim_lr0": self.start, "estim_lr_coef": self.growth}
        options |= {"eps": self.epsilon, "safeguard_warmup": self.safeguard_warmup}
        adaptive = contrib.prodigy(rate, (self.b1, self.b2), **options)

        def update(updates, state, params, **_):
            new, after = adaptive.update(updates, state, params)
            # Before the first gradient that is not 0, optax divides 0 by 0.
            idle = optax.tree.norm(after.grad_sum) == 0
            new = jax.tree.map(lambda u: jnp.where(idle, 0, u), new)
            after = after._replace(estim_lr=jnp.where(idle, state.estim_lr, after.estim_lr))
            factor = self.weight_decay * state.estim_lr * rate(state.count)
            decayed = self.is_decayed(params)
            return jax.tree.map(lambda u, p, decays: u - factor * p if decays else u, new, params, decayed), after

        return [optax.GradientTransformationExtraArgs(adaptive.init, update), *self.multipliers(setting)]


class ScheduleFreeState(NamedTuple):
    """State of `schedule_free`: the base optimizer's parameters and state, and the sum of the averaging weights."""

    z: Any
    inner: Any
    b1: Any
    peak: Any
    total: Any
    count: Any


@OPTIMIZERS.register("schedule_free_adamw")
@dataclass(frozen=True)
class ScheduleFreeAdamW(AdamW):
    """Schedule-free AdamW: averaging replaces the decay of the learning rate (arXiv 2405.15682).

    The schedule should be constant after the warm-up. Evaluations and exports use the averaged parameters.

    Attributes:
        b1: weight of the average in the parameters at which gradients are computed; above 0.
        b2: decay of the second moment.
    """

    b1: Annotated[float, Range(above=0, below=1)] = 0.9

    def rule(self, setting: Setting) -> optax.GradientTransformation:
        return optax.scale_by_adam(0.0, self.b2, self.epsilon)

    def transforms(self, setting: Setting) -> list[optax.GradientTransformation]:
        return [schedule_free(optax.chain(*super().transforms(setting)), setting.learning_rate, self.b1)]


def schedule_free(
    base: optax.GradientTransformation, learning_rate: LearningRate, b1: float
) -> optax.GradientTransformationExtraArgs:
    """Return an optimizer of y = (1 - b1) z + b1 x, where `base` updates z, and x is the average of z.

    The weights of the average are proportional to the square of the largest learning rate so far. If the
    learning rate changes, they differ from those of `optax.contrib`, which already counts that of the next step.
    """
    base = optax.with_extra_args_support(base)

    def init(params):
        zero, weight = jnp.zeros(()), jnp.asarray(b1, jnp.float32)
        z = jax.tree.map(jnp.copy, params)
        return ScheduleFreeState(z, base.init(params), weight, zero, zero, jnp.zeros((), jnp.int32))

    def update(updates, state, params, **extra):
        own, inner = base.update(updates, state.inner, params, **extra)
        peak = jnp.maximum(state.peak, learning_rate(state.count))
        total = state.total + peak**2
        share = jnp.where(total > 0, peak**2 / total, 0.0)
        new = jax.tree.map(lambda y, z, u: (1 - b1) * u + share * ((z - y) + b1 * u), params, state.z, own)
        z = jax.tree.map(jnp.add, state.z, own)
        return new, ScheduleFreeState(z, inner, state.b1, peak, total, state.count + 1)

    return optax.GradientTransformationExtraArgs(init, update)


def averaged(state: Any, params: Any) -> Any:
    """Return the averaged parameters of `schedule_free`, from an optimizer's state; None for other optimizers."""
    averaging = optax.tree_utils.tree_get(state, "ScheduleFreeState")
    if averaging is None:
        return None

    def average(z, y):  # exactly y where z is y, as in frozen layers
        return jnp.where(z == y, y, (y - (1 - averaging.b1) * z) / averaging.b1)

    return jax.tree.map(average, merged(averaging.z, params), params)
