"""Reports of runs: complete, self-contained and deterministic for all kinds of runs."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import jax
import numpy as np
import pytest

from lineage import launch
from lineage.configs import cli
from lineage.evaluation import artifacts
from lineage.evaluation.base import to_host
from lineage.models.budget import Budget
from lineage.report import figures
from lineage.report.artifacts import SECTIONS, image_attention
from lineage.report.figures import smooth
from lineage.report.run import _amount, write_report
from lineage.runs.folder import discard_artifacts
from lineage.tasks import image_classification
from lineage.train.experiment import Experiment
from tests.report.sample_runs import attention_weights, text_run, vision_run


class _Page(HTMLParser):
    """HTML parser that collects the checked elements and fails on unbalanced tags."""

    VOID = ("meta", "img", "br", "link")

    def __init__(self, text):
        super().__init__()
        self.stack, self.tags, self.sources, self.headings = [], [], [], []
        self.feed(text)
        self.close()
        assert [tag for tag in self.stack if tag not in ("td", "th", "tr")] == []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.sources += [value for name, value in attributes if name in ("src", "href", "xlink:href")]
        if tag not in self.VOID:
            self.stack.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        if tag not in self.VOID:
            self.stack.pop()

    def handle_endtag(self, tag):
        while self.stack[-1] in ("td", "th", "tr") and self.stack[-1] != tag:  # void elements
            self.stack.pop()
        assert self.stack.pop() == tag

    def handle_data(self, data):
        if self.stack and self.stack[-1] == "h2":
            self.headings.append(data)


@pytest.fixture(scope="module")
def vision(tmp_path_factory):
    return write_report(vision_run(tmp_path_factory.mktemp("vision")))


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_report(text_run(tmp_path_factory.mktemp("text")))


def test_vision_report_has_every_section(vision):
    page = _Page(vision.read_text())
    assert page.headings == [
        "Curves",
        "System",
        "Confusion matrix, validation",
        "Most confident errors, validation",
        "Attention over the image",
        "Cost",
        "Configuration",
    ]
    assert page.tags.count("svg") == 4 + 4 + 1 + 1
    assert page.tags.count("img") == 27
    body = vision.read_text()
    for shown in (
        "vit_digits",
        "98.33%",
        "at step 2,000, the best",
        "2:32",
        "201,930",
        "43.08 MiB",
        "python launch.py --config",
    ):
        assert shown in body
    assert "config.seed" not in body  # the keys are in a separate section


def test_figures_are_also_saved_as_files(vision):
    names = sorted(path.name for path in (vision.parent / "report").iterdir())
    assert [name for name in names if not name.startswith("mistakes")] == [
        "attention_image.png",
        "confusion_validation.png",
        "curve_accuracy.png",
        "curve_gradient_norm.png",
        "curve_learning_rate.png",
        "curve_loss.png",
        "curve_system_memory_gib.png",
        "curve_time_examples_per_second.png",
        "curve_time_mfu.png",
        "curve_time_waiting.png",
    ]
    assert sum(name.startswith("mistakes_validation_") for name in names) == 27


@pytest.mark.parametrize("run", ["vision", "text"])
def test_report_is_self_contained(run, request):
    path = request.getfixturevalue(run)
    body = path.read_text()
    page = _Page(body)
    assert all(source.startswith(("data:image/png;base64,", "data:text/csv;", "#")) for source in page.sources)
    assert not {"link", "iframe"} & set(page.tags)
    assert not re.search("http(?!-equiv)", re.sub(r'"data:[^"]*"', "", body))
    assert "url(" not in re.sub(r"url\(#\w+\)|url\(data:", "", body)
    ids = re.findall(r'<clipPath id="(\w+)"', body)
    assert set(re.findall(r"url\(#(\w+)\)", body)) == set(ids)


def test_figures_support_dark_mode(vision):
    svgs = "".join(re.findall(r"<svg.*?</svg>", vision.read_text(), re.DOTALL))
    assert "var(--ink)" in svgs
    assert "var(--s0)" in svgs
    assert not re.search(r"#(1f2329|0072b2|dde1e6)", svgs)
    assert not re.search(r"<text[^>]*(#000000|black)", re.sub(r"confusion.*", "", svgs))


def test_samples_and_config_are_escaped_and_dollars_are_kept(text):
    body = text.read_text()
    assert "<script>alert" not in body
    assert "&lt;b&gt;window&lt;/b&gt; breaks &amp; is it $5 or $6?" in body
    assert "&lt;/code&gt;&lt;script&gt;" in body
    assert body.index("Step 5,000") < body.index("Step 2,500") < body.index("Step 500")
    assert body.count("<details open>") == 1
    assert re.search(r"<pre class=sample><b>ROMEO:\n</b>What light", body)  # the prompt is shown once
    assert "&#34;␣cost&#34;, &#34;日本&#34;]" in body


def test_report_is_deterministic(text):
    before = text.read_text()
    assert write_report(text.parent).read_text() == before


@pytest.mark.thorough
def test_figures_use_data_of_all_processes_and_classes_are_limited(tmp_path, monkeypatch):
    config, _ = cli.load(f"{Path(__file__).parents[1]}/tiny.py:vit")
    experiment = Experiment(config, tmp_path, jax.devices()[:1])
    halves = {name: replace(part, process_count=2) for name, part in experiment.data.splits.items()}
    vars(experiment)["data"] = replace(experiment.data, splits=halves)
    state = jax.jit(experiment.make_state)()
    budget = Budget({}, {}, {}, {})
    artifacts.write_all(experiment.context(), to_host(experiment.variables(state)), tmp_path, budget)
    confusion = tmp_path / "artifacts/confusion_test.npz"
    assert np.load(confusion)["counts"].sum() == 359
    confusion.unlink()
    monkeypatch.setattr(image_classification, "MAX_CLASSES", 9)
    artifacts.write_all(experiment.context(), to_host(experiment.variables(state)), tmp_path, budget)
    assert (tmp_path / "artifacts/mistakes_test.npz").exists()
    assert not confusion.exists()


@pytest.mark.thorough
def test_confusion_matrix_of_a_hundred_classes(tmp_path):
    run = vision_run(tmp_path, classes=120)
    for name in ("attention_image", "mistakes_validation"):
        (run / f"artifacts/{name}.npz").unlink()
    body = write_report(run).read_text()
    assert "class number 117" in body
    assert body.count("<td>class number") == 2 * 12


@pytest.mark.parametrize(
    ("lines", "charts"),
    [
        ([], 0),
        ([{"step": 1, "train/loss": 2.0}], 1),
        ([{"step": 1, "train/loss": None}], 0),
        ([{"step": 0, "validation/accuracy": 0.1}], 1),
        ([{"step": s, "train/loss": None if s == 3 else 1 / s} for s in range(1, 5)], 1),
        ([{"step": s, "train/loss": None if s > 40 else -1.0 * s} for s in range(1, 60)], 1),
        ([{"step": s, "train/loss": 0.0, "train/learning_rate": 0.0} for s in range(1, 3000)], 2),
        ([{"step": s, "train/loss": 1e308 if s > 40 else -1e90 * s} for s in range(1, 60)], 1),
        ([{"step": s, "train/loss": (-1) ** s * 1.7e308} for s in range(1, 60)], 0),
        ([{"step": 1, "train/loss": 1.0, "validation/bleu": 27.3, "strange <key>": 1.0}], 3),
    ],
)  # fmt: skip
def test_short_histories_and_non_finite_values(tmp_path, lines, charts):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    body = write_report(tmp_path).read_text()
    page = _Page(body)
    assert page.tags.count("svg") == charts
    assert len(body) < 60_000  # no label of hundreds of digits
    assert page.headings == ["Curves"] * bool(charts)
    bad = [line["step"] for line in lines if (loss := line.get("train/loss", 0)) is None or abs(loss) > 1e100]
    assert ("not finite at step" in body) == bool(bad)
    assert not bad or f"not finite at step {bad[0]}." in body


def test_new_run_discards_every_artifact_that_a_report_shows(tmp_path):
    (tmp_path / "artifacts").mkdir()
    for pattern in (*SECTIONS, "run.json", "cost.json", "notes.json"):
        (tmp_path / "artifacts" / pattern.replace("*", "000000001")).touch()
    discard_artifacts(tmp_path)
    assert [path.name for path in (tmp_path / "artifacts").iterdir()] == ["notes.json"]


def test_best_value_is_shown(tmp_path):
    points = [(1, 2.0, 0.5), (2, 1.0, 0.9), (3, 1.5, 0.8)]
    lines = [{"step": s, "validation/loss": loss, "validation/accuracy": a} for s, loss, a in points]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    body = write_report(tmp_path).read_text()
    assert "<b>1.5</b><small>best 1 at step 2" in body
    assert "<b>80.00%</b><small>best 90.00% at step 2" in body


def test_best_value_of_a_test_split_is_not_shown(tmp_path):
    points = [(1, 2.0), (2, 1.0), (3, 4.0)]
    lines = [{"step": step, "test/loss": loss, "test_sum/accuracy": 1 / loss} for step, loss in points]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    body = write_report(tmp_path).read_text()
    assert "<b>4</b><small>at step 3<" in body
    assert "<b>25.00%</b><small>at step 3<" in body


def test_attention_without_class_token_is_averaged_over_queries(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(figures, "overlay", lambda axes, image, heat, extent: seen.append(heat))
    weights = attention_weights(np.random.default_rng(0), 2, 1, 3, 6, 6)
    data = {
        "image": np.zeros((1, 4, 6, 3)),
        "weights": weights,
        "grid": np.array([2, 3]),
        "has_class_token": np.array(False),
    }
    image_attention(data, tmp_path)
    image, rollout, first = seen[:3]
    assert image is None
    np.testing.assert_allclose(first, weights[0, 0].mean((0, 1)).reshape(2, 3), rtol=1e-6)
    one, two = ((weights[i, 0].mean(0) + np.eye(6)) / 2 for i in (0, 1))
    np.testing.assert_allclose(rollout, (two @ one).mean(0).reshape(2, 3), rtol=1e-6)


def test_attention_of_class_token_keeps_the_order_of_patches(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(figures, "overlay", lambda axes, image, heat, extent: seen.append(heat))
    weights = np.zeros((1, 1, 1, 7, 7))
    weights[..., 0, :] = np.arange(7) / 8
    data = {
        "image": np.zeros((1, 4, 6, 1)),
        "weights": weights,
        "grid": np.array([2, 3]),
        "has_class_token": np.array(True),
    }
    image_attention(data, tmp_path)
    assert (8 * seen[2]).tolist() == [[1, 2, 3], [4, 5, 6]]


def test_smoothing_preserves_constants_and_does_not_spread_nan():
    values = np.full(300, 2.5)
    values[100] = np.nan
    result = smooth(values)
    np.testing.assert_allclose(np.delete(result, 100), 2.5)
    assert np.isnan(result[100])
    noise = np.random.default_rng(0).normal(size=3000)
    assert smooth(noise).std() < 0.2


def test_costs_have_units():
    amounts = {
        ("memory weights", 3 * 2**20): "3 MiB",
        ("flops step", 2.9e9): "2.9 GFLOP",
        ("parameters total", 124439808): "124,439,808",
    }
    amounts |= {
        ("memory total", 0): "0 B",
        ("memory x", 1024): "1 KiB",
        ("flops x", 1e30): "1e+12 EFLOP",
        ("kind", "adamw"): "adamw",
    }
    assert {key: _amount(*key) for key in amounts} == amounts


def test_nothing_is_written_to_the_folder_of_another_program(tmp_path):
    (folder := tmp_path / "model").mkdir()
    (folder / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(FileNotFoundError, match="is not the workdir of a run"):
        write_report(folder)
    for command in (["report", str(tmp_path)], ["report", str(folder), str(folder)], ["watch", str(folder)]):
        assert launch.main(command) == 1
    assert sorted(tmp_path.rglob("*")) == [folder, folder / "config.json"]


def test_missing_or_damaged_workdir_raises(tmp_path):
    with pytest.raises(FileNotFoundError, match="is not the workdir of a run"):
        write_report(tmp_path)
    (tmp_path / "config.json").write_text("[1")
    with pytest.raises(ValueError, match=r"config\.json is damaged"):
        write_report(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "artifacts").mkdir()
    (tmp_path / "artifacts/attention_text.npz").write_bytes(b"PK\x03\x04 torn")
    with pytest.raises(ValueError, match=r"attention_text\.npz cannot be read"):
        write_report(tmp_path)


def test_arrays_of_an_unknown_compression_are_named(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    path = tmp_path / "artifacts/attention_text.npz"
    path.parent.mkdir()
    np.savez(path, weights=np.ones(3))
    content = path.read_bytes()
    place = content.index(b"PK\1\2") + 10  # the method in the directory
    path.write_bytes(content[:place] + b"\x63" + content[place + 1 :])
    with pytest.raises(ValueError, match=r"attention_text\.npz cannot be read"):
        write_report(tmp_path)


def test_import_loads_neither_jax_nor_pyplot():
    code = (
        "import sys, lineage.report.run; print(*(m for m in ('jax', 'torch', 'matplotlib.pyplot') if m in sys.modules))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == ""


def test_gaps_in_a_long_curve_do_not_hide_its_other_values():
    values = np.where(np.arange(3000) % 2, 0.5, np.nan)
    values[:5] = np.nan
    steps, actual = figures.points(np.arange(3000), values)
    assert steps[0] == 0
    assert np.isnan(actual[0])
    assert (actual[1:] == 0.5).all()
    assert len(actual) >= 699
