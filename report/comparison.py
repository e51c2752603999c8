"""Comparison of runs: `compare.html`, or for a sweep `sweep.html`, `sweep.csv` and `sweep.png`."""

import csv
import io
import math
import os
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import zip_longest
from pathlib import Path
from urllib.parse import quote

import numpy as np
from markupsafe import Markup
from matplotlib import colormaps
from matplotlib.colors import to_hex

from lineage.configs.atomic import write_atomic
from lineage.report import curves, figures, html
from lineage.runs import data_record
from lineage.runs.command import displayed
from lineage.runs.folder import MEASURED
from lineage.runs.live import Run, distinguishing, labels, print_failures, refresh, runs_in
from lineage.runs.process import printable, say, show
from lineage.runs.progress import clock

Target = tuple[str, bool]  # a metric, and whether higher is better
MAX_CHARTS, MAX_AXES = 8, 12
VIRIDIS = (0.0, 0.55), (0.4, 1.0)  # parts of the colormap with enough contrast in light and in dark mode


def finish(runs: Sequence[Run], command: Sequence[str], folder: Path, target: Target | None = None) -> None:
    """Write `folder/sweep.csv`, `sweep.html` and `sweep.png`; print the table and why runs failed.

    `command` is the part of the command line that all runs share; the default target is `target_of(runs)`.
    """
    rows = []
    for run in runs:
        with html.explained(run.folder):
            rows.append(row_of(run))
            _check(run, folder)
    write_table(rows, folder / "sweep.csv")
    plot([run for run in runs if run.state == "done"], folder)
    commands = {run: displayed(run.command(command)) for run in runs}
    show(write_page(folder / "sweep.html", runs, commands, target or target_of(runs)))
    print_failures(runs)


def target_of(runs: Sequence[Run]) -> Target:
    """Return the metric that ranks the runs, and whether higher is better.

    It is the config's `checkpoint.best`, else the first metric of the validation split, else of the test split, among
    those of known direction; ("", False) if there is none. The last value of a run counts.
    """
    settings = runs[0].settings
    best, metrics = settings.get("checkpoint.best"), [key for run in runs for key in results(run)]
    metrics.sort(key=lambda metric: not metric.startswith("validation/"))
    for metric in [best] if best else metrics:
        if (highest := curves.is_higher_better(metric, settings)) is not None:
            return metric, highest
    return "", False


def ranked(runs: Sequence[Run], target: Target) -> list[Run]:
    """Return the runs from best to worst; those without a result come last, in their order."""
    metric, highest = target
    finished = [run for run in runs if math.isfinite(result(run, metric))]
    finished.sort(key=lambda run: result(run, metric), reverse=highest)
    return finished + [run for run in runs if run not in finished]


def compare(folders: Sequence[Path]) -> Path:
    """Write `compare.html` for the runs in some folders, each of one run or several; return its path.

    The file is written to the closest folder that contains all runs, or to the current folder if that is the root.
    """
    if empty := [folder for folder in folders if not runs_in(folder)]:
        raise FileNotFoundError(f"there is no run in {empty[0]}.")
    for path in (path for folder in folders for path in runs_in(folder) if path != folder and path.is_symlink()):
        raise ValueError(f"{path} is a link: name the folders of the runs instead of {path.parent}.")
    paths = dict.fromkeys(path.absolute() for folder in folders for path in runs_in(folder))
    common = Path(os.path.commonpath(path.parent for path in paths))
    if common == Path(common.anchor):  # the file system's root
        common = Path.cwd()
    runs, settings = [], []
    for path in paths:
        html.check_files(path)
        run = Run(os.path.relpath(path, common), path)
        refresh(run)
        with html.explained(path):
            _check(run, common)
            settings.append(run.settings)
        runs.append(run)
    keys = dict.fromkeys(key for own in settings for key in own)
    keys = [key for key in keys if len({repr(own.get(key)) for own in settings}) > 1]
    for run, own in zip(runs, settings):
        run.changes = {key: own.get(key) for key in keys}
    commands = {run: run.facts().get("command", "") for run in runs}
    return write_page(common / "compare.html", runs, commands, target_of(runs))


def _check(run, folder):
    """Raise one of the errors that `html.explained` names if a page in `folder` cannot show a run."""
    target_of([run]), _table([run], [""], [], folder)
    curves.by_metric(run.metrics)


