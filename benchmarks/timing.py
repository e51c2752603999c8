"""Timing of functions in turns."""

import statistics
import time
from collections.abc import Callable, Sequence

import jax


def medians(functions: Sequence[Callable], rounds: int, clock: Callable = time.perf_counter) -> list[float]:
    """Return the median seconds of each function; every round calls all of them, and the first one is not counted."""

    def timed(function):
        start = clock()
        jax.block_until_ready(function())
        return clock() - start

    times = [[timed(function) for function in functions] for _ in range(rounds + 1)]
    return [statistics.median(column) for column in zip(*times[1:])]
