"""Readers of the pages: contrast, alternative texts, the data behind the figures, printing, explanations of curves."""

import csv
import io
import json
import re
from html import unescape
from urllib.parse import unquote

import numpy as np
import pytest
from matplotlib.colors import to_rgb

from lineage.report import comparison, curves, figures, html
from lineage.report.run import write_report
from tests.report.sample_runs import text_run, vision_run

LIGHT, DARK = 0, 1


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """Return the reports of a vision and of a language model, and the folder of the first one."""
    folder = tmp_path_factory.mktemp("runs")
    reports = [write_report(write(folder / write.__name__)) for write in (vision_run, text_run)]
    return folder / "vision_run", *(path.read_text() for path in reports)


def contrast(first, second):
    """Return the contrast ratio of two colors (WCAG 2.2, relative luminance)."""

    def luminance(color):
        channels = np.array(to_rgb(color))
        linear = np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)
        return linear @ [0.2126, 0.7152, 0.0722]

    dark, light = sorted(map(luminance, (first, second)))
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("mode", [LIGHT, DARK])
def test_texts_and_curves_have_enough_contrast(mode):
    color = {name: both[mode] for name, both in figures.PALETTE.items()}
    for ground in ("page", "card", "tint"):
        assert contrast(color["ink"], color[ground]) >= 4.5
        assert contrast(color["soft"], color[ground]) >= 4.5
        assert contrast(color["s0"], color[ground]) >= 4.5  # links
    for graphic in ("bad", *figures.SERIES):
        assert contrast(color[graphic], color["card"]) >= 3
    share = float(re.search(r"now\.image \? [\d.]+ : ([\d.]+)", html._resource("attention.js"))[1])
    token = share * np.array(to_rgb(color["s1"])) + (1 - share) * np.array(to_rgb(color["card"]))
    assert contrast(color["ink"], token) >= 4.5
    assert contrast("black", color["s1"]) >= 4.5  # labels of objects


@pytest.mark.parametrize("count", [1, 2, 7, 100])
def test_colors_of_runs_have_enough_contrast_in_both_modes(count):
    plain, css = comparison.shades(count)
    assert len(plain) == len(css) == max(count, 2)
    assert all(contrast(color, figures.PALETTE["card"][LIGHT]) >= 3 for color in plain)
    modes = [re.fullmatch(r"light-dark\((#\w{6}), (#\w{6})\)", color) for color in css[1:]]
    assert [actual[1] for actual in modes] == plain[1:]
    assert all(contrast(actual[2], figures.PALETTE["card"][DARK]) >= 3 for actual in modes)


def test_counts_of_a_confusion_matrix_have_enough_contrast():
    for share in (0.01, 0.1, 0.18, 0.19, 0.2, 0.3, 0.4, 0.6, 1):
        count = round(100 * share)
        drawn = figures.confusion(np.array([[count, 100 - count], [0, 1]]), ["a", "b"]).axes[0]
        text = next(text for text in drawn.texts if text.get_text() == str(count))
        image = drawn.images[0]
        assert contrast(image.cmap(image.norm(share))[:3], text.get_color()) >= 4.5


@pytest.mark.thorough
def test_every_figure_has_an_alternative_text_and_its_data(pages):
    _, *bodies = pages
    for body in bodies:
        svgs = re.findall(r"<svg.*?>", body)
        labels = [re.search(r'role="img" aria-label="([^"]{20,})"', svg) for svg in svgs]
        assert all(labels)
        assert len({actual[1] for actual in labels}) == len(svgs)
        drawn = re.findall(r"<figure class=.*?</figure>", body, re.DOTALL)
        assert len(drawn) == len(svgs)
        assert all("<a class=data download=" in figure for figure in drawn)
        assert all(re.search('alt="[^"]+"', image) for image in re.findall("<img.*?>", body))
    assert "Loss by step: train from " in bodies[0]
    assert "Confusion matrix of 10 classes: " in bodies[0]


def tables(body):
    """Return the rows of the CSV files in a page, by their names."""
    links = re.findall(r'<a class=data download="([^"]*)" href="data:text/csv;charset=utf-8,([^"]*)"', body)
    return {name: list(csv.reader(io.StringIO(unquote(unescape(data))))) for name, data in links}


