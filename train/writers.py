"""Where the numbers of a run go: `metrics.jsonl`, TensorBoard event files and, if asked for, Weights & Biases."""

import importlib.util
import json
import math
import os
import time
import uuid
from collections.abc import Mapping
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from lineage.runs import folder


class MetricsWriter(AbstractContextManager):
    """Writes scalars by step so that the history of a killed and resumed run equals the uninterrupted one.

    A line of `metrics.jsonl` survives the death of the process once `write` has returned. JSON has no NaN or infinity:
    such a number is written as null (TensorBoard gets the number itself).

    Args:
      workdir: the folder of the run; made if absent.
      resume_step: the step from which the run goes on. 0 is a new run: an earlier one's lines are dropped. At n, lines
        with step > n are cut, and a line of step n that is there already is not written twice (an evaluation done
        again after a kill).
      wandb: the project of Weights & Biases to write to as well; "" = none. A resumed run continues its W&B run.
      primary: whether this process writes; give `jax.process_index() == 0`. The others touch no file.

    Raises ModuleNotFoundError if W&B is asked for and not installed, ValueError if `metrics.jsonl` is damaged.
    """

    def __init__(self, workdir, *, resume_step: int = 0, wandb: str = "", primary: bool = True):
        self._file = self._wandb = None
        if not primary:
            return
        if wandb and importlib.util.find_spec("wandb") is None:
            raise ModuleNotFoundError(
                "Weights & Biases is asked for but not installed: `pip install wandb`, or turn it off."
            )
        # Here because it is slow to import: it brings torch where that is installed. Its `SummaryWriter` writes from
        # a thread, which dies on a full disk and lets the run wait for it for ever.
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto import event_pb2, summary_pb2

        workdir = Path(workdir)
        workdir.mkdir(parents=True, exist_ok=True)
        self._path = workdir / folder.METRICS
        lines = _cut(self._path, resume_step)
        self._rewritten = {_identity(line) for line in lines if line["step"] == resume_step}
        self._file, self._left = self._path.open("ab", buffering=0), b""
        self._event, self._summary = event_pb2.Event, summary_pb2.Summary
        # Two runs in one second must not share a file.
        self._events = EventsWriter(str(workdir / "events"), f".{uuid.uuid4().hex[:8]}")
        # TensorBoard hides what earlier files hold from this step on.
        start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        self._write_event(resume_step + 1 if resume_step else 0, session_log=start)
        if wandb:
            from wandb import init

            id_file = workdir / "wandb_id.txt"
            if resume_step == 0 or not id_file.exists():
                id_file.write_text(uuid.uuid4().hex[:12])
            # W&B ignores the steps that it has already: a resumed run's are equal to the first ones.
            self._wandb = init(project=wandb, dir=str(workdir), id=id_file.read_text(), resume="allow")

    def write(self, step: int | np.integer, metrics: Mapping[str, Any]) -> None:
        """Writes one line: `step`, then the metrics (`split/name` to a Python, numpy or JAX scalar).

        Raises ValueError for a value that is not a scalar and OSError, naming the file, if the disk is full: what did
        not fit is written by the next `write` or `flush`.
        """
        if self._file is None:
            return
        scalars = {key: _scalar(key, value) for key, value in metrics.items()}
        line = {"step": int(step)} | {key: value if math.isfinite(value) else None for key, value in scalars.items()}
        if _identity(line) in self._rewritten:
            return
        self._left += json.dumps(line).encode() + b"\n"
        try:
            self._write_left()
            values = [self._summary.Value(tag=key, simple_value=value) for key, value in scalars.items()]
            self._write_event(line["step"], summary=self._summary(value=values))
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self._path)) from None
        if self._wandb is not None:
            self._wandb.log(scalars, step=line["step"])

    def flush(self) -> None:
        """Forces `metrics.jsonl` to the disk: before a checkpoint is saved, so that its history is there too."""
        if self._file is not None:
            self._write_left()
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Writes what is pending and closes everything; closing twice is harmless."""
        if self._file is not None:
            self._file.close()
            self._file = None
            with suppress(OSError):  # of a full disk, which `write` has raised already
                self._events.close()
            if self._wandb is not None:
                self._wandb.finish()

    def __exit__(self, *_) -> None:
        self.close()

    def _write_left(self):
        while self._left:
            self._left = self._left[self._file.write(self._left) :]

    def _write_event(self, step, **content):
        self._events.write_event(self._event(wall_time=time.time(), step=step, **content))
        self._events.flush()


def _scalar(key: str, value: Any) -> int | float:
    array = np.asarray(value)
    if array.ndim:
        raise ValueError(f"The metric {key!r} must be a scalar but has the shape {array.shape}.")
    return int(array) if array.dtype.kind in "iub" else float(array)


def _identity(line: Mapping[str, Any]) -> tuple:
    return line["step"], frozenset(key for key in line if not key.startswith("time/"))


def _cut(path: Path, resume_step: int) -> list[dict[str, Any]]:
    """Drops a torn last line and what is after `resume_step` (for 0 everything), atomically; returns what stays."""
    lines = folder.parse_metrics(path) if path.exists() and resume_step else []
    kept = [line for line in lines if line["step"] <= resume_step]
    with folder.replacing(path) as temporary, temporary.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(line) + "\n" for line in kept)
        file.flush()
        os.fsync(file.fileno())
    return kept
