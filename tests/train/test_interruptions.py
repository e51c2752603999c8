"""Runs that are interrupted by the clock, by errors, by signals in evaluations and saves, and by steps that hang."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from lineage.evaluation import Evaluation
from lineage.runs.folder import MEASURED, plain, read_metrics, read_record
from lineage.runs.live import Run
from lineage.runs.locks import MovedError
from lineage.runs.process import HUNG
from lineage.train import distributed, loop
from lineage.train.checkpoint import Checkpoints
from lineage.train.profiling import watchdog
from lineage.train.profiling.watchdog import Watchdog
from tests.tiers import tiered
from tests.train.conftest import without_report

pytestmark = pytest.mark.usefixtures("no_report")
ONE = jax.devices()[:1]
# Evaluations of six batches after steps 3 and 6.
CHANGES = {"total_steps": 6, "evaluate_every_steps": 3, "save_every_steps": 100, "log_every_steps": 4, "ema_decay": 0.9}


def steps(workdir):
    return sorted(int(path.name) for path in (workdir / "checkpoints").iterdir())


def final(workdir):
    """Return the bytes of the final state, the history without times, and the metrics in the last record."""
    saved = ocp.StandardCheckpointer().restore(workdir / "checkpoints" / "6" / "state")
    history = [
        {key: value for key, value in line.items() if not key.startswith(MEASURED)} for line in read_metrics(workdir)
    ]
    metrics = read_record(workdir / "checkpoints" / "6")["metrics"]
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(saved)], history, metrics


@pytest.fixture(scope="module")
def compiled():
    """Return compiled training steps by number of steps, on which alone they depend here."""
    return {}


@pytest.fixture
def train(tiny, tmp_path, monkeypatch, compiled):
    """Return `train(changes, name)`, which trains in a folder and returns it."""
    whole = loop.compile_step

    def compile_step(experiment, state):
        if experiment.total_steps not in compiled:
            compiled[experiment.total_steps] = whole(experiment, state)
        return compiled[experiment.total_steps]

    monkeypatch.setattr(loop, "compile_step", compile_step)

    def train(changes=None, name="run"):
        loop.train(tiny("vit", CHANGES | (changes or {})), tmp_path / name, devices=ONE)
        return tmp_path / name

    return train


@pytest.fixture(scope="module")
def reference(tiny, tmp_path_factory):
    """Return what `final` returns for an undisturbed run."""
    workdir = tmp_path_factory.mktemp("reference")
    with pytest.MonkeyPatch.context() as patch:
        without_report(patch)
        loop.train(tiny("vit", CHANGES), workdir, devices=ONE)
    return final(workdir)


@pytest.mark.thorough
@tiered(("minutes", "saved"), [(2.5, [3, 6, 7]), (0.0, [7]), (30.0, [7])], first=1)
def test_run_saves_by_the_clock(minutes, saved, train, monkeypatch):
    clock, whole = SimpleNamespace(now=0.0), loop.TrainingLoop.run

    def run(self, step):
        clock.now += 60
        whole(self, step)

    monkeypatch.setattr(distributed, "time", SimpleNamespace(monotonic=lambda: clock.now))
    monkeypatch.setattr(loop.TrainingLoop, "run", run)
    assert steps(train({"total_steps": 7, "checkpoint.every_minutes": minutes, "checkpoint.keep": 9})) == saved


@contextlib.contextmanager
def failing_data(step, error, poisoned=None):
    """Raise an error instead of the batch of a step; the images of a step before may be nan."""
    whole = loop.device_batches

    def batches(experiment, start):
        for number, batch in enumerate(whole(experiment, start), start=start + 1):
            if number == step:
                raise error
            yield batch | {"image": batch["image"] * np.nan} if number == poisoned else batch

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "device_batches", batches)
        with pytest.raises(type(error)):
            yield


@tiered("error", [OSError("the data are gone"), KeyboardInterrupt()], first=1)
def test_state_is_saved_after_an_error_of_the_data(error, reference, train, tmp_path, capsys):
    with failing_data(5, error):
        train()
    assert steps(tmp_path / "run") == [4]
    assert "the state after step 4 was saved before the run ends" in capsys.readouterr().err
    assert final(train()) == reference


@pytest.mark.thorough
def test_state_is_saved_after_an_error_of_an_evaluator(reference, train, tmp_path, capsys):
    with pytest.MonkeyPatch.context() as patch:

        def fail(*_):
            raise KeyError("no such answer")

        patch.setattr(Evaluation, "__call__", fail)
        with pytest.raises(KeyError, match="no such answer"):
            train()
    assert steps(tmp_path / "run") == [3]
    assert final(train()) == reference  # the evaluation after step 3 is repeated
    assert "resuming from step 3" in capsys.readouterr().err


def test_state_that_is_not_finite_is_not_saved_after_an_error(train, tmp_path, capsys):
    with failing_data(5, OSError("the data are gone"), poisoned=4):
        train({"save_every_steps": 3})
    assert steps(tmp_path / "run") == [3]
    assert "the state after step 4 was not saved: train/loss is nan at step 4" in capsys.readouterr().err


def test_nothing_is_saved_after_an_error_of_a_save(train, tmp_path, monkeypatch):
    saves = []

    def save(self, state, *_, **__):
        saves.append(int(state.step))
        raise OSError("no space")

    monkeypatch.setattr(Checkpoints, "save", save)
    with pytest.raises(OSError, match="no space"):
        train({"save_every_steps": 2})
    assert saves == [2]


@pytest.mark.thorough
@tiered("replaced", [True, False], first=1)
def test_run_in_a_moved_folder_stops(replaced, reference, train, tmp_path):
    """Check that nothing is written to the old path, where another run may have begun, and that the run continues."""
    moved, whole = tmp_path / "moved", loop.device_batches

    def batches(experiment, start):
        for number, batch in enumerate(whole(experiment, start), start=start + 1):
            if number == 5:
                while not (experiment.workdir / "checkpoints" / "3").exists():  # it is being saved
                    time.sleep(0.01)
                experiment.workdir.rename(moved)
                if replaced:
                    experiment.workdir.mkdir()
            yield batch

    def close(self):
        real(self)
        raise FileNotFoundError("a file that was to be saved")

    real = ocp.CheckpointManager.close
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "device_batches", batches)
        patch.setattr(ocp.CheckpointManager, "close", close)
        with pytest.raises(MovedError, match=r"run was moved, deleted or replaced during the run"):
            train({"save_every_steps": 3})
    assert [*tmp_path.glob("run/*")] == []
    assert steps(moved) == [3]
    assert final(train({"save_every_steps": 3}, "moved")) == reference


@pytest.mark.thorough
@tiered("name", ["save", "wait_until_finished"], first=1)
def test_save_that_fails_in_a_moved_folder(name, train, tmp_path, monkeypatch):
    def fail(*_, **__):
        (tmp_path / "run").rename(tmp_path / "moved")
        raise FileNotFoundError("a file that was to be saved")

    monkeypatch.setattr(ocp.CheckpointManager, name, fail)
    with pytest.raises(MovedError, match=r"run was moved, deleted or replaced during the run"):
        train()


@pytest.mark.thorough
def test_run_without_its_report_is_not_done(tiny, train, tmp_path):
    """Check that a sweep resumes a run that was interrupted while it wrote its report."""
    run = Run("run", tmp_path / "run", config=plain(tiny("vit", CHANGES)))

    def fail(_):
        raise ValueError("no font")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "write_report", fail)
        with pytest.raises(ValueError, match="no font"):
            train()
    assert steps(run.folder) == [6]
    assert run.facts()["steps"] == 6  # for the report
    assert not run.is_done()
    train()
    assert run.is_done()


@pytest.mark.thorough
@tiered("evaluation", [1, 2], first=1)
def test_signal_stops_an_evaluation_at_the_next_batch(evaluation, train, tmp_path):
    """Check that the resumed run evaluates again and ends as an undisturbed one."""
    best = {"save_every_steps": 3, "checkpoint.best": "test/loss"}
    reference = final(train(best, "reference"))
    records = {step: read_record(tmp_path / "reference" / "checkpoints" / step)["metrics"] for step in ("3", "6")}
    assert all("test/loss" in metrics for metrics in records.values())
    whole, calls = loop.to_mesh, []

    def to_mesh(batch, mesh):
        calls.append(1)
        if len(calls) == 6 * (evaluation - 1) + 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return whole(batch, mesh)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "to_mesh", to_mesh)
        with pytest.raises(loop.Preempted, match=f"stopped at step {3 * evaluation} of 6 after saving"):
            train(best)
    assert len(calls) == 6 * (evaluation - 1) + 2
    assert read_record(tmp_path / "run" / "checkpoints" / str(3 * evaluation))["metrics"] == {}
    assert final(train(best)) == reference
    for step, metrics in records.items():
        assert read_record(tmp_path / "run" / "checkpoints" / step)["metrics"] == metrics


def test_signal_during_a_save_ends_the_run_after_it(train, tmp_path, monkeypatch):
    whole, saves = Checkpoints.save, []

    def save(self, state, *args, **history):
        saves.append(int(state.step))
        os.kill(os.getpid(), signal.SIGUSR1)
        whole(self, state, *args, **history)

    monkeypatch.setattr(Checkpoints, "save", save)
    with pytest.raises(loop.Preempted, match="stopped at step 2 of 6"):
        train({"save_every_steps": 2})
    assert saves == [2]
    assert steps(tmp_path / "run") == [2]


def test_step_that_does_not_end_is_noticed(train, monkeypatch):
    whole, hung, noticed = loop.device_batches, threading.Event(), []

    def batches(experiment, start):
        for number, batch in enumerate(whole(experiment, start), start=start + 1):
            assert number != 4 or hung.wait(60)
            yield batch

    monkeypatch.setattr(loop, "device_batches", batches)
    monkeypatch.setattr(Watchdog, "_end", lambda self: (noticed.append(self._number), hung.set()))
    train({"step_timeout_minutes": 0.05})
    assert set(noticed) == {4}


@tiered(
    ("activity", "where", "name"),
    [
        ("evaluating", loop.TrainingLoop, "_evaluate"),
        ("saving", Checkpoints, "save"),
        ("saving", Checkpoints, "wait"),
    ],
)
def test_evaluation_or_save_that_does_not_end_is_noticed(activity, where, name, train, monkeypatch):
    whole, hung, noticed = getattr(where, name), threading.Event(), []
    monkeypatch.setattr(where, name, lambda *args, **options: hung.wait(60) and whole(*args, **options))
    monkeypatch.setattr(Watchdog, "_end", lambda self: (noticed.append((self._activity, self._number)), hung.set()))
    monkeypatch.setattr(watchdog, "FIRST_LIMIT", 3.0)
    train({"step_timeout_minutes": 0.04, "evaluate_every_steps": 6})
    assert set(noticed) == {(activity, 6)}


def test_every_batch_of_an_evaluation_is_progress(train, monkeypatch):
    seen = []
    monkeypatch.setattr(Watchdog, "progress", lambda self: seen.append((self._activity, self._number)))
    train()
    assert {one: seen.count(one) for one in seen} == {("evaluating", 3): 6, ("evaluating", 6): 6}


def hanging(activity, stderr):
    """Return the end of a process that hangs in a step or an activity after it."""
    script = "import time\nfrom lineage.train.profiling import watchdog\ndef hangs(): time.sleep(10)\n"
    script += "watchdog.FIRST_LIMIT, Watchdog = 1.0, watchdog.Watchdog\n"
    script += f"with Watchdog(0.01) as dog, dog.step(1234{activity}): hangs()"
    return subprocess.run([sys.executable, "-c", script], stderr=stderr, text=True, cwd=Path(__file__).parents[3])


def test_watchdog_ends_a_process_without_a_place_for_messages():
    with open("/dev/full", "w") as full:
        assert hanging("", full).returncode == HUNG


@pytest.mark.thorough
@tiered(("activity", "said"), [(", 'saving'", "saving after"), ("", "in")])
def test_watchdog_ends_the_process_with_the_stacks_of_all_threads(activity, said):
    ended = hanging(activity, subprocess.PIPE)
    assert ended.returncode == HUNG == 76
    assert "in hangs" in ended.stderr
    assert ended.stderr.count("hread 0x") >= 2
    assert f"\nerror: no progress for 1 s {said} step 1,234 (step_timeout_minutes): the stacks" in ended.stderr


def test_limit_of_the_watchdog_follows_the_steps(monkeypatch):
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(watchdog, "time", SimpleNamespace(monotonic=lambda: clock.now))
    dog, limits = Watchdog(), []
    for seconds in (500, 100, 40, 1):
        limits.append(dog.limit)
        with dog.step(1):
            clock.now += seconds
    assert limits == [3600, 3600, 2000, 1400]
    assert dog.limit == pytest.approx(20 * 141 / 3)
    with dog.step(1):
        clock.now -= 139
    assert dog.limit == 600
    assert Watchdog(2.0).limit == 120
    with dog.step(1, "evaluating"):
        clock.now += 10_000
        assert dog.limit == 3600
        dog._passed = 99.0
        dog.progress()
        assert dog._passed == 0
    assert dog._steps == 5
    with dog.step(2):
        assert dog.limit == 600
    for minutes, limit in ((2.0, 3600), (90.0, 5400)):
        with (slow := Watchdog(minutes)).step(1, "saving"):
            assert slow.limit == limit


def test_compiling_is_recognized():
    seen = []
    jax.monitoring.register_event_listener(lambda *_, **__: seen.append(watchdog._is_compiling()))
    try:
        jax.jit(lambda x: jnp.sin(x) * 1234.5)(jnp.ones(7))
    finally:
        jax.monitoring.clear_event_listeners()
    assert True in seen
    assert not watchdog._is_compiling()
