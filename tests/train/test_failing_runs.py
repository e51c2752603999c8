"""Runs that fail or are at risk: updates that are not finite, full disks, lost files, other data, and divergence."""

import errno
import os
import shutil
from dataclasses import replace

import jax
import numpy as np
import pytest

from lineage.data.facts import FACTS, Facts
from lineage.runs.folder import read_metrics
from lineage.train import checkpoint, loop, preparation
from lineage.train.checkpoint import Checkpoints
from lineage.train.experiment import Experiment
from tests.tiers import tiered
from tests.train.conftest import without_report
from tests.train.runs import ONE, run, train_lines

pytestmark = pytest.mark.usefixtures("no_report")


@pytest.fixture
def poison(monkeypatch):
    """Return `poison(steps)`, which makes the images of the batches of these steps non-finite."""
    whole = loop.device_batches

    def poison(steps):
        def batches(experiment, start):
            for step, batch in enumerate(whole(experiment, start), start=start + 1):
                yield batch | {"image": batch["image"] * np.nan} if step in steps else batch

        monkeypatch.setattr(loop, "device_batches", batches)

    return poison


@pytest.mark.thorough
def test_nonfinite_updates_are_skipped(poison, tiny, tmp_path):
    changes = {"total_steps": 12, "save_every_steps": 4, "skip_nonfinite": 2, "ema_decay": 0.9, "checkpoint.keep": 9}
    config = tiny("vit", changes)
    poison((3, 7, 8))
    lines = train_lines(run(config, tmp_path))
    updates = np.array([0, 1, 1, 2, 3, 4, 4, 4, 5, 6, 7, 8])  # number before each step
    expected = [float(Experiment(config).schedule(number)) for number in updates]
    np.testing.assert_allclose([line["train/learning_rate"] for line in lines], expected, rtol=1e-6)
    assert [line["train/skipped"] for line in lines] == [0, 0, 1, 1, 1, 1, 2, 3, 3, 3, 3, 3]
    assert [line["train/skipped_in_a_row"] for line in lines] == [0, 0, 1, 0, 0, 0, 1, 2, 0, 0, 0, 0]
    assert [np.isfinite(line["train/loss"]) for line in lines] == [step not in (3, 7, 8) for step in range(1, 13)]
    experiment = Experiment(config, tmp_path, ONE)
    with Checkpoints(tmp_path) as checkpoints:
        four, eight, end = (experiment.state(checkpoints, step) for step in (4, 8, 12))
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(end))
    step, batches = loop.compile_step(experiment, four), loop.device_batches(experiment, 4)
    for _ in range(2):
        four, _ = step(four, next(batches))
    for name in ("params", "ema"):  # steps 7 and 8 were skipped
        jax.tree.map(np.testing.assert_array_equal, getattr(four, name), getattr(eight, name))
    poison((9, 10))  # two in a row before the resumed step 8, and two after it
    for path in (tmp_path / "checkpoints" / "12", tmp_path / "artifacts"):
        shutil.rmtree(path, ignore_errors=True)
    with pytest.raises(FloatingPointError, match=r"loss is nan at step 9: .* the checkpoint of step 8 is kept"):
        run(config, tmp_path)


@pytest.mark.thorough
@tiered("poisoned", [7, 8])
def test_nonfinite_loss_stops_the_run(poisoned, poison, tiny, tmp_path, monkeypatch):
    poison((poisoned,))
    config = tiny("vit", {"total_steps": 12, "save_every_steps": 4, "log_every_steps": 5})
    with pytest.raises(
        FloatingPointError, match=f"loss is nan at step {poisoned}: .* the checkpoint of step 4 is kept"
    ):
        loop.train(config, tmp_path, devices=ONE)
    state = Experiment(config, tmp_path, ONE).restore()
    assert int(state.step) == 4
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state))
    monkeypatch.undo()
    without_report(monkeypatch)
    assert np.isfinite(loop.train(config, tmp_path, devices=ONE)["test/loss"])  # it resumes


@pytest.mark.thorough
@tiered("on_error", ["stop", "continue"], first=lambda on_error: on_error == "continue")
def test_full_disk_for_the_history(on_error, tiny, no_report, tmp_path, monkeypatch, capsys):
    """Check that with `on_error="continue"`, lines that could not be written are written when there is space again."""

    class Full(loop.MetricsWriter):
        def write(self, step, metrics):
            if not 2 <= step <= 3:
                super().write(step, metrics)
                return
            disk, self.history.file = self.history.file, open("/dev/full", "wb", buffering=0)  # noqa: SIM115
            try:
                super().write(step, metrics)
            finally:
                self.history.file.close()
                self.history.file = disk

    monkeypatch.setattr(loop, "MetricsWriter", Full)
    config = tiny("gpt", {"total_steps": 5, "checkpoint.on_error": on_error, "log_every_steps": 1})
    if on_error == "stop":
        with pytest.raises(OSError, match=r"No space left on device: '.*metrics\.jsonl'"):
            loop.train(config, tmp_path, devices=ONE)
        return
    loop.train(config, tmp_path, devices=ONE)
    assert [line["step"] for line in train_lines(read_metrics(tmp_path))] == [1, 2, 3, 4, 5]
    assert capsys.readouterr().err.count("The run continues.") == 1


