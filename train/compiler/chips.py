"""Specifications of accelerators; importing this module does not import JAX.

Sources: NVIDIA's data sheets (HGX for B200) and Ada whitepaper, and cloud.google.com/tpu/docs/v4, v5e, v5p, v6e. The
clocks of TPUs follow from the peak and the size of the matrix units.
"""

import re
from dataclasses import dataclass
from typing import Any

GIB = 2**30
USABLE = 0.92  # fraction of a GPU's memory that programs may use


@dataclass(frozen=True)
class Chip:
    """Accelerator; `lineage compile` supports those with a `target`."""

    name: str  # name for output
    kind: str  # regular expression of its `jax.Device.device_kind`
    size: int  # GB of main memory (HBM), as sold
    peak: float  # FLOP/s of dense matrix products in 16 bits
    float32_peak: float  # FLOP/s in float32 at JAX's default precision: TF32 on NVIDIA, one bfloat16 pass on TPUs
    target: str | None = None  # name in targets, such as "v5e" or "h100"
    memory: float = 0.0  # bytes of main memory that a program may use
    bandwidth: float = 0.0  # bytes per second from and to the main memory
    # Bytes per second that a chip receives from other chips: both directions of a ring over one axis of a TPU slice, or
    # NVLink in one direction.
    link: float = 0.0
    axes: int = 3  # largest number of axes of a TPU's topology
    clock: float | None = None  # Hz, for the compiler's estimates in cycles; None for GPUs, which have no estimates
    gpu: dict[str, Any] | None = None  # fields of XLA's `GpuTargetConfigProto` that differ between GPUs; None for TPUs

    def peak_of(self, dtype: str) -> float | None:
        """Return the peak FLOP/s for a dtype; None unless it is bfloat16, float16 or float32."""
        return {"bfloat16": self.peak, "float16": self.peak, "float32": self.float32_peak}.get(dtype)


def _gpu(target, size, peak, memory, **rates):
    name = target.upper()
    return Chip(name, name, size, peak, peak / 2, target, USABLE * memory, **rates)


def _tpu(target, kind, size, peak, memory, **rates):
    return Chip(f"TPU {target}", kind, size, peak, peak, target, memory * GIB, **rates)


H100 = {"major": 9, "cores": 132, "l2": 52428800, "ghz": 1.98, "title": "NVIDIA H100 80GB HBM3"}
H200 = H100 | {"title": "NVIDIA H200 141GB HBM3e"}
B200 = {"major": 10, "cores": 148, "l2": 132644864, "ghz": 1.965, "title": "NVIDIA B200"}

CHIPS = (  # the first chip whose `kind` matches a device is used
    Chip("A100 80 GB", "A100.*80GB", 80, 312e12, 156e12),
    Chip("A100 40 GB", "A100", 40, 312e12, 156e12),
    Chip("H100 PCIe", "H100 PCIe", 80, 756e12, 378e12),
    Chip("H100 NVL", "H100 NVL", 94, 835e12, 417e12),
    _gpu("h100", 80, 989.4e12, 84942979072, bandwidth=3352e9, link=450e9, gpu=H100),
    _gpu("h200", 141, 989.4e12, 151397597184, bandwidth=4800e9, link=450e9, gpu=H200),
    _gpu("b200", 180, 2250e12, 191514411008, bandwidth=7672e9, link=900e9, gpu=B200),
    Chip("RTX 4090", "RTX 4090$", 24, 165.2e12, 82.6e12),
    _tpu("v4", "TPU v4$", 32, 275e12, 31.75, bandwidth=1228e9, link=90e9, clock=1.05e9),
    _tpu("v5e", "TPU v5 ?(lite|e)$", 16, 197e12, 15.75, bandwidth=819e9, link=90e9, axes=2, clock=1.503e9),
    _tpu("v5p", "TPU v5p?$", 95, 459e12, 95.0, bandwidth=2765e9, link=180e9, clock=1.75e9),
    _tpu("v6e", "TPU v6 ?(lite|e)$", 32, 918e12, 31.25, bandwidth=1640e9, link=180e9, axes=2, clock=1.75e9),
)


def chip_of(device_kind: str) -> Chip | None:
    """Return the accelerator of a JAX device kind; None if it is not in `CHIPS`."""
    return next((chip for chip in CHIPS if re.search(chip.kind, device_kind)), None)


def peak_flops(device_kind: str, dtype: str) -> float | None:
    """Return the peak FLOP/s of a device kind for a dtype; None if it is not in `CHIPS`."""
    chip = chip_of(device_kind)
    return chip and chip.peak_of(dtype)
