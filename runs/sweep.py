"""A sweep: the runs of a config's overrides, several at once, each a process of its own on its share of the devices."""

import fcntl
import hashlib
import json
import os
import shlex
import signal
import subprocess
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lineage.runs import devices
from lineage.runs.folder import CLAIM, PREEMPTED, StopSignal, held, is_locked, locked, read_json
from lineage.runs.live import LOG, PROMPT, Run, Table, labels, task

LONGEST_NAME = 100  # bytes
TICK = 0.2  # seconds


def run_sweep(
    command: Sequence[str],
    overrides: Sequence[Mapping[str, Any]],
    configs: Sequence[Mapping[str, Any]],
    workdir: Path,
    parallel: int = 1,
) -> int:
    """Runs `command` with each of the overrides, in `workdir/<what differs>`, so many at once.

    What is done is skipped, what was interrupted goes on; a run that fails does not keep the others from running, and
    one that an earlier sweep left at work is waited for. What comes of them is told by `compare.finish`.

    Args:
        command: the command line of a run without its workdir.
        overrides: config keys and values of each run.
        configs: the whole config of each run, as its `config.json` will have it.
        workdir: of the sweep.
        parallel: how many runs are at work at the same time.

    Returns:
        The exit code: 0 when every run is done, 75 when the sweep or a run was told to stop, 1 otherwise.

    Raises:
        ValueError: there is nothing to run, two runs have the same overrides, or another sweep is at work here.
    """
    runs = plan(overrides, configs, workdir)
    workdir.mkdir(parents=True, exist_ok=True)
    with locked(workdir):
        for run in runs:
            if run.is_done():
                run.state = "done"
                run.look()
        todo = [run for run in runs if run.state != "done"]
        if len(todo) < len(runs):
            print(f"{len(runs) - len(todo)} of {len(runs)} runs are done already", flush=True)
        if todo:
            # Those at work already come first, so that no other run is given their devices.
            todo.sort(key=lambda run: not held(run.folder))
            Launcher(command, min(parallel, len(todo))).run(todo, runs)
        from lineage.report.comparison import (
            finish,  # here because the launcher should start soon, and this brings matplotlib
        )

        finish(runs, command, workdir)
    return exit_code(runs)


def plan(overrides: Sequence[Mapping[str, Any]], configs: Sequence[Mapping[str, Any]], workdir: Path) -> list[Run]:
    """The runs of a sweep, in folders of `workdir`; raises as `run_sweep`."""
    if not overrides:
        raise ValueError("this config has no sweep(): it must yield a dict of overrides for each run.")
    texts = [json.dumps(task(config), sort_keys=True) for config in configs]
    most, count = Counter(texts).most_common(1)[0]
    if count > 1:
        alike = [dict(changes) for changes, text in zip(overrides, texts) if text == most]
        raise ValueError(f"two runs of the sweep are the same: {alike[0]} and {alike[1]}.")
    # A run may be there under another name, of a sweep in which other keys differed.
    there = [(read_json(path), path.parent.name) for path in workdir.glob("*/config.json")]
    runs = []
    for name, changes, config in zip(run_names(overrides), overrides, configs):
        name = next((known for other, known in there if task(other) == task(config)), name)
        runs.append(Run(name, workdir / name, changes, config))
    return runs


def run_names(overrides: Sequence[Mapping[str, Any]]) -> list[str]:
    """Folders' names: "learning_rate=0.001,seed=1", the keys that tell the runs apart.

    A key that says no more than those before it (the width that goes with a model's name) is left out.
    """
    keys: list[str] = []
    kinds = 1
    for key in dict.fromkeys(key for changes in overrides for key in changes):
        told = len({_values(changes, [*keys, key]) for changes in overrides})
        if told > kinds:
            keys, kinds = [*keys, key], told
    names: list[str] = []
    for changes in overrides:
        parts = [f"{label}={changes[key]}" for key, label in zip(keys, labels(keys)) if key in changes]
        name = ",".join(parts).replace("/", "_").replace(" ", "") or "base"
        if len(name.encode()) > LONGEST_NAME or name in names:
            name = name.encode()[:LONGEST_NAME].decode(errors="ignore")
            name = f"{name}~{hashlib.sha256(repr(changes).encode()).hexdigest()[:8]}"
        names.append(name)
    return names


def _values(changes: Mapping[str, Any], keys: Sequence[str]) -> tuple[str, ...]:
    return tuple(repr(changes[key]) if key in changes else "" for key in keys)


