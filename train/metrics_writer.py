"""Metrics of a running experiment: `metrics.jsonl`, TensorBoard and Weights & Biases."""

import importlib.util
import json
import math
import os
import re
import sys
import time
import uuid
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from lineage.configs.atomic import naming, write_atomic
from lineage.runs import folder
from lineage.runs.progress import ProgressBar

COUNTS = ("train/skipped", "train/skipped_in_a_row")  # metrics that are not averaged


class MetricsWriter(AbstractContextManager):
    """Writer of scalars by step to `metrics.jsonl` (see `History`), TensorBoard and Weights & Biases.

    Args:
        workdir: folder of the run; created if it does not exist.
        resume_step: step of the checkpoint that the run resumes from, 0 for a new run.
        wandb: Weights & Biases project to write to as well; "" disables it. A resumed run continues its W&B run,
            unless its folder is a copy of one that still exists.
        config: config of the run, for Weights & Biases; the run is named after the workdir.
        primary: whether this process writes (`jax.process_index() == 0`).

    Attributes:
        history: the file `metrics.jsonl`; None in other processes.
    """

    def __init__(
        self,
        workdir,
        *,
        resume_step: int = 0,
        wandb: str = "",
        config: Mapping[str, Any] | None = None,
        primary: bool = True,
    ):
        self.history = self._events = self._wandb = None
        if not primary:
            return
        if wandb and importlib.util.find_spec("wandb") is None:
            raise ModuleNotFoundError(
                "Weights & Biases is not installed: `pip install wandb`, or leave the key wandb empty."
            )
        workdir = Path(workdir)
        workdir.mkdir(parents=True, exist_ok=True)
        self.history = History(workdir / folder.METRICS, resume_step)
        self._events = Events(workdir / "events", resume_step)
        self._row = self.history.newest  # row of W&B that is not yet sent
        if wandb:
            from wandb import init

            # W&B ignores steps that it already has, so only complete rows are sent; a resumed run has the same values.
            identity = {"id": _wandb_id(workdir, resume_step > 0), "name": workdir.name, "resume": "allow"}
            self._wandb = init(project=wandb, dir=str(workdir), config=config, **identity)

    def write(self, step: int | np.integer, metrics: Mapping[str, Any]) -> None:
        """Write one line: `step`, then the metrics (`split/name` to a Python, numpy or JAX scalar).

        Raises:
            ValueError: a value is not a scalar.
            OSError: the disk is full; the line is written by the next `write` or `flush`.
        """
        if self.history is None:
            return
        scalars = {key: _scalar(key, value) for key, value in metrics.items()}
        if self.history.write(int(step), scalars):
            self._events.write(int(step), scalars)
            if step != self._row.get("step"):
                self._send_row()
                self._row = {"step": int(step)}
            self._row |= scalars

    def _send_row(self):
        """Send the values of the newest step to W&B."""
        if self._wandb is not None and self._row:
            scalars = {key: value for key, value in self._row.items() if key != "step"}
            self._wandb.log(scalars, step=self._row["step"])

    def flush(self) -> None:
        """Flush `metrics.jsonl` to the disk, so that a checkpoint never refers to lines that are lost."""
        if self.history is not None:
            self.history.flush()

    def close(self, complete: bool = True) -> None:
        """Close all files; closing twice is harmless.

        Unless the newest step is `complete`, W&B gets its values when the run resumes, with those of its evaluation.
        """
        if self.history is not None:
            self.history.file.close()
            self._events.close()
            if complete:
                self._send_row()
            if self._wandb is not None:
                self._wandb.finish()
            self.history = None

    def __exit__(self, kind: type | None, *_) -> None:
        self.close(complete=kind is None)


