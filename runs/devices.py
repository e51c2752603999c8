"""The division of a machine's devices among runs, found without JAX, which would reserve them."""

import os
from collections.abc import Sequence
from glob import glob

Share = tuple[set[int], dict[str, str]]
BOUNDS = {1: "1,1,1", 2: "1,2,1", 4: "2,2,1"}  # TPU_CHIPS_PER_PROCESS_BOUNDS by the number of chips


def shares(count: int) -> list[Share]:
    """Return for each of `count` runs its CPUs and additional environment variables.

    XLA starts one thread per CPU. Each run has access to its own GPUs or TPU chips only. If there are more runs than
    GPUs, runs share a GPU, each with a part of its memory.
    """
    if count < 1:
        raise ValueError(f"parallel is {count}: it must be 1 or more.")
    cpus = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    environments: list[dict[str, str]] = [{} for _ in range(count)]
    platform = os.environ.get("JAX_PLATFORMS", "")
    if count > 1 and platform != "cpu":
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        there = range(len(glob("/dev/nvidia[0-9]*"))) if visible is None else filter(None, visible.split(","))
        if gpus := [str(name) for name in there]:
            environments = [{"CUDA_VISIBLE_DEVICES": ",".join(part)} for part in split(gpus, count)]
            if len(gpus) < count:
                part = f"{0.9 / -(-count // len(gpus)):.3f}"
                environments = [own | {"XLA_PYTHON_CLIENT_MEM_FRACTION": part} for own in environments]
        elif chips := len(glob("/dev/accel[0-9]*") or glob("/dev/vfio/[0-9]*")):
            if chips % count or chips // count not in BOUNDS:
                raise ValueError(f"parallel is {count}: {chips} TPU chips cannot be divided by it.")
            one = {"TPU_PROCESS_BOUNDS": "1,1,1", "TPU_CHIPS_PER_PROCESS_BOUNDS": BOUNDS[chips // count]}
            one["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"
            parts = split([str(chip) for chip in range(chips)], count)
            environments = [one | {"TPU_VISIBLE_CHIPS": ",".join(part)} for part in parts]
    return list(zip(map(set, split(cpus, count)), environments))


def split(devices: Sequence, count: int) -> list[Sequence]:
    """Divide devices into `count` contiguous parts; if there are fewer devices than parts, parts share devices."""
    if 0 < len(devices) < count:
        return [[devices[i % len(devices)]] for i in range(count)]
    return [devices[i * len(devices) // count : (i + 1) * len(devices) // count] for i in range(count)]
