"""Comparison of runs: `compare.html`, or for a sweep `sweep.html`, `sweep.csv` and `sweep.png`."""

import csv
import math
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup
from matplotlib import colormaps
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from lineage.configs.directions import higher_is_better
from lineage.report import figures, html
from lineage.runs.folder import CONFIG, MEASURED, clock, displayed, flatten, read_json
from lineage.runs.live import LOG, Run, labels, runs_in

Target = tuple[str, bool]  # a metric, and whether higher is better
MAX_CHARTS, MAX_AXES = 8, 12


def finish(runs: Sequence[Run], command: Sequence[str], folder: Path, target: Target | None = None) -> None:
    """Write `folder/sweep.csv`, `sweep.html` and `sweep.png`; print the table and the reasons why runs failed.

    `command` is the part of the command line that all runs share; the target is by default `target_of(runs)`.
    """
    rows = [row_of(run) for run in runs]
    write_table(rows, folder / "sweep.csv")
    plot([run for run in runs if run.state == "done"], folder)
    commands = {run: displayed(run.command(command)) for run in runs}
    print(write_page(folder / "sweep.html", runs, commands, target or target_of(runs)))
    reasons = defaultdict(list)
    for run in runs:
        if run.state.startswith("failed"):
            reasons[run.error()].append(run)
    for reason, failed in reasons.items():
        others = f" and {len(failed) - 1} more" if len(failed) > 1 else ""
        print(f"\n{failed[0].name}{others}: {reason or 'no message'} ({failed[0].folder / LOG})")


def target_of(runs: Sequence[Run]) -> Target:
    """Return the metric that ranks the runs, and whether higher is better.

    It is the config's `checkpoint.best`, else the first metric of the validation split, else of the test split.
    """
    checkpoint = runs[0].config.get("checkpoint", {})
    if best := checkpoint.get("best"):
        stated = checkpoint["best_is_highest"]
        return best, higher_is_better(best) is not False if stated is None else stated
    found = sorted((key for run in runs for key in results(run)), key=lambda key: not key.startswith("validation/"))
    return (found[0], higher_is_better(found[0]) is not False) if found else ("", False)


def ranked(runs: Sequence[Run], target: Target) -> list[Run]:
    """Return the runs, the best first; those without a result come last, in their order."""
    metric, highest = target

    def place(run: Run) -> tuple[bool, float]:
        value = results(run).get(metric, math.nan) if run.state == "done" else math.nan
        return math.isnan(value), 0.0 if math.isnan(value) else -value if highest else value

    return sorted(runs, key=place)


def compare(folders: Sequence[Path]) -> Path:
    """Write `compare.html` for the runs in some folders, each of a run or of several; return its path.

    It is written to the closest folder that contains all runs, or to the current one if that is the root.
    """
    if empty := [folder for folder in folders if not runs_in(folder)]:
        raise FileNotFoundError(f"there is no run in {empty[0]}.")
    paths = dict.fromkeys(path.absolute() for folder in folders for path in runs_in(folder))
    common = Path(os.path.commonpath(path.parent for path in paths))
    if common == Path(common.anchor):  # the file system's root
        common = Path.cwd()
    runs = []
    for path in paths:
        run = Run(os.path.relpath(path, common), path, config=read_json(path / CONFIG))
        run.state = "done" if run.is_done() else "stopped"
        run.look()
        runs.append(run)
    settings = [dict(flatten(run.config)) for run in runs]
    for key in dict.fromkeys(key for own in settings for key in own):
        if len({repr(own.get(key)) for own in settings}) > 1:
            for run, own in zip(runs, settings):
                run.changes = {**run.changes, key: own.get(key)}
    commands = {run: run.facts().get("command", "") for run in runs}
    return write_page(common / "compare.html", runs, commands, target_of(runs))


def write_page(page: Path, runs: Sequence[Run], commands: Mapping[Run, str], target: Target) -> Path:
    """Write a page with the runs, the best first, their curves and their overrides against the results.

    Figures are saved in a folder of the same name without the suffix.
    """
    runs, metric, folder = ranked(runs, target), target[0], page.with_suffix("")
    ids = [f"run{number}" for number in range(len(runs))]
    colors = [to_hex(colormaps["viridis"](share)) for share in np.linspace(0.2, 0.8, max(len(runs) - 1, 1))]
    colors = [figures.SERIES["s1"], *colors]  # the best run has its own color
    folder.mkdir(exist_ok=True)

    def drawn(draw: Callable[..., Figure], *args, name: str) -> Markup:
        svg = html.card(draw, *args, name=name, folder=folder)
        for place, run in enumerate(runs):
            named = Markup('<g class="run run{}"><title>{}</title>').format(place, run.name)
            svg = svg.replace(f'<g id="run{place}">', named)
        return svg

    charts = []
    quantities = ["train/loss", *dict.fromkeys([metric, *(key for run in runs for key in results(run))])]
    for key in quantities[:MAX_CHARTS]:
        order = reversed([*zip(ids, runs)])  # the best is drawn last
        curves = {name: html.series(run.metrics, key) for name, run in order}
        curves = {name: curve for name, curve in curves.items() if np.isfinite(curve[1]).any()}
        if curves:
            options = {"percent": "accuracy" in key, "smoothed": True, "colors": colors, "legend": False}
            chart = partial(figures.chart, **options)
            charts.append(drawn(chart, html.words(key), curves, ids, name=f"curve_{key}"))
    keys = differing(runs)
    done = [run for run in runs if run.state == "done" and math.isfinite(results(run).get(metric, math.nan))]
    overview = Markup()
    if keys and done:
        shown = keys[:MAX_AXES]
        columns = {label: [setting(run, key) for run in done] for key, label in zip(shown, labels(shown))}
        columns[metric] = [results(run)[metric] for run in done]
        overview = drawn(figures.parallel, columns, ids, colors, name="parallel")
    title, few = page.resolve().parent.name, len(keys) <= MAX_AXES
    lines = html.join(html.command(commands[run]) for run in runs)
    parts = [
        _header(title, runs, metric),
        html.section("Curves", html.join(charts), "cards"),
        html.section("Overrides and results", overview),
        html.section("Runs, best first", _table(runs, colors, keys if few else []), "card scroll"),
        html.section("Differences between the configs", Markup() if few else _settings(runs, keys), "card scroll"),
        html.section("Commands", html.details(f"All {len(runs)} runs, best first", lines)),
    ]
    return html.write(page, title, parts, styles=("comparison.css",), script="comparison.js")


