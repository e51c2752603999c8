"""The mesh of devices, the shardings of states and batches on it, and the compiler's options for it."""

import dataclasses
import re
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import flax.linen as nn
import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Int

from lineage.configs import run
from lineage.models import EXAMPLES, TOKENS, gathering, num_parts
from lineage.train.optimizer import map_paths

AXES = tuple(field.name for field in dataclasses.fields(run.Mesh))
# XLA's CPU backend otherwise removes the models' optimization barriers before it fuses operations, and then computes
# again what several operations use.
KEEP_BARRIERS = {"xla_disable_hlo_passes": "cse_barrier_expander"}
MIN_WIDTH = 128  # number of lanes of a TPU
Rule = tuple[str, Sequence[str | tuple[str, ...] | None]]  # pattern of paths, mesh axes of the last dimensions


def make_mesh(*data: int, devices: Sequence[jax.Device] | None = None, **sizes: int) -> Mesh:
    """Return a mesh of devices, by default all; the sizes are those of `configs.run.Mesh`.

    The devices of a process, and those of a TPU slice, are adjacent: if `data` is a multiple of the number of slices,
    only the gradients of replicas are exchanged between slices.
    """
    if jax.config.jax_enable_x64:
        raise ValueError("jax_enable_x64 (JAX_ENABLE_X64) is on: turn it off, because states have no 64-bit numbers.")
    devices = jax.devices() if devices is None else devices
    devices = sorted(devices, key=lambda one: (getattr(one, "slice_index", 0), one.process_index))
    given = run.Mesh(*data, **sizes)
    try:
        grid = np.asarray(devices).reshape(dataclasses.astuple(given))
    except ValueError:
        raise ValueError(
            f"a mesh of {', '.join(f'{axis}={size}' for axis, size in vars(given).items())} does not fit "
            f"{len(devices)} devices: their product must be that number (one of them may be -1 to use the rest)."
        ) from None
    return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def abstract_mesh(**sizes: int) -> AbstractMesh:
    """Return a mesh with the sizes of `configs.run.Mesh` but without devices; -1 is replaced by 1."""
    return AbstractMesh(tuple(max(size, 1) for size in dataclasses.astuple(run.Mesh(**sizes))), AXES)


def shardings(tree: Any, rules: Sequence[Rule], mesh: Mesh | AbstractMesh) -> Any:
    """Return the sharding of each leaf, by the first rule whose regular expression matches its path.

    The axes of a rule apply to the last dimensions of a leaf, so that a rule covers a layer and a stack of layers, a
    parameter, its gradient, its moments and its average. A dimension may be split over several mesh axes. Leaves
    without a rule are replicated, as are dimensions that are not divisible by the mesh axis.
    """

    for pattern, axes in rules:
        unknown = [axis for dimension in axes for axis in _flat(dimension) if axis not in AXES]
        if unknown:
            raise ValueError(f"the sharding rule {pattern!r} names {unknown[0]!r}: mesh axes are {', '.join(AXES)}.")
    return map_paths(lambda path, leaf: NamedSharding(mesh, placement(path, leaf.shape, rules, mesh)), tree)


def check_tensor(places: Any, mesh: Mesh) -> None:
    """Raise ValueError if the tensor axis splits no leaf, so that its devices would repeat each other's work."""
    specs = (place.spec for place in jax.tree.leaves(places))
    if (size := mesh.shape["tensor"]) > 1 and not any("tensor" in _flat(axis) for spec in specs for axis in spec):
        raise ValueError(f"mesh.tensor is {size}: it must be 1, because no parameter of the model is split over it.")


def placement(path: str, shape: tuple[int, ...], rules: Sequence[Rule], mesh: Mesh | AbstractMesh) -> PartitionSpec:
    """Return the placement of a leaf (see `shardings`).

    Where the fsdp axis would split the last dimension into parts narrower than `MIN_WIDTH`, it splits the first
    dimension of the rule instead: TPUs pad narrower parts to that width, and transfer the padding too.
    """
    axes = next((axes for pattern, axes in rules if re.search(pattern, path)), ())
    if len(axes) > len(shape):
        axes = ()
    first = len(shape) - len(axes)
    kept = _divisible(axes, shape[first:], mesh)
    last = _flat(kept[-1]) if len(kept) > 1 else ()
    if "fsdp" in last and shape[-1] // num_parts(mesh, last) < MIN_WIDTH:
        moved = _divisible(((*_flat(axes[0]), "fsdp"), *axes[1:-1], _without_fsdp(axes[-1])), shape[first:], mesh)
        kept = moved if "fsdp" in _flat(moved[0]) else kept
    return PartitionSpec(*[None] * first, *kept)


def _divisible(axes, sizes, mesh):
    """Return the mesh axes of each dimension; None if it is not divisible by them."""
    return [axis if size % num_parts(mesh, _flat(axis)) == 0 else None for axis, size in zip(axes, sizes)]


