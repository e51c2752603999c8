"""Throughput of a run, and its use of resources."""

import contextlib
import math
import os
import queue
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from lineage.train.compiler.chips import GIB, peak_flops
from lineage.train.experiment import Experiment
from lineage.train.profiling.estimates import experiment_budget


class Throughput:
    """Steps, examples and model FLOPs per second, and the fractions of the wall time outside training steps.

    Waiting time is the time from the end of a step, which a thread records, to the arrival of the next batch. It does
    not include reading that overlaps with a step.

    Attributes:
        budget: FLOPs and memory of the experiment.
        skipped: number of steps whose update was skipped.
        earlier: duration of the run's earlier starts and of its useful part, in seconds.
    """

    def __init__(self, experiment: Experiment):
        self.budget = experiment_budget(experiment)

        def flops(length):
            cost = experiment_budget(experiment, length) if length else self.budget
            return cost.flops["training"]["model"]

        mean = sum(fraction * flops(length) for length, fraction in experiment.data.train.lengths.items())
        peak = peak_flops(jax.devices()[0].device_kind, experiment.run.precision)  # None on a CPU
        self._flops = mean / (peak * experiment.mesh.size) if peak else None
        self._batch_size = experiment.loader.batch_size
        self._start, self._steps, self.skipped, self.earlier = time.monotonic(), 0, 0, (0.0, 0.0)
        self._spent = dict.fromkeys(("waiting", "evaluating", "saving"), 0.0)  # seconds
        self._last: dict[str, float] | None = None
        # Times of the request of the first batch, and of the end of the newest step.
        self._began = self._ended = math.inf
        self._newest = None
        self._dispatched: queue.SimpleQueue = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._record_ends, daemon=True)  # a failed device may never end a step
        self._thread.start()

    @property
    def seconds(self) -> float:
        """Seconds since the object was created."""
        return time.monotonic() - self._start

    @contextlib.contextmanager
    def spent(self, activity: str) -> Iterator[None]:
        """Record the time of the block as "evaluating" or "saving", which the rates exclude."""
        start = time.monotonic()
        yield
        self._spent[activity] += time.monotonic() - start

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Record the time of the block, which waits for the next batch, except while a step is in progress."""
        start = time.monotonic()
        self._began = min(self._began, start)
        yield
        idle_from = start if self._newest is None else max(start, self._ended)
        self._spent["waiting"] += max(0.0, time.monotonic() - idle_from)

    def dispatched(self, outputs: Any) -> None:
        """Record that a step with these outputs was dispatched."""
        self._ended, self._newest, self._steps = math.inf, outputs, self._steps + 1
        self._dispatched.put(outputs)

    def close(self) -> None:
        """End the thread, after the newest step."""
        self._dispatched.put(None)
        self._thread.join(10)

    def _record_ends(self):
        for outputs in iter(self._dispatched.get, None):
            with contextlib.suppress(Exception):  # raised in the loop, which fetches the outputs
                jax.block_until_ready(outputs)
            if outputs is self._newest:
                self._ended = time.monotonic()

    def rates(self, step: int) -> dict[str, float]:
        """Return the rates (excluding evaluations and saves) and fractions of the wall time since the last call.

        The goodput is the fraction of the time of all starts that was spent on steps whose updates are part of the
        state: they were neither skipped nor lost. The first call returns {}.
        """
        last, self._last = self._last, {"step": step, "seconds": self.seconds, **self._spent}
        if last is None:
            return {}
        passed = {name: value - last[name] for name, value in self._last.items()}
        seconds, counted = passed["seconds"], 1 - self.skipped / self._steps
        useful = self.earlier[1] + (time.monotonic() - self._began - sum(self._spent.values())) * counted
        elapsed = self.earlier[0] + self.seconds
        rate = passed["step"] / (seconds - passed["evaluating"] - passed["saving"])
        values = {"steps_per_second": rate, "examples_per_second": rate * self._batch_size}
        values |= {"mfu": rate * self._flops} if self._flops else {}
        values |= {name: passed[name] / seconds for name in self._spent}
        values |= {"goodput": useful / elapsed, "seconds": elapsed}
        return {f"time/{name}": value for name, value in values.items()}


def resources() -> dict[str, float]:
    """Return the resource usage of this process: resident memory, open files and device memory, if available.

    Memory is in GiB; device memory is the peak since the start on the fullest device.
    """
    usage: dict[str, float] = {}
    with contextlib.suppress(OSError):  # only Linux has these files
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        usage["system/memory_gib"] = pages * os.sysconf("SC_PAGE_SIZE") / GIB
        usage["system/open_files"] = len(os.listdir("/proc/self/fd"))
    peaks = [(device.memory_stats() or {}).get("peak_bytes_in_use", 0) for device in jax.local_devices()]
    return usage | ({"system/device_memory_gib": max(peaks) / GIB} if any(peaks) else {})
