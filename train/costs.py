"""How fast a run goes, and what an experiment costs."""

import contextlib
import time
from collections.abc import Iterator
from functools import partial
from operator import mul

import jax
import jax.numpy as jnp

from models.budget import Budget, budget, peak_flops
from train.experiment import Experiment
from train.step import compute_dtype


class Clock:
    """Steps, examples and model FLOP/s by the second, without the time that evaluating and saving take.

    Attributes:
        budget: of the experiment.
    """

    def __init__(self, experiment: Experiment):
        kind = jax.devices()[0].device_kind
        peak = peak_flops(kind, compute_dtype(experiment.config.precision).name) or measured_peak()
        self.budget = experiment_budget(experiment)
        lengths = experiment.data.train.lengths
        flops = [experiment_budget(experiment, length).flops["training"]["model"] for length in lengths if length]
        flops += [self.budget.flops["training"]["model"]] if None in lengths else []
        self._flops = sum(map(mul, flops, lengths.values())) / (peak * experiment.mesh.size)
        self._batch_size = experiment.config.data.batch_size
        self._start, self._pause = time.monotonic(), 0.0
        self._last: tuple[float, int] | None = None

    @property
    def seconds(self) -> float:
        """Since the clock was made."""
        return time.monotonic() - self._start

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """What happens inside does not count in the rates."""
        start = time.monotonic()
        yield
        self._pause += time.monotonic() - start

    def rates(self, step: int) -> dict[str, float]:
        """Rates since the last call; nothing at the first one."""
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
    """FLOP/s of this machine's float32 matrix products, timed: for devices whose peak no data sheet gives."""
    a = jnp.ones((size, size))
    product = jax.jit(jnp.matmul).lower(a, a).compile()
    times = []
    for _ in range(5):
        start = time.perf_counter()
        product(a, a).block_until_ready()
        times.append(time.perf_counter() - start)
    return 2 * size**3 / min(times)


def experiment_budget(experiment: Experiment, length: int | None = None) -> Budget:
    """What the experiment's model costs with its batch, objective, optimizer and precision, on all devices together.

    `length` of the texts in the batch; None is the config's.
    """
    config = experiment.config
    batch = jax.eval_shape(partial(experiment.zeros, length=length))
    length = getattr(experiment.model, "max_length", config.data.sequence_length)  # of the cache
    return budget(
        experiment.model,
        tuple(batch[name] for name in ("image", "noise", "inputs", "tokens") if name in batch),
        objective=experiment.objective,
        batch=batch,
        optimizer=experiment.optimizer_by(lambda step: 0.0).init,  # an epoch's length may need data that are not here
        compute_dtype=config.precision,
        cache_length=length if hasattr(experiment.model, "init_cache") else None,
    )