class History:
    """The file `metrics.jsonl`; the history of a killed and resumed run equals that of an uninterrupted one.

    A line survives the death of the process once `write` has returned. NaN and infinity, which JSON lacks, are written
    as null. When a run resumes, lines of later steps than `resume_step` are deleted, and lines of this step, such as an
    evaluation repeated after a kill, are not written twice.

    Attributes:
        file: the open file.
        lines: number of lines.
        newest: the lines of the newest step when the run resumes, as one line; {} if there is none.
        crc32: CRC-32 of these lines.
        earlier: duration of the run's earlier starts up to their last lines, and of the useful part of it, in seconds.
    """

    def __init__(self, path: Path, resume_step: int):
        before = list(folder.parse_metrics(path)) if path.exists() and resume_step else []
        kept = [line for line in before if line["step"] <= resume_step]
        write_atomic(path, "".join(json.dumps(line) + "\n" for line in kept))
        seconds = [time for (time,) in _numbers(before, "time/seconds")]
        useful = [share * time for share, time in _numbers(kept, "time/goodput", "time/seconds")]
        self.earlier = next(reversed(seconds), 0.0), next(reversed(useful), 0.0)
        self.lines, self.crc32 = len(kept), zlib.crc32(path.read_bytes())
        newest = [line for line in kept if line["step"] == kept[-1]["step"]]
        self.newest = {key: math.nan if value is None else value for line in newest for key, value in line.items()}
        self._rewritten = {_identity(line) for line in kept if line["step"] == resume_step}
        self.path, self.file, self._pending = path, path.open("ab", buffering=0), b""

    def write(self, step: int, scalars: Mapping[str, int | float]) -> bool:
        """Add a line; return False if the file had it when the run resumed."""
        line = {"step": step} | folder.without_nan(scalars)
        if _identity(line) in self._rewritten:
            return False
        content = json.dumps(line).encode() + b"\n"
        self._pending += content
        self.lines, self.crc32 = self.lines + 1, zlib.crc32(content, self.crc32)
        self._write_pending()
        return True

    def flush(self) -> None:
        """Write what is pending, and flush the file to the disk."""
        self._write_pending()
        with naming(self.path):
            os.fsync(self.file.fileno())

    def _write_pending(self):
        with naming(self.path):
            while self._pending:
                self._pending = self._pending[self.file.write(self._pending) :]


class Events:
    """TensorBoard file of scalars, with a name that begins with that of `path`.

    tensorboardX's `SummaryWriter` writes from a thread that dies on a full disk; the run would wait for it forever.
    """

    def __init__(self, path: Path, resume_step: int):
        with _without_torch():
            from tensorboardX.event_file_writer import EventsWriter
            from tensorboardX.proto import event_pb2, summary_pb2

        self._path, self._event, self._summary = path, event_pb2.Event, summary_pb2.Summary
        # TensorBoard reads the files in the order of the times in their names, but the clock may have been set back.
        earlier = (re.search(r"\.tfevents\.(\d{10})\.", file.name) for file in path.parent.glob(f"{path.name}.out.*"))
        newest = max((int(match[1]) for match in earlier if match), default=0)
        if newest >= int(time.time()):
            path = path.with_name(f"{path.name}.out.tfevents.{newest + 1}")
        # Two runs that start in the same second must not share a file.
        with naming(path):
            self._writer = EventsWriter(str(path), f".{uuid.uuid4().hex[:8]}")
        # TensorBoard hides the events of earlier files from this step on.
        start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        self._write(resume_step + 1 if resume_step else 0, session_log=start)

    def write(self, step: int, scalars: Mapping[str, int | float]) -> None:
        """Write the values of a step."""
        values = [self._summary.Value(tag=key, simple_value=value) for key, value in scalars.items()]
        self._write(step, summary=self._summary(value=values))

    def close(self) -> None:
        """Close the file; what a full disk has no room for is lost, as `write` has already said."""
        with suppress(OSError):
            self._writer.close()

    def _write(self, step, **content):
        with naming(self._path):
            self._writer.write_event(self._event(wall_time=time.time(), step=step, **content))
            self._writer.flush()