def write_page(page: Path, runs: Sequence[Run], commands: Mapping[Run, str], target: Target) -> Path:
    """Write a page with the runs (best first), their curves, and a plot of their overrides and results.

    Figures are saved in a folder of the same name without the suffix.
    """
    runs, metric, folder = ranked(runs, target), target[0], page.with_suffix("")
    ids, colors, modes = [f"run{number}" for number in range(len(runs))], *shades(len(runs))
    html.figures_folder(folder)

    def adapted(card: Markup) -> Markup:
        """Return a card whose curves have the names of the runs, and their colors in light and dark mode."""
        both = dict(zip(colors, modes))
        card = Markup(re.sub("|".join(colors), lambda color: both[color[0]], card))  # noqa: S704, escaped before
        for name, run in zip(ids, runs):
            named = Markup('<g class="run {}"><title>{}</title>').format(name, run.name)
            card = card.replace(f'<g data-part="{name}">', named)
        return card

    charts = []
    quantities = dict.fromkeys(["train/loss", metric, *(key for run in runs for key in results(run))])
    quantities = [key for key in quantities if key]
    last_is_best = reversed([*zip(ids, runs)])
    drawn = {name: curves.drawable(curves.by_metric(run.metrics)) for name, run in last_is_best}
    for key in quantities[:MAX_CHARTS]:
        histories = {name: metrics[key] for name, metrics in drawn.items() if key in metrics}
        if any(np.isfinite(values).any() for _, values in histories.values()):
            options = {"labels": {name: run.name for name, run in zip(ids, runs)}, "colors": colors, "legend": False}
            options["about"] = _remark(runs) if key == "train/loss" else ""
            charts.append(adapted(curves.card(key, histories, ids, folder, **options)))
    if len(quantities) > MAX_CHARTS:
        charts.append(html.note(f"Charts of {MAX_CHARTS} of {len(quantities)} metrics; the table of runs has all."))
    if changed := _data_note(runs):
        say(f"note: {changed}")
    keys = differing(runs)
    done = [run for run in runs if math.isfinite(result(run, metric))]
    overview = Markup()
    if keys and done:
        shown = keys[:MAX_AXES]
        columns = {label: [run.settings.get(key) for run in done] for key, label in zip(shown, labels(shown))}
        columns[metric] = [results(run)[metric] for run in done]
        rows = [["run", *columns], *zip((run.name for run in done), *columns.values())]
        text = f"{metric} of {len(done)} runs against {', '.join(columns)}; the table of runs has the values."
        chart = partial(html.card, figures.parallel, columns, ids, colors)
        overview = adapted(chart(name="parallel", folder=folder, alt=text, data=rows))
    title, few, order = page.resolve().parent.name, len(keys) <= MAX_AXES, ", best first" if done else ""
    lines = html.join(html.command(commands[run]) for run in runs)
    parts = [
        _header(title, runs, metric, changed),
        html.section("Curves", html.join(charts), "cards"),
        html.section("Overrides and results", overview),
        html.section(f"Runs{order}", _table(runs, modes, keys if few else [], page.parent)),
        html.section("Differences between the configs", Markup() if few else _settings(runs, keys)),
        html.section("Commands", html.details(f"All {len(runs)} runs{order}", lines)),
    ]
    return html.write(page, title, parts, styles=("comparison.css",), script="comparison.js")


def shades(count: int) -> tuple[list[str], list[str]]:
    """Return colors of runs (best first), in light mode and as CSS for both modes."""
    parts = (np.linspace(*ends, max(count - 1, 1)) for ends in VIRIDIS)
    light, dark = ([to_hex(colormaps["viridis"](share)) for share in part] for part in parts)
    both = [f"light-dark({a}, {b})" for a, b in zip(light, dark)]
    return [figures.SERIES["s1"], *light], ["var(--s1)", *both]  # the best run has its own color


def _remark(runs: Sequence[Run]) -> str:
    """Describe the settings that change the training losses of the runs, and whether they differ between runs."""
    counts = Counter(curves.only_in_training(run.settings) for run in runs)
    if len(counts) == 1:
        return curves.remark(runs[0].settings, "loss", [])
    listed = "; ".join(f"{count} {f'with {names}' if names else 'without'}" for names, count in counts.most_common(4))
    return f"Not comparable between all runs: {listed}{'; others' if len(counts) > 4 else ''}."


def differing(runs: Sequence[Run]) -> list[str]:
    """Return the overridden keys whose values differ between the runs."""
    keys = dict.fromkeys(key for run in runs for key in run.changes)
    return [key for key in keys if len({str(run.settings.get(key)) for run in runs}) > 1]


def _data_note(runs: Sequence[Run]) -> str:
    """Return a note with the data files that changed between the starts of runs, "" if there are none."""
    names = data_record.differing_between(run.folder for run in runs)
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"The runs have different data: {', '.join(names[:3])}{more} changed between their starts." if names else ""


def _header(title: str, runs: Sequence[Run], metric: str, changed: str) -> Markup:
    facts = [f"{count} {state}" for state, count in Counter(run.state for run in runs).items()]
    best = runs[0]
    shown = results(best) if math.isfinite(result(best, metric)) else {}
    tiles = [html.tile(html.words(key), html.number(value), "of the best run") for key, value in shown.items()]
    biased = " The test split selects it: its result is too optimistic." if curves.is_test(metric) else ""
    about = html.note(f"The best run by the last {metric} is {best.name}.{biased}") if tiles else Markup()
    about += html.alert(changed) if changed else Markup()
    return html.header(title, facts, about, tiles)


