"""The mesh of devices, and where the parts of a state and of a batch lie on it."""

import math
import re
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import flax.linen as nn
import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Int

from lineage.train.optimizer import map_paths

AXES = ("data", "fsdp", "tensor")
Rule = tuple[str, Sequence[str | tuple[str, ...] | None]]  # several axes may share a dimension


def make_mesh(data: int = -1, fsdp: int = 1, tensor: int = 1, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """All devices, those of a process side by side, as a mesh of three axes; one size may be -1: what the others leave.

    Raises:
        ValueError: the sizes do not multiply to the number of devices.
    """
    devices = sorted(jax.devices() if devices is None else devices, key=lambda device: device.process_index)
    sizes = [data, fsdp, tensor]
    known = int(np.prod([size for size in sizes if size > 0]))
    if sizes.count(-1) == 1 and len(devices) % known == 0:
        sizes[sizes.index(-1)] = len(devices) // known
    if int(np.prod(sizes)) != len(devices) or min(sizes) < 1:
        raise ValueError(
            f"a mesh of data={data}, fsdp={fsdp}, tensor={tensor} does not fit {len(devices)} devices: "
            "the sizes must multiply to that number (-1 in one of them fills it)."
        )
    return Mesh(np.asarray(devices).reshape(sizes), AXES, axis_types=(AxisType.Auto,) * 3)


def abstract_mesh(data: int = -1, fsdp: int = 1, tensor: int = 1) -> AbstractMesh:
    """A mesh of these sizes without its devices; -1 stands for 1."""
    return AbstractMesh(tuple(max(size, 1) for size in (data, fsdp, tensor)), AXES)


def shardings(tree: Any, rules: Sequence[Rule], mesh: Mesh | AbstractMesh) -> Any:
    """Where each leaf lies: the first rule whose regular expression finds something in its path says so.

    A rule's axes belong to the last dimensions of a leaf, so that they hold for one layer and for a stack of layers
    alike, and for a parameter, its gradient, its moments and its average. What no rule finds is on every device; so is
    a dimension that the mesh axis does not divide.
    """

    def flat(axis):
        return axis if isinstance(axis, tuple) else (axis,) * (axis is not None)

    def place(path, leaf):
        axes = next((axes for pattern, axes in rules if re.search(pattern, path)), ())
        if len(axes) > len(leaf.shape):
            axes = ()
        sizes = leaf.shape[len(leaf.shape) - len(axes) :]
        axes = [
            axis if size % math.prod(mesh.shape[a] for a in flat(axis)) == 0 else None
            for axis, size in zip(axes, sizes)
        ]
        return NamedSharding(mesh, PartitionSpec(*[None] * (len(leaf.shape) - len(axes)), *axes))

    for pattern, axes in rules:
        unknown = [axis for dimension in axes for axis in flat(dimension) if axis not in AXES]
        if unknown:
            raise ValueError(f"the sharding rule {pattern!r} names {unknown[0]!r}: mesh axes are {', '.join(AXES)}.")
    return map_paths(place, tree)


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """The examples of a batch are spread over the data and fsdp axes."""
    return NamedSharding(mesh, PartitionSpec(("data", "fsdp")))


def in_parts(function: Callable[..., Any], mesh: Mesh, sequence: bool) -> Callable[..., Any]:
    """The function, in which what goes from layer to layer lies where its examples do: without this, XLA may spread it
    as it finds tables and kernels, and each device keep the whole batch's.

    With `sequence` its tokens are spread over the tensor axis, so that norms, dropout and what is kept for the backward
    pass are parts as well (arXiv 2205.05198, section 4.2.2).
    """
    rules = (("batch", ("data", "fsdp")), ("sequence", "tensor" if sequence else None))

    @wraps(function)
    def placed(*args: Any) -> Any:
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh), nn.logical_axis_rules(rules):
            return function(*args)

    return placed


def check_batch(size: int, mesh: Mesh, grad_accum_steps: int = 1) -> None:
    """Raises ValueError when a global batch does not divide into equal parts."""
    devices = mesh.shape["data"] * mesh.shape["fsdp"]
    if size % (devices * grad_accum_steps):
        raise ValueError(
            f"a batch of {size} examples does not divide over {devices} devices (data x fsdp)"
            + (f" in {grad_accum_steps} accumulated parts" if grad_accum_steps > 1 else "")
            + f": it must be a multiple of {devices * grad_accum_steps}."
        )


def share(mesh: Mesh) -> tuple[int, int]:
    """Which part of a global batch this process reads, and how many parts there are."""
    owners = [device.process_index for device in mesh.devices.flat]
    return part_of(np.reshape(owners, (-1, mesh.shape["tensor"])), jax.process_index())


def part_of(owners: Int[np.ndarray, "rows tensor"], process: int) -> tuple[int, int]:
    """Part i of n, rows [i / n, (i + 1) / n) of a batch, that a process reads whose devices are where `owners` has it.

    Processes between which a tensor axis runs read the same part.

    Raises:
        ValueError: it would hold parts of rows that it does not read.
    """
    mine = np.flatnonzero((owners == process).any(axis=1))
    if len(owners) % len(mine) or mine[0] % len(mine):
        raise ValueError(
            f"mesh.tensor is {owners.shape[1]}, but a process has {(owners == process).sum()} devices: one must be a "
            "multiple of the other."
        )
    return int(mine[0]) // len(mine), len(owners) // len(mine)


def to_mesh(batch: dict[str, np.ndarray], mesh: Mesh) -> dict[str, jax.Array]:
    """The global batch, of which every process gives the rows of its `share`."""
    sharding, parts = batch_sharding(mesh), share(mesh)[1]
    return {
        name: jax.make_array_from_process_local_data(sharding, array, (len(array) * parts, *array.shape[1:]))
        for name, array in batch.items()
    }
