"""Estimates of the memory and the FLOPs of an experiment."""

import contextlib
import math
from collections.abc import Iterator
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh

from lineage.models import EXAMPLES, num_parts
from lineage.models.budget import Budget, budget
from lineage.train.compiler.chips import GIB
from lineage.train.experiment import Experiment
from lineage.train.sharding import shardings
from lineage.train.step import make_loss

# Fraction of a block's activations that tensor parallelism does not shard (arXiv 2205.05198, section 4.2.1).
REPLICATED = 10 / 34
RESOURCE_EXHAUSTED = 8  # status code; see https://abseil.io/docs/cpp/guides/status-codes


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
    replicated = 0 if experiment.config.sequence_sharding else REPLICATED
    rest *= (replicated + (1 - replicated) / mesh.shape["tensor"]) / accumulation
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
