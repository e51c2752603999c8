"""Checks of a run's folder before it is used: it must belong to a run of this config, with these data."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
from ml_collections import ConfigDict

from lineage.configs.atomic import write_atomic
from lineage.runs.folder import differences, has_saved, plain, read_json

# Beginnings of the keys that may change when a run is resumed: its length, when it evaluates and saves, and the devices
# and processes that it uses. A test checks that each is the beginning of a key.
MAY_CHANGE = (
    "checkpoint.",
    "cluster.",
    "evaluate_every_",
    "evaluators.",
    "experts.",
    "grad_accum_steps",
    "imports",
    "loader.evaluation_batch_size",
    "loader.threads",
    "loader.workers",
    "log_every_",
    "mesh.",
    "model.attend",
    "model.remat",
    "model.unroll",
    "sampling.",
    "save_every_",
    "sharding",
    "task.cache_dir",
    "total_",
    "wandb",
)


def keep_config(config: ConfigDict, workdir: Path, force: bool = False) -> None:
    """Write `config.json`, and delete the files of an earlier run that has not saved a checkpoint.

    Args:
        force: accept a folder that holds a run of another config, which otherwise raises ValueError.
    """
    path, saved = workdir / "config.json", has_saved(workdir)
    if not saved:
        for name in ("tokenizer.json", "artifacts/samples.jsonl"):
            (workdir / name).unlink(missing_ok=True)
    if saved and path.exists() and not force:
        check_config(config, workdir)
    write_atomic(path, _text(config))


def keep_data(files: Mapping[str, Any], workdir: Path, force: bool = False) -> None:
    """Write `data.json`, the fingerprints by path of the files that the run reads.

    Args:
        force: accept files that differ from those that the run started with, which otherwise raise ValueError.
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
    """Check that this process has the config and the folder of process 0, which has written `config.json`.

    Raises:
        ValueError: it has not.
    """
    path = workdir / "config.json"
    if not path.exists() or path.read_text(encoding="utf-8") != _text(config):
        raise ValueError(
            f"{path} of process {jax.process_index()} is not that of process 0: every process must be given the same "
            "command, and a workdir on storage that all share."
        )


def check_config(config: ConfigDict, workdir: Path) -> None:
    """Raise ValueError unless the run in the folder has this config, apart from the keys of `MAY_CHANGE`."""
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
