"""Progress of a run in the terminal: the bar, the remaining time, and the format of numbers."""

import math
import os
import shutil
import sys
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, suppress
from typing import SupportsFloat

from rich.console import Console
from rich.progress_bar import ProgressBar as Bar

from lineage.runs.folder import MEASURED
from lineage.runs.process import for_terminal

MIN_BAR = 16  # minimum width of the progress bar


class ProgressBar(AbstractContextManager):
    """Display of step, loss, accuracy, examples/s, MFU and the time left: a bar on a terminal, otherwise lines.

    Fields that do not fit the terminal's width are omitted.

    Args:
        total: number of steps of the run.
        stream: where to write; None: standard error.
        log_seconds: seconds between two lines if the stream is not a terminal.
        primary: whether this process shows anything (`jax.process_index() == 0`).

    Attributes:
        total: number of steps of the run.
        step: number of completed steps.
    """

    def __init__(self, total: int, *, stream=None, log_seconds: int | float = 10, primary: bool = True):
        self.total, self.step, self._primary = total, 0, primary
        self._stream = stream or sys.stderr
        self._terminal = self._stream.isatty() and os.environ.get("TERM") != "dumb"
        self._console = Console(file=self._stream)
        self._interval = 0.1 if self._terminal else log_seconds
        self._metrics: dict[str, SupportsFloat] = {}
        self._pace, self._left = Pace(), ""  # the clock starts after the first step
        self._drawn, self._shown = -float("inf"), ""

    def update(self, step: int, metrics: Mapping[str, SupportsFloat] | None = None) -> None:
        """Show `step` completed steps and the newest value of each metric (keys as in `metrics.jsonl`).

        Draws at most ten times per second, and is therefore cheap enough for every step.
        """
        self.step = step
        self._metrics.update(metrics or {})
        self._left = self._pace.left(step, self.total)
        if time.monotonic() - self._drawn >= self._interval and (self._terminal or self._metrics):
            self._draw()

    def message(self, text: str) -> None:
        """Print a line above the bar."""
        text = for_terminal(text, self._stream)
        self._draw(before=f"\r\x1b[2K{text}\n" if self._terminal else f"{text}\n", only_bar=True)

    def evaluation(self, step: int, metrics: Mapping[str, SupportsFloat]) -> None:
        """Print a line for each split of an evaluation: `step 1,200  validation  loss 0.0312  accuracy 0.991`."""
        splits: dict[str, list[str]] = {}
        for key, value in metrics.items():
            split, _, name = key.rpartition("/")
            if not key.startswith(MEASURED):
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
        done, total = (self.step, self.total) if self.total else (1, 1)
        fraction, percent = (min(part * done / total, part) for part in (1, 100))
        head = f"step {self.step:,}/{self.total:,} {math.floor(percent):3}%"  # 100% only at the end
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


def number(value: SupportsFloat) -> str:
    """Return a number with three significant digits, as an integer from 1,000 on: 18,400, 0.990, 0.0312, 3.10e-05."""
    value = float(value)
    return f"{value:,.0f}" if 999.5 <= abs(value) < 1e15 else f"{value:#.3g}".rstrip(".")


class Pace:
    """Estimate of a run's remaining time from its mean speed, including evaluations and checkpoints."""

    def __init__(self):
        self._first: tuple[float, int] | None = None  # time and step of the first call

    def left(self, step: int, total: int | None) -> str:
        """Return the time left as text; "" at the first call, at the end, or if the total is unknown."""
        now = time.monotonic()
        start, first = self._first = self._first or (now, step)
        return clock((now - start) / (step - first) * (total - step)) if total and first < step < total else ""


def clock(seconds: int | float) -> str:
    """Return a duration as 0:12, 3:05, 1:02:03 or 2d 4:00:00."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    text = f"{hours}:{minutes:02}:{seconds:02}" if hours or days else f"{minutes}:{seconds:02}"
    return f"{days}d {text}" if days else text
