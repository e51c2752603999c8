"""Numbers, labels and names in pages: units, directions, ticks, legends and the order of runs."""

import fcntl
import itertools
import json
import re

import matplotlib
import numpy as np
import pytest

from lineage.report import figures
from lineage.report.comparison import compare
from lineage.report.run import _amount, write_report
from tests.report.test_readers import tables


def write_run(folder, lines, config=None, seconds=None, **costs):
    """Write a run, which is finished if its `seconds` are given; return its folder."""
    (folder / "artifacts").mkdir(parents=True)
    config = {"seed": folder.name} if config is None else config
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if seconds is not None:
        (folder / "artifacts/run.json").write_text(json.dumps({"config": config, "seconds": seconds}))
    if costs:
        (folder / "artifacts/cost.json").write_text(json.dumps(costs))
    return folder


def tiles(body):
    """Return the label, value and note of each tile of a page."""
    return re.findall("<div class=tile><span>(.*?)</span><b>(.*?)</b><small>(.*?)</small>", body)


def texts(body):
    """Return the texts of each figure of a page."""
    return [re.findall("<text[^>]*>([^<]*)<", svg) for svg in re.findall("<svg.*?</svg>", body, re.DOTALL)]


def test_direction_and_unit_follow_from_the_metric_and_not_from_its_split(tmp_path):
    values = {"typing_errors/accuracy": (0.1, 0.9, 0.5), "accuracy_set/loss": (3, 1, 2), "stepwise/loss": (1, 2, 3)}
    values["test/exact_match"] = (0.1, 0.2, 0.25)
    lines = [{"step": step} | {key: found[step - 1] for key, found in values.items()} for step in (1, 2, 3)]
    body = write_report(write_run(tmp_path, lines)).read_text()
    assert tiles(body) == [
        ("typing errors accuracy", "50.00%", "best 90.00% at step 2"),
        ("accuracy set loss", "2", "best 1 at step 2"),
        ("stepwise loss", "3", "best 1 at step 1"),
        ("test exact match", "25.00%", "at step 3"),
    ]
    assert not any("%" in text for text in texts(body)[0])
    assert compare([tmp_path]).read_text().count("<th scope=col class=n>stepwise/loss") == 1


def test_value_that_equals_the_best_is_the_best(tmp_path):
    lines = [{"step": step, "validation/loss": loss} for step, loss in ((1, 2.0), (2, 1.0), (3, 1.0))]
    body = write_report(write_run(tmp_path, lines)).read_text()
    assert tiles(body) == [("validation loss", "1", "at step 3, the best")]


def test_last_of_equal_values_is_the_best_as_for_checkpoints(tmp_path):
    lines = [{"step": step, "validation/loss": loss} for step, loss in ((1, 1.0), (2, 1.0), (3, 2.0))]
    body = write_report(write_run(tmp_path, lines)).read_text()
    assert tiles(body) == [("validation loss", "2", "best 1 at step 2")]


def test_best_value_is_not_named_if_the_direction_is_unknown(tmp_path):
    names = ("validation/rmse", "validation/similarity", "validation/entropy")
    lines = [{"step": step} | dict.fromkeys(names, step) for step in (1, 2, 3)]
    config = {"checkpoint": {"best": "validation/entropy", "best_is_highest": False}}
    assert [note for _, _, note in tiles(write_report(write_run(tmp_path, lines, config)).read_text())] == [
        "best 1 at step 1",
        "at step 3",
        "best 1 at step 1",
    ]


