"""Building blocks of a config's `sweep()` and `search()`.

A sweep is an iterable of overrides, dictionaries of dotted config keys:

    def sweep():
        yield from product(axis("model.depth", (2, 4)), axis("seed", range(3)))  # six runs
        yield from repeat(samples({"schedule.learning_rate": Floats(1e-4, 1e-2, log=True)}, count=10), seeds=2)

With `sweep --optuna`, Optuna chooses the overrides from a search:

    def search():
        space = {"schedule.learning_rate": Floats(1e-4, 1e-2, log=True), "model.position": Choice("1d", "2d")}
        return Search(space, metric="validation/loss", trials=30)
"""

import itertools
import math
import random
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, ClassVar

from lineage.configs.directions import direction

Sweep = Iterable[Mapping[str, Any]]
chain = itertools.chain


def axis(key: str, values: Iterable[Any]) -> list[dict[str, Any]]:
    """Return a run for each value of one key."""
    if not isinstance(values, Iterable):
        raise ValueError(f"axis() of {key} has the values {str(values)[:60]}: they must be in a list.")
    return [{key: value} for value in values]


def product(*sweeps: Sweep) -> Iterator[dict[str, Any]]:
    """Return all combinations of one run from each sweep; if several set a key, the last value is used."""
    return map(_merged, itertools.product(*sweeps))


def zipped(*sweeps: Sweep) -> Iterator[dict[str, Any]]:
    """Return the first runs of all sweeps combined, then the second ones, and so on; they must be equally long."""
    return map(_merged, zip(*sweeps, strict=True))


def repeat(sweep: Sweep, seeds: int) -> Iterator[dict[str, Any]]:
    """Return each run with the seeds 0 to `seeds` - 1."""
    return product(sweep, axis("seed", range(seeds)))


def samples(space: Mapping[str, "Range"], count: int, seed: int = 0) -> Iterator[dict[str, Any]]:
    """Return `count` random points of a space, the same ones for the same seed."""
    for key, values in space.items():
        if not isinstance(values, Range):
            raise ValueError(f"samples() of {key} has {str(values)[:60]}: it must be Floats, Integers or a Choice.")
    rng = random.Random(seed)
    return ({key: values.draw(rng) for key, values in space.items()} for _ in range(count))


def without_numpy(value: Any) -> Any:
    """Return a value of a config key with Python's numbers, texts and lists in place of those of NumPy."""
    if hasattr(value, "tolist"):
        return value.tolist()
    return type(value)(map(without_numpy, value)) if type(value) in (list, tuple) else value


def _merged(parts):
    if wrong := [part for part in parts if not isinstance(part, Mapping)]:
        raise ValueError(f"a sweep has the run {str(wrong[0])[:60]!r}: it must be a dictionary of config keys.")
    return {key: value for part in parts for key, value in part.items()}


@dataclass(frozen=True)
class Floats:
    """Numbers from `low` to `high`, uniform or, with `log`, uniform in their logarithm."""

    low: float
    high: float
    log: bool = False

    kind: ClassVar[tuple[type, str]] = Real, "numbers"

    def __post_init__(self):
        if not (isinstance(self.low, self.kind[0]) and isinstance(self.high, self.kind[0])):
            needed = f"they must be {self.kind[1]}"
        elif not self.low <= self.high or (self.log and self.low <= 0):
            needed = "the first must be at most the second" + ", and above 0 because of log" * self.log
        elif not math.isfinite(self.high - self.low):
            needed = "their difference must be finite"
        else:
            return
        raise ValueError(f"{type(self).__name__} has the bounds {self.low!r} and {self.high!r}: {needed}.")

    def draw(self, rng: random.Random) -> float:
        if self.log:
            return math.exp(rng.uniform(math.log(self.low), math.log(self.high)))
        return rng.uniform(self.low, self.high)

    def suggest(self, trial: Any, key: str) -> float:
        """Return the value suggested by an Optuna trial."""
        return trial.suggest_float(key, self.low, self.high, log=self.log)


@dataclass(frozen=True)
class Integers(Floats):
    """Whole numbers from `low` to `high`, both included."""

    kind = Integral, "whole numbers"

    def draw(self, rng: random.Random) -> int:
        if self.log:  # a number is as probable as the interval that rounds to it
            wide = Floats(self.low - 0.5, self.high + 0.5, log=True).draw(rng)
            return min(max(round(wide), self.low), self.high)
        return rng.randint(self.low, self.high)

    def suggest(self, trial: Any, key: str) -> int:
        return trial.suggest_int(key, self.low, self.high, log=self.log)


class Choice:
    """One of several values of any type."""

    def __init__(self, *values: Any):
        if not values:
            raise ValueError("Choice() has no values: it must have at least one.")
        self.values = tuple(map(without_numpy, values))

    def draw(self, rng: random.Random) -> Any:
        return rng.choice(self.values)

    def suggest(self, trial: Any, key: str) -> Any:
        named = {str(value): value for value in self.values}  # Optuna stores numbers and strings only
        if lost := [value for value in self.values if named[str(value)] != value]:
            raise ValueError(f"{key} has the choices {lost[0]!r} and {named[str(lost[0])]!r}: their texts must differ.")
        return named[trial.suggest_categorical(key, list(named))]


Range = Floats | Choice


@dataclass(frozen=True)
class Search:
    """The objective of `sweep --optuna`.

    Attributes:
        space: range of each key.
        metric: metric of an evaluation, such as validation/loss.
        highest: whether higher is better; None: determined by the name of the metric.
        trials: total number of runs.
        prune: whether to stop a run whose metric at an evaluation is worse than the median of the earlier runs at that
            step.
        startup: number of trials that are random and never pruned, before the others use their results.
        seed: seed of the choices.
    """

    space: Mapping[str, Range]
    metric: str = "validation/loss"
    highest: bool | None = None
    trials: int = 20
    prune: bool = True
    startup: int = 5
    seed: int = 0

    def __post_init__(self):
        _ = self.maximize
        if self.trials < 1:
            raise ValueError(f"the Search has {self.trials} trials: it must have 1 or more.")

    @property
    def maximize(self) -> bool:
        """Return whether a higher value of the metric is better."""
        return direction(self.metric, self.highest, "highest of the Search")