@pytest.mark.slow
def test_lost_or_changed_history_is_reported(tiny, tmp_path, capsys):
    changes = {"log_every_steps": 1, "evaluate_every_steps": 100}
    run(tiny("gpt", changes | {"total_steps": 3}), tmp_path)
    run(tiny("gpt", changes | {"total_steps": 4}), tmp_path)
    path = tmp_path / "metrics.jsonl"
    assert path.name not in capsys.readouterr().err
    for total, kept, lost in ((5, 2, 4), (6, 0, 4)):  # of 6 lines, 4 steps and 2 evaluations; and then of 4
        path.write_text("".join(path.read_text().splitlines(keepends=True)[:kept]))
        run(tiny("gpt", changes | {"total_steps": total}), tmp_path)
        assert f"{path}: {lost} of {kept + lost} lines are lost" in capsys.readouterr().err
    run(tiny("gpt", changes | {"total_steps": 7}), tmp_path)
    assert path.name not in capsys.readouterr().err
    path.write_text(path.read_text().replace('"train/loss": ', '"train/loss": 1', 1))
    run(tiny("gpt", changes | {"total_steps": 8}), tmp_path)
    assert f"{path}: the first 4 lines are not those written" in capsys.readouterr().err


@tiered(("name", "content"), [("run.json", ""), ("samples.jsonl", '{"step": 1}\n\x00\n{"step": 2}\n')], first=2)
def test_damaged_artifact_stops_the_run_before_it_trains(name, content, tiny, tmp_path, monkeypatch):
    (tmp_path / "artifacts").mkdir()
    (tmp_path / "artifacts" / name).write_text(content)
    (tmp_path / "checkpoints" / "1").mkdir(parents=True)  # otherwise the samples are those of a run that saved nothing
    monkeypatch.setattr(loop, "TrainingLoop", None)
    with pytest.raises(ValueError, match=f"artifacts/{name}"):
        run(tiny("gpt", {"total_steps": 3, "sampling.num_samples": 1}), tmp_path)


def test_unwritable_folder_of_checkpoints_stops_the_run_before_it_trains(tiny, tmp_path, monkeypatch):
    real = os.mkdir

    def mkdir(path, *args, **kwargs):
        if "checkpoints/" in str(path):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        real(path, *args, **kwargs)

    monkeypatch.setattr(os, "mkdir", mkdir)
    monkeypatch.setattr(loop, "TrainingLoop", None)
    with pytest.raises(PermissionError, match=f"Permission denied: '{tmp_path}/checkpoints/"):
        run(tiny("gpt", {"total_steps": 3}), tmp_path)


@pytest.mark.thorough
def test_restoring_a_deleted_checkpoint_takes_the_newest(tiny, tmp_path, monkeypatch):
    """Check what `evaluate` and `export` read while the run saves, and deletes the checkpoint that they read."""
    config = tiny("gpt", {"total_steps": 2})
    run(config, tmp_path)
    experiment, real = Experiment(config, tmp_path, ONE), checkpoint.read_checkpoint
    state = experiment.restore()

    def read(folder, target):
        if folder.name == "2":
            with Checkpoints(tmp_path) as checkpoints:
                checkpoints.save(state.replace(step=state.step + 1), config.to_dict(), {})
            shutil.rmtree(folder)
        return real(folder, target)

    monkeypatch.setattr(checkpoint, "read_checkpoint", read)
    assert int(experiment.restore().step) == 3


def test_restoring_while_a_run_replaces_its_only_checkpoint(tiny, tmp_path, monkeypatch):
    """Check that the checkpoints are listed again if those of a list were deleted before they were looked at."""
    experiment, real = Experiment(tiny("gpt"), tmp_path, ONE), Checkpoints.reload
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(experiment.state(checkpoints).replace(step=3), {}, {})
    path, aside = tmp_path / "checkpoints" / "3", tmp_path / "3"

    def reload(self):
        monkeypatch.setattr(Checkpoints, "reload", real)
        path.rename(aside)
        real(self)
        aside.rename(path)

    monkeypatch.setattr(Checkpoints, "reload", reload)
    assert int(experiment.restore().step) == 3


@pytest.mark.thorough
def test_divergence_stops_the_run(tiny, tmp_path):
    config = tiny("gpt", {"schedule.learning_rate": 1e38, "save_every_steps": 1, "checkpoint.keep": 9})
    with pytest.raises(FloatingPointError, match=r"train/(loss|gradient_norm) is (nan|inf) at step \d+: the run stops"):
        loop.train(config, tmp_path, devices=ONE)
    for path in (tmp_path / "checkpoints").iterdir():
        with Checkpoints(tmp_path) as checkpoints:
            state = Experiment(config, tmp_path, ONE).state(checkpoints, int(path.name))
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state))


def test_resuming_with_other_data_without_files_raises(tiny, tmp_path):
    """Check the number of examples and the classes: data that the user's code creates may have no files."""
    loop.train(tiny("vit", {"total_steps": 1}), tmp_path, devices=ONE)
    path = tmp_path / FACTS
    facts, longer = Facts.load(path), tiny("vit", {"total_steps": 2})
    changes = {"examples": {**facts.examples, "train": 1000}, "class_names": facts.class_names[::-1]}
    for name, value in changes.items():
        replace(facts, **{name: value}).save(path)
        kept = {path.name: path.read_bytes() for path in tmp_path.glob("*.json")}
        with pytest.raises(
            ValueError, match=rf"{preparation.COMPARED[name]} was .* in the run in {tmp_path}, and is now"
        ):
            loop.train(longer, tmp_path, devices=ONE)
        assert kept == {path.name: path.read_bytes() for path in tmp_path.glob("*.json")}
    replace(facts, examples={}).save(path)  # as an earlier version may have written it
    loop.train(longer, tmp_path, devices=ONE)
    assert Facts.load(path) == facts
