"""What a config's `sweep()` and `search()` are written with.

A sweep is an iterable of overrides, dicts of dotted config keys:

    def sweep():
        yield from product(axis("model.depth", (2, 4)), axis("seed", range(3)))  # six runs
        yield from repeat(samples({"optimizer.learning_rate": Floats(1e-4, 1e-2, log=True)}, count=10), seeds=2)

A search lets Optuna choose them, `--sweep=optuna`:

    def search():
        space = {"optimizer.learning_rate": Floats(1e-4, 1e-2, log=True), "model.position": Choice("1d", "2d")}
        return Search(space, metric="validation/loss", trials=30)
"""

import itertools
import math
import random
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

Sweep = Iterable[Mapping[str, Any]]
chain = itertools.chain


def axis(key: str, values: Iterable[Any]) -> list[dict[str, Any]]:
    """A run for each value of one key."""
    return [{key: value} for value in values]


def product(*sweeps: Sweep) -> Iterator[dict[str, Any]]:
    """Every combination of one from each; where two have a key, the later one's value counts."""
    return map(_merged, itertools.product(*sweeps))


def zipped(*sweeps: Sweep) -> Iterator[dict[str, Any]]:
    """The firsts of all together, then the seconds, and so on; ValueError if one has more than another."""
    return map(_merged, zip(*sweeps, strict=True))


def repeat(sweep: Sweep, seeds: int) -> Iterator[dict[str, Any]]:
    """Each run with so many seeds, from 0."""
    return product(sweep, axis("seed", range(seeds)))


def samples(space: Mapping[str, "Range"], count: int, seed: int = 0) -> Iterator[dict[str, Any]]:
    """So many random points of a space: the same for the same seed."""
    rng = random.Random(seed)
    return ({key: values.draw(rng) for key, values in space.items()} for _ in range(count))


def _merged(parts):
    return {key: value for part in parts for key, value in part.items()}


@dataclass(frozen=True)
class Floats:
    """Numbers from `low` to `high`, evenly spread, or evenly in their logarithm."""

    low: float
    high: float
    log: bool = False

    def draw(self, rng: random.Random) -> float:
        if self.log:
            return math.exp(rng.uniform(math.log(self.low), math.log(self.high)))
        return rng.uniform(self.low, self.high)

    def suggest(self, trial: Any, key: str) -> float:
        """What a trial of Optuna tries."""
        return trial.suggest_float(key, self.low, self.high, log=self.log)


@dataclass(frozen=True)
class Integers(Floats):
    """Whole numbers from `low` to `high`, both included."""

    def draw(self, rng: random.Random) -> int:
        if self.log:  # each number's share is that of what rounds to it
            wide = Floats(self.low - 0.5, self.high + 0.5, log=True).draw(rng)
            return min(max(round(wide), self.low), self.high)
        return rng.randint(self.low, self.high)

    def suggest(self, trial: Any, key: str) -> int:
        return trial.suggest_int(key, self.low, self.high, log=self.log)


class Choice:
    """One of some values of any type."""

    def __init__(self, *values: Any):
        self.values = values

    def draw(self, rng: random.Random) -> Any:
        return rng.choice(self.values)

    def suggest(self, trial: Any, key: str) -> Any:
        named = {str(value): value for value in self.values}  # Optuna stores numbers and texts only
        return named[trial.suggest_categorical(key, list(named))]


Range = Floats | Choice


@dataclass(frozen=True)
class Search:
    """What `--sweep=optuna` looks for.

    Attributes:
        space: the values that each key may have.
        metric: of an evaluation, such as validation/loss.
        highest: more of it is better.
        trials: how many runs there are in all.
        prune: whether a run stops early that is worse at an evaluation than the median of those before at that step.
        startup: how many trials are random and whole, before the others learn from them.
        seed: of the choices.
    """

    space: Mapping[str, Range]
    metric: str = "validation/loss"
    highest: bool = False
    trials: int = 20
    prune: bool = True
    startup: int = 5
    seed: int = 0
