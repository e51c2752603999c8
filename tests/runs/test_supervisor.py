"""Supervised runs: restarts after failures, and signals."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from lineage import launch
from lineage.runs import supervisor
from lineage.runs.supervisor import supervise

# A run whose process number n reaches the n-th of some steps and then ends in the n-th of some ways: by an exit code,
# or by a signal if that is negative.
SCRIPT = """
import json, os, pathlib, signal, sys, time
folder, steps, codes = pathlib.Path(sys.argv[1]), json.loads(sys.argv[2]), json.loads(sys.argv[3])
starts = folder / "starts"
number = len(starts.read_text()) if starts.exists() else 0
if codes[number] == "wait":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
with (folder / "metrics.jsonl").open("a") as file:
    file.write(json.dumps({"step": steps[number]}) + "\\n")
starts.write_text("x" * (number + 1))
if codes[number] == "wait":
    time.sleep(60)
if codes[number] < 0:
    os.kill(os.getpid(), -codes[number])
sys.exit(codes[number])
"""


@pytest.fixture
def run(tmp_path, monkeypatch, capfd):
    """Return `run(steps, codes, most)`, which returns the exit code, the number of starts and the lines."""
    monkeypatch.setattr(supervisor, "FIRST_DELAY", 0.05)

    def run(steps, codes, most=5):
        code = supervise([sys.executable, "-c", SCRIPT, str(tmp_path), str(steps), codes], tmp_path, most)
        return code, len((tmp_path / "starts").read_text()), capfd.readouterr().err.splitlines()

    return run


def test_failed_run_is_started_again_until_it_ends(run):
    code, starts, lines = run([3, 1200, 1250, 1300], "[1, -9, -40, 0]")
    assert (code, starts) == (0, 4)
    assert lines == [
        "the run failed at step 3 (exit code 1): restart 1 of 5 in 0 s",
        "the run failed at step 1,200 (killed by SIGKILL): restart 2 of 5 in 0 s",
        "the run failed at step 1,250 (killed by signal 40): restart 3 of 5 in 0 s",
    ]


def test_failed_run_is_started_again_without_a_place_for_messages(run, capfd):
    with open("/dev/full", "w") as full, capfd.disabled():
        kept = os.dup(2)
        os.dup2(full.fileno(), 2)
        try:
            assert run([3, 7, 9], "[1, 1, 0]")[:2] == (0, 3)
        finally:
            os.dup2(kept, 2)
            os.close(kept)


def test_run_that_fails_twice_at_the_same_step_is_given_up(run):
    code, starts, lines = run([3, 7, 7, 9], "[1, 76, 76, 0]")
    assert (code, starts) == (76, 3)
    assert lines[-1] == (
        "the run failed at step 7 (exit code 76: no progress) for the second time: it is not restarted"
    )


def test_checkpoints_tell_the_step_of_a_failure_too(run, tmp_path):
    (tmp_path / "checkpoints" / "8").mkdir(parents=True)
    assert run([3, 7, 9], "[1, 1, 0]")[:2] == (1, 2)


def test_restarts_are_limited(run):
    code, starts, lines = run([1, 2, 3, 4], "[1, -9, -9, 0]", most=2)
    assert (code, starts) == (137, 3)
    assert lines[-1] == "the run failed at step 3 (killed by SIGKILL) after 2 restarts: it is not restarted"


@pytest.mark.parametrize(("code", "result"), [("0", 0), ("2", 2), ("75", 75), ("80", 80), ("130", 130), ("-15", 143)])
def test_run_that_ended_on_purpose_is_not_started_again(code, result, run):
    assert run([1], f"[{code}]") == (result, 1, [])


def tell_when(path, number):
    """Send this process a signal as soon as a file has content."""

    def tell():
        while not (path.exists() and path.stat().st_size):
            time.sleep(0.01)
        os.kill(os.getpid(), number)

    threading.Thread(target=tell).start()


def test_signal_is_passed_on(run, tmp_path):
    tell_when(tmp_path / "starts", signal.SIGTERM)
    assert run([1], '["wait"]') == (75, 1, [])
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_nohup_is_respected(run, tmp_path):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        tell_when(tmp_path / "starts", signal.SIGHUP)
        assert run([1, 2], "[-9, 0]")[:2] == (0, 2)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_exit_codes_are_known_although_the_parent_process_ignored_sigchld(run):
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        assert run([3, 7], "[1, 0]")[:2] == (0, 2)
    finally:
        signal.signal(signal.SIGCHLD, before)


@pytest.fixture
def supervised(tmp_path):
    """Yield a supervisor, in its own session, and the process id of its run."""
    run = "import os, sys, time; print(os.getpid(), file=sys.stderr, flush=True); time.sleep(60)"
    program = "import sys; from lineage.runs.supervisor import supervise\n"
    program += f"supervise([sys.executable, '-c', {run!r}], {str(tmp_path)!r}, 3)"
    settings = {"stderr": subprocess.PIPE, "text": True, "start_new_session": True}
    with subprocess.Popen([sys.executable, "-c", program], **settings) as process:
        yield process, int(process.stderr.readline())
        process.kill()


def wait_until_suspended(*pids, suspended=True):
    end = time.monotonic() + 30
    while any((Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] == "T") != suspended for pid in pids):
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_ctrl_z_suspends_the_run_too(supervised):
    process, run = supervised
    for _ in range(2):
        process.send_signal(signal.SIGTSTP)
        wait_until_suspended(process.pid, run)
        process.send_signal(signal.SIGCONT)
        wait_until_suspended(process.pid, run, suspended=False)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process that its parent has ended")
@pytest.mark.parametrize("suspended", [False, True])
def test_run_ends_with_its_killed_supervisor(supervised, suspended):
    process, run = supervised
    if suspended:
        process.send_signal(signal.SIGTSTP)
        wait_until_suspended(process.pid, run)
    with process:
        process.kill()
        begin = time.monotonic()
        process.stderr.read()  # until the last process that has the pipe has ended
    assert time.monotonic() - begin < 30


def test_signal_ends_the_wait_for_a_restart(run, tmp_path, monkeypatch):
    monkeypatch.setattr(supervisor, "FIRST_DELAY", 600.0)
    tell_when(tmp_path / "starts", signal.SIGINT)
    script = [sys.executable, "-c", SCRIPT, str(tmp_path), "[1]", "[1]"]
    begin = time.monotonic()
    assert supervise(script, tmp_path, 3) in (1, 130)
    assert time.monotonic() - begin < 60


def test_supervised_run_on_an_unknown_storage_is_refused_in_one_sentence(capsys):
    before = signal.getsignal(signal.SIGTERM)
    assert launch.main(["train", "--max-restarts=1", "--workdir=foo://a/b"]) == 1
    assert "error: foo://a/b has the unknown scheme 'foo'" in capsys.readouterr().err
    assert signal.getsignal(signal.SIGTERM) is before


class Clock:
    """Clock that sleeping sets forward."""

    def __init__(self):
        self.now = 0.0

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


def test_waits_double(run, monkeypatch):
    clock = Clock()
    monkeypatch.setattr(supervisor, "FIRST_DELAY", 5.0)
    monkeypatch.setattr(supervisor, "time", clock)
    code, _, lines = run(list(range(9)), "[1, 1, 1, 1, 1, 1, 1, 1, 0]", most=9)
    assert code == 0
    waits = [5, 10, 20, 40, 80, 160, 300, 300]
    assert [line.rpartition(" in ")[2] for line in lines] == [f"{wait} s" for wait in waits]
    assert clock.now == pytest.approx(sum(waits), abs=2)


def test_waits_of_many_restarts(monkeypatch, tmp_path):
    clock, steps = Clock(), iter(range(2000))
    monkeypatch.setattr(supervisor, "time", clock)
    monkeypatch.setattr(supervisor, "reached", lambda _: next(steps))
    monkeypatch.setattr(supervisor.subprocess, "Popen", lambda *_, **__: SimpleNamespace(wait=lambda: 1))
    monkeypatch.setattr(supervisor, "say", lambda _: None)
    monkeypatch.setattr(clock, "sleep", lambda _: setattr(clock, "now", clock.now + 100))
    assert supervise(["run"], tmp_path, 1100) == 1
    assert next(steps) == 1101


def test_checkpoints_that_cannot_be_listed_do_not_end_the_supervision(tmp_path):
    (tmp_path / "checkpoints").symlink_to("elsewhere")  # such as a file system that is not mounted for a moment
    assert supervisor.reached(tmp_path) == 0
