"""One line that tells how a run is going: a bar on a terminal, a plain line every few seconds elsewhere."""

import os
import shutil
import sys
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import SupportsFloat

from lineage.runs.folder import clock, number


class Progress(AbstractContextManager):
    """Shows step, loss, accuracy, examples/s, MFU and the time left; what does not fit the terminal is left out.

    Args:
      total: the number of steps of the run.
      stream: where to; standard error by default.
      log_seconds: how often a line is printed when the stream is not a terminal.
      primary: whether this process shows anything; give `jax.process_index() == 0`.
    """

    def __init__(self, total: int, *, stream=None, log_seconds: int | float = 10, primary: bool = True):
        self._total, self._step, self._primary = total, 0, primary
        self._stream = stream or sys.stderr
        self._terminal = self._stream.isatty() and os.environ.get("TERM") != "dumb"
        self._colours = (
            ("\x1b[36m", "\x1b[90m", "\x1b[0m") if self._terminal and not os.environ.get("NO_COLOR") else None
        )
        self._unicode = "utf" in (self._stream.encoding or "").lower()
        self._interval = 0.1 if self._terminal else log_seconds
        self._metrics: dict[str, SupportsFloat] = {}
        self._first: tuple[float, int] | None = None  # the first step includes compilation: the clock starts after it
        self._drawn = -float("inf")

    def update(self, step: int, metrics: Mapping[str, SupportsFloat] | None = None) -> None:
        """Says that `step` steps are done; of `metrics` (keys as in `metrics.jsonl`) the last values stay on show.

        Cheap enough for every step: it draws at most ten times a second.
        """
        self._step = step
        self._metrics.update(metrics or {})
        now = time.monotonic()
        self._first = self._first or (now, step)
        if now - self._drawn >= self._interval and (self._terminal or self._metrics):
            self._draw()

    def message(self, text: str) -> None:
        """Prints a line above the bar."""
        if self._primary:
            self._stream.write(f"\r\x1b[2K{text}\n" if self._terminal else f"{text}\n")
            self._draw(only_bar=True)

    def evaluation(self, step: int, metrics: Mapping[str, SupportsFloat]) -> None:
        """Prints a line for each split of an evaluation: `step 1,200  validation  loss 0.0312  accuracy 0.991`."""
        splits: dict[str, list[str]] = {}
        for key, value in metrics.items():
            split, _, name = key.rpartition("/")
            if split != "time":
                splits.setdefault(split, []).append(f"{name.replace('_', ' ')} {number(value)}")
        for split, values in splits.items():
            self.message("  ".join([f"step {step:,}", split, *values]))

    def close(self) -> None:
        """Draws the last state and ends the line; closing twice is harmless."""
        self._draw()
        if self._primary and self._terminal:
            self._stream.write("\n")
        self._primary = False

    def __exit__(self, *_) -> None:
        self.close()

    def _draw(self, only_bar: bool = False) -> None:
        if self._primary and self._terminal:
            self._stream.write("\r\x1b[2K" + self._line(shutil.get_terminal_size().columns - 1))
        elif self._primary and not only_bar:
            self._stream.write(self._line(None) + "\n")
        self._stream.flush()
        self._drawn = time.monotonic()

    def _line(self, width: int | None) -> str:
        get, fraction = self._metrics.get, min(self._step / max(self._total, 1), 1.0)
        head = f"{self._step:,}/{self._total:,} {fraction:4.0%}"
        fields = []  # (in full, in brief)
        for name, brief in (("loss", "loss"), ("accuracy", "acc")):
            if (value := get(f"train/{name}")) is not None:
                fields.append((f"{name} {number(value)}", f"{brief} {number(value)}"))
        if (rate := get("time/examples_per_second")) is not None:
            fields.append((f"{number(rate)} examples/s", f"{number(rate)}/s"))
        if (mfu := get("time/mfu")) is not None:
            fields.append((f"MFU {float(mfu):.0%}" if mfu >= 0.1 else f"MFU {float(mfu):.1%}",) * 2)
        if self._first and self._first[1] < self._step < self._total:
            # By the mean over the run, not over the last steps: evaluations and checkpoints will come again.
            seconds = (time.monotonic() - self._first[0]) / (self._step - self._first[1]) * (self._total - self._step)
            fields.append((f"{clock(seconds)} left",) * 2)
        long, short = ([field[i] for field in fields] for i in (0, 1))
        if width is None:
            return "  ".join([f"step {head}", *long])
        for start, parts, least in ((f"step {head}", long, 16), (head, short, 5)):
            room = width - len("  ".join([start, *parts])) - 1
            if room >= least:
                return "  ".join([f"{start} {self._bar(fraction, min(room, 40))}", *parts])
        while len(short) > 1 and len("  ".join([head, *short])) > width:
            del short[-2]  # the loss and the time left stay longest
        return "  ".join([head, *short])[:width]

    def _bar(self, fraction: float, width: int) -> str:
        halves = round(fraction * width * 2)
        whole, half, rest = "━╸━" if self._unicode else "#  "
        done = whole * (halves // 2) + half * (halves % 2)
        if self._colours is None:
            return done.ljust(width)
        bright, dim, end = self._colours
        return f"{bright}{done}{dim}{rest * (width - len(done))}{end}"
