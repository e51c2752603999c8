"""Live table of the progress of runs, read from their folders."""

import hashlib
import json
import math
import os
import re
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table as Grid
from rich.text import Text

from lineage.configs.atomic import regular
from lineage.runs.folder import ARTIFACTS, CONFIG, FACTS, METRICS, differences, flatten, is_run_config, read_json
from lineage.runs.locks import held
from lineage.runs.metrics import GrowingMetrics
from lineage.runs.process import ERROR, MOVED, printable, show
from lineage.runs.progress import Pace, number
from lineage.runs.supervisor import reason

LOG = "log.txt"  # the output of a run that a sweep or a job started
PROMPT = "$ "  # precedes the command of each start in the log
COLORS = {"running": "cyan", "done": "green", "failed": "red", "pruned": "yellow", "stopped": "yellow"}
LOG_SECONDS = 30


def without_cluster(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of a config that determines a run's result: all but its cluster settings."""
    return {key: value for key, value in config.items() if key != "cluster"}


def digest(config: Mapping[str, Any]) -> str:
    """Return the SHA-256 of the part of a config that determines a run's result."""
    return hashlib.sha256(json.dumps(without_cluster(config), sort_keys=True).encode()).hexdigest()


@dataclass(eq=False)
class Run:
    """A run and its state: waiting, running, done, stopped (it can continue), pruned or failed (EXIT_CODE)."""

    name: str  # in tables
    folder: Path  # workdir of the run
    changes: Mapping[str, Any] = field(default_factory=dict)  # config keys that the run overrides, with their values
    config: Mapping[str, Any] = field(default_factory=dict)  # the whole config, as in `config.json`
    state: str = "waiting"
    metrics: Sequence[Mapping[str, Any]] = ()  # the lines of `metrics.jsonl`, see `GrowingMetrics`
    code: int | None = None  # exit code of its process, if a sweep started it and it has ended
    ended: str = ""  # why the cluster ended its job, if it says so
    _read: tuple = ()  # size and modification time of the file when it was read
    _file: GrowingMetrics | None = None
    _pace: Pace = field(default_factory=Pace)

    def look(self) -> bool:
        """Read `metrics.jsonl`; return whether it has changed."""
        with suppress(FileNotFoundError):
            facts = (self.folder / METRICS).stat()
            if (read := (facts.st_size, facts.st_mtime_ns)) != self._read:
                self._file = self._file or GrowingMetrics(self.folder / METRICS)
                self.metrics, self._read = self._file.read(), read
                return True
        return False

    @property
    def step(self) -> int | None:
        """Last step with metrics, None if there is none."""
        return self.metrics[-1]["step"] if self.metrics else None

    @property
    def total(self) -> int | None:
        """Total number of steps, from the config or the run's output; None if unknown."""
        if isinstance(steps := self.config.get("total_steps"), int):
            return steps
        shown = re.findall(r"^step [\d,]+/([\d,]*\d)", self.tail(), re.MULTILINE)
        return int(shown[-1].replace(",", "")) if shown else None

    @property
    def settings(self) -> dict[str, Any]:
        """Values of the config by dotted key, with the overrides of the run."""
        return flatten(self.config) | self.changes

    def last(self, key: str) -> float:
        """Return the last value of a metric, NaN if there is none."""
        values = (line[key] for line in reversed(self.metrics) if key in line)
        with suppress(StopIteration, OverflowError):  # an integer can be too large
            return float(next(value for value in values if isinstance(value, int | float)))
        return math.nan

    def tail(self) -> str:
        """Return the end of the log, "" if there is none."""
        return tail(self.folder / LOG)

    def error(self) -> str:
        """Return what killed the process, or the error message in the log since the last start.

        If there is none, return why the cluster ended the job, or the last line of the log.
        """
        if self.code == MOVED or not self.folder.exists():  # the last save may have created the folder anew
            return f"{ERROR}the folder of the run was moved or deleted"
        if self.code is not None and self.code < 0:
            return f"{ERROR}the run was {reason(self.code)}"
        lines = self.tail().rpartition(f"\n{PROMPT}")[2].strip().splitlines() or [""]
        return next((line for line in reversed(lines) if line.startswith(ERROR)), self.ended or lines[-1])

    def is_done(self) -> bool:
        """Return whether a run with this config has finished, which is when its facts contain the config."""
        config = self.facts().get("config")
        return isinstance(config, dict) and without_cluster(config) == without_cluster(self.config)

    def check_config(self) -> None:
        """Raise ValueError if the folder has a run of another config or length, whose results differ."""
        if changed := differences(read_json(self.folder / CONFIG), self.config, also=("total_",)):
            raise ValueError(
                f"{self.folder} holds a run of another config ({changed}): undo the changes of the config since the "
                "sweep began and delete the folder, or choose another workdir."
            )

    def facts(self) -> Mapping[str, Any]:
        """Return the facts that the run wrote when it finished, {} if it has not."""
        return read_json(self.folder / ARTIFACTS / FACTS)

    def command(self, start: Sequence[str]) -> list[str]:
        """Return the command line: `start`, which all runs of a sweep share, the overrides and the workdir."""
        settings = [f"--config.{key}={value}" for key, value in self.changes.items()]
        return [*start, *settings, f"--workdir={self.folder}"]

    def row(self) -> tuple[str, ...]:
        """Return the name, state, step, loss and remaining time as text."""
        step, total, loss = self.step, self.total, self.last("train/loss")
        left = self._pace.left(step, total) if self.state == "running" and self.metrics else ""
        shown = "" if step is None else f"{step:,}" + (f"/{total:,}" if total else "")
        return printable(self.name), self.state, shown, "" if math.isnan(loss) else number(loss), left


def tail(path: Path) -> str:
    """Return the end of a log, "" if there is none."""
    with suppress(FileNotFoundError), regular(path).open("rb") as file:
        file.seek(max(file.seek(0, os.SEEK_END) - 4096, 0))
        return file.read().decode(errors="replace")
    return ""


def labels(keys: Sequence[str]) -> list[str]:
    """Return the last part of each dotted key, or the whole key where the last parts coincide."""
    ends = [key.rpartition(".")[2] for key in keys]
    return [end if ends.count(end) == 1 else key for key, end in zip(keys, ends)]


def distinguishing(overrides: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the keys that distinguish runs with these overrides.

    A key that the keys before it determine (such as a width that is set together with a model's name) is left out.
    """
    keys: list[str] = []
    count = 1  # number of groups of runs that the keys distinguish
    for key in dict.fromkeys(key for changes in overrides for key in changes):
        groups = {tuple(repr(changes.get(k, ...)) for k in (*keys, key)) for changes in overrides}
        if len(groups) > count:
            keys, count = [*keys, key], len(groups)
    return keys


def print_failures(runs: Sequence[Run]) -> None:
    """Print why runs failed, each reason once."""
    errors = defaultdict(list)
    for run in runs:
        if run.state.startswith("failed"):
            errors[run.error()].append(run)
    for error, failed in errors.items():
        others = f" and {len(failed) - 1} more" if len(failed) > 1 else ""
        show(f"\n{failed[0].name}{others}: {error or 'no message'} ({failed[0].folder / LOG})")


class Table(ExitStack):
    """Table of runs.

    On a terminal the table is updated in place. Elsewhere a line is printed for each change of a state, and every
    `LOG_SECONDS` for each run in progress.
    """

    def __init__(self, console: Console | None = None):
        super().__init__()
        self.console = console or Console(highlight=False, emoji=False)
        live = Live(console=self.console, auto_refresh=False)
        self.live = self.enter_context(live) if self.console.is_terminal else None
        self.printed: dict[Run, tuple[str, float]] = {}

    def show(self, runs: Sequence[Run]) -> None:
        """Show the runs; if the terminal is too small, those that are in progress or failed take precedence."""
        if self.live:
            self.live.update(self._grid(runs), refresh=True)
            return
        now = time.monotonic()
        for run in runs:
            state, when = self.printed.get(run, ("waiting", -math.inf))
            if run.state != state or (state == "running" and now - when >= LOG_SECONDS):
                name, state, step, loss, left = run.row()
                details = step and f"step {step}", loss and f"loss {loss}", left and f"{left} left"
                self.printed[run] = run.state, now  # even if the line cannot be written
                self.console.print("  ".join(filter(None, (name, state, *details))), markup=False, soft_wrap=True)

    def _grid(self, runs: Sequence[Run]) -> Grid:
        room = max(self.console.height - 5, 3)
        shown = runs
        if len(runs) > room:
            urgent = sorted(runs, key=lambda run: not run.state.startswith(("running", "failed")))[:room]
            shown = [run for run in runs if run in urgent]
        counts = Counter(run.state.partition(" ")[0] for run in runs)
        caption = ", ".join(f"{count} {state}" for state, count in counts.items())
        grid = Grid(box=None, caption=caption, caption_justify="left", pad_edge=False)
        settings = {"no_wrap": True, "overflow": "crop" if self.console.options.ascii_only else "ellipsis"}
        for column in ("run", "state", "step", "loss", "left"):
            grid.add_column(column, justify="left" if column in ("run", "state") else "right", **settings)
        for run in shown:
            name, state, *rest = run.row()
            name = name.encode(self.console.encoding, "backslashreplace").decode(self.console.encoding)
            grid.add_row(Text(name), f"[{COLORS.get(state.partition(' ')[0], 'dim')}]{state}", *rest)
        return grid


def runs_in(folder: Path) -> list[Path]:
    """Return the folder itself if it is a run folder, else the run folders in it."""
    if _is_run(folder):
        return [folder]
    return [path.parent for path in sorted(folder.glob(f"*/{CONFIG}")) if _is_run(path.parent)]


def _is_run(folder):
    """Return whether a folder has the config of a run, also a damaged or unreadable one, not of another program."""
    path, has_begun = folder / CONFIG, (folder / METRICS).exists() or (folder / ARTIFACTS).exists()
    with suppress(OSError, ValueError):
        return path.exists() and (has_begun or is_run_config(read_json(path)))
    return True


def watch(folders: Iterable[Path]) -> None:
    """Show the runs in some folders, each of one run or several, until none is in progress."""
    folders = list(folders)
    runs: dict[Path, Run] = {}
    with Table() as table:
        while True:
            for folder in folders:
                for path in runs_in(folder):
                    if path not in runs:
                        name = str(path.relative_to(folder.parent if len(folders) > 1 else folder))
                        runs[path] = Run(folder.resolve().name if name == "." else name, path)
            for run in runs.values():  # including those whose folders have been deleted meanwhile
                refresh(run)
            # A sweep locks its own folder, and may be about to start a run.
            busy = any(map(held, folders)) or any(run.state == "running" for run in runs.values())
            if not runs and not busy:
                raise FileNotFoundError(f"there is no run in {', '.join(map(str, folders))}.")
            table.show(list(runs.values()))
            if not busy:
                return
            time.sleep(1)


def refresh(run: Run) -> None:
    """Read the config, the state and the metrics of a run that another process may have started."""
    run.config = read_json(run.folder / CONFIG)
    if held(run.folder):
        run.state = "running"
    elif run.is_done():
        run.state = "done"
    else:
        run.state = "failed" if run.error().startswith(ERROR) else "stopped"
    run.look()
