"""A sweep whose runs are jobs of a SLURM cluster, for the faults of `processes`."""

import contextlib
import os
import subprocess
import time
from pathlib import Path

from lineage.runs.command import LAUNCH
from lineage.runs.live import LOG
from lineage.runs.process import PREEMPTED
from tests import slurm
from tests.faults.processes import SECONDS, SETTINGS, Group


class Jobs(Group):
    """Jobs of a sweep. The parents are the processes that SLURM starts; the children are the runs that they start."""

    disturbances = (*Group.disturbances, "requeue")
    shared = "slurm/*.json"

    def wait(self):
        """Wait until no job is in the queue; return the exit code of the submission, or of `slurm status` after it."""
        codes = super().wait()
        if codes != [PREEMPTED]:
            return codes
        end = time.monotonic() + SECONDS
        while jobs := self.queue():
            assert time.monotonic() < end, f"jobs hang: {jobs}"
            for job, _, reason in jobs:
                if reason == "(BeginTime)":
                    slurm.restart_now(os.environ, job)
            time.sleep(0.3)
        options = [*SETTINGS["slurm"][2:], f"--config={self.root}/config.py", f"--workdir={self.run}"]
        with (self.root / "0.log").open("ab") as log:
            return [subprocess.run([*LAUNCH, "slurm", "status", *options], stdout=log, stderr=log).returncode]

    def queue(self):
        """Return the number, state and reason of each job."""
        lines = slurm.answer(os.environ, "squeue", "--array", "--format=%i %T %R").splitlines()
        return [line.split(maxsplit=2) for line in lines]

    def log(self, run):
        """Return the output of a run."""
        return (run / LOG).read_text()

    def parents(self):
        """Return the processes of the jobs, which start those of the runs."""
        return processes_with(f"{self.run}/slurm/")

    def children(self):
        """Return the processes of the runs that are in progress."""
        return [pid for run in self.runs() for pid in processes_with(f"--workdir={run}\0")]

    def is_alive(self):
        """Return whether a job is in the queue, or is being submitted."""
        return super().is_alive() or bool(self.queue())

    def send(self, processes, how):
        """Send a signal to processes, or requeue the jobs that are running."""
        if how != "requeue":
            super().send(processes, how)
            return
        for job, state, _ in self.queue():
            if state == "RUNNING":
                subprocess.run(["scontrol", "requeue", job], check=True)


def processes_with(text):
    """Return the processes whose command line contains a text."""
    pids = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if text.encode() in path.read_bytes():
                pids.append(int(path.parent.name))
    return pids
