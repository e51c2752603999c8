"""Searches: sampling, pruning of trials, and resuming an interrupted search."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest

from lineage.configs.sweeps import Choice, Floats, Integers, Search
from lineage.report.comparison import finish
from lineage.runs import search as module
from lineage.runs import sweep
from lineage.runs.folder import METRICS
from lineage.runs.locks import locked
from lineage.runs.process import NO_MEMORY, NOT_FINITE, PREEMPTED, UNKNOWN_METRIC
from lineage.runs.search import Trials, run_search

# Fake run: its loss falls to the distance from the optimum, with an evaluation after each step.
RUN = """
import json, os, pathlib, sys, time
options = dict(part.removeprefix("--").split("=", 1) for part in sys.argv[1:])
folder = pathlib.Path(options["workdir"])
(folder / "artifacts").mkdir(parents=True, exist_ok=True)
x, depth, kind = float(options["config.x"]), int(options["config.depth"]), options["config.kind"]
with open(folder.parent / "ran.txt", "a") as file:
    print(folder.name, file=file)
if folder.name.startswith(os.environ.get("FAIL", "none")):
    sys.exit("error: no disk")
number, victim, *always = os.environ.get("KILL", "").split() or [0, ""]
if victim == folder.name and (always or not (folder / "killed").exists()):
    (folder / "killed").touch()
    os.kill(os.getpid(), int(number))
if x > 9:
    sys.exit(77)  # as after a loss that is not finite
for step in range(1, 5):
    loss = (x - 3) ** 2 + (kind == "bad") * 100 + 1 / step
    with open(folder / "metrics.jsonl", "a") as file:
        print(json.dumps({"step": step, "train/loss": loss, "validation/loss": loss}), file=file)
    time.sleep(float(os.environ.get("SLEEP", 0)))
