"""Description of an experiment before it runs: costs, suitable accelerators, changes to fit others, and parameters."""

import itertools
from collections.abc import Collection, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from lineage.models.budget import Budget, aligned, human
from lineage.train.compiler.chips import CHIPS
from lineage.train.experiment import Experiment
from lineage.train.optimizer import paths_of
from lineage.train.profiling.estimates import experiment_budget, memory_per_device
from lineage.train.sharding import abstract_mesh, shardings

UTILIZATION = 0.4  # fraction of the peak FLOP/s assumed for the estimated time of a step
MAX_DEVICES = 1024  # maximum number of devices of a suggested change


def describe(experiment: Experiment) -> str:
    """Return the budget as text, with the memory of each device of the config's mesh.

    For known accelerators, which need not be present, the text includes whether a step fits, the flags with which it
    would fit (see `smallest_changes`), and the duration of a step at 40% model FLOPs utilization.
    """
    total, config = experiment_budget(experiment), experiment.config
    mesh = abstract_mesh(**config.mesh)
    memory = memory_per_device(experiment, total, mesh)
    names = {"activations": "activations and temporary arrays"}
    axes = ", ".join(f"{axis} {size}" for axis, size in mesh.shape.items())
    rows = [(f"training on each of {mesh.size} devices ({axes}), bytes", "")]
    rows += [(f"  {names.get(key, key)}", human(size, 1024)) for key, size in memory.items()]
    devices, small = [("accelerator", "memory", "needed", "step")], []
    for chip in CHIPS:
        share, peak = memory["total"] / (chip.size * 1e9), chip.peak_of(config.precision) * mesh.size
        needed = f"{share:.0%}" if share <= 1 else "too much"
        step = duration(total.flops["training"]["model"] / (UTILIZATION * peak))
        devices.append((chip.name, f"{chip.size} GB", needed, step))
        if share > 1:
            small.append(chip)
    parts = [total.table(), aligned(rows)]
    parts.append(f"{aligned(devices)}\n(steps at {UTILIZATION:.0%} MFU; `lineage compile` plans a step for a target)")
    if small:
        changes = smallest_changes(experiment, total, {chip.size * 1e9 for chip in small})
        rows = [f"  {chip.name}: {changes.get(chip.size * 1e9, 'no change that was tried fits')}" for chip in small]
        parts.append("\n".join(["smallest change with which a step fits:", *rows]))
    return "\n\n".join(parts)


def smallest_changes(experiment: Experiment, total: Budget, limits: Collection[float]) -> dict[float, str]:
    """Return, for each limit in bytes per device, the flags with which a step fits.

    Parameters are sharded over the available devices (FSDP), gradients are accumulated, and activations are recomputed
    (remat), with as few of these changes as possible; then the number of devices is doubled. Limits that no change
    reaches are omitted.
    """
    config, changes = experiment.config, {}
    given = config.model.get("remat")
    versions = {given: (experiment, total)}
    before = abstract_mesh(**config.mesh)
    for mesh, remat, accumulation in candidates(config, before):
        if remat not in versions:
            changed = config.copy_and_resolve_references()
            changed.model.remat = remat
            version = Experiment(changed)
            versions[remat] = version, experiment_budget(version)
        needed = memory_per_device(*versions[remat], mesh, accumulation)["total"]
        for limit in [limit for limit in limits if limit not in changes and needed <= limit]:
            flags = [f"--config.mesh.{axis}={mesh.shape[axis]}" for axis in ("data", "fsdp") if mesh != before]
            if remat != given:
                flags.append(f"--config.model.remat={remat}")
            if accumulation != config.grad_accum_steps:
                flags.append(f"--config.grad_accum_steps={accumulation}")
            if mesh.size > before.size:
                flags.append(f"({mesh.size:,} devices)")
            changes[limit] = " ".join(flags)
        if len(changes) == len(limits):
            break
    return changes


def candidates(config: Any, before: AbstractMesh) -> Iterator[tuple[AbstractMesh, str | None, int]]:
    """Yield meshes, remat policies and gradient accumulation steps that divide the batch, smallest changes first."""
    sizes, size, given = dict(before.shape), config.loader.batch_size, config.model.get("remat")
    remats = [given, *(["full"] if "remat" in config.model and given != "full" else [])]
    replicas = sizes["data"] * sizes["fsdp"]
    while replicas * sizes["context"] * sizes["tensor"] <= MAX_DEVICES and size % replicas == 0:
        shards = [fsdp for fsdp in _doubled(sizes["fsdp"], replicas) if replicas % fsdp == 0]
        steps = [n for n in _doubled(config.grad_accum_steps, size // replicas) if size % (replicas * n) == 0]

        def cost(choice):
            fsdp, remat, accumulation = choice
            changed = fsdp != sizes["fsdp"], remat != given, accumulation != config.grad_accum_steps
            return sum(changed), changed[1], accumulation, fsdp

        for fsdp, remat, accumulation in sorted(itertools.product(shards, remats, steps), key=cost):
            yield abstract_mesh(**sizes | {"data": replicas // fsdp, "fsdp": fsdp}), remat, accumulation
        replicas *= 2


def _doubled(first: int, last: int) -> Iterator[int]:
    while first <= last:
        yield first
        first *= 2


def duration(seconds: int | float) -> str:
    """Format a time with three digits in a readable unit, such as "112 s" or "140 µs"."""
    seconds = float(f"{seconds:.3g}")
    units = (("h", 3600, 7200), ("min", 60, 120), ("s", 1, 1), ("ms", 1e-3, 1e-3), ("µs", 1e-6, 0))
    name, size = next((name, size) for name, size, minimum in units if seconds >= minimum)
    return f"{seconds / size:.3g} {name}"


def parameters(experiment: Experiment) -> str:
    """Return a table of the initial parameters: path, shape, dtype, mesh axes of each dimension, mean and deviation.

    The parameters are initialized on the devices of this machine. With an adapter, only its parameters are listed.
    """
    state = jax.jit(experiment.make_state, out_shardings=experiment.state_shardings)()
    return parameter_table(experiment, state.params)


def parameter_table(experiment: Experiment, params: Any) -> str:
    """Return the table of `parameters` for given values."""
    mesh = abstract_mesh(**experiment.config.mesh)
    places = jax.tree.leaves(shardings(params, experiment.sharding_rules, mesh))
    everywhere = NamedSharding(experiment.mesh, PartitionSpec())
    moments = jax.jit(partial(jax.tree.map, _moments), out_shardings=everywhere)(jax.tree.leaves(params))
    rows = [("parameter", "shape", "dtype", "sharding", "mean", "deviation")]
    columns = paths_of(params), jax.tree.leaves(params), places, jax.device_get(moments)
    for path, leaf, place, (mean, deviation) in zip(*columns):
        axes = [", ".join(axis) if isinstance(axis, tuple) else axis or "-" for axis in place.spec]
        shape, spec = " x ".join(map(str, leaf.shape)) or "()", " x ".join(axes) if any(place.spec) else "whole"
        rows.append((path, shape, str(leaf.dtype), spec, f"{mean:.3g}", f"{deviation:.3g}"))
    return aligned(rows)


def _moments(leaf):
    leaf = leaf.astype(jnp.float32)
    return leaf.mean(), leaf.std()