def _table(runs: Sequence[Run], colors: Sequence[str], keys: Sequence[str], folder: Path) -> Markup:
    """Return the table of the runs, with links from the page in `folder` to their reports."""
    metrics = list(dict.fromkeys(key for run in runs for key in results(run)))
    rows = [html.table_head("run", "state", *keys, numbers=[*metrics, "steps", "time"])]
    for place, run in enumerate(runs):
        values, times = results(run), [run.facts().get("seconds", math.nan), run.last("time/seconds")]
        numbers = [html.number(values[key]) if key in values else "" for key in metrics]
        numbers += [f"{run.step or 0:,}", clock(np.nanmax(times)) if np.isfinite(times).any() else ""]
        name, report = run.name, run.folder / "report.html"
        if report.is_file():
            name = Markup('<a href="./{}">{}</a>').format(quote(os.fsencode(os.path.relpath(report, folder))), name)
        name = Markup("<i style='background:{}'></i>{}").format(colors[place], name)
        cells = [run.state, *(run.settings.get(key) for key in keys)]
        rows.append(html.table_row(*cells, name=name, numbers=numbers, kind=f"run run{place}"))
    return html.wide_table("Runs", rows, "runs", around="card")


def _settings(runs: Sequence[Run], keys: Sequence[str]) -> Markup:
    head = html.table_head("key", *(run.name for run in runs))
    rows = [html.table_row(*(run.settings.get(key) for run in runs), name=key) for key in keys]
    return html.wide_table("Differences between the configs", [head, *rows], around="card")


def results(run: Run) -> dict[str, float]:
    """Return the last value of each metric of a run's evaluations."""
    newest = {key: value for line in run.metrics for key, value in line.items()}
    return {key: value for key, value in newest.items() if key != "step" and not key.startswith(("train/", *MEASURED))}


def result(run: Run, metric: str) -> float:
    """Return the last value of a metric of a finished run, NaN if there is none."""
    return results(run).get(metric, math.nan) if run.state == "done" else math.nan


def row_of(run: Run) -> dict[str, str]:
    """Return a run's row of `sweep.csv`; only a finished run has results."""
    row = {"run": run.name, "state": run.state, **{key: str(value) for key, value in run.changes.items()}}
    if run.state == "done":
        row["seconds"] = f"{run.facts()['seconds']:.1f}"
        row |= {key: f"{value:.5g}" for key, value in results(run).items()}
    return row


def write_table(rows: Sequence[Mapping[str, str]], path: Path) -> None:
    """Write the rows as CSV, and print them."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    content = io.StringIO(newline="")
    lines = [columns, *([row.get(key, "") for key in columns] for row in rows)]
    csv.writer(content).writerows([_safe(text) for text in line] for line in lines)
    write_atomic(path, content.getvalue())
    cells = [[printable(text) for text in line[1:]] for line in lines]
    widths = [max(map(len, column)) for column in zip(*cells)]
    print()
    for line in cells:
        print("  ".join(map(str.ljust, line, widths)).rstrip())
    show(f"\n{path}")


def _safe(text: str) -> str:
    """Return a text that spreadsheets do not interpret as a formula; numbers can be negative."""
    try:
        float(text)
        return text
    except ValueError:
        return html.cell(text)


def plot(done: Sequence[Run], folder: Path) -> None:
    """Write `sweep.png`: up to four metrics of the test split, or else of the validation split.

    They are plotted against the first key that differs, with a line for each combination of the other keys; runs that
    differ only in their seed are dots around the mean. Nothing is written if no key differs, or if there are more lines
    than colors; the figure of an earlier sweep is deleted.
    """
    (folder / "sweep.png").unlink(missing_ok=True)
    measured = dict.fromkeys(key for run in done for key in results(run))
    splits = ([key for key in measured if key.startswith(split)] for split in ("test/", "validation/"))
    metrics = next(filter(None, splits), [])
    keys = [key for key in differing(done) if key != "seed"]
    keys = distinguishing([{key: run.settings.get(key) for key in keys} for run in done])
    names, panels = labels(keys), {}
    for metric in metrics[:4] if keys else ():
        values = defaultdict(lambda: defaultdict(list))  # by line and x value
        for run in done:
            place, *others = (str(run.settings.get(key)) for key in keys)
            line = ", ".join(map("{}={}".format, names[1:], others)) or metric
            values[line][place].append(results(run).get(metric, np.nan))
        panels[metric] = {
            line: (list(places), np.array(list(zip_longest(*places.values(), fillvalue=np.nan))).T)
            for line, places in values.items()
        }
    if panels and all(len(lines) <= len(figures.SERIES) for lines in panels.values()):
        figures.save(figures.lines, panels, names[0], name="sweep", folder=folder)
