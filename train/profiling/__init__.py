"""Throughput and resources of a run, and estimates of the memory and time of an experiment."""

import contextlib
import math
import os
import queue
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh

from lineage.models import EXAMPLES, num_parts
from lineage.models.budget import Budget, budget
from lineage.train.compiler.chips import GIB, peak_flops
from lineage.train.experiment import Experiment
from lineage.train.sharding import shardings
from lineage.train.step import make_loss

# Fraction of a block's activations that tensor parallelism does not shard (arXiv 2205.05198, section 4.2.1).
REPLICATED = 10 / 34
RESOURCE_EXHAUSTED = 8  # status code; see https://abseil.io/docs/cpp/guides/status-codes


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
        whole = self.earlier[0] + self.seconds
        rate = passed["step"] / (seconds - passed["evaluating"] - passed["saving"])
        values = {"steps_per_second": rate, "examples_per_second": rate * self._batch_size}
        values |= {"mfu": rate * self._flops} if self._flops else {}
        values |= {name: passed[name] / seconds for name in self._spent} | {"goodput": useful / whole, "seconds": whole}
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


def experiment_budget(experiment: Experiment, length: int | None = None) -> Budget:
    """Return the FLOPs and memory of an experiment on all devices together, for texts of `length` tokens."""
    model, state = experiment.model.portable(), experiment.abstract_state
    batch = jax.eval_shape(partial(experiment.zeros, length=length))
    cache_length = (model.max_length or experiment.task.sequence_length) if model.is_decoder else None
    dtype = jnp.dtype(experiment.config.precision)
    loss_sum = make_loss(model, experiment.task.loss, dtype, experiment.trained)

    def loss(params, rest, batch, key):
        collections = {name: value for name, value in rest.items() if name != "frozen"}
        return loss_sum(params, {}, state.replace(frozen=rest["frozen"]), collections, batch, key)[0]

    def merge(params, rest):
        return state.adapter.apply(rest["frozen"], params)

    inputs = tuple(batch[name] for name in experiment.task.arguments)
    variables = {"params": state.params, "frozen": state.frozen, **state.collections}
    options = {"optimizer": experiment.make_optimizer().init, "compute_dtype": dtype, "cache_length": cache_length}
    return budget(model, inputs, variables=variables, merge=merge, loss=loss, batch=batch, **options)


def memory_per_device(
    experiment: Experiment, total: Budget, mesh: Mesh | AbstractMesh, accumulation: int | None = None
) -> dict[str, int]:
    """Return the bytes that a training step needs on each device.

    The keys are "weights" (with moving averages and statistics), "gradients" and "optimizer", sharded by the config's
    rules, "gathered" (copies of sharded weights that are kept for the backward pass, unless the model has `remat`),
    "activations" (an estimate of all else), split like the batch, and "total". The estimate assumes a scan over layers;
    unrolled models need 0.7 to 1.6 times as much on a CPU.

    Args:
        accumulation: number of gradient accumulation steps; None: as in the config.
    """
    state, memory = experiment.abstract_state, total.memory["training"]
    accumulation = accumulation or experiment.config.grad_accum_steps

    def placed(*trees):
        places = jax.tree.leaves(shardings(trees, experiment.sharding_rules, mesh))
        return [(math.prod(place.shard_shape(x.shape)), x, place) for x, place in zip(jax.tree.leaves(trees), places)]

    def size(*trees):
        return sum(count * x.dtype.itemsize for count, x, _ in placed(*trees))

    def gathered(params):
        if mesh.shape["fsdp"] == 1 or experiment.config.model.get("remat"):
            return 0
        counts = [count for count, _, place in placed(params) if "fsdp" in jax.tree.leaves(tuple(place.spec))]
        return sum(counts) * mesh.shape["fsdp"] * jnp.dtype(experiment.run.precision).itemsize

    rest = max(0, memory["total"] - memory["weights"] - memory["gradients"] - memory["optimizer"])
    whole = 0 if experiment.config.sequence_sharding else REPLICATED
    rest *= (whole + (1 - whole) / mesh.shape["tensor"]) / accumulation
    needed = {
        "weights": size(state.params, state.collections, state.ema, state.frozen),
        "gradients": size(jax.eval_shape(experiment.trained, state.params)) * min(accumulation, 2),
        "optimizer": size(state.opt_state),
        "gathered": gathered(state.params),
        "activations": int(rest / num_parts(mesh, (*EXAMPLES, "context"))),
    }
    return needed | {"total": sum(needed.values())}


@contextlib.contextmanager
def out_of_memory_explained() -> Iterator[dict[str, int]]:
    """Raise MemoryError with advice if a device runs out of memory in the block.

    Yield a dictionary; the message includes the estimated bytes of a step that the block stores in it.
    """
    memory: dict[str, int] = {}
    try:
        yield memory
    except jax.errors.JaxRuntimeError as error:
        if error.error_code != RESOURCE_EXHAUSTED:
            raise
        needed = ", ".join(f"{name} {size / GIB:.3g} GiB" for name, size in memory.items())
        estimate = f" Estimated for a step, on all devices together: {needed}." if needed else ""
        raise MemoryError(
            f"out of memory ({str(error).splitlines()[0]}): make loader.batch_size smaller or grad_accum_steps larger, "
            f"set model.remat, or spread the parameters over mesh.fsdp; see `lineage describe`.{estimate}"
        ) from error
