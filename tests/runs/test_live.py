"""Following runs through their folders, with and without a terminal; and dividing the devices among runs."""

import fcntl
import io
import json
import os
import re
import shutil
import time
from pathlib import Path

import pytest
from rich.console import Console

from lineage.runs import locks, sweep
from lineage.runs.live import Run, Table, print_failures, watch


def make(folder, steps, total=40, done=False, log=""):
    (folder / "artifacts").mkdir(parents=True)
    config = {"total_steps": total, "seed": 1}
    (folder / "config.json").write_text(json.dumps(config))
    lines = [json.dumps({"step": step, "train/loss": 1 / step}) for step in range(1, steps + 1)]
    (folder / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
    (folder / "log.txt").write_text(log)
    if done:
        (folder / "artifacts" / "run.json").write_text(json.dumps({"config": config}))
    return folder


def test_watch_shows_the_state_of_each_run(tmp_path, capsys):
    make(tmp_path / "a", 40, done=True)
    make(tmp_path / "b", 7, log="step 5/40  12%\n\nerror: the disk is full\n(use --traceback for the full traceback)\n")
    make(tmp_path / "c", 5)
    (tmp_path / "other").mkdir()
    watch([tmp_path])
    assert capsys.readouterr().out.splitlines() == [
        "a  done  step 40/40  loss 0.0250",
        "b  failed  step 7/40  loss 0.143",
        "c  stopped  step 5/40  loss 0.200",
    ]
    (tmp_path / "a" / "export").mkdir()  # inside of a run's folder, but not a run
    (tmp_path / "a" / "export" / "config.json").write_text("{}")
    watch([tmp_path / "a", tmp_path / "c"])
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["a", "c"]
    with pytest.raises(FileNotFoundError, match="there is no run in"):
        watch([tmp_path / "other"])


def test_current_folder_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(make(tmp_path / "a", 5))
    watch([Path(".")])
    assert capsys.readouterr().out == "a  stopped  step 5/40  loss 0.200\n"


def test_hostile_folders_are_shown(tmp_path, capsys):
    """Check values of other types in the files of a run from somebody else, and markup in the name of its folder."""
    for number, total in enumerate(["x", [1], {"a": 1}, 9]):
        make(tmp_path / str(number), 3, total=total)
    (tmp_path / "0" / "metrics.jsonl").write_text('{"step": 1, "train/loss": "<b>"}\n')
    (tmp_path / "1" / "artifacts" / "run.json").write_text('{"config": [1]}')
    os.mkfifo(tmp_path / "2" / ".lock")
    (tmp_path / "3" / "metrics.jsonl").write_text(json.dumps({"step": 1, "train/loss": 10**400}) + "\n")
    (tmp_path / "0" / "log.txt").write_text("step 1/,\n")
    watch([tmp_path])
    assert capsys.readouterr().out.splitlines() == [
        "0  stopped  step 1",
        "1  stopped  step 3  loss 0.333",
        "2  stopped  step 3  loss 0.333",
        "3  stopped  step 1/9",
    ]
    make(tmp_path / "names" / "a\x1b[2J\nb", 3)
    watch([tmp_path / "names"])
    assert capsys.readouterr().out == "a\\x1b[2J\\nb  stopped  step 3/40  loss 0.333\n"
    make(tmp_path / "emoji" / "a:bomb:b", 3)
    watch([tmp_path / "emoji"])
    assert capsys.readouterr().out.startswith("a:bomb:b  stopped")
    name = r"a\[/x][bold]b:bomb:"
    console = Console(file=io.StringIO(), force_terminal=True, width=80, color_system=None)
    with Table(console) as table:
        table.show([Run(name, tmp_path)])
    assert name in console.file.getvalue()


@pytest.mark.parametrize("target", ["pipe", "/dev/zero"])
def test_log_without_end_is_not_read(target, tmp_path):
    folder = make(tmp_path, 3)
    (folder / "log.txt").unlink()
    os.mkfifo(folder / "log.txt") if target == "pipe" else (folder / "log.txt").symlink_to(target)
    with pytest.raises(ValueError, match=r"log\.txt is not a regular file"):
        watch([folder])


def test_watch_continues_while_a_run_is_active(tmp_path, monkeypatch, capsys):
    folder = make(tmp_path / "run", 5)
    lock = (folder / ".lock").open("a")
    fcntl.flock(lock, fcntl.LOCK_EX)

    def sleep(seconds):
        if os.path.getsize(folder / "metrics.jsonl") < 200:
            with (folder / "metrics.jsonl").open("a") as file:
                file.write(json.dumps({"step": 10, "train/loss": 0.5}) + "\n")
        else:
            lock.close()

    monkeypatch.setattr(time, "sleep", sleep)
    watch([folder])
    assert capsys.readouterr().out.splitlines() == [
        "run  running  step 5/40  loss 0.200",
        "run  stopped  step 10/40  loss 0.500",
    ]


def test_watch_ends_if_the_folder_of_an_active_run_is_deleted(tmp_path, monkeypatch, capsys):
    other, folder = make(tmp_path / "a", 5), make(tmp_path / "b", 5)
    lock = (folder / ".lock").open("a")
    fcntl.flock(lock, fcntl.LOCK_EX)
    naps = iter([lambda: shutil.rmtree(folder), lock.close])
    monkeypatch.setattr(time, "sleep", lambda seconds: next(naps)())
    watch([tmp_path])
    assert [line.split()[:2] for line in capsys.readouterr().out.splitlines()] == [
        [other.name, "stopped"],
        ["b", "running"],
        ["b", "failed"],
    ]


def test_time_left_and_total(tmp_path, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    folder = make(tmp_path / "run", 10, total=None, log="step 1/2,000   0%\nstep 9/2,000   0%  loss 1.0\n")
    run = Run("run", folder, state="running")
    assert run.look()
    assert not run.look()
    assert run.row() == ("run", "running", "10/2,000", "0.100", "")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 20, "train/loss": None}) + "\n")
    now[0] += 5
    assert run.look()
    assert run.row() == ("run", "running", "20/2,000", "", "16:30")
    assert Run("new", tmp_path / "absent").row() == ("new", "waiting", "", "", "")