def _flat(axis: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return tuple(jax.tree.leaves(axis))  # None has no leaves


def _without_fsdp(axis: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return tuple(name for name in _flat(axis) if name != "fsdp")


def placed(tree: Any, places: Any) -> Any:
    """Return the shapes and dtypes of a tree with the sharding of each leaf."""
    return jax.tree.map(lambda a, place: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=place), tree, places)


def offloaded(places: Any, state: Any) -> Any:
    """Return the shardings of a training state with moments and average in host memory.

    Scalars stay on the device, as XLA requires.
    """

    def moved(places, tree):
        return jax.tree.map(lambda one, leaf: one.with_memory_kind("pinned_host") if leaf.ndim else one, places, tree)

    return places.replace(opt_state=moved(places.opt_state, state.opt_state), ema=moved(places.ema, state.ema))


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Return the sharding of a batch: its examples are split over the data and fsdp axes."""
    return NamedSharding(mesh, PartitionSpec(EXAMPLES))


def on_mesh(function: Callable[..., Any], mesh: Mesh, rules: Sequence[Rule], sequence: bool) -> Callable[..., Any]:
    """Return the function with activations sharded like the batch, and parameters gathered from the fsdp axis.

    Otherwise, XLA may shard activations like the parameters, so that each device holds those of the whole batch.

    Tokens are split over the context axis and, with `sequence`, over the tensor axis too, so that norms, dropout and
    the residuals of the backward pass are sharded (sequence parallelism, arXiv 2205.05198, section 4.2.2).
    """
    tokens = TOKENS if sequence else ("context",)
    if mesh.devices.flat[0].platform == "cpu" and num_parts(mesh, tokens) == 1:
        tokens = None  # `Linear` then merges tokens with examples: faster on CPUs, slower on TPUs
    names = (("batch", EXAMPLES), ("sequence", tokens))

    def places(path: str, shape: tuple[int, ...]) -> tuple[PartitionSpec, PartitionSpec]:
        at_rest = placement(path, shape, rules, mesh)
        return at_rest, PartitionSpec(*map(_without_fsdp, at_rest))

    @wraps(function)
    def sharded(*args: Any) -> Any:
        gather = gathering(places if mesh.shape["fsdp"] > 1 else None)
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh), nn.logical_axis_rules(names), gather:
            return function(*args)

    return sharded


def compiler_options(mesh: Mesh, given: Sequence[tuple[str, Any]]) -> dict[str, Any] | None:
    """Return the options of XLA for the devices of a mesh; raise ValueError if some of the given ones are wrong."""
    options = dict(given)
    if options:
        try:  # XLA has no list of its options
            everywhere = NamedSharding(mesh, PartitionSpec())
            jax.jit(lambda: 0, out_shardings=everywhere, compiler_options=options).lower().compile()
        except jax.errors.JaxRuntimeError as error:
            raise ValueError(f"compiler_options: {str(error).splitlines()[0]}") from error
    if mesh.devices.flat[0].platform == "cpu":
        options = KEEP_BARRIERS | options
    return options or None


def check_batch(size: int, mesh: Mesh, grad_accum_steps: int = 1) -> None:
    """Raise ValueError if a global batch cannot be split into equal parts."""
    devices = num_parts(mesh, EXAMPLES)
    if size % (devices * grad_accum_steps):
        raise ValueError(
            f"a batch of {size} examples cannot be split evenly over {devices} devices (data x fsdp)"
            + (f" in {grad_accum_steps} micro-batches" if grad_accum_steps > 1 else "")
            + f": it must be a multiple of {devices * grad_accum_steps}."
        )


def share(mesh: Mesh) -> tuple[int, int]:
    """Return the index of the part of a global batch that this process reads, and the number of parts."""
    owners = [device.process_index for device in mesh.devices.flat]
    return part_of(np.reshape(owners, (-1, mesh.shape["context"] * mesh.shape["tensor"])), jax.process_index())


def part_of(owners: Int[np.ndarray, "rows columns"], process: int) -> tuple[int, int]:
    """Return (i, n): a process reads the rows [i / n, (i + 1) / n) of a batch.

    `owners` contains the index of the process that owns each device; the devices of a row (context and tensor axes)
    compute the same examples.
    """
    mine = np.flatnonzero((owners == process).any(axis=1))
    if len(owners) % len(mine) or mine[0] % len(mine):
        raise ValueError(
            f"mesh.context x mesh.tensor is {owners.shape[1]}, but a process has {(owners == process).sum()} devices: "
            "one must be a multiple of the other."
        )
    return int(mine[0]) // len(mine), len(owners) // len(mine)


def to_mesh(batch: dict[str, np.ndarray], mesh: Mesh) -> dict[str, jax.Array]:
    """Return the global batch as arrays on the mesh; every process passes the rows of its `share`."""
    sharding, shares = batch_sharding(mesh), share(mesh)[1]
    check_batch(len(next(iter(batch.values()))) * shares, mesh)
    return {
        name: jax.make_array_from_process_local_data(sharding, array, (len(array) * shares, *array.shape[1:]))
        for name, array in batch.items()
    }
