"""Following runs from outside: what their folders tell, as one table."""

import math
import os
import re
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table as Grid

from lineage.runs.folder import METRICS, clock, held, number, read_json, read_metrics

LOG = "log.txt"  # what a run of a sweep prints
PROMPT = "$ "  # there, before the command of each start
COLOURS = {"running": "cyan", "done": "green", "failed": "red", "pruned": "yellow", "stopped": "yellow"}
LOG_SECONDS = 30


def task(config: Mapping[str, Any]) -> dict[str, Any]:
    """What a config makes a run do, wherever that is done."""
    return {key: value for key, value in config.items() if key != "cluster"}


@dataclass(eq=False)
class Run:
    """A run and how it goes.

    Attributes:
        name: what it is called in tables.
        folder: its workdir.
        changes: the config's keys that it overrides, with their values.
        config: the whole config, as its `config.json` has it.
        state: waiting, running, done, stopped (it goes on when it is started again), pruned or failed (CODE).
        metrics: the lines of its `metrics.jsonl`.
    """

    name: str
    folder: Path
    changes: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    state: str = "waiting"
    metrics: Sequence[Mapping[str, Any]] = ()
    _read: tuple = ()  # size and time of the file that was read
    _first: tuple[float, int] | None = None  # when it was first seen at work, and at which step

    def look(self) -> bool:
        """Reads `metrics.jsonl`; whether there is anything new."""
        with suppress(FileNotFoundError):
            facts = (self.folder / METRICS).stat()
            if (read := (facts.st_size, facts.st_mtime_ns)) != self._read:
                self.metrics, self._read = read_metrics(self.folder), read
                if self.state == "running" and self.metrics and self._first is None:
                    self._first = time.monotonic(), self.step
                return True
        return False

    @property
    def step(self) -> int | None:
        return self.metrics[-1]["step"] if self.metrics else None

    @property
    def total(self) -> int | None:
        """Of its steps, where the config or what it prints tells it."""
        if (steps := self.config.get("total_steps")) is not None:
            return steps
        shown = re.findall(r"^step [\d,]+/([\d,]+)", self.tail(), re.MULTILINE)
        return int(shown[-1].replace(",", "")) if shown else None

    def last(self, key: str) -> float:
        """The newest value of a metric; NaN if there is none."""
        return next((line[key] for line in reversed(self.metrics) if key in line), math.nan)

    def tail(self) -> str:
        """The end of what it printed, if that is kept."""
        with suppress(FileNotFoundError), (self.folder / LOG).open("rb") as file:
            file.seek(max(file.seek(0, os.SEEK_END) - 4096, 0))
            return file.read().decode(errors="replace")
        return ""

    def error(self) -> str:
        """The error that it ended with, or else the last that it said, since it was started last."""
        lines = self.tail().rpartition(f"\n{PROMPT}")[2].strip().splitlines() or [""]
        return next((line for line in reversed(lines) if line.startswith("error: ")), lines[-1])

    def is_done(self) -> bool:
        """Whether the run of this config came to its end: the facts that it wrote have the config."""
        facts = self.facts()
        return "config" in facts and task(facts["config"]) == task(self.config)

    def facts(self) -> Mapping[str, Any]:
        """What it wrote of itself at its end."""
        return read_json(self.folder / "artifacts" / "run.json")

    def command(self, start: Sequence[str]) -> list[str]:
        """Its command line, after what all runs of a sweep have in common."""
        settings = [f"--config.{key}={value}" for key, value in self.changes.items()]
        return [*start, *settings, f"--workdir={self.folder}"]

    def row(self) -> tuple[str, ...]:
        """Name, state, step, loss and time left, as a table shows them."""
        step, total, loss, left = self.step, self.total, self.last("train/loss"), ""
        if self.state == "running" and self._first and total and step > self._first[1]:
            seconds = (time.monotonic() - self._first[0]) / (step - self._first[1]) * (total - step)
            left = clock(max(seconds, 0))
        shown = "" if step is None else f"{step:,}" + (f"/{total:,}" if total else "")
        return self.name, self.state, shown, "" if math.isnan(loss) else number(loss), left