def differing(runs: Sequence[Run]) -> list[str]:
    """Return the overridden keys whose values differ between the runs."""
    keys = dict.fromkeys(key for run in runs for key in run.changes)
    return [key for key in keys if len({str(setting(run, key)) for run in runs}) > 1]


def setting(run: Run, key: str) -> Any:
    """Return the value of a dotted key in a run's config, None if there is none."""
    return run.changes.get(key, dict(flatten(run.config)).get(key))


def _header(title: str, runs: Sequence[Run], metric: str) -> Markup:
    facts = [f"{count} {state}" for state, count in Counter(run.state for run in runs).items()]
    best = runs[0]
    shown = results(best) if best.state == "done" else {}
    tiles = [html.tile(html.words(key), html.number(value), "of the best run") for key, value in shown.items()]
    about = html.note(f"The best run by {metric} is {best.name}.") if tiles else Markup()
    return html.header(title, facts, about, tiles)


def _table(runs: Sequence[Run], colors: Sequence[str], keys: Sequence[str]) -> Markup:
    metrics = list(dict.fromkeys(key for run in runs for key in results(run)))
    rows = [html.table_row("run", "state", *keys, numbers=[*metrics, "steps", "time"], tag="th")]
    for place, run in enumerate(runs):
        found, seconds = results(run), run.facts().get("seconds")
        numbers = [html.number(found[key]) if key in found else "" for key in metrics]
        numbers += [f"{run.step or 0:,}", clock(seconds) if seconds is not None else ""]
        name = Markup("<i style='background:{}'></i>{}").format(colors[place], run.name)
        cells = [name, run.state, *(setting(run, key) for key in keys)]
        rows.append(html.table_row(*cells, numbers=numbers, kind=f"run run{place}"))
    return html.table(rows, "runs")


def _settings(runs: Sequence[Run], keys: Sequence[str]) -> Markup:
    head = html.table_row("", *(run.name for run in runs), tag="th")
    return html.table([head, *(html.table_row(key, *(setting(run, key) for run in runs)) for key in keys)])


def results(run: Run) -> dict[str, float]:
    """Return the last value of each metric of a run's evaluations."""
    found = {key: value for line in run.metrics for key, value in line.items()}
    return {key: value for key, value in found.items() if not key.startswith(("train/", "step", *MEASURED))}


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
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(rows)
    shown = columns[1:]
    widths = [max(len(column), *(len(row.get(column, "")) for row in rows)) for column in shown]
    print()
    for row in [{column: column for column in shown}, *rows]:
        print("  ".join(row.get(column, "").ljust(width) for column, width in zip(shown, widths)).rstrip())
    print(f"\n{path}")


def plot(done: Sequence[Run], folder: Path) -> None:
    """Write `sweep.png`: up to four metrics of the test split, or else of the validation split.

    They are plotted against the first key that differs, with a line for each value of the second; runs that differ in
    their seed are dots around the mean. Nothing is written if no key differs, or if there are more lines than colors.
    """
    found = dict.fromkeys(key for run in done for key in results(run))
    splits = ([key for key in found if key.startswith(split)] for split in ("test/", "validation/"))
    metrics = next(filter(None, splits), [])
    keys = [key for key in differing(done) if key != "seed"]
    panels = {}
    for metric in metrics[:4] if keys else ():
        values = defaultdict(lambda: defaultdict(list))  # by line and x value
        for run in done:
            place, *others = (str(setting(run, key)) for key in keys[:2])
            values[others[0] if others else metric][place].append(results(run).get(metric, np.nan))
        panels[metric] = {
            line: (list(places), np.array(list(zip_longest(*places.values(), fillvalue=np.nan))).T)
            for line, places in values.items()
        }
    if panels and all(len(lines) <= len(figures.SERIES) for lines in panels.values()):
        figures.save(figures.lines, panels, labels(keys)[0], name="sweep", folder=folder)
