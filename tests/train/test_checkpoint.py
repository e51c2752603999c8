"""Checkpoints: exact restoration, retention, records, and failed saves."""

import errno
import itertools
import os
import threading
import time
from pathlib import Path

import jax
import orbax.checkpoint as ocp
import pytest
from absl import logging

from lineage.configs.run import Checkpoint
from lineage.runs.folder import read_record
from lineage.train import reading
from lineage.train.checkpoint import Checkpoints, clean
from lineage.train.reading import read_newest
from tests.train.checkpoints import assert_equal, full_disk, restore, save, state, target

# If the read of one array fails, Orbax leaves the reads of the others unfinished.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


def test_restore_is_bit_exact(tmp_path):
    save(tmp_path, state())
    assert_equal(restore(tmp_path), state())


def test_reading_an_intact_checkpoint_logs_no_warning(tmp_path, monkeypatch):
    save(tmp_path, state())
    warnings = []
    monkeypatch.setattr(logging, "warning", lambda *args: warnings.append(args))
    read_newest(tmp_path)
    assert not warnings


def test_path_of_a_parent_folder_is_that_of_the_system(tmp_path):
    """Check paths with "..", which TensorStore refuses, also behind a link to a folder elsewhere."""
    (tmp_path / "a/b").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "a/b")
    for path in (tmp_path / "a/../run", tmp_path / "link/../run"):
        save(path, state())
        assert_equal(restore(path), state())
        assert read_newest(path).step == 3


def test_asynchronous_save_is_not_affected_by_donation(tmp_path):
    change = jax.jit(lambda state: jax.tree.map(lambda leaf: leaf * 0, state), donate_argnums=0)
    with Checkpoints(tmp_path) as checkpoints:
        now = state()
        checkpoints.save(now, {}, {})
        change(now)  # reuses its buffers at once
    assert_equal(restore(tmp_path), state())


def test_save_is_not_affected_by_a_clock_that_is_set_forward(tmp_path, monkeypatch):
    clock, ahead = time.time, itertools.count(step=3600.0)
    with Checkpoints(tmp_path) as checkpoints:
        monkeypatch.setattr(time, "time", lambda: clock() + next(ahead))
        checkpoints.save(state(), {}, {})
        checkpoints.wait()
    assert_equal(restore(tmp_path), state())


def test_newest_and_best_are_kept(tmp_path):
    losses = [{"loss": 2.0}, {"loss": 1.0}, {}, {"loss": 3.0}, {"loss": 1.5}]
    save(tmp_path, *map(state, range(1, 6)), metrics=losses, keep=2, best="loss")
    with Checkpoints(tmp_path, Checkpoint(keep=2, best="loss")) as checkpoints:
        assert (checkpoints.best, checkpoints.latest) == (2, 5)
        assert_equal(checkpoints.restore(target(state()), 2), state(2))
        assert sorted(int(path.name) for path in checkpoints.folder.iterdir()) == [2, 4, 5]
    save(tmp_path, state(6), metrics=[{"loss": 0.5}], keep=2, best="loss")  # after resuming
    with Checkpoints(tmp_path, Checkpoint(keep=2, best="loss")) as checkpoints:
        assert checkpoints.best == 6


def test_best_can_be_the_highest(tmp_path):
    accuracies = [{"accuracy": 0.2}, {"accuracy": 0.9}, {"accuracy": 0.5}, {"accuracy": float("nan")}]
    save(tmp_path, *map(state, (1, 2, 3, 4)), metrics=accuracies, best="accuracy")
    with Checkpoints(tmp_path, Checkpoint(best="accuracy")) as checkpoints:
        assert (checkpoints.best, checkpoints.latest) == (2, 4)


def test_entries_of_a_record_are_replaced(tmp_path, monkeypatch):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(state(), {"seed": 1}, {"loss": 1.0}, lines=4)
        checkpoints.wait()
        before = read_record(tmp_path / "checkpoints" / "3")
        for process, lines in ((1, 4), (0, 5)):  # the first process writes
            monkeypatch.setattr(jax, "process_index", lambda process=process: process)
            checkpoints.amend(3, lines=5)
            assert checkpoints.record(3)["lines"] == 5
            assert read_record(tmp_path / "checkpoints" / "3") == before | {"lines": lines}
    assert_equal(restore(tmp_path), state())


def test_remains_of_interrupted_saves_are_deleted(tmp_path, monkeypatch):
    partial = ".run.json.host.7.partial"
    left = [f"checkpoints/4.orbax-checkpoint-tmp-7/{partial}", partial, f"artifacts/{partial}"]
    kept = [f"checkpoints/4/{partial}", "artifacts/run.json"]
    for name in left + kept:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    for process, expected in ((1, left + kept), (0, kept)):
        monkeypatch.setattr(jax, "process_index", lambda process=process: process)
        clean(tmp_path)
        assert {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()} == {*expected}
    assert not [*tmp_path.glob("checkpoints/*tmp*")]


