"""Image classifiers from configs to reports, and initialization from a run at another resolution."""

import json

import jax
import pytest

from lineage.configs import cli
from lineage.train import loop

SHORT = {
    "total_steps": 2,
    "evaluate_every_steps": 2,
    "save_every_steps": 2,
    "loader.batch_size": 8,
    "loader.evaluation_batch_size": 120,
}
RUNS = {
    "resnet": {"model.depths": (1,), "model.widths": (8,), "model.stem_width": 8},
    "swin": {"model.depths": (1, 1), "model.num_heads": (1, 2), "model.width": 8, "model.window": 2},
    "deit": {
        "model.name": "deit",
        "model.pooling": "token",
        "model.depth": 1,
        "model.width": 16,
        "model.num_heads": 2,
        "task.name": "distilled_image_classification",
    },
}


def run(workdir, name, changes):
    """Train configs/small/<name>_digits.py and return its last evaluation."""
    config, _ = cli.load(f"{name}_digits")
    cli.override(config, changes)
    return loop.train(config, workdir, devices=jax.devices()[:1])


@pytest.fixture(scope="module")
def workdirs(tmp_path_factory):
    """Train a short run of each family; the teacher of DeiT is the residual network."""
    folder = tmp_path_factory.mktemp("runs")
    for name, changes in RUNS.items():
        taught = {"teacher": str(folder / "resnet")} if name == "deit" else {}
        run(folder / name, "vit" if name == "deit" else name, SHORT | changes | taught)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_report_of_a_run(name, workdirs):
    page = (workdirs / name / "report.html").read_text()
    for section in ("Curves", "Confusion matrix, test", "Most confident errors, test", "Cost", "Configuration"):
        assert f"<h2>{section}</h2>" in page
    assert ("Attention over the image" in page) == (name == "deit")
    last = json.loads((workdirs / name / "metrics.jsonl").read_text().splitlines()[-1])
    assert set(last) >= {"step", "test/loss", "test/accuracy"}
    assert ("test/teacher_accuracy" in last) == (name == "deit")


@pytest.mark.slow
@pytest.mark.usefixtures("no_report")
def test_positions_transfer_to_another_resolution(tmp_path):
    """Check that a model trained at 8x8 keeps most of its accuracy at 12x12 with resampled position embeddings,
    and loses it with new ones.
    """
    sizes = {"model.depth": 2, "model.width": 32, "model.num_heads": 2, "model.stochastic_depth": 0.0, "ema_decay": 0.0}
    short = sizes | {"task.mixup": 0.0, "loader.evaluation_batch_size": 360, "schedule.learning_rate": 5e-3}
    learned = run(tmp_path / "small", "vit", short | {"total_steps": 250})
    larger = {"total_steps": 0, "task.image_size": 12, "task.resample": "bicubic", "init.path": str(tmp_path / "small")}
    actual = run(tmp_path / "large", "vit", short | larger)
    fresh = run(tmp_path / "fresh", "vit", short | larger | {"init.skip": ("^table",)})
    assert learned["test/accuracy"] > 0.7
    assert actual["test/accuracy"] > learned["test/accuracy"] - 0.1
    assert fresh["test/accuracy"] < learned["test/accuracy"] - 0.3
