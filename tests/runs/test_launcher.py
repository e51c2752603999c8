"""Processes of a sweep: starting, stopping and the states of runs."""

import json
import os
import resource
import signal

import pytest

from lineage.runs import sweep
from lineage.runs.live import LOG, Run
from lineage.runs.locks import CLAIM, locked, locked_file
from lineage.runs.process import PREEMPTED, StopSignal
from lineage.runs.sweep import Job, Launcher, exit_code, job_in


class Process:
    """Process of a run that has ended with an exit code, or is in progress."""

    def __init__(self, code=None):
        self.code, self.told = code, 0

    def poll(self):
        return self.code

    def terminate(self):
        self.told += 1


@pytest.fixture
def run(tmp_path):
    """Return a run in progress."""
    (tmp_path / "a").mkdir()
    return Run("a", tmp_path / "a", config={"seed": 1}, state="running")


def launched(run, job, observe=lambda run: False):
    launcher = Launcher([], 1, observe)
    launcher.jobs[run] = job
    return launcher


@pytest.mark.parametrize(
    ("code", "stopping", "pruned", "state"),
    [
        (0, False, False, "done"),
        (0, True, True, "done"),
        (75, False, False, "stopped"),
        (75, False, True, "pruned"),
        (1, False, False, "failed (1)"),
        (-9, False, False, "failed (-9)"),
        (1, True, False, "stopped"),
        (None, True, False, "running"),
    ],
)
def test_state_of_a_run_whose_process_ended(code, stopping, pruned, state, run):
    seen = []
    launcher = launched(run, Job(0, 7, Process(code), pruned), seen.append)
    launcher.poll(run, stopping)
    assert run.state == state
    assert (launcher.jobs.keys() == {run}, seen) == ((True, []) if code is None else (False, [run]))


def test_state_of_a_run_that_another_process_started(run):
    launcher = launched(run, Job(0, 7))
    with locked(run.folder):
        launcher.poll(run, stopping=True)
        assert run.state == "running"  # until it has saved
        launched(run, Job()).poll(run, stopping=True)
        assert run.state == "stopped"  # a run started by hand is not told to stop
    run.state = "running"
    launcher.poll(run, stopping=False)
    assert (run.state, list(launcher.again), launcher.jobs) == ("waiting", [run], {})
    (run.folder / "artifacts").mkdir()
    (run.folder / "artifacts" / "run.json").write_text(json.dumps({"config": run.config}))
    launcher.jobs[run] = Job(0, 7)
    launcher.poll(run, stopping=False)
    assert (run.state, launcher.jobs) == ("done", {})


@pytest.mark.parametrize(
    ("states", "code"),
    [
        (("done", "pruned"), 0),
        (("done", "failed (1)"), 1),
        (("failed (1)", "stopped"), PREEMPTED),
        (("done", "waiting"), PREEMPTED),  # after a signal between two runs
    ],
)
def test_exit_code_of_a_sweep(states, code, tmp_path):
    assert exit_code([Run(str(number), tmp_path, state=state) for number, state in enumerate(states)]) == code


def test_run_that_ended_before_its_turn_is_not_started(run):
    """Check a run of an earlier sweep, which has ended since this one began."""
    (run.folder / "artifacts").mkdir()
    (run.folder / "artifacts" / "run.json").write_text(json.dumps({"config": run.config}))
    seen = []
    launcher = Launcher([], 1, seen.append)
    launcher.begin(run)
    assert (run.state, seen, launcher.jobs) == ("done", [run], {})


def test_pruned_run_is_told_to_stop_once(run):
    process = Process()
    launcher = launched(run, Job(0, 7, process), lambda run: run.step >= 2)
    for step, told in ((1, 0), (2, 1), (3, 1)):
        with (run.folder / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": step}) + "\n")
        launcher.poll(run, stopping=False)
        assert (process.told, launcher.jobs[run].pruned) == (told, bool(told))


def test_stopping_a_run_of_another_process(run, monkeypatch):
    told = []
    monkeypatch.setattr(os, "kill", lambda *arguments: told.append(arguments))
    Job(0, 7).stop()
    Job().stop()
    assert told == [(7, signal.SIGTERM)]
    host = os.uname().nodename
    (run.folder / CLAIM).write_text(f"3 7 {host}\n")
    assert job_in(run.folder) == Job()  # it has ended
    with locked_file(run.folder / CLAIM):
        assert job_in(run.folder) == Job(3, 7)
        (run.folder / CLAIM).write_text(f"3 7 not-{host}\n")
        assert job_in(run.folder) == Job()  # its process is on another machine
        (run.folder / CLAIM).write_text("3")
        assert job_in(run.folder) == Job()


def test_run_of_another_sweep_is_continued_and_suspended_with_this_one(run, monkeypatch):
    sent, launcher = [], Launcher([], 1)
    monkeypatch.setattr(os, "killpg", lambda *arguments: sent.append(arguments))
    monkeypatch.setattr(os, "kill", lambda *arguments: sent.append(arguments))
    with locked_file(run.folder / CLAIM):
        (run.folder / CLAIM).write_text(f"0 7 {os.uname().nodename}\n")
        launcher.begin(run)
    assert sent == [(7, signal.SIGCONT)]
    with StopSignal(launcher.groups):
        signal.raise_signal(signal.SIGTSTP)
    assert sent[1:] == [(7, signal.SIGSTOP), (os.getpid(), signal.SIGSTOP), (7, signal.SIGCONT)]
    assert signal.getsignal(signal.SIGTSTP) is signal.SIG_DFL


def test_error_of_the_sweep_stops_its_runs(run, monkeypatch):
    process = Process()
    launcher = launched(run, Job(0, 7, process))
    monkeypatch.setattr(launcher, "poll", lambda run, stopping: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        launcher.run([], [run])
    assert process.told == 1


def test_run_is_stopped_if_the_disk_is_full_at_its_start(run, monkeypatch):
    launcher, process = launched(run, None), Process()
    launcher.jobs, process.pid = {}, 7
    monkeypatch.setattr(sweep.subprocess, "Popen", lambda *args, **settings: process)
    full = os.open("/dev/full", os.O_WRONLY)
    monkeypatch.setattr("builtins.print", lambda *args, **settings: os.write(full, b"a line"))
    with pytest.raises(OSError, match="No space left"):
        launcher.run([run], [])
    assert process.told == 1


def test_full_disk_at_the_start_of_a_run_is_reported_with_the_file(run):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))  # as on a full disk, writing raises an OSError
    try:
        with pytest.raises(OSError, match=f"File too large: '{run.folder / LOG}'"):
            Launcher(["false"], 1).begin(run)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize("value", ["a\0b", "a\udcff"])
def test_value_that_a_command_line_or_the_name_of_a_folder_cannot_have_is_refused(value, tmp_path):
    with pytest.raises(
        ValueError, match=r"^sweep\(\) sets sampling.prompt to 'a.*': it must be valid Unicode without NUL"
    ):
        sweep.plan([{"sampling.prompt": value}], [{}], tmp_path)