config = {"x": x, "depth": depth, "kind": kind}
(folder / "artifacts" / "run.json").write_text(json.dumps({"seconds": 1.0, "config": config}))
"""
SPACE = {"x": Floats(0.0, 10.0), "depth": Integers(1, 4), "kind": Choice("good", "bad")}
COMMAND = [sys.executable, "-c", RUN]


def run(workdir, parallel=2, **more):
    search = Search(**{"space": SPACE, "trials": 12, "prune": False, "seed": 1} | more)
    return run_search(COMMAND, search, dict, workdir, finish, parallel)


def ran(workdir):
    return (workdir / "ran.txt").read_text().split()


def rows(workdir):
    header, *lines = (line.split(",") for line in (workdir / "sweep.csv").read_text().splitlines())
    return [dict(zip(header, line)) for line in lines]


@pytest.mark.thorough
def test_search_finds_better_values_and_resumes(tmp_path, monkeypatch):
    """Check trials one after the other: the values of parallel ones depend on their order, and with it on the load."""
    monkeypatch.setenv("FAIL", "trial_002")
    assert run(tmp_path, 1) == 1
    states = {row["run"]: row["state"] for row in rows(tmp_path)}
    assert states.pop("trial_002") == "failed (1)"
    assert len(states) == 11
    assert set(states.values()) <= {"done", "pruned"}  # with a non-finite loss
    assert set(ran(tmp_path)) == {f"trial_{number:03}" for number in range(12)}
    for row in rows(tmp_path):
        assert 0 <= float(row["x"]) <= 10
        assert row["depth"] in "1234"
        assert (row["state"] == "done") == (float(row["x"]) <= 9 and row["run"] != "trial_002")
    tried = rows(tmp_path)[2]
    monkeypatch.delenv("FAIL")
    assert run(tmp_path, 1, trials=25) == 0
    assert len(ran(tmp_path)) == 12 + 1 + 13  # only trials that failed for another reason are repeated
    assert {key: rows(tmp_path)[2][key] for key in ("x", "depth", "kind")} == {
        key: tried[key] for key in ("x", "depth", "kind")
    }
    assert all((row["state"] == "done") == (float(row["x"]) <= 9) for row in rows(tmp_path))
    late = [row for row in rows(tmp_path)[12:] if row["state"] == "done"]
    assert sum(row["kind"] == "good" for row in late) > len(late) * 0.6
    best = min(float(row["validation/loss"]) for row in rows(tmp_path) if row["state"] == "done")
    assert best < 2.5
    page = (tmp_path / "sweep.html").read_text()
    assert "The best run by the last validation/loss is" in page


@pytest.mark.thorough
def test_search_prunes_worse_trials(tmp_path, monkeypatch):
    monkeypatch.setenv("SLEEP", "0.5")
    assert run(tmp_path, 3, trials=9, prune=True, startup=2) == 0
    states = [row["state"] for row in rows(tmp_path)]
    assert "pruned" in states
    assert states.count("done") >= 2
    before = ran(tmp_path)
    assert run(tmp_path, 3, trials=9, prune=True, startup=2) == 0  # pruned trials stay pruned
    assert ran(tmp_path) == before


@pytest.mark.thorough
def test_search_resumes_after_a_kill(tmp_path):
    program = "import sys; from pathlib import PosixPath; from lineage.runs.search import run_search\n"
    program += "from lineage.configs.sweeps import *\n"
    program += "from lineage.report.comparison import finish\n"
    program += f"run_search({COMMAND!r}, Search({SPACE!r}, trials=4, prune=False), dict, {tmp_path!r}, finish, 2)"
    program = program.replace(repr(SPACE["kind"]), "Choice('good', 'bad')")
    environment = {"SLEEP": "1", "PATH": ""}
    with subprocess.Popen([sys.executable, "-c", program], env=environment) as process:
        end = time.monotonic() + 300
        while not (tmp_path / "ran.txt").exists() or len(ran(tmp_path)) < 2:
            assert time.monotonic() < end
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
    assert run(tmp_path, trials=4) == 0
    assert sorted(ran(tmp_path)) == [f"trial_{number:03}" for number in range(4)]  # none is repeated
    assert [row["state"] for row in rows(tmp_path)] == ["done"] * 4


@pytest.mark.thorough
@pytest.mark.parametrize("lines", [0, 3, 5, 11, 19])
def test_search_whose_storage_is_torn_chooses_the_same_values(lines, tmp_path):
    run(tmp_path, 1, trials=4, startup=2)
    expected, journal = rows(tmp_path), tmp_path / module.STORAGE
    written = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join(written[:lines]) + written[lines][:20])
    assert run(tmp_path, 1, trials=4, startup=2) == 0
    assert rows(tmp_path) == expected
    assert len(ran(tmp_path)) == 4


@pytest.mark.thorough
@pytest.mark.parametrize("number", [9, 15])
def test_search_of_which_a_run_was_killed_chooses_the_same_values(number, tmp_path, monkeypatch):
    for folder in ("undisturbed", "killed"):
        (tmp_path / folder).mkdir()
        monkeypatch.setenv("KILL", f"{number} trial_000" if folder == "killed" else "")
        assert run(tmp_path / folder, 1, trials=3, startup=1) == 0
    assert rows(tmp_path / "killed") == rows(tmp_path / "undisturbed")
    assert ran(tmp_path / "killed") == ["trial_000", *ran(tmp_path / "undisturbed")]


@pytest.mark.thorough
def test_run_that_is_always_killed_does_not_stop_a_search(tmp_path, monkeypatch):
    monkeypatch.setenv("KILL", "9 trial_000 always")
    assert run(tmp_path, 1, trials=2) == 1
    assert ran(tmp_path) == ["trial_000", "trial_000", "trial_001"]


@pytest.mark.thorough
def test_search_ends_if_all_of_its_first_runs_fail(tmp_path, monkeypatch):
    monkeypatch.setenv("FAIL", "trial")
    assert run(tmp_path) == 1
    assert 5 <= len(ran(tmp_path)) <= 6  # two at a time
    monkeypatch.setenv("FAIL", "trial_000")
    assert run(tmp_path) == 1
    assert len(rows(tmp_path)) == 12


@pytest.mark.thorough
def test_trial_whose_folder_is_lost_is_repeated_to_its_end(tmp_path, monkeypatch):
    run(tmp_path, 1, trials=3)
    expected = rows(tmp_path)
    shutil.rmtree(tmp_path / "trial_001")
    monkeypatch.setattr("optuna.pruners.NopPruner.prune", lambda *_: True)
    monkeypatch.setenv("SLEEP", "0.5")
    assert run(tmp_path, 1, trials=3) == 0
    assert rows(tmp_path) == expected
    assert ran(tmp_path) == ["trial_000", "trial_001", "trial_002", "trial_001"]


@pytest.mark.thorough
def test_search_that_a_signal_ends_between_two_runs_is_not_complete(tmp_path, monkeypatch):
    stopping = [*COMMAND[:2], f"{RUN}\nos.kill(os.getppid(), {signal.SIGTERM:d})\n"]
    with monkeypatch.context() as patch:
        patch.setattr(sys.modules[__name__], "COMMAND", stopping)
        patch.setattr(sweep, "ignore_stop_signals", lambda: None)
        assert run(tmp_path, 1, trials=2) == PREEMPTED
    assert ran(tmp_path) == ["trial_000"]
    assert run(tmp_path, 1, trials=2) == 0
    assert ran(tmp_path) == ["trial_000", "trial_001"]


def test_damaged_storage_is_named(tmp_path):
    tmp_path /= "new/folder"
    run(tmp_path, trials=1)
    journal = tmp_path / module.STORAGE
    journal.write_bytes(journal.read_bytes().replace(b"{", b"(", 3))
    with pytest.raises(ValueError, match=f"{module.STORAGE} is damaged"):
        run(tmp_path, trials=1)


def ended(run, state, *values, code=None):
    """Let a run have a state, and values of the metric at the steps 1, 2, ..."""
    run.folder.mkdir()
    run.state, run.code, run.metrics = state, code, [{"step": 1, "train/loss": 9.0}]
    run.metrics += [{"step": step, "validation/loss": value} for step, value in enumerate(values, 1)]
    (run.folder / "artifacts").mkdir()
    (run.folder / "artifacts" / "run.json").write_text('{"seconds": 1.0}' if state == "done" else "{}")


def test_trials_have_the_results_of_their_runs(tmp_path):
    search = Search(SPACE, trials=7, prune=False, seed=1)
    trials = Trials(search, dict, tmp_path)
    done, infinite, failed, diverged, large, stopped, pruned = trials.todo()
    ended(done, "done", 4.0, 3.0, 2.0)
    ended(infinite, "done", 1.0, float("inf"))
    ended(failed, "failed (1)", 3.0, code=1)
    ended(diverged, "failed (77)", code=NOT_FINITE)
    ended(large, "failed (78)", code=NO_MEMORY)
    ended(stopped, "stopped", 5.0)
    ended(pruned, "pruned", 6.0)
    for run in (*trials.runs, *trials.runs):  # what is known is not reported again
        assert trials.observe(run) is False
    assert [run.state for run in (diverged, large)] == ["pruned", "pruned"]
    known = trials.study.get_trials()
    states = ["COMPLETE", "FAIL", "RUNNING", "PRUNED", "PRUNED", "RUNNING", "PRUNED"]
    assert [one.state.name for one in known] == states
    assert (known[0].value, known[0].intermediate_values) == (2.0, {1: 4.0, 2: 3.0, 3: 2.0})
    assert known[5].intermediate_values == {1: 5.0}
    (done.folder / METRICS).write_text('{"step": 1, "validation/loss": 4.0}\n')
    again = Trials(search, dict, tmp_path)
    states = {"COMPLETE": "done", "FAIL": "done", "RUNNING": "waiting"}
    assert [run.state for run in again.runs] == [states.get(one.state.name, "pruned") for one in known]
    assert [run.changes for run in again.runs] == [run.changes for run in trials.runs]
    assert again.runs[0].step == 1  # the table shows the results of runs that have ended
    with locked(stopped.folder):  # a run in progress comes first
        assert [run.name for run in again.todo()] == ["trial_005", "trial_002"]


def test_completed_trial_without_its_folder_is_run_again_and_not_pruned(tmp_path):
    search = Search(SPACE, trials=2, startup=1)
    trials = Trials(search, dict, tmp_path)
    for run, value in zip(trials.todo(), (1.0, 2.0)):
        ended(run, "done", value)
        trials.observe(run)
    shutil.rmtree(run.folder)
    again = Trials(search, dict, tmp_path)
    assert [run.state for run in again.runs] == ["done", "waiting"]
    ended(again.runs[1], "running", 9.0)
    assert again.observe(again.runs[1]) is False


@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_storage_that_is_a_link_or_a_pipe_is_refused(kind, tmp_path):
    (own := tmp_path / "own.txt").write_text("a line without an end")
    storage = tmp_path / "search" / module.STORAGE
    storage.parent.mkdir()
    if kind == "link":
        storage.symlink_to(own)
    else:
        os.mkfifo(storage)
    with pytest.raises(ValueError, match=f"{storage} is (a link|not a regular file)"):
        run(storage.parent, trials=1)
    assert own.read_text() == "a line without an end"


def test_lock_of_a_killed_search_is_deleted(tmp_path, monkeypatch):
    """Check that Optuna does not wait for the lock."""
    (tmp_path / f"{module.STORAGE}.lock").symlink_to(tmp_path)
    monkeypatch.setattr("optuna.storages.journal._file.time.sleep", lambda seconds: pytest.fail("the lock is held"))
    assert len(list(Trials(Search(SPACE, trials=1), dict, tmp_path).todo())) == 1


def test_finished_trial_whose_last_value_is_not_finite_stays_finished(tmp_path, monkeypatch):
    null = 'loss = None if step == 4 else loss\n    with open(folder / "metrics'
    diverging = RUN.replace('with open(folder / "metrics', null)
    monkeypatch.setitem(globals(), "COMMAND", [sys.executable, "-c", diverging])
    for _ in range(2):
        with pytest.raises(ValueError, match="none of the 1 runs ended with a finite validation/loss"):
            run(tmp_path, trials=1)
        assert [(row["state"], row["validation/loss"]) for row in rows(tmp_path)] == [("done", "nan")]
    assert len(ran(tmp_path)) == 1


def test_search_whose_runs_all_have_a_non_finite_loss_raises(tmp_path):
    with pytest.raises(ValueError, match="none of the 2 runs ended with a finite validation/loss"):
        run(tmp_path, trials=2, space=SPACE | {"x": Choice(9.5)})
    assert [row["state"] for row in rows(tmp_path)] == ["pruned"] * 2


def test_metric_may_change_while_no_run_has_it(tmp_path):
    Trials(Search(SPACE, metric="test/loss"), dict, tmp_path)
    ended((trials := Trials(Search(SPACE), dict, tmp_path)).add(trials.study.ask()), "done", 1.0)
    assert Trials(Search(SPACE), dict, tmp_path).study.user_attrs == {"metric": "validation/loss"}


def test_search_stops_if_the_runs_do_not_have_its_metric(tmp_path):
    trials = Trials(Search(SPACE, trials=2), dict, tmp_path)
    run = next(trials.todo())
    ended(run, "failed (79)", code=UNKNOWN_METRIC)
    (run.folder / "log.txt").write_text("error: checkpoint.best is 'loss': it must be one of test/loss.")
    with pytest.raises(ValueError, match=r"trial_000 has no such metric, .*: error: checkpoint.best is 'loss'"):
        trials.observe(run)


@pytest.mark.parametrize(("highest", "pruned"), [(False, [False, True]), (True, [True, False])])
def test_runs_that_are_worse_than_the_median_are_pruned(highest, pruned, tmp_path):
    search = Search(SPACE, highest=highest, trials=3, startup=1)
    trials = Trials(search, dict, tmp_path)
    first, *others = trials.todo()
    ended(first, "done", 2.0)
    trials.observe(first)
    for run, value in zip(others, (1.0, 3.0)):
        ended(run, "running", value)
    assert [trials.observe(run) for run in others] == pruned


def test_first_trials_are_not_pruned_if_later_ones_end_before_them(tmp_path):
    trials = Trials(Search(SPACE, trials=3, startup=2), dict, tmp_path)
    first, *others = trials.todo()
    for run in others:
        ended(run, "done", 2.0)
        trials.observe(run)
    ended(first, "running", 3.0)
    assert trials.observe(first) is False


@pytest.mark.parametrize("value", ['"2.5"', "[1]", "1" + 400 * "0"])
def test_metric_that_is_not_a_number_is_reported_with_its_file(value, tmp_path):
    """Check a file of a run that had ended when the search was killed."""
    assert run(tmp_path, trials=1) == 0
    (tmp_path / "optuna.journal").unlink()
    path = tmp_path / "trial_000" / METRICS
    path.write_text(f'{{"step": 4, "validation/loss": {value}}}\n')
    with pytest.raises(ValueError, match=f"^{path} is damaged: validation/loss is not a number"):
        run(tmp_path, trials=1)


def test_runs_keep_the_best_checkpoint_by_the_metric(tmp_path, monkeypatch):
    commands = []

    class Launcher:
        def __init__(self, command, parallel, observe):
            commands.append(command)

        def run(self, todo, shown, check):
            pass

    monkeypatch.setattr(module, "Launcher", Launcher)
    search = Search(SPACE, trials=1)
    for config in ({}, {"checkpoint": {"best": ""}}, {"checkpoint": {"best": "test/loss"}}):
        run_search(["run"], search, lambda changes, config=config: config, tmp_path, finish)
    best = ["--config.checkpoint.best=validation/loss", "--config.checkpoint.best_is_highest=False"]
    assert commands == [["run"], ["run", *best], ["run"]]


def test_invalid_search_raises(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"has no search\(\)"):
        run_search(COMMAND, None, dict, tmp_path, finish)
    with pytest.raises(ValueError, match="'test/bleu'; the metrics of the runs are train/loss, validation/loss"):
        run(tmp_path / "a", metric="test/bleu")
    run(tmp_path / "b", trials=1)
    for space in ({"x": SPACE["x"]}, SPACE | {"y": SPACE["x"]}):
        with pytest.raises(ValueError, match=r"a search over other keys \(x, depth, kind\)"):
            run_search(COMMAND, Search(space), dict, tmp_path / "b", finish)
    for kind in (Choice("good", "ugly"), Floats(0, 1)):
        with pytest.raises(ValueError, match=r"kind has other choices or another type .*: undo the change"):
            run_search(COMMAND, Search(SPACE | {"kind": kind}), dict, tmp_path / "b", finish)
    for objective in ({"metric": "test/loss"}, {"highest": True}):
        with pytest.raises(ValueError, match="a search for the lowest validation/loss, not for the "):
            run(tmp_path / "b", **objective)
    (tmp_path / "b" / "trial_000" / "config.json").write_text('{"total_steps": 9}')
    with pytest.raises(ValueError, match=r"trial_000 holds a run of another config \(total_steps was 9, is 8\): undo"):
        run_search(COMMAND, Search(SPACE), lambda changes: {"total_steps": 8}, tmp_path / "b", finish)
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match="pip install optuna"):
        run(tmp_path)


def test_storage_is_readable_by_optuna(tmp_path):
    run(tmp_path, trials=2)
    lines = [json.loads(line) for line in (tmp_path / "optuna.journal").read_text().splitlines()]
    assert sum("distribution" in line for line in lines) == 6


def test_full_disk_is_reported_with_the_storage(tmp_path, monkeypatch):
    def fail(number):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match=f"No space left on device: '{tmp_path / module.STORAGE}'"):
        run(tmp_path, trials=1)
