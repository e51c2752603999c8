"""Targets of ahead-of-time compilation: chips, and the topologies that XLA compiles for without a device."""

import os
import re
from dataclasses import dataclass
from typing import Any

ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",  # programs are traced on the CPU
    "TPU_SKIP_MDS_QUERY": "1",  # no metadata server is asked for the topology
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # several compilations at a time
}
# Without a device the GPU compiler cannot autotune Triton's matrix products, and fails on some of them.
GPU_FLAGS = "--xla_gpu_enable_triton_gemm=false"
GPUS_PER_HOST = 8
USABLE = 0.92  # fraction of a GPU's memory that programs are given


@dataclass(frozen=True)
class Chip:
    """Accelerator.

    Sources: the vendors' data sheets; the clocks of TPUs follow from the peak and the size of the matrix units.

    Attributes:
        name: "v5e", "h100", ...
        peak: FLOP/s of dense bfloat16 matrix products.
        bandwidth: bytes per second from and to the main memory (HBM).
        memory: bytes of main memory that a program may use.
        link: bytes per second that a chip receives from other chips: both directions of a ring over one axis of a TPU
            slice, or NVLink in one direction.
        clock: clock rate in Hz, by which the compiler's estimated cycles become seconds; None for GPUs, for which the
            compiler estimates none.
        gpu: fields of XLA's `GpuTargetConfigProto` that differ between GPUs; None for TPUs.
    """

    name: str
    peak: float
    bandwidth: float
    memory: float
    link: float
    clock: float | None = None
    gpu: dict[str, Any] | None = None


GIB = 2**30
HOPPER = {"major": 9, "cores": 132, "l2": 52428800, "ghz": 1.98}
CHIPS = {
    chip.name: chip
    for chip in (
        Chip("v4", 275e12, 1228e9, 31.75 * GIB, 90e9, clock=1.05e9),
        Chip("v5e", 197e12, 819e9, 15.75 * GIB, 90e9, clock=1.503e9),
        Chip("v5p", 459e12, 2765e9, 95.0 * GIB, 180e9, clock=1.75e9),
        Chip("v6e", 918e12, 1640e9, 31.25 * GIB, 180e9, clock=1.75e9),
        Chip("h100", 989e12, 3352e9, USABLE * 84942979072, 450e9, gpu=HOPPER | {"title": "NVIDIA H100 80GB HBM3"}),
        Chip("h200", 989e12, 4800e9, USABLE * 151397597184, 450e9, gpu=HOPPER | {"title": "NVIDIA H200 141GB HBM3e"}),
        Chip(
            "b200",
            2250e12,
            7672e9,
            USABLE * 191514411008,
            900e9,
            gpu={"major": 10, "cores": 148, "l2": 132644864, "ghz": 1.965, "title": "NVIDIA B200"},
        ),
    )
}


@dataclass(frozen=True)
class Target:
    """Devices to compile for.

    Attributes:
        chip: their kind.
        topology: of TPUs, such as "4x4"; of GPUs their number.
        count: use only the first devices of the topology; None is all.
    """

    chip: Chip
    topology: str
    count: int | None = None

    def __str__(self) -> str:
        part = f"/{self.count}" if self.count else ""
        return f"{self.chip.name}{'x' if self.chip.gpu else ':'}{self.topology}{part}"

    def devices(self) -> list[Any]:
        """Return the devices, which can be compiled for but not computed on.

        Raises:
            ModuleNotFoundError: the compiler is not installed.
            ValueError: the compiler does not know the topology.
        """
        from jax.experimental import topologies

        if self.chip.gpu is None:
            options = {"chip_config_name": "megacore"} if self.chip.name == "v4" else {}
            arguments = {"platform": "tpu", "topology_name": f"{self.chip.name}:{self.topology}", **options}
        else:
            number = int(self.topology)
            hosts, each = (number // GPUS_PER_HOST, GPUS_PER_HOST) if number > GPUS_PER_HOST else (1, number)
            shape = f"1x{hosts}x{each}"
            config = target_config(self.chip)
            arguments = {"platform": "cuda", "topology_name": shape, "topology": shape, "target_config": config}
        try:
            found = topologies.get_topology_desc(**arguments).devices
        except Exception as error:  # of the plugin, which is found by name
            extra = "tpu-compile" if self.chip.gpu is None else "gpu-compile"
            message = " ".join(str(error).split())[:300]
            raise ValueError(
                f"The compiler for {self} is not available ({message}): "
                f"`pip install 'lineage[{extra}]'` installs it. Topologies are, for example, v5e:4x4 or h100x8."
            ) from error
        return list(found)[: self.count]


def parse(text: str) -> Target:
    """Return the target of a text: "v5e:4x4", "v5p:2x2x1", "v5e:2x2/1" (one chip of four), "h100x8", "h100x64".

    Raises:
        ValueError: the text is not of this form, or the chip is unknown.
    """
    tpu = re.fullmatch(r"(v\d\w*):(\d+(?:x\d+){1,2})(?:/(\d+))?", text)
    gpu = re.fullmatch(r"([a-z]+\d+)x(\d+)", text)
    name = (tpu or gpu).group(1) if tpu or gpu else ""
    if name not in CHIPS or (CHIPS[name].gpu is None) != bool(tpu):
        raise ValueError(
            f"target is {text!r}: it must be a chip and a topology, such as v5e:4x4, v5e:2x2/1 (one chip of it) or "
            f"h100x8. Chips: {', '.join(CHIPS)}."
        )
    if gpu and int(gpu.group(2)) > GPUS_PER_HOST and int(gpu.group(2)) % GPUS_PER_HOST:
        raise ValueError(f"target is {text!r}: several hosts have {GPUS_PER_HOST} GPUs each.")
    if tpu:
        return Target(CHIPS[name], tpu.group(2), int(tpu.group(3)) if tpu.group(3) else None)
    return Target(CHIPS[name], gpu.group(2))


def prepare(target: Target) -> None:
    """Set the environment that the compilers need; to be called before JAX is imported."""
    os.environ.update(ENVIRONMENT)
    if target.chip.gpu is not None:
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {GPU_FLAGS}".strip()


def target_config(chip: Chip) -> str:
    """Return XLA's description of a GPU, the text of a `GpuTargetConfigProto`."""
    gpu = chip.gpu
    return f"""
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: 233472
  threads_per_core_limit: 2048
  core_count: {gpu["cores"]}
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {int(chip.bandwidth)}
  l2_cache_size: {gpu["l2"]}
  clock_rate_ghz: {gpu["ghz"]}
  device_memory_size: {round(chip.memory / USABLE)}
  shared_memory_per_block_optin: 232448
  cuda_compute_capability {{ major: {gpu["major"]} }}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 12 }}
runtime_version {{ major: 13 }}
device_description_str: "{gpu["title"]}"
"""
