"""Sweeps with fake runs: skipping, resuming, signals and devices (real runs: `tests/e2e/test_sweep.py`)."""

import csv
import errno
import io
import json
import os
import signal
import subprocess
import sys
import time
from itertools import product

import numpy as np
import pytest

from lineage.report import figures
from lineage.report.comparison import finish
from lineage.runs.locks import CLAIM, MovedError, held, is_locked
from lineage.runs.sweep import plan, run_names, run_sweep
from tests.tiers import tiered

# Fake run: takes steps, saves every other one, resumes from the last save, stops on SIGTERM, fails on request, and
# writes the files of a finished run.
RUN = """
import fcntl, json, os, pathlib, signal, sys, time
options = dict(part.removeprefix("--").split("=", 1) for part in sys.argv[1:])
folder = pathlib.Path(options["workdir"])
(folder / "artifacts").mkdir(parents=True, exist_ok=True)
with open(folder.parent / "ran.txt", "a") as file:
    file.write(options["config.seed"] + "\\n")
print("a run of seed", options["config.seed"], flush=True)
lock = open(folder / ".lock", "a")
try:
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
except BlockingIOError:
    sys.exit("error: another run is at work")
code = int(options.get("config.fail", 0))
if code and not (folder.parent / "mended").exists():
    print("error: it cannot start", file=sys.stderr)
    sys.exit(code)
while len(list(folder.parent.glob("*/.lock"))) < int(options.get("config.together", 0)):
    time.sleep(0.01)
stopped = []
signal.signal(signal.SIGTERM, lambda *_: stopped.append(1))
seed, total = int(options["config.seed"]), int(options.get("config.total_steps", 4))
config = {"seed": seed, "total_steps": total}
for key, value in options.items():
    if key.startswith("config.") and key not in ("config.fail", "config.sleep", "config.together"):
        config.setdefault(key.removeprefix("config."), int(value) if value.isdecimal() else value)
(folder / "config.json").write_text(json.dumps(config))
saved = folder / "saved"
start = int(saved.read_text()) if saved.exists() else 0
lines = [{"step": step, "train/loss": 1 / step, "time/mfu": 0.5} for step in range(1, start + 1)]
for step in range(start + 1, total + 1):
    time.sleep(float(options.get("config.sleep", 0)))
    with open(folder / "trained.txt", "a") as file:
        print(step, file=file)
    lines.append({"step": step, "train/loss": 1 / step, "time/mfu": 0.5, "test/loss": 1 / seed + 1 / step - 1 / total})
    (folder / "metrics.partial").write_text("".join(json.dumps(line) + "\\n" for line in lines))
    (folder / "metrics.partial").replace(folder / "metrics.jsonl")
    if step % 2 == 0 or stopped:
        saved.write_text(str(step))
    if stopped:
        sys.exit(75)
cpus = sorted(os.sched_getaffinity(0))
(folder / "artifacts" / "run.json").write_text(json.dumps({"seconds": 12.34, "config": config, "cpus": cpus}))
"""


def configs(overrides, total):
    own = "fail", "sleep", "together"  # which are not part of the config of a run
    whole = [{"total_steps": total} | changes for changes in overrides]
    return [{key: value for key, value in changes.items() if key not in own} for changes in whole]


def arguments(workdir, overrides, total_steps=4):
    command = [sys.executable, "-c", RUN, f"--config.total_steps={total_steps}"]
    return command, overrides, configs(overrides, total_steps), workdir


def sweep(workdir, overrides, total_steps=4, parallel=1):
    return run_sweep(*arguments(workdir, overrides, total_steps), finish, parallel)


@pytest.fixture
def start(tmp_path):
    """Return `start(workdir, overrides, ...)`, which runs a sweep in a process; kill all processes at the end."""
    started = []

    def start(workdir, overrides, total_steps=4, parallel=1):
        program = "import sys; from pathlib import PosixPath; from lineage.runs.sweep import run_sweep\n"
        program += "from lineage.report.comparison import finish\n"
        program += f"sys.exit(run_sweep(*{arguments(workdir, overrides, total_steps)!r}, finish, {parallel}))"
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "start_new_session": True}
        started.append(subprocess.Popen([sys.executable, "-c", program], **pipes))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()
    for path in tmp_path.rglob(CLAIM):  # runs that outlive their sweep
        if is_locked(path):
            os.kill(int(path.read_text().split()[1]), signal.SIGKILL)


def wait_for(condition, seconds=300):
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end
        time.sleep(0.01)
    return found


def ran(workdir):
    return (workdir / "ran.txt").read_text().split()


