"""Timing of functions in turns."""

import time
from collections.abc import Callable, Sequence

import jax
import numpy as np


def in_turns(functions: Sequence[Callable], rounds: int, clock: Callable = time.perf_counter) -> np.ndarray:
    """Return the seconds of the calls [rounds, functions]: every round calls all functions, after one to warm up."""

    def timed(function):
        start = clock()
        jax.block_until_ready(function())
        return clock() - start

    return np.array([[timed(function) for function in functions] for _ in range(rounds + 1)][1:])


def medians(functions: Sequence[Callable], rounds: int, clock: Callable = time.perf_counter) -> list[float]:
    """Return the median seconds of each function, called in turns."""
    return np.median(in_turns(functions, rounds, clock), axis=0).tolist()
