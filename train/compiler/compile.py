"""Compilation of the steps of an experiment for a target, and a report of the compiler's plan."""

import re
import time
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

from lineage.models.budget import aligned
from lineage.models.decoding.generate import empty, separate_layers
from lineage.train.compiler.chips import GIB
from lineage.train.compiler.plan import LARGE, Plan
from lineage.train.compiler.targets import Target
from lineage.train.experiment import Experiment
from lineage.train.preparation import jit_step
from lineage.train.profiling.estimates import RESOURCE_EXHAUSTED, experiment_budget
from lineage.train.sharding import batch_sharding, check_batch, placed, shardings
from lineage.train.step import cast, make_forward_step

# Needed and available memory in the two error messages of the TPU compiler; the first one excludes arguments.
USED_MEMORY = re.compile(
    r"temporaries \(([\d.]+\w)\) exceeds available HBM \(([\d.]+\w)\)|Used ([\d.]+\w) of ([\d.]+\w) hbm"
)


@dataclass(frozen=True)
class Compiled:
    """Compiled step; bytes and FLOPs are per device."""

    title: str  # the experiment, the step and the target
    plan: Plan  # costs of the program
    arguments: int  # bytes of the inputs and of the outputs that do not reuse them
    temporaries: int  # bytes of all other arrays
    host: int  # bytes of inputs in host memory; the planned time excludes their transfers
    peak: int  # peak number of bytes in use
    flops: float | None  # FLOPs of the model without recomputation; None for decoding, which is bandwidth-bound
    precision: str  # dtype of computation
    leaves: int  # number of state arrays with more than one element, which should be donated
    seconds: float  # duration of the compilation

    @property
    def fits(self) -> bool:
        """True if the program fits in the memory of the chip."""
        return self.peak <= self.plan.chip.memory

    @property
    def ideal(self) -> float:
        """Seconds of the model's FLOPs at the peak of the precision; for decoding, of reading all arguments once."""
        chip = self.plan.chip
        return self.arguments / chip.bandwidth if self.flops is None else self.flops / chip.peak_of(self.precision)

    @property
    def utilization(self) -> float:
        """Ideal time as a fraction of the planned time: the MFU, or for decoding the bandwidth utilization."""
        return self.ideal / max(self.plan.seconds, 1e-12)

    def figures(self) -> dict[str, Any]:
        """Return the figures for JSON, in bytes and seconds per device."""
        plan, buffers = self.plan, sorted(self.plan.buffers.values(), reverse=True)
        fields = ("title", "arguments", "temporaries", "host", "peak", "fits", "ideal", "utilization", "leaves")
        values = {name: getattr(self, name) for name in fields}
        values |= {name: getattr(plan, name) for name in ("seconds", "estimated", "roofline", "exposed")}
        values |= {"matmul": plan.share("matmul|gemm"), "f32_matmul": plan.share("f32 matmul")}
        values |= {"memory": plan.chip.memory, "donated": plan.module.donated, "compile_seconds": self.seconds}
        rows = {"operations": plan.costliest(), "collectives": plan.collectives, "buffers": buffers}
        return values | {name: [entry._asdict() for entry in entries] for name, entries in rows.items()}

    def __str__(self) -> str:
        plan = self.plan
        memory = (
            f"memory       {self.peak / GIB:.2f} GiB of {plan.chip.memory / GIB:.2f}: "
            f"{'fits' if self.fits else 'DOES NOT FIT'} "
            f"(arguments {self.arguments / GIB:.2f}, temporaries {self.temporaries / GIB:.2f})"
        )
        parts = f"compiler's estimates {plan.estimated * 1e3:.2f}, ~roofline {plan.roofline * 1e3:.2f}"
        times = f"planned time {plan.seconds * 1e3:.2f} ms ({parts}, exposed communication {plan.exposed * 1e3:.2f})"
        name = "bandwidth   " if self.flops is None else "MFU         "
        shares = f"{plan.share('matmul|gemm'):.0%} of the time, those in float32 {plan.share('f32 matmul'):.0%}"
        use = f"{name} {self.utilization:.1%} (ideally {self.ideal * 1e3:.2f} ms); matrix products take {shares}"
        donated = f"donated      {plan.module.donated} arrays; the state has {self.leaves} with more than one element"
        host = f"host memory  {self.host / GIB:.2f} GiB; the planned time does not include their transfer in each step"
        lines = (self.title, memory, host if self.host else "", times, use, donated if self.leaves else "")
        head = "\n".join(filter(None, lines))
        return "\n\n".join(part for part in (head, self._operations(), self._collectives(), self._buffers()) if part)

    def _operations(self) -> str:
        rows = [("costliest operations", "ms", "share", "times", "kind", "shape")]
        for row in self.plan.costliest():
            share = f"{row.seconds / self.plan.seconds:.1%}"
            milliseconds = f"{'' if row.estimated else '~'}{row.seconds * 1e3:.2f}"
            rows.append((row.label[-70:], milliseconds, share, str(row.times), row.kind[:24], row.shape[:40]))
        return aligned(rows)

    def _collectives(self) -> str:
        rows = [("communication", "times", "GB", "ms", "hidden ms", "largest")]
        for kind in dict.fromkeys(collective.kind for collective in self.plan.collectives):
            group = [collective for collective in self.plan.collectives if collective.kind == kind]
            largest = max(group, key=lambda collective: collective.bytes)
            moved = sum(collective.bytes * collective.times for collective in group) / 1e9
            needed = sum(collective.seconds * collective.times for collective in group) * 1e3
            hidden = sum(collective.hidden * collective.times for collective in group) * 1e3
            label = f"{largest.bytes / 2**20:.0f} MiB {largest.label[-50:]}"
            times = sum(collective.times for collective in group)
            rows.append((kind, str(times), f"{moved:.2f}", f"{needed:.2f}", f"{hidden:.2f}", label))
        return aligned(rows) if len(rows) > 1 else ""

    def _buffers(self) -> str:
        rows = [(f"buffers of {LARGE // 2**20} MiB or more", "GiB", "times", "from")]
        for buffer in sorted(self.plan.buffers.values(), reverse=True):
            rows.append((buffer.shape, f"{buffer.bytes / GIB:.2f}", str(buffer.times), buffer.label[-60:]))
        return aligned(rows) if len(rows) > 1 else ""