def test_files_hold_the_values_of_the_figures(pages):
    folder, body, _ = pages
    actual = tables(body)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    head, *rows = actual["curve_loss.csv"]
    assert head == ["step", "train", "validation"]
    for column, split in enumerate(head[1:], start=1):
        expected = {line["step"]: line[f"{split}/loss"] for line in lines if f"{split}/loss" in line}
        values = {int(row[0]): float(row[column]) for row in rows if row[column]}
        assert values == pytest.approx(expected, rel=1e-5)
    with np.load(folder / "artifacts/confusion_validation.npz") as data:
        head, *rows = actual["confusion_validation.csv"]
        assert head[1:] == [row[0] for row in rows] == data["class_names"].tolist()
        np.testing.assert_array_equal(np.array([row[1:] for row in rows], int), data["counts"])
    with np.load(folder / "artifacts/attention_image.npz") as data:
        head, *rows = actual["attention_image.csv"]
        assert len(rows) == 6 * 16
        third = data["weights"][2, 1].mean(0)[0, 1:]  # layer 3 of the second image, of the class token
        assert head[6] == "layer 3"
        np.testing.assert_allclose(np.array([row[6] for row in rows if row[0] == "2"], float), third, rtol=1e-5)
    assert actual["mistakes_validation.csv"][1] == ["0", "3", "0.99"]


def test_long_curves_are_thinned_to_their_extremes_and_ends(tmp_path):
    steps = np.arange(1, 100_001)
    values = 2 + np.sin(steps)
    values[[33_333, 66_666]] = 0.01, 500
    body = curves.card("loss", {"train": (steps, values)}, ["train"], tmp_path)
    _, *rows = tables(body)["curve_loss.csv"]
    actual = {int(step): float(value) for step, value in rows}
    assert 1400 <= len(actual) <= 1402
    assert actual == pytest.approx({step: values[step - 1] for step in actual}, rel=1e-5)
    assert {1, 33_334, 66_667, 100_000} <= actual.keys()
    assert f"train from {values[0]:.4g} to {values[-1]:.4g}" in body
    figure = figures.chart("Loss", {"train": (steps, values)}, ["train"], percent=False, smoothed=True)
    faint, smoothed = (line.get_ydata() for line in figure.axes[0].lines)
    assert (faint.min(), faint.max()) == (0.01, 500)
    assert smoothed[:500] == pytest.approx(2, abs=0.01)
    assert figure.axes[0].get_yscale() == "log"


def test_files_have_no_formulas_and_keep_every_character():
    rows = [
        ["=1+2", 'a,b\n"c"', "</a>%&#é"],
        [-1.5, 0.123456789, "+x"],
        ["\n=1", "\uff1d1", "@x"],
        ["a;=1", "b\n+1", "1-2=3"],
    ]
    link = html.download(rows, "x")
    safe = [
        ["'=1+2", 'a,b\n"c"', "</a>%&#é"],
        ["-1.5", "0.123457", "'+x"],
        ["'\n'=1", "'\uff1d1", "'@x"],
        ["a;'=1", "b\n'+1", "1-2=3"],
    ]
    assert tables(link)["x.csv"] == safe
    assert link.count("<") == 2


def test_browser_saves_the_file(pages, browse, tmp_path):
    (tmp_path / "user/Default").mkdir(parents=True)
    settings = {"download": {"default_directory": str(tmp_path / "saved"), "prompt_for_download": False}}
    (tmp_path / "user/Default/Preferences").write_text(json.dumps(settings))
    browse(pages[1], 'document.querySelector("a.data").click();', "--timeout=4000")
    assert (tmp_path / "saved/curve_loss.csv").read_text().startswith("step,train,validation\n10,")


PRINT = """
for (const rule of document.styleSheets[0].cssRules)
  if (rule.media?.mediaText === 'print') rule.media.mediaText = 'all';
const style = (name, pseudo) => getComputedStyle(document.querySelector(name), pseudo);
document.title = [style('body').backgroundColor, style('.card').backgroundColor, style('.card').breakInside,
  style('a.data').display, style('tr').breakInside, style('.scroll').overflowX,
  style('details:not([open])', '::details-content').contentVisibility].join('|');
"""


@pytest.mark.thorough
def test_print_is_light_and_complete(pages, browse):
    body = browse(pages[1], PRINT, "--blink-settings=preferredColorScheme=0")
    white = "rgb(255, 255, 255)"
    assert re.search("<title>(.*)</title>", body)[1].split("|") == [
        white,
        white,
        "avoid",
        "none",
        "avoid",
        "visible",
        "visible",
    ]
    dark = browse(pages[1], PRINT.replace("'all'", "'print'"), "--blink-settings=preferredColorScheme=0")
    assert "<title>rgb(15, 18, 22)|rgb(23, 27, 33)|" in dark


