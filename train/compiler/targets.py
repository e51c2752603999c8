"""Targets of ahead-of-time compilation: chip topologies for which XLA compiles without a device."""

import importlib.util
import math
import os
import re
from dataclasses import dataclass
from typing import Any

from lineage.train.compiler.chips import CHIPS, USABLE, Chip

ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",  # programs are traced on the CPU
    "TPU_SKIP_MDS_QUERY": "1",  # do not query the metadata server for the topology
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # allow concurrent compilations
}
# Without a device the GPU compiler cannot autotune Triton's matrix products, and fails on some of them. The user's
# flags come after these: `--xla_gpu_enable_triton_gemm=true --xla_gpu_autotune_level=0` uses them untuned.
GPU_FLAGS = "--xla_gpu_enable_triton_gemm=false"
GPUS_PER_HOST = 8
BY_TARGET = {chip.target: chip for chip in CHIPS if chip.target}


@dataclass(frozen=True)
class Target:
    """Devices to compile for."""

    chip: Chip  # kind of the devices
    topology: str  # topology of TPUs, such as "4x4", or number of GPUs
    count: int | None = None  # number of devices to use, the first ones of the topology; None: all

    def __str__(self) -> str:
        part = f"/{self.count}" if self.count else ""
        return f"{self.chip.target}{'x' if self.chip.gpu else ':'}{self.topology}{part}"

    def devices(self) -> list[Any]:
        """Return the devices, which support compilation but not computation.

        Raises:
            ModuleNotFoundError: the compiler is not installed.
            ValueError: the compiler does not support the topology.
        """
        from jax.experimental import topologies

        package, extra = ("jax_cuda13_plugin", "gpu-compile") if self.chip.gpu else ("libtpu", "tpu-compile")
        if not importlib.util.find_spec(package):
            raise ModuleNotFoundError(f"the compiler for {self} is not installed: `pip install 'lineage[{extra}]'`.")
        if self.chip.gpu is None:
            options = {"chip_config_name": "megacore"} if self.chip.target == "v4" else {}
            arguments = {"platform": "tpu", "topology_name": f"{self.chip.target}:{self.topology}", **options}
        else:
            number = int(self.topology)
            hosts, per_host = (number // GPUS_PER_HOST, GPUS_PER_HOST) if number > GPUS_PER_HOST else (1, number)
            shape = f"1x{hosts}x{per_host}"
            config = target_config(self.chip)
            arguments = {"platform": "cuda", "topology_name": shape, "topology": shape, "target_config": config}
        try:
            topology = topologies.get_topology_desc(**arguments)
            devices = list(topology.devices)
        except Exception as error:  # raised by the plugin, which is found by name
            message = " ".join(str(error).split())[:300]
            raise ValueError(f"the compiler for {self.chip.name} does not support {self}: {message}") from error
        return devices[: self.count]


def parse(text: str) -> Target:
    """Parse a target: "v5e:4x4", "v5p:2x2x1", "v5e:2x2/1" (one chip of four), "h100x8", "h100x64".

    Raises:
        ValueError: the text is not of this form, or there are no such chips or topologies.
    """
    tpu = re.fullmatch(r"(v\d\w*):(\d+(?:x\d+){1,2})(?:/(\d+))?", text)
    gpu = re.fullmatch(r"([a-z]+\d+)x(\d+)", text)
    name = (tpu or gpu).group(1) if tpu or gpu else ""
    if name not in BY_TARGET or (BY_TARGET[name].gpu is None) != bool(tpu):
        raise ValueError(
            f"target is {text!r}: it must be a chip and a topology, such as v5e:4x4, v5e:2x2/1 (one chip of it) or "
            f"h100x8. Chips: {', '.join(BY_TARGET)}."
        )
    chip, topology, used = BY_TARGET[name], (tpu or gpu).group(2), int(tpu.group(3)) if tpu and tpu.group(3) else None
    sizes = [int(size) for size in topology.split("x")]
    number = math.prod(sizes)
    if gpu and number > GPUS_PER_HOST and number % GPUS_PER_HOST:
        raise ValueError(f"target is {text!r}: several hosts have {GPUS_PER_HOST} GPUs each.")
    if len(sizes) > chip.axes:
        raise ValueError(f"target is {text!r}: topologies of {chip.name} have {chip.axes} axes, such as 4x4.")
    if not 0 < (number if used is None else used) <= number:
        raise ValueError(f"target is {text!r}: it must have at least one device, and no more than its topology.")
    return Target(chip, topology, used)


def prepare(target: Target) -> None:
    """Set the environment for the compilers; call this before JAX is imported."""
    os.environ.update(ENVIRONMENT)
    if target.chip.gpu is not None:
        os.environ["XLA_FLAGS"] = f"{GPU_FLAGS} {os.environ.get('XLA_FLAGS', '')}".strip()


def target_config(chip: Chip) -> str:
    """Return XLA's description of a GPU, as the text of a `GpuTargetConfigProto`."""
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