def trained(folder):
    path = folder / "trained.txt"
    return [*map(int, path.read_text().split())] if path.exists() else []


def pid(folder):
    return int((folder / CLAIM).read_text().split()[1])


def table(workdir):
    with (workdir / "sweep.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_sweep_continues_after_a_failure_and_skips_finished_runs(tmp_path, capfd):
    overrides = [{"seed": 1}, {"seed": 2, "fail": 3}, {"seed": 4}, {"seed": 5, "fail": 3}]
    assert sweep(tmp_path, overrides) == 1
    assert ran(tmp_path) == ["1", "2", "4", "5"]
    rows = table(tmp_path)
    assert [row["run"] for row in rows] == ["seed=1", "seed=2", "seed=4", "seed=5"]
    assert [row["state"] for row in rows] == ["done", "failed (3)", "done", "failed (3)"]
    assert [row["test/loss"] for row in rows] == ["1", "", "0.25", ""]  # the last of each run
    assert [row["seconds"] for row in rows] == ["12.3", "", "12.3", ""]
    assert "train/loss" not in rows[0]
    printed = capfd.readouterr().out
    assert printed.count("it cannot start") == 1
    assert f"seed=2 and 1 more: error: it cannot start ({tmp_path}/seed=2/log.txt)" in printed
    assert "a run of seed" not in printed
    assert (tmp_path / "seed=1" / "log.txt").read_text().endswith("\na run of seed 1\n")
    assert "0.25" in printed
    (tmp_path / "mended").touch()
    assert sweep(tmp_path, overrides) == 0
    assert ran(tmp_path) == ["1", "2", "4", "5", "2", "5"]
    assert [row["state"] for row in table(tmp_path)] == ["done"] * 4
    assert "2 of 4 runs are done already" in capfd.readouterr().out


def test_run_finished_with_another_config_is_not_skipped(tmp_path):
    overrides = [{"seed": 1}, {"seed": 2}]
    sweep(tmp_path, overrides)
    sweep(tmp_path, overrides, total_steps=5)
    assert ran(tmp_path) == ["1", "2", "1", "2"]


def test_cluster_settings_do_not_distinguish_runs(tmp_path):
    config = {"seed": 1, "cluster": {"nodes": 2}}
    (run,) = plan([{"seed": 1}], [config], tmp_path)
    (run.folder / "artifacts").mkdir(parents=True)
    (run.folder / "config.json").write_text(json.dumps(config))
    (run.folder / "artifacts" / "run.json").write_text(json.dumps({"config": config}))
    overrides, elsewhere = [{}, {"seed": 2}], [{**config, "cluster": {"nodes": 1}}, {"seed": 2, "cluster": {}}]
    first, second = plan(overrides, elsewhere, tmp_path)
    assert first.folder == run.folder
    assert first.is_done()
    assert not second.is_done()
    with pytest.raises(ValueError, match="two runs of the sweep are the same"):
        plan([{}, {"cluster.nodes": 1}], [config, elsewhere[0]], tmp_path)


def test_finished_run_with_another_name_is_skipped(tmp_path):
    """Check also that another run of the sweep whose name would be that of the finished one gets its own folder."""
    sweep(tmp_path, [{"seed": 1}])
    sweep(tmp_path, [{"seed": 1}, {"seed": 2}])
    assert ran(tmp_path) == ["1", "2"]
    assert [row["run"] for row in table(tmp_path)] == ["base", "seed=2"]
    (first, second) = plan([{}, {"seed": 1}], configs([{"seed": 0}, {"seed": 1}], 4), tmp_path)
    assert (first.name[:5], second.name) == ("base~", "base")
    assert not first.folder.exists()


def test_sweep_ends_if_its_config_was_edited_meanwhile(tmp_path):
    """Check a run that reads another config than the sweep has, whose results would be taken for those of its own."""
    (command, *rest) = arguments(tmp_path, [{"seed": 1}, {"seed": 2}])
    with pytest.raises(ValueError, match=r"another config \(total_steps was 5, is 4\): undo the changes"):
        run_sweep([*command, "--config.total_steps=5"], *rest, finish)
    assert ran(tmp_path) == ["1"]


def test_sweep_whose_folder_is_moved_stops(tmp_path):
    """Check that the later runs are not started in a new folder in its place, which another sweep could use too."""
    command, *rest = arguments(tmp_path / "sweep", [{"seed": seed} for seed in range(1, 4)])
    move = "folder.parent.rename(folder.parent.with_name('moved'))"
    with pytest.raises(MovedError, match=r"sweep was moved, deleted or replaced during the run, which stops"):
        run_sweep([*command[:2], RUN + move, *command[3:]], *rest, finish)
    assert not (tmp_path / "sweep").exists()


@pytest.mark.parametrize("error", [errno.EPIPE, errno.ENOSPC])
def test_output_that_cannot_be_written_does_not_stop_the_runs(error, tmp_path, monkeypatch):
    class Closed(io.StringIO):
        fileno = io.FileIO(os.devnull).fileno  # to which Rich redirects a closed pipe

        def write(self, text):
            raise OSError(error, os.strerror(error))

    monkeypatch.setattr(sys, "stdout", Closed())
    assert run_sweep(*arguments(tmp_path, [{"seed": 1}, {"seed": 2}]), lambda *results: None) == 0
    assert ran(tmp_path) == ["1", "2"]


def test_stopped_run_does_not_stop_others(tmp_path):
    tmp_path /= "\udcff"  # a folder whose name is not UTF-8
    assert sweep(tmp_path, [{"seed": 1, "fail": 75}, {"seed": 2}]) == 75
    assert ran(tmp_path) == ["1", "2"]
    assert [row["state"] for row in table(tmp_path)] == ["stopped", "done"]


def test_parallel_runs_have_separate_cpus(tmp_path):
    all_cpus = sorted(os.sched_getaffinity(0))
    # Each run waits for the others: run sequentially, they would wait forever.
    assert sweep(tmp_path, [{"seed": seed, "together": 3} for seed in (1, 2, 3)], parallel=3) == 0
    used = [json.loads((tmp_path / f"seed={seed}/artifacts/run.json").read_text())["cpus"] for seed in (1, 2, 3)]
    assert sorted(os.sched_getaffinity(0)) == all_cpus
    assert all(set(cpus) <= set(all_cpus) for cpus in used)
    if len(all_cpus) > 1:
        assert used[0] != used[1]
        assert all(len(cpus) < len(all_cpus) for cpus in used)


@pytest.mark.thorough
def test_killed_runs_and_killed_sweep_are_completed_by_the_next_call(start, tmp_path):
    """Kill three runs and then the sweep; its other runs continue, and the next call trains only what is missing."""
    overrides = [{"seed": seed, "sleep": 0.1} for seed in range(1, 7)]
    folders = [tmp_path / f"seed={seed}" for seed in range(1, 7)]
    killed = []

    def at_work():
        """Return whether a run is in the middle of its steps."""
        return [f for f in folders if f not in killed and 3 <= len(trained(f)) < 12 and held(f)]

    first = start(tmp_path, overrides, 20, 2)
    for _ in range(3):
        killed.append(wait_for(at_work)[0])
        os.kill(pid(killed[-1]), signal.SIGKILL)
    wait_for(at_work)
    first.kill()
    first.wait()
    # A killed run may still hold its lock for a moment.
    left = {folder: pid(folder) for folder in folders if held(folder) and folder not in killed}
    assert left  # which outlive the sweep
    second = start(tmp_path, overrides, 20, 2)
    output = second.communicate(timeout=300)[0]
    assert second.returncode == 0, output
    for folder in folders:
        steps = trained(folder)
        twice = {step for step in steps if steps.count(step) > 1}
        assert sorted(set(steps)) == [*range(1, 21)]
        # Checkpoints are written every other step: a killed run repeats at most one step, or two if it was saving.
        assert len(twice) <= (2 if folder in killed else 0), steps
    assert {folder: pid(folder) for folder in left} == left
    assert [row["state"] for row in table(tmp_path)] == ["done"] * 6
    assert [float(row["test/loss"]) for row in table(tmp_path)] == pytest.approx(
        [1 / seed for seed in range(1, 7)], rel=1e-4
    )
    before = ran(tmp_path)
    assert sweep(tmp_path, overrides, 20, 2) == 0
    assert ran(tmp_path) == before


@tiered("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_stops_all_runs_after_saving(number, start, tmp_path):
    overrides = [{"seed": seed, "sleep": 0.1} for seed in (1, 2, 3)]
    process = start(tmp_path, overrides, 50, 2)
    wait_for(lambda: all(len(trained(tmp_path / f"seed={seed}")) >= 3 for seed in (1, 2)))
    process.send_signal(number)
    while number == signal.SIGTERM and process.poll() is None:  # a cluster may send several
        time.sleep(0.05)
        process.send_signal(number)
    output = process.communicate(timeout=300)[0]
    assert process.returncode == 75, output
    assert [row["state"] for row in table(tmp_path)] == ["stopped", "stopped", "waiting"]
    for seed in (1, 2):
        folder = tmp_path / f"seed={seed}"
        assert int((folder / "saved").read_text()) == trained(folder)[-1] < 50


@pytest.mark.thorough
def test_ctrl_c_reaches_the_runs_once(start, tmp_path):
    """Check that Ctrl-C reaches the runs only once, via the sweep; a second signal would end them without saving."""
    process = start(tmp_path, [{"seed": 1, "sleep": 0.1}], 50, 1)
    wait_for(lambda: len(trained(tmp_path / "base")) >= 3)
    os.killpg(process.pid, signal.SIGINT)
    output = process.communicate(timeout=300)[0]
    assert process.returncode == 75, output
    assert int((tmp_path / "base" / "saved").read_text()) == trained(tmp_path / "base")[-1] < 50


@pytest.mark.thorough
def test_signal_stops_runs_of_an_earlier_sweep(start, tmp_path):
    first = start(tmp_path, [{"seed": 1, "sleep": 0.1}], 500, 1)
    wait_for(lambda: trained(tmp_path / "base"))
    first.kill()
    first.wait()
    second = start(tmp_path, [{"seed": 1, "sleep": 0.1}], 500, 1)
    assert second.stdout.readline().startswith("base  running")
    second.terminate()
    assert second.communicate(timeout=300)[0]
    assert second.returncode == 75
    assert not held(tmp_path / "base")
    assert ran(tmp_path) == ["1"]
    assert int((tmp_path / "base" / "saved").read_text()) == trained(tmp_path / "base")[-1]


def test_sweep_waits_for_a_run_started_by_hand(tmp_path):
    command = [sys.executable, "-c", RUN, "--config.seed=1", "--config.sleep=0.3", f"--workdir={tmp_path}/seed=1"]
    with subprocess.Popen(command) as other:
        wait_for(lambda: trained(tmp_path / "seed=1"))
        assert sweep(tmp_path, [{"seed": 1}, {"seed": 2}], parallel=2) == 0
        assert other.wait() == 0
    assert sorted(ran(tmp_path)) == ["1", "2"]
    assert trained(tmp_path / "seed=1") == [1, 2, 3, 4]


@pytest.mark.thorough
def test_sweep_resumes_a_run_started_by_hand(start, tmp_path):
    command = [sys.executable, "-c", RUN, "--config.seed=1", "--config.sleep=1000", f"--workdir={tmp_path}/base"]
    with subprocess.Popen(command) as other:
        wait_for((tmp_path / "base" / "config.json").exists)
        process = start(tmp_path, [{"seed": 1}])
        assert process.stdout.readline().startswith("base  running")
        other.kill()
    output = process.communicate(timeout=300)[0]
    assert process.returncode == 0, output
    assert ran(tmp_path) == ["1", "1"]
    assert trained(tmp_path / "base") == [1, 2, 3, 4]


@pytest.mark.thorough
def test_run_of_an_earlier_sweep_keeps_its_devices(start, tmp_path):
    first = start(tmp_path, [{"seed": 2, "sleep": 0.1}], 20)
    wait_for(lambda: trained(tmp_path / "base"))
    first.kill()
    first.wait()
    assert sweep(tmp_path, [{"seed": 1}, {"seed": 2, "sleep": 0.1}], 20) == 0
    ended, began = tmp_path / "base" / "artifacts" / "run.json", tmp_path / "seed=1" / "log.txt"
    assert ended.stat().st_mtime_ns <= began.stat().st_mtime_ns


@pytest.mark.thorough
def test_run_of_an_earlier_sweep_may_finish_before_its_turn(start, tmp_path):
    overrides = [{"seed": 1, "sleep": 0.1}, {"seed": 2, "sleep": 0.1}]
    first = start(tmp_path, overrides, 20, 2)
    wait_for(lambda: trained(tmp_path / "seed=1") and trained(tmp_path / "seed=2"))
    first.kill()
    first.wait()
    assert sweep(tmp_path, overrides, 20, parallel=1) == 0  # sequentially
    assert sorted(ran(tmp_path)) == ["1", "2"]
    assert [row["state"] for row in table(tmp_path)] == ["done", "done"]


def test_second_sweep_in_the_same_folder_raises(start, tmp_path):
    start(tmp_path, [{"seed": 1, "sleep": 0.2}], 50)
    wait_for(lambda: trained(tmp_path / "base"))
    with pytest.raises(ValueError, match="another run is using"):
        sweep(tmp_path, [{"seed": 1}])


def test_sweep_report_shows_the_results(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(figures, "save", lambda *args, **names: drawn.append((args[1:], names)) or "")
    sweep(tmp_path, [{"seed": seed} for seed in (1, 2)])
    assert not [names for _, names in drawn if names["name"] == "sweep"]  # only the seed differs
    overrides = [{"a.b": place, "c": c, "d": c + c, "seed": seed} for place, c, seed in product((10, 9), "xy", (1, 4))]
    sweep(tmp_path, overrides[:-1])
    ((panels, xlabel),) = [args for args, names in drawn if names == {"name": "sweep", "folder": tmp_path}]
    assert (list(panels), xlabel) == (["test/loss"], "b")
    places, values = panels["test/loss"]["c=x"]
    assert places == ["10", "9"]
    np.testing.assert_array_equal(values, [[1, 0.25], [1, 0.25]])
    np.testing.assert_array_equal(panels["test/loss"]["c=y"][1], [[1, 0.25], [1, np.nan]])


def test_sweep_figure(tmp_path):
    assert sweep(tmp_path, [{"a.b": place, "seed": seed} for place, seed in product((10, 9), (1, 4))]) == 0
    assert (tmp_path / "sweep.png").stat().st_size > 1000


def test_no_figure_for_more_runs_than_colors(tmp_path):
    assert sweep(tmp_path, [{"a": seed % 2, "b": seed, "seed": seed} for seed in range(1, 6)], parallel=5) == 0
    assert not (tmp_path / "sweep.png").exists()


def test_run_names_contain_differing_keys_only():
    rates = [{"schedule.learning_rate": rate, "seed": seed} for rate, seed in product((1e-3, 1e-4), (0, 1))]
    assert run_names(rates)[:2] == ["learning_rate=0.001,seed=0", "learning_rate=0.001,seed=1"]
    sizes = [{"model.name": name, "model.depth": depth, "model.width": 8} for name, depth in (("vit", 4), ("gpt", 2))]
    assert run_names(sizes) == ["name=vit", "name=gpt"]
    both = [{"model.name": m, "optimizer.name": o} for m, o in product("ab", "cd")]
    assert run_names(both)[0] == "model.name=a,optimizer.name=c"
    assert run_names([{"seed": 1}, {"seed": 1, "model.depth": 2}]) == ["base", "depth=2"]
    assert run_names([{"seed": 1}, {"model.depth": 2}]) == ["seed=1", "model.depth=2"]
    assert run_names([{}]) == run_names([{"seed": 3}]) == ["base"]


def test_run_names_are_valid_folder_names():
    names = run_names([{"source": f"text:{letter}/b.txt"} for letter in "ab"])
    assert names == ["source=text:a_b.txt", "source=text:b_b.txt"]
    first, second = run_names([{"source": "a/b"}, {"source": "a_b"}])
    assert first == "source=a_b"
    assert second.startswith("source=a_b~")
    lists = run_names([{"layers": layers, "prompt": "a* b?\\"} for layers in ([0, 2], (0,))])
    assert lists == ["layers=(0,2)", "layers=(0,)"]
    assert run_names([{"prompt": "a* b?\\"}, {"prompt": ""}]) == ["prompt=a_b__", "prompt="]
    long = run_names([{"init.path": "x" * 300 + letter} for letter in "ab"])
    assert len(set(long)) == 2
    assert all(len(name) < 120 for name in long)
    foreign = run_names([{"source": "文" * 90 + letter} for letter in "ab"])
    assert len(set(foreign)) == 2
    assert all(len(name.encode()) < 120 for name in foreign)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([], r"has no sweep\(\)"),
        ([{"seed": 1}, {"seed": 1}], "two runs of the sweep are the same: {'seed': 1} and {'seed': 1}"),
        ([{"seed": 1}, {"seed": 2}] * 2, "two runs of the sweep are the same: {'seed': 1} and {'seed': 1}"),
        ([{"seed": 1}] * 2, "two runs of the sweep are the same: {'seed': 1} and {'seed': 1}"),
        ([{"seed": 1, "total_steps": 4}, {"seed": 1}], "are the same: {'seed': 1, 'total_steps': 4} and {'seed': 1}"),
    ],
)
def test_invalid_sweep_raises(overrides, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        sweep(tmp_path, overrides)


def test_folder_that_cannot_be_created_raises(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError, match=r"the workdir is .*sweep, but .*file is a file: choose another"):
        sweep(tmp_path / "file" / "sweep", [{"seed": 1}])