def test_table_in_a_terminal(tmp_path):
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=60, height=10, color_system=None)
    runs = [Run(f"rate={number}[0]", tmp_path / str(number)) for number in range(12)]
    runs[1].state, runs[9].state, runs[3].state = "done", "running", "failed (1)"
    runs[9].metrics, runs[9].config = [{"step": 5, "train/loss": 0.25}], {"total_steps": 50}
    with Table(console) as table:
        table.show(runs)
    shown = stream.getvalue()
    shown = shown[shown.rindex("run   ") :]  # as drawn last
    assert "rate=9[0]  running     5/50  0.250" in shown
    assert "rate=3[0]  failed (1)" in shown
    assert "9 waiting, 1 done, 1 failed, 1 running" in shown
    assert shown.count("rate=") == 5  # as many as there is room for


@pytest.mark.parametrize("width", [1, 20, 40])
def test_table_fits_an_ascii_terminal(width, tmp_path):
    """Check that no character is escaped when it is printed, which would make the lines longer than the terminal."""
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii", errors="backslashreplace")
    console = Console(file=stream, force_terminal=True, width=width, height=20, color_system=None)
    with Table(console) as table:
        table.show([Run(name, tmp_path / name, state="failed (1)") for name in ("source=été", "rate=0.0001,seed=1")])
    stream.flush()
    lines = re.sub(r"\x1b\[[?0-9;]*[A-Za-z]", "", stream.buffer.getvalue().decode()).splitlines()
    assert max(map(len, lines)) <= width


def test_devices_are_divided_among_runs(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3, 8})
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert sweep.shares(1) == [({0, 1, 2, 3, 8}, {})]
    assert sweep.shares(2) == [({0, 1}, {}), ({2, 3, 8}, {})]
    assert [cpus for cpus, _ in sweep.shares(7)] == [{0}, {1}, {2}, {3}, {8}, {0}, {1}]
    monkeypatch.delenv("JAX_PLATFORMS")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,2,5")
    assert sweep.shares(1)[0][1] == {}
    assert [own for _, own in sweep.shares(2)] == [{"CUDA_VISIBLE_DEVICES": "1"}, {"CUDA_VISIBLE_DEVICES": "2,5"}]
    crowd = [own for _, own in sweep.shares(4)]
    assert [own["CUDA_VISIBLE_DEVICES"] for own in crowd] == ["1", "2", "5", "1"]
    assert {own["XLA_PYTHON_CLIENT_MEM_FRACTION"] for own in crowd} == {"0.450"}
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr(sweep, "glob", lambda pattern: ["/dev/nvidia0", "/dev/nvidia1"] * ("nvidia" in pattern))
    assert [own for _, own in sweep.shares(2)] == [{"CUDA_VISIBLE_DEVICES": "0"}, {"CUDA_VISIBLE_DEVICES": "1"}]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(sweep, "glob", lambda pattern: [f"/dev/accel{n}" for n in range(8)] * ("accel" in pattern))
    tpus = [own for _, own in sweep.shares(4)]
    assert [own["TPU_VISIBLE_CHIPS"] for own in tpus] == ["0,1", "2,3", "4,5", "6,7"]
    assert {own["TPU_CHIPS_PER_PROCESS_BOUNDS"] for own in tpus} == {"1,2,1"}
    assert {own["ALLOW_MULTIPLE_LIBTPU_LOAD"] for own in tpus} == {"1"}
    assert sweep.split([], 2) == [[], []]
    with pytest.raises(ValueError, match="parallel is 3: 8 TPU chips cannot be divided by it"):
        sweep.shares(3)
    with pytest.raises(ValueError, match="parallel is 0: it must be 1 or more"):
        sweep.shares(0)


def test_held_devices(tmp_path):
    assert not locks.held(tmp_path)
    with (tmp_path / locks.CLAIM).open("w") as file:
        assert not locks.held(tmp_path)
        fcntl.flock(file, fcntl.LOCK_EX)
        assert locks.held(tmp_path)
    assert not locks.held(tmp_path)


def test_failure_of_a_run_whose_folder_was_deleted(tmp_path, capsys):
    print_failures([Run("seed=1", tmp_path / "seed=1", state="failed (1)")])
    assert "seed=1: error: the folder of the run was moved or deleted (" in capsys.readouterr().out


@pytest.mark.parametrize(("code", "why"), [(-9, "the run was killed by SIGKILL"), (80, "the folder of the run was")])
def test_failure_without_an_error_message_in_the_log(code, why, tmp_path):
    (tmp_path / "log.txt").write_text("$ lineage train\nstep 20/300\n")
    assert Run("seed=1", tmp_path, code=code).error().startswith(f"error: {why}")
