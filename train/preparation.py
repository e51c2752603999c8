"""Checks of a run before its first step, and notes on what is likely to be a mistake."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from lineage.configs.atomic import write_atomic
from lineage.data.fingerprint import fingerprint
from lineage.data.notes import notes
from lineage.evaluation import artifacts
from lineage.runs import folder
from lineage.runs.folder import START
from lineage.train import pretrained
from lineage.train.checkpoint import check_writable, clean
from lineage.train.experiment import Experiment


def prepare_folder(experiment: Experiment, about: Mapping[str, Any], force_config: bool) -> None:
    """Check that an experiment can begin in its folder, or go on in it, and write its config and metadata there."""
    config, workdir, done = experiment.config, experiment.workdir, folder.last_step(experiment.workdir)
    if not done:
        folder.discard(workdir, force_config)
        pretrained.check(experiment)  # before the data are opened
        experiment.check()  # before anything is written
    elif done > (total := experiment.total_steps):
        raise ValueError(f"the run is {total:,} steps long, but {workdir} has step {done:,}.")
    folder.keep_config(config, workdir, force_config)
    artifacts.check(workdir)
    write_atomic(workdir / START, json.dumps(dict(about), indent=2))
    files = fingerprint(experiment.source.files(), cache_dir=experiment.task.cache_dir)
    folder.keep_data(files, workdir, force_config)
    clean(workdir)
    check_writable(workdir)


def start_notes(experiment: Experiment, start: int) -> Iterator[str]:
    """Yield sentences about the data of a run, and about its schedule, that goes on after `start` steps."""
    if not start:
        classified = "label" in experiment.task.arrays and "num_classes" in experiment.model.settings
        yield from notes(experiment.source, experiment.data, classified)
    warmup = experiment.steps("warmup", experiment.config.schedule, default=0)
    if warmup > experiment.total_steps > start:
        yield f"the warm-up has {warmup:,} steps and the run {experiment.total_steps:,}: its peak is not reached."