@dataclass
class Job:
    """A run at work: its share of the devices, and its process, if this one started it."""

    slot: int | None = None
    pid: int | None = None
    process: subprocess.Popen | None = None
    pruned: bool = False

    def stop(self) -> None:
        """Tells it to save and end, if it is a sweep's."""
        if self.process:
            self.process.terminate()
        elif self.pid is not None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGTERM)


class Launcher:
    """Starts runs, so many at once, follows them and says how they ended.

    A run's process keeps a lock in the run's folder, which it inherits and which so outlives the launcher: whoever
    comes after a launcher that was killed sees which of its runs are still at work, and on which share of the devices.

    Args:
        command: the command line of a run without its overrides and its workdir.
        parallel: how many runs are at work at the same time.
        observe: is told of every run that has new metrics or has ended; True ends it, as pruned.
    """

    def __init__(self, command: Sequence[str], parallel: int, observe: Callable[[Run], bool] = lambda run: False):
        self.command, self.observe = command, observe
        self.shares = devices.shares(parallel)
        self.jobs: dict[Run, Job] = {}
        self.again: deque[Run] = deque()

    def run(self, todo: Iterable[Run], shown: Sequence[Run]) -> None:
        """Runs what `todo` yields, which it is asked for when a share of the devices is free; shows `shown`.

        SIGTERM and SIGINT stop all of them, which save.
        """
        todo, stopping = iter(todo), False
        with StopSignal() as stop, Table() as table:
            try:
                while True:
                    for run in list(self.jobs):
                        self.poll(run, stop.received)
                    if stop.received and not stopping:
                        stopping = True
                        self.stop()
                    while not stopping and len(self.jobs) < len(self.shares):
                        run = self.again.popleft() if self.again else next(todo, None)
                        if run is None:
                            break
                        self.begin(run)
                    table.show(shown)
                    if not self.jobs:
                        return
                    time.sleep(TICK)
            except BaseException:
                self.stop()
                raise

    def stop(self) -> None:
        """Tells all runs to save and end."""
        for job in self.jobs.values():
            job.stop()

    def begin(self, run: Run) -> None:
        """Starts a run, or follows it where it is at work already, or has come to its end by itself."""
        run.look()
        if not held(run.folder) and run.is_done():
            run.state = "done"
            self.observe(run)
            return
        run.state = "running"
        run.folder.mkdir(parents=True, exist_ok=True)
        if held(run.folder):
            self.jobs[run] = found(run.folder)
            return
        slot = min(set(range(len(self.shares))) - {job.slot for job in self.jobs.values()})
        cpus, environment = self.shares[slot]
        with (run.folder / CLAIM).open("w") as claim, (run.folder / LOG).open("ab") as log:
            fcntl.flock(claim, fcntl.LOCK_EX)
            command = run.command(self.command)
            log.write(f"{PROMPT}{shlex.join(command)}\n".encode())
            log.flush()
            before = os.sched_getaffinity(0) if cpus else None
            try:
                if cpus:
                    os.sched_setaffinity(0, cpus)  # which the process inherits
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=os.environ | environment,
                    pass_fds=[claim.fileno()],
                    start_new_session=True,  # the terminal's ^C is for the launcher, which tells the runs
                )
            finally:
                if cpus:
                    os.sched_setaffinity(0, before)
            print(slot, process.pid, file=claim, flush=True)
        self.jobs[run] = Job(slot, process.pid, process)

    def poll(self, run: Run, stopping: bool) -> None:
        """Looks how a run is doing."""
        job = self.jobs[run]
        code = job.process.poll() if job.process else None
        ended = code is not None if job.process else not held(run.folder)
        new = run.look()
        if stopping and job.process is None and job.pid is None:  # somebody else's
            ended = True
        if ended:
            del self.jobs[run]
            if code == 0 or (job.process is None and run.is_done()):
                run.state = "done"
            elif job.pruned:
                run.state = "pruned"
            elif stopping or code == PREEMPTED:
                run.state = "stopped"
            elif job.process is None:  # another one's, that ended before its end
                run.state = "waiting"
                self.again.append(run)
                return
            else:
                run.state = f"failed ({code})"
        if (ended or new) and self.observe(run) and not ended and not job.pruned:
            job.pruned = True
            job.stop()


def found(folder: Path) -> Job:
    """The run at work that an earlier launcher started in the folder, or that somebody else did."""
    path = folder / CLAIM
    numbers = path.read_text().split() if path.exists() and is_locked(path) else []
    return Job(*map(int, numbers)) if len(numbers) == 2 else Job()


def exit_code(runs: Sequence[Run]) -> int:
    """0 when all came to their end, 75 when one was told to stop before, 1 otherwise."""
    states = {run.state for run in runs}
    if "stopped" in states:
        return PREEMPTED
    return int(not states <= {"done", "pruned"})