class Log:
    """Log of a run on the progress bar and in the history: means of the metrics of its steps, and its evaluations.

    Means are over the finite values, or nan if there are none; for numbers of skipped updates, the newest is used.

    Args:
        sums: total and number of the values of each metric since the last line, from the checkpoint of a resumed run.
        every: number of steps between two lines.
        continues: whether a full disk is reported once and the run continues; otherwise the OSError is raised.
    """

    def __init__(
        self, progress: ProgressBar, writer: MetricsWriter, sums: Mapping[str, Any], every: int, continues: bool
    ):
        self.progress, self.writer, self._sums = progress, writer, dict(sums)
        self._every, self._continues, self._reported = every, continues, False

    def step(self, step: int, metrics: Mapping[str, float], measure: Callable[[], dict[str, float]]) -> None:
        """Add the metrics of a step; if a line is due, write the means and the metrics that `measure` returns."""
        for key, value in metrics.items():
            total, number = self._sums.get(key, (0.0, 0))
            if key in COUNTS:
                total, number = value, 1
            elif math.isfinite(value):
                total, number = total + value, number + 1
            self._sums[key] = total, number
        due = step % self._every == 0 or step == self.progress.total
        if due:
            means = {key: total / number if number else math.nan for key, (total, number) in self._sums.items()}
            metrics, self._sums = means | measure(), {}
            with self.disk_errors():
                self.writer.write(step, metrics)
        self.progress.update(step, metrics if due else None)

    def evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show and write the metrics of an evaluation."""
        self.progress.evaluation(step, metrics)
        with self.disk_errors():
            self.writer.write(step, metrics)

    def flush(self) -> None:
        """Flush the history to the disk (see `MetricsWriter.flush`)."""
        with self.disk_errors():
            self.writer.flush()

    def record(self) -> dict[str, Any]:
        """Return the entries of the record of a checkpoint: the averages, and in the writing process the history."""
        history = self.writer.history
        written = {"lines": history.lines, "history_crc32": history.crc32} if history else {}
        return written | {"averages": self._sums}

    @contextmanager
    def disk_errors(self) -> Iterator[None]:
        """Report an OSError of the block once and continue, if the run does so."""
        try:
            yield
        except OSError as error:
            if not self._continues:
                raise
            if not self._reported:
                self.progress.message(f"{error}. The run continues.")
            self._reported = True


@contextmanager
def _without_torch():
    """Hide torch from an import that would otherwise spend seconds on importing it."""
    if "torch" in sys.modules:
        yield
        return
    sys.modules["torch"] = None
    try:
        yield
    finally:
        del sys.modules["torch"]


def _scalar(key: str, value: Any) -> int | float:
    array = np.asarray(value)
    if array.ndim:
        raise ValueError(f"The metric {key!r} has shape {array.shape}: it must be a scalar.")
    return int(array) if array.dtype.kind in "iub" else float(array)


def _identity(line: Mapping[str, Any]) -> tuple:
    return line["step"], frozenset(key for key in line if not key.startswith(folder.MEASURED))


def _numbers(lines: Iterable[Mapping[str, Any]], *keys: str) -> Iterator[list[float]]:
    """Yield the values of some keys in each line, except in lines that lack one or in which one is not a number."""
    for line in lines:
        values = [line.get(key) for key in keys]
        if all(isinstance(value, int | float) and abs(value) < 1e15 for value in values):
            yield values


def history_problem(path: Path, record: Mapping[str, Any]) -> str:
    """Describe the problem of a history; "" if it begins with the history in the record of a checkpoint.

    Raises:
        ValueError: a line is damaged.
    """
    known = record.get("lines", 0)
    present = sum(line["step"] <= record.get("next_batch", 0) for line in folder.parse_metrics(path))
    if present < known:
        return f"{known - present:,} of {known:,} lines are lost"
    with path.open("rb") as file:
        crc32 = zlib.crc32(b"".join(islice(file, known)))
    return "" if record.get("history_crc32", crc32) == crc32 else f"the first {known:,} lines are not those written"


def check_events(path: Path) -> None:
    """Check the records of a TensorBoard file; a kill or a full disk may have cut the last one."""
    with _without_torch():
        from tensorboardX.record_writer import masked_crc32c
    size, is_head, file_size = 12, True, path.stat().st_size
    with path.open("rb") as file:
        while len(part := file.read(size)) == size:  # alternately the size of a record and the record, with checksums
            if masked_crc32c(part[:-4]).to_bytes(4, "little") != part[-4:]:
                raise ValueError(f"the checksum before byte {file.tell():,} does not match")
            size, is_head = min(int.from_bytes(part[:8], "little") + 4, file_size) if is_head else 12, not is_head


def _wandb_id(workdir: Path, resumes: bool) -> str:
    """Return the id of the W&B run of a folder: a new one if the run starts, or is a copy of one that still exists."""
    file, place = workdir / "wandb_id.txt", str(workdir.resolve())
    known, *places = file.read_text().splitlines() if resumes and file.exists() else [""]
    other = Path(places[0], file.name) if places and places[0] != place else None
    if not known or (other and other.exists() and other.read_text().startswith(known)):
        known = uuid.uuid4().hex[:12]
    write_atomic(file, f"{known}\n{place}\n")
    return known
