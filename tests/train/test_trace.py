"""Traces of steps, and the search for the operation that makes a nan."""

import gzip
import json

import pytest

from lineage import launch
from lineage.runs.folder import read_metrics
from lineage.runs.process import NOT_FINITE
from lineage.train import loop
from lineage.train.profiling.trace import parse
from tests.train.runs import ONE

pytestmark = pytest.mark.usefixtures("no_report")
GPT = "--config=tests/tiny.py:gpt"


@pytest.mark.thorough
def test_steps_are_traced(tiny, tmp_path, capsys):
    changes = {"total_steps": 6, "evaluate_every_steps": 6}
    loop.train(tiny("gpt", changes), tmp_path / "traced", devices=ONE, profile=(3, 4))
    assert f"profile of steps 3 to 4: {tmp_path}/traced/profile" in capsys.readouterr().err
    (folder,) = (tmp_path / "traced" / "profile" / "plugins" / "profile").iterdir()  # where TensorBoard looks
    (file,) = folder.glob("*.xplane.pb")
    assert file.stat().st_size > 1000
    (readable,) = folder.glob("*.trace.json.gz")
    events = json.loads(gzip.decompress(readable.read_bytes()))["traceEvents"]
    assert [one["args"]["step_num"] for one in events if one.get("name") == "train"] == ["3", "4"]
    loop.train(tiny("gpt", changes), tmp_path / "plain", devices=ONE)
    assert not (tmp_path / "plain" / "profile").exists()
    losses = [[line.get("train/loss") for line in read_metrics(tmp_path / name)] for name in ("traced", "plain")]
    assert losses[0] == losses[1]


def test_steps_of_a_profile():
    assert parse("20:25") == (20, 25)
    assert parse("7") == (7, 7)
    with pytest.raises(
        ValueError, match=r"the profile is '2-3': it must be the first and the last step, such as 20:25"
    ):
        parse("2-3")


@pytest.mark.thorough
def test_profiles_that_are_not_in_the_run_are_refused(tiny, tmp_path):
    for steps in ((0, 1), (3, 2), (2, 5)):
        with pytest.raises(ValueError, match=f"the profile covers steps {steps[0]} to {steps[1]}: they must be"):
            loop.train(tiny("gpt", {"total_steps": 4}), tmp_path, devices=ONE, profile=steps)
    loop.train(tiny("gpt", {"total_steps": 2}), tmp_path, devices=ONE)
    with pytest.raises(ValueError, match="covers steps 2 to 3: they must be in order, and part of this run, 3 to 4"):
        loop.train(tiny("gpt", {"total_steps": 4}), tmp_path, devices=ONE, profile=(2, 3))


@pytest.mark.thorough
def test_an_interrupted_run_ends_its_trace(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(loop.TrainingLoop, "_evaluate", lambda self: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loop.train(tiny("gpt", {"total_steps": 4, "evaluate_every_steps": 2}), tmp_path, devices=ONE, profile=(2, 4))
    assert list((tmp_path / "profile").rglob("*.xplane.pb"))


@pytest.mark.thorough
@pytest.mark.parametrize("flag", [[], ["--debug-nans"]])
def test_first_nan_is_found_where_it_is_made(flag, tmp_path, capsys):
    diverging = ["schedule.learning_rate=1e38", "optimizer.name=sgd", "optimizer.clip_norm=0.0", "total_steps=4"]
    changes = [f"--config.{change}" for change in diverging]
    assert launch.main(["train", GPT, f"--workdir={tmp_path}", *changes, *flag]) == NOT_FINITE == 77
    output = capsys.readouterr().err
    assert ("error: invalid value (nan) encountered in " in output) == bool(flag)
    assert ("error: train/loss is nan at step 2" in output) == (not flag)
