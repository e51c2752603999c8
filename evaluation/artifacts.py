"""Artifacts of a run for its report, in `workdir/artifacts`: arrays of figures, samples, costs and run metadata."""

import json
import os
import platform
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from lineage.configs.atomic import replacing, sealed, write_atomic, write_record
from lineage.evaluation.base import Context, Split
from lineage.evaluation.sampling import Sampler
from lineage.models.budget import Budget
from lineage.runs.folder import ARTIFACTS, FACTS, SAMPLES, parse_metrics, read_json


def check(workdir: Path) -> None:
    """Raise ValueError if an earlier artifact to which a run adds is damaged."""
    read_json(workdir / ARTIFACTS / FACTS)
    if (path := workdir / ARTIFACTS / SAMPLES).exists():
        deque(parse_metrics(path), maxlen=0)


def write_samples(context: Context, variables: Any, workdir: Path, step: int) -> None:
    """Append generated texts at a step, if the config enables samples.

    Samples of this and later steps, left by a run that was killed before it saved, are replaced.
    """
    settings = context.sampling
    if not settings.num_samples:
        return
    sampler = Sampler(context)
    texts = sampler.write(variables, settings.prompt)
    if jax.process_index():
        return
    path = folder(workdir) / SAMPLES
    earlier = [line for line in parse_metrics(path) if line["step"] < step] if path.exists() else []
    new = [sealed({"step": step, "prompt": sampler.lead(settings.prompt), "text": text}) for text in texts]
    write_atomic(path, "".join(f"{json.dumps(line)}\n" for line in earlier + new))


def write_snapshot(context: Context, variables: Any, workdir: Path, step: int) -> None:
    """Write the snapshot of an evaluation, such as reconstructed images; `variables` must be whole on every process."""
    if jax.process_index() or not context.data.splits:
        return
    name, batches = next(iter(context.data.splits.items()))
    split = Split(name, name, batches, context.data.facts)
    for name, arrays in context.task.snapshot(context, variables, split).items():
        _write_arrays(folder(workdir) / f"{name}_{step:09}.npz", arrays)


def _write_arrays(path: Path, arrays: Mapping[str, Any]) -> None:
    with replacing(path) as temporary, temporary.open("wb") as file:
        np.savez_compressed(file, **arrays)


def write_all(context: Context, variables: Any, workdir: Path, budget: Budget) -> None:
    """Write all other artifacts but the facts, at the end of a run; `variables` must be whole on every process."""
    if jax.process_index():
        return
    out, data, artifacts = folder(workdir), context.data, dict(context.artifacts)
    for name, batches in data.splits.items():
        batches = replace(batches, process_index=0, process_count=1)  # all examples, not only the share of this process
        artifacts |= context.task.pictures(context, variables, Split(name, name, batches, data.facts))
    for name, content in artifacts.items():
        if all(isinstance(value, np.ndarray | tuple | bool | np.bool_) for value in content.values()):
            _write_arrays(out / f"{name}.npz", content)
        else:
            write_record(out / f"{name}.json", content)
    write_record(out / "cost.json", asdict(budget))


def write_facts(workdir: Path, about: Mapping[str, Any]) -> None:
    """Write metadata of a run and its device, at its end; `seconds` is the duration of all starts of the run."""
    kind = jax.devices()[0].device_kind
    device = f"{platform.machine()} CPU, {os.cpu_count()} cores" if kind == "cpu" else kind
    facts = {"device": device, "python": platform.python_version(), "jax": jax.__version__}
    write_record(folder(workdir) / FACTS, {**about, **facts})


def folder(workdir: Path) -> Path:
    """Return `workdir/artifacts`, created if absent."""
    path = workdir / ARTIFACTS
    path.mkdir(exist_ok=True)
    return path
