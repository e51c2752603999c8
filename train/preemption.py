"""What keeps a run and its workdir safe: one run at a time, its own config, a stop that saves, errors that explain."""

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
from ml_collections import ConfigDict

from lineage.runs.folder import differences, has_saved, plain, read_json, write_atomic

# What a later part of the same run may change: how long it is, when it looks and saves, and what it is computed on.
MAY_CHANGE = (
    *(
        "total_",
        "log_every_",
        "evaluate_every_",
        "save_every_",
        "checkpoint.",
        "sampling.",
        "experts.",
        "wandb",
        "cluster.",
    ),
    *("mesh.", "sharding", "grad_accum_steps", "model.remat", "model.unroll", "model.implementation"),
    *("data.evaluation_batch_size", "data.workers", "data.threads", "data.cache_dir"),
)


class Preempted(Exception):
    """The run was told to stop and has saved; started again, it goes on from there."""


@contextlib.contextmanager
def explained(memory: Mapping[str, int] = MappingProxyType({})) -> Iterator[None]:
    """Raises MemoryError, with what to change, where a device runs out of memory.

    Args:
        memory: what a step is estimated to need, in bytes, by part; it may be filled inside.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        parts = ", ".join(f"{name} {size / 2**30:.3g} GiB" for name, size in memory.items())
        raise MemoryError(
            f"out of memory ({str(error).splitlines()[0]}): make data.batch_size smaller or grad_accum_steps larger, "
            "set model.remat, or spread the parameters over mesh.fsdp; see `lineage describe`."
            + f" Estimated for a step, on all devices together: {parts}."
            * bool(parts)
        ) from error


def keep_config(config: ConfigDict, workdir: Path, force: bool = False) -> None:
    """Writes `config.json`.

    Args:
        config: of this run.
        workdir: where it is.
        force: even if the workdir holds a run of another config.

    Raises:
        ValueError: the workdir holds a run of another config; the message has the keys that differ.
    """
    path, saved = workdir / "config.json", has_saved(workdir)
    if not saved:  # a run that never saved leaves nothing to one that starts anew
        for name in ("tokenizer.json", "artifacts/samples.jsonl"):
            (workdir / name).unlink(missing_ok=True)
    if saved and path.exists() and not force:
        check_config(config, workdir)
    write_atomic(path, _text(config))


def keep_data(files: Mapping[str, Any], workdir: Path, force: bool = False) -> None:
    """Writes `data.json`: the files that the run reads, each with what changes when it does.

    Raises:
        ValueError: they are not those that the run in the workdir began with, unless `force` is True.
    """
    path = workdir / "data.json"
    if has_saved(workdir) and path.exists() and not force:
        before = read_json(path)
        changed = [name for name in {**before, **files} if before.get(name) != files.get(name)]
        if changed:
            raise ValueError(
                f"{', '.join(changed[:3])} changed since the run in {workdir} began ({len(changed)} of {len(before)} "
                "files): restore the data, choose another workdir, or --force-config."
            )
    write_atomic(path, json.dumps(files, indent=2))


def check_shared(config: ConfigDict, workdir: Path) -> None:
    """Raises ValueError unless the workdir and the config are those of process 0, which has written `config.json`."""
    path = workdir / "config.json"
    if not path.exists() or path.read_text(encoding="utf-8") != _text(config):
        raise ValueError(
            f"{path} of process {jax.process_index()} is not that of process 0: every process must be given the same "
            "command, and a workdir on storage that all share."
        )


def check_config(config: ConfigDict, workdir: Path) -> None:
    """Raises ValueError, with the keys that differ, unless the run in the workdir is one of this config."""
    there = read_json(workdir / "config.json")
    changed = [
        f"{key}: {was!r} there, {now!r} here"
        for key, was, now in differences(there, plain(config))
        if not key.startswith(MAY_CHANGE)
    ]
    if changed:
        raise ValueError(
            f"{workdir} holds a run of another config ({'; '.join(changed)}): choose another workdir, or "
            "--force-config."
        )


def _text(config):
    return json.dumps(plain(config), indent=2)
