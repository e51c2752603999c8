"""Sweeps: a run for each of a config's overrides, several at a time, each with its share of the devices."""

import hashlib
import os
import shlex
import signal
import subprocess
import time
from collections import Counter, deque
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from glob import glob
from pathlib import Path
from types import MappingProxyType
from typing import Any

from lineage.configs.atomic import naming, without_links
from lineage.runs.folder import make, read_json
from lineage.runs.live import LOG, PROMPT, Run, Table, digest, distinguishing, labels, without_cluster
from lineage.runs.locks import CLAIM, held, is_locked, lock, locked, unmoved
from lineage.runs.process import PREEMPTED, StopSignal, ignore_stop_signals, send_to_groups

LONGEST_NAME = 100  # bytes
FOLDER = str.maketrans({" ": None, "/": "_", "[": "(", "]": ")", **dict.fromkeys("*?\\", "_")})  # see folder.make
TICK = 0.2  # seconds
Share = tuple[set[int], dict[str, str]]
BOUNDS = {1: "1,1,1", 2: "1,2,1", 4: "2,2,1"}  # TPU_CHIPS_PER_PROCESS_BOUNDS by the number of chips


def run_sweep(
    command: Sequence[str],
    overrides: Sequence[Mapping[str, Any]],
    configs: Sequence[Mapping[str, Any]],
    workdir: Path,
    finish: Callable[..., None],
    parallel: int = 1,
) -> int:
    """Run `command` with each of the overrides, in subfolders of `workdir` named after the overrides.

    Finished runs are skipped, interrupted runs are resumed, and runs that an earlier sweep left in progress are waited
    for. A run that fails does not stop the others. Return the exit code, see `exit_code`.

    Args:
        command: the command line of a run without its overrides and its workdir.
        configs: the whole config of each run, as in its `config.json`.
        finish: function that writes the results at the end, see `report.comparison.finish`.
        parallel: number of runs at a time.
    """
    runs = plan(overrides, configs, workdir)
    make(workdir)
    with locked(workdir):
        for run in runs:
            if run.is_done():
                run.state = "done"
                run.look()
        todo = [run for run in runs if run.state != "done"]
        if len(todo) < len(runs):
            print(f"{len(runs) - len(todo)} of {len(runs)} runs are done already", flush=True)
        if todo:
            # Runs in progress come first, so that their devices are not given to other runs.
            todo.sort(key=lambda run: not held(run.folder))
            Launcher(command, min(parallel, len(todo))).run(todo, runs, unmoved(workdir))
        finish(runs, command, workdir)
    return exit_code(runs)


def plan(
    overrides: Sequence[Mapping[str, Any]],
    configs: Sequence[Mapping[str, Any]],
    workdir: Path,
    waiting: Mapping[str, str] = MappingProxyType({}),
) -> list[Run]:
    """Return the runs of a sweep, in folders of `workdir`.

    `waiting` has the names of runs that have not started, by the digests of their configs.
    """
    if not overrides:
        raise ValueError("this config has no sweep(), which yields a dictionary of overrides for each run.")
    for key, value in (item for changes in overrides for item in changes.items()):
        if "\0" in (text := str(value)) or text != text.encode(errors="replace").decode():
            raise ValueError(f"sweep() sets {key} to {value!r}: it must be valid Unicode without NUL characters.")
    digests = list(map(digest, configs))
    repeated, count = Counter(digests).most_common(1)[0]
    if count > 1:
        alike = [dict(changes) for changes, value in zip(overrides, digests) if value == repeated]
        raise ValueError(f"two runs of the sweep are the same: {alike[0]} and {alike[1]}.")
    # The same run may have another name, from a sweep in which other keys differed.
    existing = [(without_cluster(read_json(path)), path.parent.name) for path in sorted(workdir.glob("*/config.json"))]
    wanted = zip(map(without_cluster, configs), map(waiting.get, digests))
    known = [next((name for other, name in existing if other == config), name) for config, name in wanted]
    names = (old or new for old, new in zip(known, run_names(overrides, {*known})))
    return [Run(name, workdir / name, *both) for name, *both in zip(names, overrides, configs)]


