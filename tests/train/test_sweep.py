"""A sweep's order, what it skips and what stops it; `tests/e2e/test_launch.py` has one of real runs."""

import csv
import sys
from itertools import product

import numpy as np
import pytest

from train import figures
from train.sweep import run_name, run_sweep

# In a run's place: fails when told to, and otherwise leaves what a finished run leaves.
RUN = """
import json, pathlib, sys
options = dict(part.removeprefix("--").split("=", 1) for part in sys.argv[1:])
folder = pathlib.Path(options["workdir"])
(folder / "artifacts").mkdir(parents=True, exist_ok=True)
with open(folder.parent / "ran.txt", "a") as file:
    file.write(options["config.seed"] + "\\n")
code = int(options.get("config.fail", 0))
if code and not (folder.parent / "mended").exists():
    sys.exit(code)
line = {"step": 4, "test/loss": 1 / int(options["config.seed"]), "train/loss": 9.0, "time/mfu": 0.5}
(folder / "metrics.jsonl").write_text(json.dumps({"step": 2, "test/loss": 5.0}) + "\\n" + json.dumps(line) + "\\n")
facts = {"seconds": 12.34, "config": {"seed": int(options["config.seed"])}}
(folder / "artifacts" / "run.json").write_text(json.dumps(facts))
"""


def sweep(workdir, overrides, **more):
    configs = [{"seed": changes["seed"], **more} for changes in overrides]
    return run_sweep([sys.executable, "-c", RUN], overrides, configs, workdir)


def ran(workdir):
    return (workdir / "ran.txt").read_text().split()


def table(workdir):
    with (workdir / "sweep.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_goes_on_after_a_failure_and_skips_what_is_done(tmp_path, capfd):
    overrides = [{"seed": 1}, {"seed": 2, "fail": 3}, {"seed": 4}]
    assert sweep(tmp_path, overrides) == 1
    assert ran(tmp_path) == ["1", "2", "4"]
    rows = table(tmp_path)
    assert [row["run"] for row in rows] == ["seed=1", "seed=2,fail=3", "seed=4"]
    assert [row["state"] for row in rows] == ["done", "failed (3)", "done"]
    assert [row["test/loss"] for row in rows] == ["1", "", "0.25"]  # the last of each run
    assert [row["seconds"] for row in rows] == ["12.3", "", "12.3"]
    assert "train/loss" not in rows[0]
    printed = capfd.readouterr().out
    assert "failed (3)" in printed
    assert "0.25" in printed
    (tmp_path / "mended").touch()
    assert sweep(tmp_path, overrides) == 0
    assert ran(tmp_path) == ["1", "2", "4", "2"]
    assert [row["state"] for row in table(tmp_path)] == ["done", "done", "done"]


def test_what_is_done_with_another_config_is_not_done(tmp_path):
    overrides = [{"seed": 1}, {"seed": 2}]
    sweep(tmp_path, overrides)
    sweep(tmp_path, overrides, total_steps=5)
    assert ran(tmp_path) == ["1", "2", "1", "2"]


def test_a_stopped_run_stops_the_sweep(tmp_path):
    assert sweep(tmp_path, [{"seed": 1, "fail": 75}, {"seed": 2}]) == 75
    assert ran(tmp_path) == ["1"]
    assert [row["state"] for row in table(tmp_path)] == ["stopped", "not run"]


def test_draws_what_it_found(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(figures, "save", lambda *args, **names: drawn.append((args[1:], names)))
    sweep(tmp_path, [{"seed": seed} for seed in (1, 2)])
    assert not drawn  # seeds alone
    overrides = [{"a.b": place, "c": c, "d": c + c, "seed": seed} for place, c, seed in product((10, 9), "xy", (1, 4))]
    sweep(tmp_path, overrides[:-1])
    ((panels, xlabel), names) = drawn[0]
    assert (list(panels), xlabel, names) == (["test/loss"], "b", {"name": "sweep", "folder": tmp_path})
    places, values = panels["test/loss"]["x"]
    assert places == ["10", "9"]
    np.testing.assert_array_equal(values, [[1, 0.25], [1, 0.25]])
    np.testing.assert_array_equal(panels["test/loss"]["y"][1], [[1, 0.25], [1, np.nan]])


def test_figure_of_a_sweep(tmp_path):
    assert sweep(tmp_path, [{"a.b": place, "seed": seed} for place, seed in product((10, 9), (1, 4))]) == 0
    assert (tmp_path / "sweep.png").stat().st_size > 1000


def test_names_are_folders():
    assert run_name({"optimizer.learning_rate": 1e-3, "seed": 1}) == "learning_rate=0.001,seed=1"
    assert "/" not in run_name({"data.source": "text:a/b.txt"})
    assert run_name({}) == "base"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [([], r"has no sweep\(\)"), ([{"seed": 1}, {"seed": 1}], "two runs of the sweep are the same: seed=1")],
)
def test_what_cannot_be_swept(overrides, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        sweep(tmp_path, overrides)