def test_runs_are_not_ranked_by_a_metric_of_unknown_direction(tmp_path):
    for seed, name in enumerate("ab"):
        write_run(tmp_path / name, [{"step": 1, "validation/entropy": seed}], seconds=1.0)
    body = compare([tmp_path]).read_text()
    assert "best" not in re.sub("<(style|script)>.*?</", "", body, flags=re.DOTALL).lower()
    for seed, name in enumerate("ab"):
        line = {"step": 1, "validation/entropy": seed, "validation/nll": 1 - seed}
        (tmp_path / name / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    assert "The best run by the last validation/nll is b." in compare([tmp_path]).read_text()


def test_time_and_pictures_of_a_run_that_has_continued(tmp_path):
    lines = [{"step": step, "train/loss": 1.0, "time/seconds": 2.0 * step} for step in (10, 20, 30)]
    for name in "ab":
        run = write_run(tmp_path / name, lines, seconds=20.5)
        facts = json.loads((run / "artifacts/run.json").read_text())
        (run / "artifacts/run.json").write_text(json.dumps(facts | {"steps": 10}))
    body = write_report(run).read_text()
    assert ("training time", "1:00", "30 steps") in tiles(body)
    assert "The run has continued since step 10, at which confusion matrices" in body
    assert re.findall(r"<td class=n>30<td class=n>([\d:]*)", compare([tmp_path]).read_text()) == ["1:00"] * 2
    (run / "artifacts/run.json").write_text(json.dumps(facts | {"steps": 30, "seconds": 61.0}))
    body = write_report(run).read_text()
    assert ("training time", "1:01", "30 steps") in tiles(body)
    assert "has continued" not in body
    short = write_run(tmp_path / "short", [{"step": 1, "train/loss": 1.0}], seconds=60)
    assert ("training time", "1:00", "1 step") in tiles(write_report(short).read_text())


def test_units_of_costs_do_not_depend_on_names_of_modules(tmp_path):
    parameters = {"time_embed": 3192, "memory": 2048, "total": 5240}
    flops, textbook = {"parts": {"time_mix": 10**9, "memory": 10**6}}, {"parameters": 10**9, "flops": 10**12}
    run = write_run(tmp_path, [], parameters=parameters, flops=flops, textbook=textbook)
    cells = re.findall("<tr class='[a-z]*'><th scope=row>([^<]*).*?<td class=n>([^<]*)", write_report(run).read_text())
    assert cells == [
        ("time_embed", "3,192"),
        ("memory", "2,048"),
        ("total", "5,240"),
        ("time_mix", "1 GFLOP"),
        ("memory", "1 MFLOP"),
        ("parameters", "1,000,000,000"),
        ("FLOPs", "1 TFLOP"),
    ]
    assert _amount("memory.training", 1024) == "1 KiB"


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (1 + 1e-6 * np.arange(10), ["1", "1.000002", "1.000004", "1.000006", "1.000008"]),
        (12345 + 0.05 * np.arange(10), ["12,345", "12,345.1", "12,345.2", "12,345.3", "12,345.4"]),
        (1e6 + np.arange(5.0), ["1,000,000", "1,000,001", "1,000,002", "1,000,003", "1,000,004"]),
        (1e20 * np.arange(1, 6), ["1e+20", "2e+20", "3e+20", "4e+20", "5e+20"]),
        (-1e-3 * np.arange(5), ["-0.004", "-0.003", "-0.002", "-0.001", "0"]),
    ],
)
def test_ticks_of_narrow_axes_differ(tmp_path, values, expected):
    lines = [{"step": step, "validation/x": value} for step, value in enumerate(values.tolist(), 1)]
    actual = texts(write_report(write_run(tmp_path, lines)).read_text())[0]
    assert actual[actual.index("step") + 1 : -1] == expected


def test_names_that_differ_in_punctuation_have_their_own_curves_and_files(tmp_path):
    keys = ("validation/top_5", "validation/top.5", "val.a/loss", "val_a/loss")
    lines = [{"step": step} | {key: step * place for place, key in enumerate(keys, 1)} for step in (1, 2)]
    run = write_run(tmp_path, lines)
    actual = tables(write_report(run).read_text())
    assert actual["curve_loss.csv"] == [["step", "val.a", "val_a"], ["1", "3", "4"], ["2", "6", "8"]]
    names = [name for name in actual if name.startswith("curve_top")]
    assert [actual[name][2][1] for name in names] == ["2", "4"]
    assert sorted(path.stem for path in (run / "report").iterdir()) == sorted(name[:-4] for name in actual)


def test_many_splits_have_distinct_lines_and_a_legend_beside_the_chart():
    points = np.arange(3), np.arange(3.0)
    names = ["train", "validation", "test", *(f"validation of task {n}" for n in range(5))]
    figure = figures.chart("Exact match", dict.fromkeys(names, points), names, percent=False, smoothed=True)
    figure.draw_without_rendering()
    lines, legend = figure.axes[0].lines, figure.legends[0].get_window_extent()
    assert len({(line.get_color(), line.get_linestyle()) for line in lines}) == len(names)
    assert legend.x0 >= 0
    assert legend.x1 <= figure.bbox.x1
    assert not legend.overlaps(figure.axes[0].get_window_extent())
    assert not legend.overlaps(figure._suptitle.get_window_extent())