def labels(keys: Sequence[str]) -> list[str]:
    """The last part of each dotted key, or all of it where others end alike."""
    ends = [key.rpartition(".")[2] for key in keys]
    return [end if ends.count(end) == 1 else key for key, end in zip(keys, ends)]


class Table(AbstractContextManager):
    """Shows runs: on a terminal a table that stays in its place; elsewhere a line for each change of a state, and now
    and then one for each run at work."""

    COLUMNS = ("run", "state", "step", "loss", "left")

    def __init__(self, console: Console | None = None):
        self.console = console or Console(highlight=False)
        self.live = Live(console=self.console, auto_refresh=False) if self.console.is_terminal else None
        self.said: dict[Run, tuple[str, float]] = {}

    def __enter__(self):
        if self.live:
            self.live.start()
        return self

    def __exit__(self, *_):
        if self.live:
            self.live.stop()

    def show(self, runs: Sequence[Run]) -> None:
        """The runs as they are now; those at work and failed come first where the terminal has not room for all."""
        if self.live:
            self.live.update(self._grid(runs), refresh=True)
            return
        now = time.monotonic()
        for run in runs:
            state, when = self.said.get(run, ("waiting", -math.inf))
            if run.state != state or (state == "running" and now - when >= LOG_SECONDS):
                name, state, step, loss, left = run.row()
                said = step and f"step {step}", loss and f"loss {loss}", left and f"{left} left"
                self.console.print("  ".join(filter(None, (name, state, *said))), markup=False, soft_wrap=True)
                self.said[run] = run.state, now

    def _grid(self, runs: Sequence[Run]) -> Grid:
        room = max(self.console.height - 5, 3)
        shown = runs
        if len(runs) > room:
            urgent = sorted(runs, key=lambda run: not run.state.startswith(("running", "failed")))[:room]
            shown = [run for run in runs if run in urgent]
        counts = Counter(run.state.partition(" ")[0] for run in runs)
        caption = ", ".join(f"{count} {state}" for state, count in counts.items())
        grid = Grid(box=None, caption=caption, caption_justify="left", pad_edge=False)
        for column in self.COLUMNS:
            grid.add_column(column, justify="left" if column in ("run", "state") else "right", no_wrap=True)
        for run in shown:
            name, state, *rest = run.row()
            grid.add_row(name.replace("[", r"\["), f"[{COLOURS.get(state.partition(' ')[0], 'dim')}]{state}", *rest)
        return grid


def runs_in(folder: Path) -> list[Path]:
    """The workdirs of a folder that is one, or that has some."""
    if (folder / "config.json").exists():
        return [folder]
    return [path.parent for path in sorted(folder.glob("*/config.json"))]


def watch(folders: Iterable[Path], seconds: float = 1.0) -> None:
    """Shows the runs of folders, each a run's workdir or one of several, until none is at work.

    Raises:
        FileNotFoundError: there is no run.
    """
    folders, runs = list(folders), {}
    with Table() as table:
        while True:
            busy = False
            for folder in folders:
                busy |= held(folder)  # the sweep's own too, which may be about to start a run
                for path in runs_in(folder):
                    if path not in runs:
                        name = str(path.relative_to(folder.parent if len(folders) > 1 else folder))
                        runs[path] = Run(folder.name if name == "." else name, path)
                    run = runs[path]
                    run.config = read_json(path / "config.json")
                    if held(run.folder):
                        run.state, busy = "running", True
                    elif run.is_done():
                        run.state = "done"
                    else:
                        run.state = "failed" if run.error().startswith("error: ") else "stopped"
                    run.look()
            if not runs and not busy:
                raise FileNotFoundError(f"there is no run in {', '.join(map(str, folders))}.")
            table.show(list(runs.values()))
            if not busy:
                return
            time.sleep(seconds)
