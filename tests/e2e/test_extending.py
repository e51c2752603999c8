"""The examples of docs/extending.md: single files outside of the repository, used without editing the project."""

import json
import re
import sqlite3
import sys
import time
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lineage.configs import base, cli, modules, schema
from lineage.evaluation import EVALUATORS
from lineage.train import export, loop, trained

TEXT = (Path(__file__).parents[2] / "docs" / "extending.md").read_text(encoding="utf-8")
EXAMPLES = dict(re.findall(r"```python\n# (\w+\.py)\n(.*?)```", TEXT, flags=re.DOTALL))
ONE = {"devices": jax.devices()[:1]}
METRICS = {"test/loss", "test/accuracy", "test/knn_accuracy"}
OWN = [("model", "mixer"), ("model", "projected_vit"), ("task", "contrastive"), ("source", "sqlite")]


@pytest.fixture
def example(tmp_path, monkeypatch):
    """Return `example(name, argument)`, which loads the config of an example; its registrations are undone
    afterwards.
    """
    monkeypatch.setattr(loop, "write_report", lambda workdir: None)

    def load(name, argument=""):
        path = tmp_path / f"{name}.py"
        path.write_text(EXAMPLES[path.name], encoding="utf-8")
        return cli.load(f"{path}:{argument}" if argument else str(path))[0]

    yield load
    forget(tmp_path)


def forget(folder):
    """Undo the registrations of the examples, as in a new process."""
    for part, name in OWN:
        base.REGISTRIES[part].pop(name, None)
    EVALUATORS.pop("calibration", None)
    for name in EXAMPLES:
        sys.modules.pop(modules._module_name(folder / name), None)


def test_documentation_has_four_examples():
    assert list(EXAMPLES) == ["mixer.py", "simclr.py", "reviews.py", "calibration.py"]


@pytest.mark.thorough
def test_new_architecture(example, tmp_path):
    metrics = loop.train(example("mixer"), tmp_path / "run", **ONE)
    assert np.isfinite(metrics["test/loss"])
    model = trained.load(tmp_path / "run")
    files = export.write(model.experiment, model.variables, "stablehlo", tmp_path / "export")  # for any batch size
    assert tmp_path / "export" / "model.stablehlo" in files


@pytest.mark.thorough
def test_new_source(example, tmp_path):
    path = tmp_path / "reviews.db"
    with closing(sqlite3.connect(path)) as database, database:
        for split in ("train", "validation"):
            database.execute(f"CREATE TABLE {split} (text, label)")
            database.executemany(f"INSERT INTO {split} VALUES (?, ?)", [("good, nice", "yes"), ("bad", "no")] * 8)
    metrics = loop.train(example("reviews", path), tmp_path / "run", **ONE)
    assert {"validation/loss", "validation/f1"} < set(metrics)


@pytest.mark.thorough
def test_new_evaluator(example, tmp_path):
    metrics = loop.train(example("calibration"), tmp_path / "run", **ONE)
    assert 0 <= metrics["test/calibration_error"] <= 1


def test_contrastive_loss_is_that_of_the_paper(example):
    """Compare with equation 1 of arXiv 2002.05709 for each of the 2N views; the last image is padding."""
    task = schema.build(base.REGISTRIES["task"], example("simclr").task)
    rng = np.random.default_rng(0)
    first, second, weights = (rng.normal(size=shape).astype(np.float32) for shape in ((5, 6), (5, 6), (6, 3)))
    model = SimpleNamespace(project=lambda image: jnp.tanh(image) @ weights)
    batch = {"image": first, "other": second, "mask": np.arange(5) < 4}
    total, weight, metrics = task.loss(model, jax.tree.map(jnp.asarray, batch))
    z = np.tanh(np.stack([first, second], axis=1)[:4].reshape(8, 6)).astype(float) @ weights  # pairs are adjacent
    similarity = np.array([[a @ b / np.linalg.norm(a) / np.linalg.norm(b) for b in z] for a in z]) / task.temperature

    def loss(i, j):
        return -similarity[i, j] + np.log(sum(np.exp(similarity[i, k]) for k in range(8) if k != i))

    expected = np.mean([loss(2 * k, 2 * k + 1) + loss(2 * k + 1, 2 * k) for k in range(4)]) / 2
    assert weight == 8
    np.testing.assert_allclose(total / weight, expected, rtol=1e-5)
    np.testing.assert_allclose(metrics["loss"].compute(), expected, rtol=1e-5)


@pytest.mark.thorough
def test_new_task(example, tmp_path):
    metrics = loop.train(example("simclr"), tmp_path / "run", **ONE)
    assert set(metrics) == METRICS


def evaluation(folder):
    """Return the metrics of the last evaluation of a run."""
    last = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
    return {key: last[key] for key in METRICS}


@pytest.mark.slow
def test_killed_run_of_new_task_is_resumed_evaluated_and_exported(start, launch, tmp_path):
    path = tmp_path / "simclr.py"
    path.write_text(EXAMPLES[path.name], encoding="utf-8")
    arguments = ("train", f"--config={path}", "--config.total_steps=40", "--config.loader.workers=1")
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    code, expected = launch(*arguments, f"--workdir={whole}")
    assert code == 0, expected
    process = start(*arguments, f"--workdir={killed}")
    while not any(folder.name.isdigit() for folder in (killed / "checkpoints").glob("*")):
        assert process.poll() is None
        time.sleep(0.01)
    process.kill()
    process.communicate()
    assert not (killed / "report.html").exists()
    code, output = launch(*arguments, f"--workdir={killed}")
    assert code == 0, output
    assert "from step" in output
    records = [evaluation(folder) for folder in (whole, killed)]
    assert records[0] == records[1]
    code, output = launch("evaluate", f"--workdir={killed}")
    assert json.JSONDecoder().raw_decode(output, output.index("{"))[0] == records[0]
    code, output = launch("export", f"--workdir={killed}", "--format=stablehlo")
    assert code == 0, output
    assert {"model.stablehlo", "model.json"} <= {file.name for file in (killed / "export").iterdir()}