def test_consecutive_values_that_are_not_finite_are_marked_once():
    values = np.array([1, np.nan, np.nan, 2, 3, np.inf, np.inf])
    figure = figures.chart("Loss", {"train": (np.arange(7), values)}, ["train"], percent=False, smoothed=True)
    marks = [line.get_xdata()[0] for line in figure.axes[0].lines if line.get_linestyle() == ":"]
    assert marks == [1, 5]


@pytest.mark.parametrize("smoothed", [False, True])
def test_finite_values_without_finite_neighbors_are_dots(smoothed):
    values = np.full(60, np.nan)
    values[[0, 20, 40, 41]] = 1, 2, 3, 4
    figure = figures.chart("Loss", {"train": (np.arange(60), values)}, ["train"], percent=False, smoothed=smoothed)
    (line,) = [line for line in figure.axes[0].lines if line.get_marker() == "o"]
    assert [*np.flatnonzero(line.get_markevery())] == [0, 20]


def test_best_run_is_named_only_if_it_has_the_metric(tmp_path):
    checkpoint = {"best": "test/accuracy", "best_is_highest": None}
    for number, name in enumerate("ab"):
        lines = [{"step": 1, "validation/loss": 1.0 / (number + 1)}]
        write_run(tmp_path / name, lines, {"seed": number, "checkpoint": checkpoint}, seconds=1.0)
    body = compare([tmp_path]).read_text()
    assert "The best run" not in body
    assert "best first" not in body
    assert not tiles(body)


def test_runs_in_progress_are_not_ranked(tmp_path):
    for name, loss in (("a", 2.0), ("b", 1.0)):
        write_run(tmp_path / name, [{"step": 1, "validation/loss": loss}])
    assert "best first" not in compare([tmp_path]).read_text()
    write_run(tmp_path / "c", [{"step": 1, "validation/loss": 3.0}], seconds=1.0)
    assert "<h2>Runs, best first</h2>" in compare([tmp_path]).read_text()