CONFIG = {
    "model": {"dropout": 0.1, "head_dropout": None},
    "task": {"label_smoothing": 0.1, "mixup": 0.0, "cutmix": 1.0},
}
AUGMENTED = (
    "Train can look worse than test: it is measured with augmentation flip, stochastic depth 0.2, test without, "
    "and with averaged weights (EMA)."
)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("config", "evaluated", "loss", "accuracy"),
    [
        (
            CONFIG,
            True,
            "Train can look worse than test: it is measured with label smoothing 0.1, CutMix 1.0, dropout 0.1, "
            "test without.",
            "Train can look worse than test: it is measured with CutMix 1.0, dropout 0.1, test without.",
        ),
        (CONFIG, False, "With label smoothing 0.1, CutMix 1.0, dropout 0.1.", ""),
        ({"ema_decay": 0.9}, True, "Test: with averaged weights (EMA).", "Test: with averaged weights (EMA)."),
        (
            {"model": {"stochastic_depth": 0.2}, "task": {"augment": "flip"}, "ema_decay": 0.9},
            True,
            AUGMENTED,
            AUGMENTED,
        ),
        ({"model": {"dropout": 0.0}, "optimizer": {"mixup": 1.0}}, True, "", ""),
    ],
)
def test_curves_say_what_only_training_has(tmp_path, config, evaluated, loss, accuracy):
    lines = [{"step": 1, "train/loss": 2.0, "train/accuracy": 0.5, "train/gradient_norm": 1.0}]
    lines += [{"step": 1, "test/loss": 1.0, "test/accuracy": 0.6}] if evaluated else []
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    body = write_report(tmp_path).read_text()
    said = dict(re.findall(r'<figcaption>(.*?) ?<a class=data download="(.*?)"', body)[i][::-1] for i in range(3))
    assert said == {"curve_loss.csv": loss, "curve_accuracy.csv": accuracy, "curve_gradient_norm.csv": ""}


def test_comparison_has_the_data_of_the_runs_and_says_how_they_were_trained(runs, tmp_path):
    (runs[0].folder / "report.html").touch()
    for run in runs:
        run.config["task"] = {"label_smoothing": 0.1}
    body, target = {}, comparison.target_of(runs)
    for smoothing in (0.1, 0.0):
        runs[0].config["task"] = {"label_smoothing": smoothing}
        page = comparison.write_page(tmp_path / "sweep.html", runs, dict.fromkeys(runs, ""), target)
        body[smoothing] = page.read_text()
    assert "<figcaption>With label smoothing 0.1. <a" in body[0.1]
    assert "Not comparable between all runs: 3 with label smoothing 0.1; 1 without." in body[0.0]
    actual = tables(body[0.0])
    assert actual["curve_train_loss.csv"][0] == ["step", "rate=0.1", "rate=0.0001", "rate=0.01", "rate=0.001"]
    assert [row[4] for row in actual["curve_train_loss.csv"][1:]] == ["1.2", "0.7", "0.533333"]
    assert actual["parallel.csv"] == [
        ["run", "learning_rate", "validation/loss"],
        ["rate=0.001", "0.001", "0.2"],
        ["rate=0.01", "0.01", "0.3"],
        ["rate=0.0001", "0.0001", "0.4"],
    ]
    plain, css = comparison.shades(4)
    svgs = "".join(re.findall(r"<svg.*?</svg>", body[0.0], re.DOTALL))
    assert all(f"stroke: {color}" in svgs for color in css)
    assert not re.search(rf"(?<!light-dark\()({'|'.join(plain)})", svgs)
    assert re.findall(r'<a href="(.*?)">(.*?)</a>', body[0.0]) == [("./rate%3D0.0001/report.html", "rate=0.0001")]


def test_names_in_costs_are_kinds_of_flops_or_paths_of_modules(tmp_path):
    (tmp_path / "artifacts").mkdir()
    (tmp_path / "config.json").write_text("{}")
    flops = {"forward": {"model": 5, "matmul": 5, "other": 1}, "training": {"model": 5, "matmul": 9, "other": 1}}
    parts = {"patch_embed": 3, "decoder_stack/mlp_norm": 2, "unembed": 1}
    (tmp_path / "artifacts/cost.json").write_text(json.dumps({"flops": flops | {"parts": parts}}))
    body = write_report(tmp_path).read_text()
    assert re.findall("<caption>(.*?)</caption>", body) == [
        "FLOPs of the forward pass of a batch",
        "FLOPs of a training step",
        "FLOPs of matrix products of the forward pass",
    ]
    assert re.findall("<tr class=''><th scope=row>([^<]*)", body) == [
        "matrix products",
        "element-wise operations",
        "matrix products",
        "matrix products, with recomputation",
        "element-wise operations",
        "patch_embed",
        "decoder_stack/mlp_norm",
        "unembed",
    ]