def run_names(overrides: Sequence[Mapping[str, Any]], taken: Container[str | None] = ()) -> list[str]:
    """Return names of folders from the keys that distinguish the runs, such as "learning_rate=0.001,seed=1".

    The names differ from each other and from those that are `taken`.
    """
    keys = distinguishing(overrides)
    label, common = dict(zip(keys, labels(keys))), set(overrides[0]).intersection(*overrides)
    names: list[str] = []
    for changes in overrides:
        used = [key for key in keys if key in changes] or [key for key in changes if key not in common]
        parts = [f"{label.get(key, key)}={changes[key]}" for key in used]
        name = ",".join(parts).translate(FOLDER) or "base"
        if len(name.encode()) > LONGEST_NAME or name in taken or name in names:
            name = name.encode()[:LONGEST_NAME].decode(errors="ignore")
            name = f"{name}~{hashlib.sha256(repr(changes).encode()).hexdigest()[:8]}"
        names.append(name)
    return names


@dataclass
class Job:
    """Run in progress."""

    slot: int | None = None  # index of its share of the devices; None if it was not started by a sweep
    pid: int | None = None  # its process; None if it was started by hand
    process: subprocess.Popen | None = None  # the process object, if this sweep started it
    pruned: bool = False

    def stop(self) -> None:
        """Signal the run to save and end, if a sweep started it."""
        if self.process:
            self.process.terminate()
        elif self.pid is not None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGTERM)


class Launcher:
    """Launcher that starts runs, several at a time, and follows them to their end.

    The process of a run inherits a lock in the run's folder, which outlives the launcher: if a launcher is killed, the
    next one sees which runs are still in progress, and on which share of the devices.

    `observe` is called with every run that has new metrics or has ended; if it returns True, the run is pruned.
    """

    def __init__(self, command: Sequence[str], parallel: int, observe: Callable[[Run], bool] = lambda run: False):
        self.command, self.observe = command, observe
        self.shares = shares(parallel)
        self.jobs: dict[Run, Job] = {}
        self.again: deque[Run] = deque()

    def run(self, todo: Iterable[Run], shown: Sequence[Run], check: Callable[[], None] = lambda: None) -> None:
        """Run the runs of `todo`, taking the next one when a share of the devices is free; show `shown`.

        On SIGINT and `STOP_SIGNALS`, and if `check`, which is called regularly, raises, all runs save and end. After a
        signal, later `STOP_SIGNALS` are ignored.
        """
        todo, stopping = iter(todo), False
        with StopSignal(self.groups) as stop, Table() as table:
            try:
                while True:
                    for run in list(self.jobs):
                        self.poll(run, stop.received)
                    check()
                    if stop.received and not stopping:
                        stopping = True
                        self.stop()
                    while not stopping and len(self.jobs) < len(self.shares):
                        run = self.again.popleft() if self.again else next(todo, None)
                        if run is None:
                            break
                        self.begin(run)
                    with suppress(OSError, SystemExit):  # a full disk or a closed pipe, at which Rich exits
                        table.show(shown)
                    if not self.jobs:
                        break
                    time.sleep(TICK)
            except BaseException:
                self.stop()
                raise
        if stop.received:  # the results are still to be written
            ignore_stop_signals()

    def groups(self) -> list[int]:
        """Return the process groups of the runs in progress that a sweep started."""
        return [job.pid for job in self.jobs.values() if job.pid is not None]

    def stop(self) -> None:
        """Signal all runs to save and end."""
        for job in self.jobs.values():
            job.stop()

    def begin(self, run: Run) -> None:
        """Start a run, or follow it if it is already in progress or has ended."""
        run.look()
        if not held(run.folder) and run.is_done():
            run.state = "done"
            self.observe(run)
            return
        run.state = "running"
        run.folder.mkdir(parents=True, exist_ok=True)
        if held(run.folder):
            self.jobs[run] = job_in(run.folder)
            send_to_groups(self.groups(), signal.SIGCONT)  # their launcher may have been killed while suspended
            return
        slot = min(set(range(len(self.shares))) - {job.slot for job in self.jobs.values()})
        cpus, environment = self.shares[slot]
        with (
            open(run.folder / CLAIM, "w", opener=without_links) as claim,
            open(run.folder / LOG, "ab", buffering=0, opener=without_links) as log,
        ):
            lock(claim.fileno())
            command = run.command(self.command)
            with naming(log.name):
                log.write(os.fsencode(f"{PROMPT}{shlex.join(command)}\n"))
            before = os.sched_getaffinity(0) if cpus else None
            try:
                if cpus:
                    os.sched_setaffinity(0, cpus)  # inherited by the process
                streams = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log, "pass_fds": [claim.fileno()]}
                # In its own session: a terminal's Ctrl-C reaches only the launcher, which stops the runs.
                environment = os.environ | environment
                process = subprocess.Popen(command, env=environment, start_new_session=True, **streams)
            finally:
                if cpus:
                    os.sched_setaffinity(0, before)
            self.jobs[run] = Job(slot, process.pid, process)  # if the disk is full now, the run is stopped
            with naming(claim.name):
                print(slot, process.pid, os.uname().nodename, file=claim, flush=True)

    def poll(self, run: Run, stopping: bool) -> None:
        """Update the state of a run in progress."""
        job = self.jobs[run]
        if job.process:
            run.code = job.process.poll()
            ended = run.code is not None
        else:  # a run that was started by hand is not waited for if the launcher is stopped
            ended = not held(run.folder) or (stopping and job.pid is None)
        new = run.look()
        if new and job.process:  # the run has written its config, and read the file of the config, after this sweep
            run.check_config()
        if ended:
            del self.jobs[run]
            if run.code == 0 or (not job.process and run.is_done()):
                run.state = "done"
            elif job.pruned:
                run.state = "pruned"
            elif stopping or run.code == PREEMPTED:
                run.state = "stopped"
            elif not job.process:  # interrupted run of another process
                run.state = "waiting"
                self.again.append(run)
                return
            else:
                run.state = f"failed ({run.code})"
        if (ended or new) and self.observe(run) and not ended and not job.pruned:
            job.pruned = True
            job.stop()


