"""The examples of docs/extending.md: single files outside of the repository, used without editing the project."""

import re
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from lineage.configs import base, cli, modules
from lineage.evaluation import EVALUATORS
from lineage.train import export, loop
from lineage.train.experiment import Experiment

TEXT = (Path(__file__).parents[1] / "docs" / "extending.md").read_text(encoding="utf-8")
EXAMPLES = dict(re.findall(r"```python\n# (\w+\.py)\n(.*?)```", TEXT, flags=re.DOTALL))
ONE = {"devices": jax.devices()[:1]}
OWN = {"model": "mixer", "task": "contrastive", "source": "csv"}


@pytest.fixture
def example(tmp_path, monkeypatch):
    """example(name, argument) is the config of an example's file; what it registers is forgotten afterwards."""
    monkeypatch.setattr(loop, "write_report", lambda workdir: None)

    def load(name, argument=""):
        path = tmp_path / f"{name}.py"
        path.write_text(EXAMPLES[path.name], encoding="utf-8")
        return cli.load(f"{path}:{argument}" if argument else str(path))[0]

    yield load
    forget(tmp_path)


def forget(folder):
    """Undo what the examples' files have registered, as in a new process."""
    for part, name in OWN.items():
        base.REGISTRIES[part].pop(name, None)
    EVALUATORS.pop("calibration", None)
    for name in EXAMPLES:
        sys.modules.pop(modules._module_name(folder / name), None)


def test_there_are_four():
    assert list(EXAMPLES) == ["mixer.py", "simclr.py", "reviews.py", "calibration.py"]


def test_an_architecture(example, tmp_path):
    metrics = loop.train(example("mixer"), tmp_path / "run", **ONE)
    assert np.isfinite(metrics["test/loss"])


def test_a_source(example, tmp_path):
    rows = [("good, nice", "yes"), ("bad", "no")] * 8
    path = tmp_path / "reviews.csv"
    path.write_text("text,label\n" + "".join(f'"{text}",{label}\n' for text, label in rows), encoding="utf-8")
    metrics = loop.train(example("reviews", path), tmp_path / "run", **ONE)
    assert {"validation/loss", "validation/f1"} < set(metrics)


def test_an_evaluator(example, tmp_path):
    metrics = loop.train(example("calibration"), tmp_path / "run", **ONE)
    assert 0 <= metrics["test/calibration_error"] <= 1


def test_a_task_is_trained_resumed_evaluated_and_exported(example, tmp_path):
    config = example("simclr")
    metrics = loop.train(config, tmp_path / "whole", **ONE)
    assert {"test/loss", "test/accuracy", "test/knn_accuracy"} == set(metrics)
    first = config.copy_and_resolve_references()
    first.total_steps = 2
    loop.train(first, tmp_path / "parts", **ONE)
    forget(tmp_path)  # as after a kill: the next process knows the folder alone
    config, _ = cli.load(str(tmp_path / "parts" / "config.json"))
    with config.unlocked():
        config.total_steps = 4
    assert loop.train(config, tmp_path / "parts", **ONE) == metrics
    experiments = [Experiment(config, tmp_path / name, **ONE) for name in ("whole", "parts")]
    whole, parts = (experiment.restore() for experiment in experiments)
    jax.tree.map(np.testing.assert_array_equal, whole.params, parts.params)
    assert experiments[1].evaluation()(parts.variables(average=True)) == metrics
    files = export.write(experiments[1], parts, "stablehlo", tmp_path / "export")
    assert {"model.stablehlo", "model.json"} <= {file.name for file in files}