def test_saved_step_is_kept_and_unfinished_step_is_rewritten(tmp_path):
    save(tmp_path, state(3))
    save(tmp_path, state(3).replace(params=state(4).params))
    assert_equal(restore(tmp_path), state(3))
    unfinished = tmp_path / "checkpoints" / "4.orbax-checkpoint-tmp"
    (unfinished / "state.orbax-checkpoint-tmp").mkdir(parents=True)
    assert_equal(restore(tmp_path), state(3))
    save(tmp_path, state(4))
    assert_equal(restore(tmp_path), state(4))


def test_missing_checkpoint_raises(tmp_path):
    with pytest.raises(FileNotFoundError, match=f"there is no checkpoint in {tmp_path}"):
        restore(tmp_path)
    save(tmp_path, state())
    with pytest.raises(FileNotFoundError, match="there is no checkpoint of step 7 in"):
        restore(tmp_path, step=7)


def test_read_newest_returns_the_saved_parameters(tmp_path):
    """Check the parameters from which another run starts: the average if there is one."""
    save(tmp_path, state().replace(ema=state(4).params))
    actual = read_newest(tmp_path)
    assert_equal([actual.params, actual.collections], [state(4).params, state().collections])
    save(tmp_path / "none", state().replace(ema=None))
    assert_equal(read_newest(tmp_path / "none").params, state().params)


def test_full_disk_raises_and_keeps_checkpoints(tmp_path):
    save(tmp_path, state(3))
    with (
        full_disk(8_000),
        pytest.raises(OSError, match=r"a checkpoint could not be written to .*/checkpoints \(File too"),
    ):
        save(tmp_path, state(4))
    assert_equal(restore(tmp_path), state(3))
    save(tmp_path, state(4))  # there is space again
    assert_equal(restore(tmp_path, step=4), state(4))


def test_reader_of_a_deleted_checkpoint_takes_the_newest(tmp_path, monkeypatch):
    save(tmp_path, state(3), keep=1)
    real = reading.read_record

    def rotate(folder):
        if folder.name == "3":  # the run saves, and deletes what is just read
            save(tmp_path, state(4), keep=1)
        return real(folder)

    monkeypatch.setattr(reading, "read_record", rotate)
    assert_equal(read_newest(tmp_path).params, state(4).ema)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["4"]


def test_unwritable_folder_is_reported_at_once(tmp_path, monkeypatch):
    """Check that no thread of Orbax waits for a folder that cannot be created: the end would take minutes."""
    save(tmp_path / "other", state(3))  # starts the threads that the process keeps
    before, real = {thread.name for thread in threading.enumerate()}, os.mkdir

    def mkdir(path, *args, **kwargs):
        if "tmp" in Path(path).name:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return real(path, *args, **kwargs)

    monkeypatch.setattr(os, "mkdir", mkdir)
    with pytest.raises(OSError, match=r"a checkpoint could not be written to .*/checkpoints \(Permission denied"):
        save(tmp_path, state(3))
    started = {thread.name for thread in threading.enumerate()} - before
    assert {name for name in started if not name.startswith("asyncio_")} == set()  # asyncio keeps idle ones


def test_run_can_continue_after_a_failed_save(tmp_path, monkeypatch):
    said = []
    with Checkpoints(tmp_path, Checkpoint(keep=2, on_error="continue")) as checkpoints:
        checkpoints.notify = said.append
        checkpoints.save(state(3), {}, {})
        checkpoints.wait()
        with full_disk(8_000):
            checkpoints.save(state(4), {}, {})
            checkpoints.save(state(5), {}, {})
            while checkpoints._manager.is_saving_in_progress():
                time.sleep(0.01)
        checkpoints.save(state(6), {}, {})
    full = (
        f"a checkpoint could not be written to {tmp_path}/checkpoints (File too large). Existing checkpoints are kept."
    )
    assert said == [f"{full} The run continues."] * 2
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["3", "6"]  # nor unfinished ones
    for step in (3, 6):
        assert_equal(restore(tmp_path, step=step), state(step))
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(ValueError, match="it must be 'stop' in runs of several processes"):
        Checkpoints(tmp_path, Checkpoint(on_error="continue"))


def test_path_that_is_not_utf8_is_refused_before_training(tmp_path):
    with pytest.raises(ValueError, match=r"a\\udce9/checkpoints': its name must be UTF-8"):
        Checkpoints(tmp_path / "a\udce9")


def test_checkpoints_that_are_deleted_while_they_are_listed(tmp_path, monkeypatch, capsys):
    real, fails = ocp.CheckpointManager.reload, [FileNotFoundError(2, "No such file"), None]

    def reload(self):
        if error := fails.pop(0):
            raise error
        real(self)

    monkeypatch.setattr(ocp.CheckpointManager, "reload", reload)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.reload()
        assert fails == []
        assert checkpoints.record(7) == {}
    assert "damaged" not in capsys.readouterr().err
