"""Metrics of a running experiment: `metrics.jsonl`, TensorBoard, Weights & Biases and the progress bar."""

import importlib.util
import json
import math
import os
import shutil
import sys
import time
import uuid
import zlib
from collections.abc import Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Any, SupportsFloat

import numpy as np
from rich.console import Console
from rich.progress_bar import ProgressBar as Bar

from lineage.configs.atomic import naming, write_atomic
from lineage.runs import folder
from lineage.runs.folder import number

MIN_BAR = 16  # minimum width of the progress bar
COUNTS = ("train/skipped", "train/skipped_in_a_row")  # metrics that are not averaged


class MetricsWriter(AbstractContextManager):
    """Writer of scalars by step; the history of a killed and resumed run equals that of an uninterrupted one.

    A line of `metrics.jsonl` survives the death of the process once `write` has returned. NaN and infinity, which JSON
    lacks, are written as null (TensorBoard gets the number itself).

    Args:
        workdir: folder of the run; created if it does not exist.
        resume_step: step of the checkpoint that the run resumes from, 0 for a new run. Lines of later steps are
            deleted, and lines of this step, such as an evaluation repeated after a kill, are not written twice.
        wandb: Weights & Biases project to write to as well; "" disables it. A resumed run continues its W&B run,
            unless its folder is a copy of one that still exists.
        config: config of the run, for Weights & Biases; the run is named after the workdir.
        primary: whether this process writes (`jax.process_index() == 0`).

    Attributes:
        lines: number of lines of the history.
        crc32: CRC-32 of these lines.
        earlier: duration of the run's earlier starts up to their last lines, and of the useful part of it, in seconds.
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
        self._file = self._wandb = None
        self.lines, self.crc32, self.earlier = 0, 0, (0.0, 0.0)
        if not primary:
            return
        if wandb and importlib.util.find_spec("wandb") is None:
            raise ModuleNotFoundError(
                "Weights & Biases is not installed: `pip install wandb`, or leave the key wandb empty."
            )
        # `SummaryWriter` writes from a thread that dies on a full disk; the run would wait for it forever.
        with _without_torch():
            from tensorboardX.event_file_writer import EventsWriter
            from tensorboardX.proto import event_pb2, summary_pb2

        workdir = Path(workdir)
        workdir.mkdir(parents=True, exist_ok=True)
        self._path = workdir / folder.METRICS
        lines, deleted = _truncated_history(self._path, resume_step)
        seconds = [line["time/seconds"] for line in lines + deleted if "time/seconds" in line]
        useful = [line["time/goodput"] * line["time/seconds"] for line in lines if "time/seconds" in line]
        self.earlier = next(reversed(seconds), 0.0), next(reversed(useful), 0.0)
        self.lines, self.crc32 = len(lines), zlib.crc32(self._path.read_bytes())
        self._rewritten = {_identity(line) for line in lines if line["step"] == resume_step}
        self._file, self._pending = self._path.open("ab", buffering=0), b""
        self._event, self._summary = event_pb2.Event, summary_pb2.Summary
        # Two runs that start in the same second must not share a file.
        with naming(workdir / "events"):
            self._events = EventsWriter(str(workdir / "events"), f".{uuid.uuid4().hex[:8]}")
            # TensorBoard hides the events of earlier files from this step on.
            start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            self._write_event(resume_step + 1 if resume_step else 0, session_log=start)
        if wandb:
            from wandb import init

            # W&B ignores steps that it already has; a resumed run has the same values for them.
            identity = {"id": _wandb_id(workdir, resume_step > 0), "name": workdir.name, "resume": "allow"}
            self._wandb = init(project=wandb, dir=str(workdir), config=config, **identity)

    def write(self, step: int | np.integer, metrics: Mapping[str, Any]) -> None:
        """Write one line: `step`, then the metrics (`split/name` to a Python, numpy or JAX scalar).

        Raises:
            ValueError: a value is not a scalar.
            OSError: the disk is full; the line is written by the next `write` or `flush`.
        """
        if self._file is None:
            return
        scalars = {key: _scalar(key, value) for key, value in metrics.items()}
        line = {"step": int(step)} | {key: value if math.isfinite(value) else None for key, value in scalars.items()}
        if _identity(line) in self._rewritten:
            return
        content = json.dumps(line).encode() + b"\n"
        self._pending += content
        self.lines, self.crc32 = self.lines + 1, zlib.crc32(content, self.crc32)
        with naming(self._path):
            self._write_pending()
            values = [self._summary.Value(tag=key, simple_value=value) for key, value in scalars.items()]
            self._write_event(line["step"], summary=self._summary(value=values))
        if self._wandb is not None:
            self._wandb.log(scalars, step=line["step"])

    def flush(self) -> None:
        """Flush `metrics.jsonl` to the disk, so that a checkpoint never refers to lines that are lost."""
        if self._file is not None:
            with naming(self._path):
                self._write_pending()
                os.fsync(self._file.fileno())

    def close(self) -> None:
        """Write what is pending and close all files; closing twice is harmless."""
        if self._file is not None:
            self._file.close()
            self._file = None
            with suppress(OSError):  # the disk is full; `write` has already raised the error
                self._events.close()
            if self._wandb is not None:
                self._wandb.finish()

    def __exit__(self, *_) -> None:
        self.close()

    def _write_pending(self):
        while self._pending:
            self._pending = self._pending[self._file.write(self._pending) :]

    def _write_event(self, step, **content):
        self._events.write_event(self._event(wall_time=time.time(), step=step, **content))
        self._events.flush()


class Averages:
    """Means of the training metrics over the steps since the last line of the history.

    Means are over the finite values, or nan if there are none; for numbers of skipped updates, the newest is used.

    Attributes:
        sums: total and number of the values of each metric; a resumed run starts with those of its checkpoint.
    """

    def __init__(self, sums: Mapping[str, Any] = MappingProxyType({})):
        self.sums = dict(sums)

    def add(self, metrics: Mapping[str, float]) -> None:
        """Add the metrics of a step."""
        for key, value in metrics.items():
            total, number = self.sums.get(key, (0.0, 0))
            if key in COUNTS:
                total, number = value, 1
            elif math.isfinite(value):
                total, number = total + value, number + 1
            self.sums[key] = total, number

    def take(self) -> dict[str, float]:
        """Return the means and reset them."""
        sums, self.sums = self.sums, {}
        return {key: total / number if number else math.nan for key, (total, number) in sums.items()}


class ProgressBar(AbstractContextManager):
    """Display of step, loss, accuracy, examples/s, MFU and the time left: a bar on a terminal, otherwise lines.

    Fields that do not fit the terminal's width are omitted.

    Args:
        total: number of steps of the run.
        stream: where to write; None: standard error.
        log_seconds: seconds between two lines if the stream is not a terminal.
        primary: whether this process shows anything (`jax.process_index() == 0`).

    Attributes:
        step: number of completed steps.
    """

    def __init__(self, total: int, *, stream=None, log_seconds: int | float = 10, primary: bool = True):
        self._total, self.step, self._primary = total, 0, primary
        self._stream = stream or sys.stderr
        self._terminal = self._stream.isatty() and os.environ.get("TERM") != "dumb"
        self._console = Console(file=self._stream)
        self._interval = 0.1 if self._terminal else log_seconds
        self._metrics: dict[str, SupportsFloat] = {}
        self._pace, self._left = folder.Pace(), ""  # the clock starts after the first step
        self._drawn, self._shown = -float("inf"), ""

    def update(self, step: int, metrics: Mapping[str, SupportsFloat] | None = None) -> None:
        """Show `step` completed steps and the newest value of each metric (keys as in `metrics.jsonl`).

        Draws at most ten times per second, and is therefore cheap enough for every step.
        """
        self.step = step
        self._metrics.update(metrics or {})
        self._left = self._pace.left(step, self._total)
        if time.monotonic() - self._drawn >= self._interval and (self._terminal or self._metrics):
            self._draw()

    def message(self, text: str) -> None:
        """Print a line above the bar."""
        self._draw(before=f"\r\x1b[2K{text}\n" if self._terminal else f"{text}\n", only_bar=True)

    def evaluation(self, step: int, metrics: Mapping[str, SupportsFloat]) -> None:
        """Print a line for each split of an evaluation: `step 1,200  validation  loss 0.0312  accuracy 0.991`."""
        splits: dict[str, list[str]] = {}
        for key, value in metrics.items():
            split, _, name = key.rpartition("/")
            if not key.startswith(folder.MEASURED):
                splits.setdefault(split, []).append(f"{name.replace('_', ' ')} {number(value)}")
        for split, values in splits.items():
            self.message("  ".join([f"step {step:,}", split, *values]))

    def close(self) -> None:
        """Draw the last state and end the line; closing twice is harmless."""
        self._draw(after="\n" if self._terminal else "")
        self._primary = False

    def __exit__(self, *_) -> None:
        self.close()

    def _draw(self, before: str = "", after: str = "", only_bar: bool = False) -> None:
        """Write the bar or a line; a closed terminal or pipe, or a full disk, does not stop the run."""
        if not self._primary:
            return
        with suppress(OSError):
            if self._terminal:
                before += "\r\x1b[2K" + self._line(shutil.get_terminal_size().columns - 1)
            elif not only_bar and (line := self._line()) != self._shown:
                before, self._shown = f"{before}{line}\n", line
            self._stream.write(before + after)
            self._stream.flush()
        self._drawn = time.monotonic()

    def _line(self, width: int | None = None) -> str:
        """Return the line with a bar for a terminal of this width, or the whole line without a bar."""
        fraction = min(self.step / max(self._total, 1), 1.0)
        head = f"step {self.step:,}/{self._total:,} {fraction:4.0%}"
        fields = {"bar": " " * MIN_BAR} if width else {}
        for name in ("loss", "accuracy"):
            if (value := self._metrics.get(f"train/{name}")) is not None:
                fields[name] = f"{name} {number(value)}"
        if (rate := self._metrics.get("time/examples_per_second")) is not None:
            fields["rate"] = f"{number(rate)} examples/s"
        if (mfu := self._metrics.get("time/mfu")) is not None:
            fields["mfu"] = f"MFU {float(mfu):.0%}" if mfu >= 0.1 else f"MFU {float(mfu):.1%}"
        if self._left:
            fields["left"] = f"{self._left} left"
        if width:
            for name in ("accuracy", "rate", "bar", "mfu", "left", "loss"):  # dropped in this order
                if len("  ".join([head, *fields.values()])) > width:
                    fields.pop(name, None)
            if "bar" in fields:
                room = width - len("  ".join([head, *fields.values()])) + MIN_BAR
                fields["bar"] = self._bar(fraction, min(room, 40))
            elif len(head) > width:
                head = head.removeprefix("step ")[:width]
        return "  ".join([head, *fields.values()])

    def _bar(self, fraction: float, width: int) -> str:
        styles = {"style": "bright_black", "complete_style": "cyan", "finished_style": "cyan"}
        with self._console.capture() as drawn:
            self._console.print(Bar(total=1, completed=fraction, width=width, **styles), end="")
        return drawn.get()


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


def history_problem(path: Path, record: Mapping[str, Any]) -> str:
    """Describe the problem of a history; "" if it begins with the history in the record of a checkpoint.

    Raises:
        ValueError: a line is damaged.
    """
    known = record.get("lines", 0)
    found = sum(line["step"] <= record.get("next_batch", 0) for line in folder.parse_metrics(path))
    if found < known:
        return f"{known - found:,} of {known:,} lines are lost"
    with path.open("rb") as file:
        crc32 = zlib.crc32(b"".join(islice(file, known)))
    return "" if record.get("history_crc32", crc32) == crc32 else f"the first {known:,} lines are not those written"


def check_events(path: Path) -> None:
    """Check the records of a TensorBoard file; a kill or a full disk may have cut the last one."""
    with _without_torch():
        from tensorboardX.record_writer import masked_crc32c
    size, is_head, most = 12, True, path.stat().st_size
    with path.open("rb") as file:
        while len(part := file.read(size)) == size:  # alternately the size of a record and the record, with checksums
            if masked_crc32c(part[:-4]).to_bytes(4, "little") != part[-4:]:
                raise ValueError(f"the checksum before byte {file.tell():,} does not match")
            size, is_head = min(int.from_bytes(part[:8], "little") + 4, most) if is_head else 12, not is_head


def _truncated_history(path: Path, resume_step: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Delete a torn last line and the lines after `resume_step` (all for 0), atomically; return the rest and these."""
    lines = list(folder.parse_metrics(path)) if path.exists() and resume_step else []
    kept = [line for line in lines if line["step"] <= resume_step]
    write_atomic(path, "".join(json.dumps(line) + "\n" for line in kept))
    return kept, [line for line in lines if line["step"] > resume_step]


def _wandb_id(workdir: Path, resumes: bool) -> str:
    """Return the id of the W&B run of a folder: a new one if the run starts, or is a copy of one that still exists."""
    file, place = workdir / "wandb_id.txt", str(workdir.resolve())
    known, *places = file.read_text().splitlines() if resumes and file.exists() else [""]
    other = Path(places[0], file.name) if places and places[0] != place else None
    if not known or (other and other.exists() and other.read_text().startswith(known)):
        known = uuid.uuid4().hex[:12]
    write_atomic(file, f"{known}\n{place}\n")
    return known