def without_data(config: ConfigDict) -> ConfigDict:
    """Return the config with durations that need no data; the compiled step does not depend on them."""
    config = config.copy_and_resolve_references()
    for section, name in ((config, "total"), (config.schedule, "warmup")):
        if section[f"{name}_epochs"] is not None:
            section.update({f"{name}_epochs": None, f"{name}_steps": 1000})
    return config


def compile_step(experiment: Experiment, target: Target, step: str = "train", title: str = "") -> Compiled:
    """Compile a step of an experiment for the devices of a target.

    Args:
        experiment: experiment created with `devices=target.devices()`.
        target: chips to compile for.
        step: "train", "evaluate" or "decode".
        title: name of the experiment, for the report.

    Raises:
        MemoryError: no program fits in the memory of the target.
        ValueError: the model has no such step, or the batch cannot be split over the devices.
    """
    start = time.monotonic()
    lowered, leaves = lower(experiment, step)
    try:
        compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        if error.error_code != RESOURCE_EXHAUSTED:
            raise
        reason = str(error).partition("\n")[0]
        if used := USED_MEMORY.search(str(error)):
            needed, available = filter(None, used.groups())
            reason = f"it needs {needed} of {available} HBM."
        raise MemoryError(f"{title} does not fit: {reason}") from error
    memory = compiled.memory_analysis()
    kept = max(0, memory.output_size_in_bytes - memory.alias_size_in_bytes)
    arguments, temporaries = memory.argument_size_in_bytes + kept, memory.temp_size_in_bytes
    host, plan = memory.host_argument_size_in_bytes, Plan(compiled.as_text(), target.chip)
    peak = max(arguments + temporaries, memory.peak_memory_in_bytes - host)
    flops = None
    if step != "decode":
        total = experiment_budget(experiment).flops["training" if step == "train" else "forward"]["model"]
        flops = total * _batch_size(experiment, step) / experiment.loader.batch_size / experiment.mesh.size
    sizes = {"arguments": arguments, "temporaries": temporaries, "host": host, "peak": peak}
    cost = {"flops": flops, "precision": experiment.run.precision}
    return Compiled(title, plan, **sizes, **cost, leaves=leaves, seconds=time.monotonic() - start)


def _batch_size(experiment: Experiment, step: str) -> int:
    """Return the global batch size of a training or evaluation step."""
    loader = experiment.loader
    return (step == "evaluate" and loader.evaluation_batch_size) or loader.batch_size


def lower(experiment: Experiment, step: str) -> tuple[Any, int]:
    """Return a step lowered for the devices of an experiment, and the number of arrays that it should donate.

    The decoding step extends `sampling.num_samples` sequences by the most probable token, with a cache for the longest
    sequence, in the config's format, and parameters in its precision and format (`weights`).
    """
    mesh, precision = experiment.mesh, experiment.run.precision
    state = placed(experiment.abstract_state, experiment.state_shardings)
    if step != "decode":
        size = _batch_size(experiment, step)
        check_batch(size, mesh, experiment.run.grad_accum_steps if step == "train" else 1)
        batch = jax.eval_shape(partial(experiment.zeros, size))
        batch = placed(batch, jax.tree.map(lambda _: batch_sharding(mesh), batch))
    if step == "train":
        return jit_step(experiment).lower(state, batch), _arrays(state)
    variables = jax.eval_shape(experiment.variables, state)
    if step == "evaluate":
        variables = placed(variables, shardings(variables, experiment.sharding_rules, mesh))
        evaluation = make_forward_step(experiment.model, experiment.task.loss, precision, mutable=["memory"])
        return experiment.jit(evaluation).lower(variables, batch), 0
    model, size = experiment.model, experiment.run.sampling.num_samples or 1
    if not model.is_decoder:
        raise ValueError(f"step is {step!r}: {type(model).__name__} generates no text, so it has no decoding step.")
    variables = jax.eval_shape(lambda tree: separate_layers(model, cast(tree, jnp.dtype(precision))), variables)
    variables = placed(variables, shardings(variables, experiment.sharding_rules, mesh))
    length = model.max_length or experiment.task.sequence_length
    batch = jax.eval_shape(lambda: experiment.zeros(size))
    inputs = (batch["inputs"], batch["inputs_mask"]) if "inputs" in batch else None
    begin = partial(empty, model, batch_size=size, max_length=length, cache_format=experiment.run.sampling.cache_format)
    cache, memory = jax.eval_shape(begin, variables, inputs)
    tokens = jax.ShapeDtypeStruct((size, 1), jnp.int32)

    def decode(variables, tokens, cache, memory):
        logits, cache = model.apply(variables, tokens, cache, memory, method="decode")
        return logits.argmax(axis=-1).astype(jnp.int32), cache

    lowered = experiment.jit(decode, donate_argnums=2).lower(variables, tokens, cache, memory)
    return lowered, _arrays(cache)


def _arrays(tree: Any) -> int:
    """Return the number of arrays with more than one element; steps may not use all scalars of an optimizer."""
    return sum(leaf.size > 1 for leaf in jax.tree.leaves(tree))
