"""Learning-rate schedules; their fields are the keys of the config's section `schedule`."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import jax.numpy as jnp
import optax

from lineage.configs.registry import Range, Registry, check_ranges

LearningRate = Callable[[Any], Any]  # learning rate of a step, counted from 0
NonNegative = Annotated[float, Range(0)]

SCHEDULES = Registry("schedule")


@dataclass(frozen=True)
class Schedule:
    """Learning-rate schedule: a linear warm-up from 0, then a decay.

    Attributes:
        learning_rate: peak learning rate.
        warmup_steps, warmup_epochs, warmup_examples: length of the warm-up, which is part of the run, in one unit.
        warmup_percent: length of the warm-up in percent of the run.
    """

    scales: ClassVar[bool] = False  # whether `learning_rate` is a factor of a formula that gives the learning rate

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
        """Return the learning rate as a function of the step after the warm-up.

        A subclass must implement this method or `make`; if it implements only `make`, the default is a constant.
        """
        if type(self).make is Schedule.make:
            raise ValueError(f"The schedule {type(self).__name__} must have the method decay or make.")
        return optax.constant_schedule(self.learning_rate)


SCHEDULES.base = Schedule


@SCHEDULES.register("constant")
@dataclass(frozen=True)
class Constant(Schedule):
    """Constant learning rate after the warm-up."""

    def decay(self, steps: int, warmup_steps: int) -> LearningRate:
        return optax.constant_schedule(self.learning_rate)


@dataclass(frozen=True)
class _Falling(Schedule):
    """Decay to a fraction of the peak.

    Attributes:
        end_factor: ratio of the final learning rate (after the last step) to the peak.
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


@SCHEDULES.register("step")
@dataclass(frozen=True)
class StepDecay(Schedule):
    """Learning rate that is multiplied by a factor at some points of the run.

    Attributes:
        milestones_percent: these points, in percent of the run.
        factor: factor of the learning rate at each of them.
    """

    milestones_percent: Annotated[tuple[float, ...], Range(0, 100)] = (50.0, 75.0)
    factor: NonNegative = 0.1

    def make(self, total_steps: int, warmup_steps: int = 0, width: int = 512) -> LearningRate:
        before = super().make(total_steps, warmup_steps, width)
        milestones = [math.ceil(round(percent / 100 * total_steps, 6)) for percent in self.milestones_percent]
        return lambda n: before(n) * self.factor ** sum(n >= milestone for milestone in milestones)


@SCHEDULES.register("wsd")
@dataclass(frozen=True)
class WarmupStableDecay(_Falling):
    """Constant learning rate after the warm-up, then a decay in the last steps (WSD, arXiv 2404.06395, 2405.18392).

    A run can be continued from a checkpoint before the decay with another number of steps.

    Attributes:
        decay_percent: length of the decay in percent of the run.
        shape: decay of the learning rate from the peak: "linear", or "sqrt", as 1 - sqrt(fraction of the decay).
    """

    decay_percent: Annotated[float, Range(0, 100)] = 20.0
    shape: Literal["linear", "sqrt"] = "sqrt"

    def make(self, total_steps: int, warmup_steps: int = 0, width: int = 512) -> LearningRate:
        before = super().make(total_steps, warmup_steps, width)
        length = max(self.decay_percent / 100 * total_steps, 1e-6)

        def rate(n):
            fraction = jnp.clip((n - total_steps + length) / length, 0.0, 1.0)
            fallen = jnp.sqrt(fraction) if self.shape == "sqrt" else fraction
            return before(n) * (1 - (1 - self.end_factor) * fallen)

        return rate


@SCHEDULES.register("rsqrt")
@dataclass(frozen=True)
class InverseSquareRoot(Schedule):
    """Decay as 1 / sqrt(step) after the warm-up (arXiv 1910.10683)."""

    def decay(self, steps: int, warmup_steps: int) -> LearningRate:
        return lambda n: self.learning_rate * jnp.sqrt(warmup_steps / (jnp.maximum(n, 0) + warmup_steps))


@SCHEDULES.register("transformer")
@dataclass(frozen=True)
class TransformerSchedule(Schedule):
    """width^-0.5 min(n^-0.5, n warmup^-1.5) for n = step + 1 (arXiv 1706.03762, equation 3), times `learning_rate`.

    Attributes:
        learning_rate: factor of the formula, usually 1.
    """

    scales = True
    learning_rate: NonNegative = 1.0

    def make(self, total_steps: int, warmup_steps: int = 0, width: int = 512) -> LearningRate:
        if not width:
            raise ValueError("schedule.name is 'transformer', which requires a model with a single width.")
        warmup, scale = max(warmup_steps, 1), self.learning_rate
        return lambda n: scale * width**-0.5 * jnp.minimum((n + 1.0) ** -0.5, (n + 1.0) * warmup**-1.5)