def job_in(folder: Path) -> Job:
    """Return the job of a run in progress that an earlier launcher or a user started in the folder."""
    path = folder / CLAIM
    words = path.read_text().split() if path.exists() and is_locked(path) else []
    if words[2:] == [os.uname().nodename]:  # elsewhere, the number is that of another process
        return Job(*map(int, words[:2]))
    return Job()


def exit_code(runs: Sequence[Run]) -> int:
    """Return 0 if all runs are done or pruned, 75 if a signal stopped one or left one waiting, 1 otherwise."""
    states = {run.state for run in runs}
    if states & {"stopped", "waiting"}:
        return PREEMPTED
    return int(not states <= {"done", "pruned"})


def shares(count: int) -> list[Share]:
    """Return the CPUs and additional environment variables of each of `count` runs.

    XLA starts one thread per CPU. Each run has access to its own GPUs or TPU chips only. If there are more runs than
    GPUs, runs share a GPU, each with a part of its memory.
    """
    if count < 1:
        raise ValueError(f"parallel is {count}: it must be 1 or more.")
    cpus = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    environments: list[dict[str, str]] = [{} for _ in range(count)]
    platform = os.environ.get("JAX_PLATFORMS", "")
    if count > 1 and platform != "cpu":
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        indices = range(len(glob("/dev/nvidia[0-9]*"))) if visible is None else filter(None, visible.split(","))
        if gpus := [str(index) for index in indices]:
            environments = [{"CUDA_VISIBLE_DEVICES": ",".join(part)} for part in split(gpus, count)]
            if len(gpus) < count:
                part = f"{0.9 / -(-count // len(gpus)):.3f}"
                environments = [one | {"XLA_PYTHON_CLIENT_MEM_FRACTION": part} for one in environments]
        elif chips := len(glob("/dev/accel[0-9]*") or glob("/dev/vfio/[0-9]*")):
            if chips % count or chips // count not in BOUNDS:
                raise ValueError(f"parallel is {count}: {chips} TPU chips cannot be divided by it.")
            common = {"TPU_PROCESS_BOUNDS": "1,1,1", "TPU_CHIPS_PER_PROCESS_BOUNDS": BOUNDS[chips // count]}
            common["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"
            parts = split([str(chip) for chip in range(chips)], count)
            environments = [common | {"TPU_VISIBLE_CHIPS": ",".join(part)} for part in parts]
    return list(zip(map(set, split(cpus, count)), environments))


def split(devices: Sequence, count: int) -> list[Sequence]:
    """Divide devices into `count` contiguous parts; if there are fewer devices than parts, parts share devices."""
    if 0 < len(devices) < count:
        return [[devices[i % len(devices)]] for i in range(count)]
    return [devices[i * len(devices) // count : (i + 1) * len(devices) // count] for i in range(count)]
