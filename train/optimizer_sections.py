"""Interim sections of optimizers and schedules; replaced by those of `train/optimizer.py`."""

import dataclasses

from lineage.configs.registry import Registry

OPTIMIZERS, SCHEDULES = Registry("optimizer"), Registry("schedule")


@dataclasses.dataclass(frozen=True)
class Optimizer:
    learning_rate: float = 1e-3
    b1: float = 0.9
    b2: float = 0.999
    epsilon: float = 1e-8
    weight_decay: float = 0.0
    no_decay: tuple[str, ...] = ("bias$", "scale$")
    clip_norm: float = 1.0
    frozen: tuple[str, ...] = ()
    frozen_layers: int = 0
    layer_decay: float = 0.0
    lr_multipliers: tuple = ()


@dataclasses.dataclass(frozen=True)
class Schedule:
    warmup_steps: int | None = None
    warmup_epochs: float | None = None
    warmup_examples: int | None = None
    warmup_percent: float | None = None
    end_factor: float = 0.0


for _name in ("adamw", "sgd", "adafactor", "lion", "lars"):
    OPTIMIZERS[_name] = Optimizer
for _name in ("constant", "cosine", "linear", "rsqrt", "transformer"):
    SCHEDULES[_name] = Schedule