def test_comparison_shows_which_runs_are_in_progress_or_failed(tmp_path):
    for name in ("done", "failed", "running", "stopped"):
        write_run(tmp_path / name, [{"step": 1, "validation/loss": 1.0}], seconds=1.0 if name == "done" else None)
    (tmp_path / "failed/log.txt").write_text("$ lineage train\nerror: the disk is full\n")
    with (tmp_path / "running/.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        body = compare([tmp_path]).read_text()
    rows = re.findall(r"<tr class='run run\d'><th scope=row><i[^>]*></i>([^<]+)<td>([^<]+)", body)
    assert rows == [(name, name) for name in ("done", "failed", "running", "stopped")]


@pytest.mark.thorough
def test_browser_sorts_durations_and_leaves_missing_values_last(tmp_path, browse):
    runs = {5: 1.0, 185: -2.0, 3723: 3.0, 187_200: 0.5, 36_000: None, 3540: 2.0}
    for seconds, value in runs.items():
        line = {"step": 1, "train/loss": 1.0} | ({} if value is None else {"validation/x": value})
        write_run(tmp_path / str(seconds), [line], seconds=seconds)
    body = compare([tmp_path]).read_text()
    for column, clicks, expected in (
        (-1, 1, sorted(runs)),
        (-1, 2, sorted(runs, reverse=True)),
        (3, 1, [185, 187_200, 5, 3540, 3723, 36_000]),
        (3, 2, [3723, 3540, 5, 187_200, 185, 36_000]),
    ):
        shown = browse(
            body,
            f'for (let i = 0; i < {clicks}; i++) [...document.querySelectorAll(".runs button")].at({column}).click();',
        )
        assert re.findall(r'<tr class="run run\d[^>]*><th scope="row"><i[^>]*></i>(\d+)', shown) == list(
            map(str, expected)
        )


def test_comparison_says_how_many_metrics_have_no_chart(tmp_path):
    for name in "ab":
        write_run(tmp_path / name, [{"step": 1} | {f"test/m{n}": 1.0 for n in range(9)}], seconds=1.0)
    body = compare([tmp_path]).read_text()
    assert "Charts of 8 of 10 metrics; the table of runs has all." in body


def test_long_titles_and_many_words_fit_into_figures():
    points, title = (np.arange(3), np.arange(3.0)), "Validation summaries of functions expected calibration error"
    figure = figures.chart(title, {"train": points}, ["train"], percent=False, smoothed=True)
    figure.draw_without_rendering()
    assert figure._suptitle.get_window_extent().x1 <= figure.bbox.x1
    columns = {
        "path": [f"file {n}" for n in range(200)],
        "a_long_name_of_a_column_of_a_sweep": [*range(200)],
        "b": [0] * 200,
    }
    figure = figures.parallel(columns, ["run"] * 200, ["black"] * 200)
    figure.draw_without_rendering()
    boxes = [text.get_window_extent() for text in figure.axes[0].texts]
    assert not [a for i, a in enumerate(boxes) for b in boxes[:i] if a.overlaps(b)]


@pytest.mark.parametrize("value", [0.0, 0.5, 1.0])
def test_axis_of_a_constant_fraction_shows_all_fractions(value):
    curve = np.arange(3), np.full(3, value)
    figure = figures.chart("Accuracy", {"test": curve}, ["test"], percent=True, smoothed=True)
    figure.draw_without_rendering()
    low, high = figure.axes[0].get_ylim()
    ticks = [tick for tick in figure.axes[0].get_yticks() if low <= tick <= high]
    assert (min(ticks), max(ticks)) == pytest.approx((0, 1))


@pytest.mark.parametrize("step", [1, 8, 60])
def test_axis_of_one_step_has_its_number_once(step):
    curve = np.array([step]), np.array([0.5])
    figure = figures.chart("Loss", {"train": curve}, ["train"], percent=False, smoothed=True)
    figure.draw_without_rendering()
    shown = [label.get_text() for label in figure.axes[0].get_xticklabels()]
    assert str(step) in shown
    assert len(set(shown)) == len(shown)


@pytest.mark.parametrize("last", [999, 250_000, 10**9, 10**12])
def test_numbers_of_steps_do_not_overlap(last):
    curve = np.linspace(0, last, 50).astype(int), np.linspace(0, 1, 50)
    figure = figures.chart("Loss", {"train": curve}, ["train"], percent=False, smoothed=True)
    figure.draw_without_rendering()
    boxes = [label.get_window_extent() for label in figure.axes[0].get_xticklabels() if label.get_text()]
    shown = [box for box in boxes if figure.bbox.x0 <= box.x0 and box.x1 <= figure.bbox.x1]
    assert len(shown) > 1
    assert all(left.x1 < right.x0 for left, right in itertools.pairwise(shown))


def test_large_numbers_are_shown_though_they_are_not_drawn(tmp_path):
    lines = [
        {"step": step, "validation/perplexity": value, "test/perplexity": 3e150}
        for step, value in enumerate((2e120, 7e130), 1)
    ]
    page = write_report(write_run(tmp_path, lines)).read_text()
    assert ("validation perplexity", "7e+130", "best 2e+120 at step 1") in tiles(page)
    assert ("test perplexity", "3e+150", "at step 2") in tiles(page)
    assert "<svg" not in page


def test_numbers_of_settings_are_in_ascending_order_above_words():
    columns = {"width": [32, None, 8, 256], "seed": [10**20, 1, 2, 3], "loss": [1.0, 2.0, 3.0, 4.0]}
    figure = figures.parallel(columns, list("abcd"), ["#000000"] * 4)
    heights = {line.get_gid(): line.get_ydata() for line in figure.axes[0].lines if line.get_gid()}
    assert sorted("abcd", key=lambda name: heights[name][0]) == list("bcad")  # None, 8, 32, 256
    assert sorted("abcd", key=lambda name: heights[name][1]) == list("bcda")


@pytest.mark.parametrize("title", ["Top 5 accuracy", "Cardinality error", "Class loss layer 1", "Giou loss layer 2"])
def test_legend_does_not_touch_the_title(title):
    points, names = (np.arange(3), np.arange(3.0)), ["train", "validation", "test"]
    with matplotlib.rc_context(figures.STYLE):
        figure = figures.chart(title, dict.fromkeys(names, points), names, percent=False, smoothed=True)
        figure.draw_without_rendering()
    heading, handle = (part.get_window_extent() for part in (figure._suptitle, figure.legends[0].legend_handles[0]))
    assert handle.x0 > heading.x1 + 8 or handle.y1 < heading.y0
