"""Throughput of a run, and estimates of the memory and the time that an experiment needs."""

import contextlib
import math
import time
from collections.abc import Iterator, Mapping
from functools import partial
from operator import mul
from types import MappingProxyType

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh

from lineage.models import EXAMPLES, num_parts
from lineage.models.budget import Budget, budget
from lineage.train.compiler.chips import peak_flops
from lineage.train.experiment import Experiment
from lineage.train.sharding import shardings
from lineage.train.step import make_loss

# Fraction of a block's activations that tensor parallelism does not shard (arXiv 2205.05198, section 4.2.1).
REPLICATED = 10 / 34
RESOURCE_EXHAUSTED = 8  # status code, see https://abseil.io/docs/cpp/guides/status-codes


class Throughput:
    """Steps, examples and model FLOPs per second, without the time that evaluations and saves take.

    Attributes:
        budget: FLOPs and memory of the experiment.
    """

    def __init__(self, experiment: Experiment):
        kind = jax.devices()[0].device_kind
        peak = peak_flops(kind, experiment.run.precision) or measured_peak()
        self.budget = experiment_budget(experiment)
        lengths = experiment.data.train.lengths
        flops = [experiment_budget(experiment, length).flops["training"]["model"] for length in lengths if length]
        flops += [self.budget.flops["training"]["model"]] if None in lengths else []
        self._flops = sum(map(mul, flops, lengths.values())) / (peak * experiment.mesh.size)
        self._batch_size = experiment.loader.batch_size
        self._start, self._pause = time.monotonic(), 0.0
        self._last: tuple[float, int] | None = None

    @property
    def seconds(self) -> float:
        """Seconds since the object was created."""
        return time.monotonic() - self._start

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Leave the time that the block takes out of the rates."""
        start = time.monotonic()
        yield
        self._pause += time.monotonic() - start

    def rates(self, step: int) -> dict[str, float]:
        """Return the rates since the last call; nothing at the first one."""
        now = time.monotonic() - self._pause
        last, self._last = self._last, (now, step)
        if last is None or now <= last[0]:
            return {}
        rate = (step - last[1]) / (now - last[0])
        return {
            "time/steps_per_second": rate,
            "time/examples_per_second": rate * self._batch_size,
            "time/mfu": rate * self._flops,
        }


def measured_peak(size: int = 1024) -> float:
    """Measure the FLOP/s of float32 matrix products, for devices whose peak is not in `CHIPS`."""
    a = jnp.ones((size, size))
    product = jax.jit(jnp.matmul).lower(a, a).compile()
    times = []
    for _ in range(5):
        start = time.perf_counter()
        product(a, a).block_until_ready()
        times.append(time.perf_counter() - start)
    return 2 * size**3 / min(times)


def experiment_budget(experiment: Experiment, length: int | None = None) -> Budget:
    """Return FLOPs and memory of a model with its batch (of texts of `length` tokens), task and optimizer, on all
    devices together.
    """
    model, adapter, state = experiment.model.portable(), experiment.adapter, experiment.abstract_state
    batch = jax.eval_shape(partial(experiment.zeros, length=length))
    length = (model.max_length or experiment.task.sequence_length) if model.is_decoder else None  # length of the cache
    dtype = jnp.dtype(experiment.config.precision)
    loss_sum = make_loss(model, experiment.task.loss, dtype)

    def loss(params, rest, batch, key):
        collections = {name: value for name, value in rest.items() if name != "frozen"}
        return loss_sum(params, (adapter, rest["frozen"]), {}, collections, batch, key)[0]

    return budget(
        model,
        tuple(batch[name] for name in experiment.task.arguments),
        variables={"params": state.params, "frozen": state.frozen, **state.collections},
        merge=lambda params, rest: adapter.apply(rest["frozen"], params),
        loss=loss,
        batch=batch,
        optimizer=experiment.optimizer_by().init,
        compute_dtype=dtype,
        cache_length=length,
    )


def memory_per_device(
    experiment: Experiment, total: Budget, mesh: Mesh | AbstractMesh, accumulation: int | None = None
) -> dict[str, int]:
    """Return the bytes that a training step needs on each device.

    The keys are "weights" (with moving averages and statistics), "gradients" and "optimizer", sharded by the config's
    rules, "activations" (an estimate of all else), divided as the batch is, and "total". The estimate assumes a scan
    over layers: unrolled, models take 0.7 to 1.6 times as much on a CPU.

    Args:
        accumulation: number of gradient accumulation steps; None: that of the config.
    """
    state, memory = experiment.abstract_state, total.memory["training"]
    accumulation = accumulation or experiment.config.grad_accum_steps

    def size(*trees):
        leaves = jax.tree.leaves(trees), jax.tree.leaves(shardings(trees, experiment.sharding_rules, mesh))
        return sum(math.prod(place.shard_shape(x.shape)) * x.dtype.itemsize for x, place in zip(*leaves))

    rest = max(0, memory["total"] - memory["weights"] - memory["gradients"] - memory["optimizer"])
    whole = 0 if experiment.config.sequence_sharding else REPLICATED
    rest *= (whole + (1 - whole) / mesh.shape["tensor"]) / accumulation
    found = {
        "weights": size(state.params, state.collections, state.ema, state.frozen),
        "gradients": size(state.params) * min(accumulation, 2),
        "optimizer": size(state.opt_state),
        "activations": int(rest / num_parts(mesh, (*EXAMPLES, "context"))),
    }
    return found | {"total": sum(found.values())}


@contextlib.contextmanager
def out_of_memory_explained(memory: Mapping[str, int] = MappingProxyType({})) -> Iterator[None]:
    """Raise MemoryError, with what to change, if a device runs out of memory in the block.

    `memory` holds the estimated bytes that a step needs, and may be filled inside the block.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if error.error_code != RESOURCE_EXHAUSTED:
            raise
        needed = ", ".join(f"{name} {size / 2**30:.3g} GiB" for name, size in memory.items())
        raise MemoryError(
            f"out of memory ({str(error).splitlines()[0]}): make loader.batch_size smaller or grad_accum_steps larger, "
            "set model.remat, or spread the parameters over mesh.fsdp; see `lineage describe`."
            + f" Estimated for a step, on all devices together: {needed}."
            * bool(needed)
        ) from error
