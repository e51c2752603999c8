"""The HTML report of a run, `report.html`: self-contained, made only from the files in the run folder."""

import json
import math
import os
import re
import zipfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup

from lineage.configs.directions import higher_is_better
from lineage.report import artifacts, figures, html
from lineage.runs.folder import ARTIFACTS, CONFIG, FACTS, MEASURED, METRICS, clock, flatten, read_json
from lineage.runs.metrics import GrowingMetrics

# charts shown first, with their titles
CURVES = {
    "loss": "Loss",
    "accuracy": "Accuracy",
    "perplexity": "Perplexity",
    "learning_rate": "Learning rate",
    "gradient_norm": "Gradient norm",
}
# charts of the metrics of time and resources, with their titles
SYSTEM = {
    "time/examples_per_second": "Examples per second",
    "time/mfu": "Model FLOP/s utilization",
    "time/waiting": "Time waiting for data",
    "time/evaluating": "Time in evaluations",
    "time/saving": "Time in saves",
    "time/goodput": "Goodput since the start",
    "system/memory_gib": "Resident memory in GiB",
    "system/device_memory_gib": "Maximum device memory in GiB",
    "system/open_files": "Open files",
}
GROUPS = {"flops": "FLOPs"}


def write_report(workdir: str | os.PathLike) -> Path:
    """Write `workdir/report.html`, and its figures as `workdir/report/*.png`; return its path.

    Sections whose files are absent are left out.
    """
    workdir = Path(workdir)
    if not any((workdir / name).exists() for name in (METRICS, CONFIG)):
        raise FileNotFoundError(f"{workdir} is not the workdir of a run: it has neither {METRICS} nor {CONFIG}.")
    metrics = GrowingMetrics(workdir / METRICS).read() if (workdir / METRICS).exists() else []
    files = workdir / ARTIFACTS
    config, run, cost = map(read_json, (workdir / CONFIG, files / FACTS, files / "cost.json"))
    folder = workdir / "report"
    folder.mkdir(exist_ok=True)
    for old in folder.glob("*.png"):
        old.unlink()
    name = str(run.get("config_name") or workdir.resolve().name)
    with html.explained(workdir / METRICS):
        curves = html.section("Curves", _curves(metrics, folder), "cards")
        curves += html.section("System", _system(metrics, folder), "cards")
    with html.explained(files / "cost.json"):
        costs = html.section("Cost", _cost(cost), "cards")
    with html.explained(files / FACTS):
        header = _header(name, run, cost, metrics)
    arrays = {path.stem: _read_npz(path) for path in sorted(files.glob("*.npz"))}
    parts = artifacts.sections(files, arrays, folder)
    configuration = html.section("Configuration", _config(config))
    return html.write(workdir / "report.html", name, [header, curves, *parts, costs, configuration])


def _header(name: str, run: Mapping[str, Any], cost: Mapping[str, Any], metrics: html.Metrics) -> Markup:
    """Return the name, facts and command of the run, and tiles with its results."""
    facts = {key: value for key, value in run.items() if key not in ("config_name", "config", "packages")}
    command = html.command(facts.pop("command")) if "command" in facts else Markup()
    seconds, device, count = facts.pop("seconds", None), facts.pop("device", None), facts.pop("device_count", 1)
    shown = [f"{count} {device}" if count != 1 else device] if device else []
    if git := facts.pop("git", None):
        shown.append(f"commit {git['commit'][:10]}{' with changes' if git['dirty'] else ''}")
    shown += [f"{key} {value}" for key, value in flatten(facts)]
    evaluated = [key for key in html.keys(metrics) if not key.startswith(("train/", *MEASURED))]
    tiles = [_result(key, *html.series(metrics, key)) for key in evaluated or ("train/loss", "train/accuracy")]
    if metrics and seconds is not None:
        tiles.append(html.tile("training time", clock(seconds), f"{metrics[-1]['step']:,} steps"))
    _, speed = html.series(metrics, "time/examples_per_second")
    if np.isfinite(speed).any():
        tiles.append(html.tile("examples per second", html.number(np.nanmedian(speed)), "median"))
    if isinstance(parameters := dict(flatten(cost)).get("parameters.total"), int | float):
        tiles.append(html.tile("parameters", f"{parameters:,}", ""))
    steps, loss = html.series(metrics, "train/loss")
    bad = steps[~np.isfinite(loss)]
    if bad.size:
        command += Markup("<p class=alert>The training loss was not finite at step {:,}.</p>").format(bad[0])
    return html.header(name, shown, command, tiles)


def _result(key: str, steps: np.ndarray, values: np.ndarray) -> Markup:
    """Return a tile for the metric of an evaluation, or of the training if there was none."""
    finite = np.flatnonzero(np.isfinite(values))
    if not finite.size:
        return Markup()
    show = "{:.2%}".format if "accuracy" in key else html.number
    best = finite[np.argmin(values[finite]) if higher_is_better(key) is False else np.argmax(values[finite])]
    note = f"best {show(values[best])} at step {steps[best]:,}"
    if best == len(values) - 1:
        note = f"at step {steps[-1]:,}, the best"
    return html.tile(html.words(key), show(values[-1]), note)


def _curves(metrics: html.Metrics, folder: Path) -> Markup:
    """Return a chart for each quantity, with a curve for each split."""
    groups: dict[str, dict[str, figures.Curve]] = {name: {} for name in CURVES}
    keys = [key for key in html.keys(metrics) if not key.startswith(MEASURED)]
    splits = [html.words(split) for split in dict.fromkeys(key.split("/")[0] for key in keys)]
    for key in keys:
        split, _, name = key.partition("/")
        curve = html.series(metrics, key)
        if np.isfinite(curve[1]).any():
            groups.setdefault(name, {})[html.words(split)] = curve
    charts = []
    for name, curves in groups.items():
        if curves:
            title = CURVES.get(name, html.words(name).capitalize())
            draw = partial(figures.chart, percent="accuracy" in name, smoothed=name != "learning_rate")
            charts.append(html.card(draw, title, curves, splits, name=f"curve_{name}", folder=folder, kind="card"))
    return html.join(charts)


def _system(metrics: html.Metrics, folder: Path) -> Markup:
    """Return a chart for each metric of time and resources."""
    charts = []
    for key, title in SYSTEM.items():
        curve = html.series(metrics, key)
        if np.isfinite(curve[1]).any():
            percent, name = key.startswith("time/") and "second" not in key, f"curve_{key}"
            draw = partial(figures.chart, percent=percent, smoothed=key.startswith("time/"))
            charts.append(html.card(draw, title, {key: curve}, [key], name=name, folder=folder, kind="card"))
    return html.join(charts)


def _cost(cost: Mapping[str, Any]) -> Markup:
    """Return a card for each group of numbers (parameters, FLOPs, memory, ...), with bars where there is a total."""
    groups = {key: flatten(value) for key, value in cost.items() if isinstance(value, Mapping)}
    groups["other"] = [(key, value) for key, value in cost.items() if not isinstance(value, Mapping)]
    cards = []
    for group, rows in groups.items():
        parts = {key: v for key, v in rows if isinstance(v, int | float) and not re.search(r"\btotal$", key)}
        largest = max(parts.values(), default=0) or 1
        lines = []
        for key, value in rows:
            has_bar = key in parts and len(parts) < len(rows)
            bar = Markup("<i style='width:{:.1f}%'></i>").format(100 * parts[key] / largest) if has_bar else ""
            line = Markup("<tr class='{}'><td>{}{}<td class=n>{}")
            kind, amount = "" if key in parts else "total", _amount(f"{group} {key}", value)
            lines.append(line.format(kind, html.words(key), bar, amount))
        if lines:
            title = GROUPS.get(group, html.words(group).capitalize())
            card = Markup("<div class=card><h3>{}</h3>{}</div>")
            cards.append(card.format(title, html.table(lines, "cost")))
    return html.join(cards)


def _config(config: Mapping[str, Any]) -> Markup:
    line = Markup("<tr><td>{}<td><code>{}</code>")
    rows = [line.format(key, json.dumps(value)) for key, value in flatten(config)]
    table = Markup("<div class=scroll>{}</div>").format(html.table(rows))
    return html.details(f"All {len(rows)} keys", table) if rows else Markup()


def _amount(name: str, value: Any) -> str:
    """Return a cost with the unit that its name implies: bytes in powers of 1,024, FLOPs in powers of 1,000, times."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return str(value)
    if re.search("second|time", name):
        return f"{value:.3g} s" if value < 60 else clock(value)
    flops = re.search("flop", name, re.IGNORECASE)
    if flops or re.search("memory|bytes|cache", name):
        base, prefixes, unit = (1000, ",k,M,G,T,P,E", "FLOP") if flops else (1024, ",Ki,Mi,Gi,Ti", "B")
        prefixes = prefixes.split(",")
        power = min(int(math.log(max(value, 1), base) + 1e-9), len(prefixes) - 1)
        return f"{value / base**power:.4g} {prefixes[power]}{unit}"
    return f"{value:,}" if isinstance(value, int) else html.number(value)


def _read_npz(path: Path) -> dict[str, np.ndarray]:
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            return dict(arrays)
    except (ValueError, OSError, EOFError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path} cannot be read ({error}): delete it to generate the report without it.") from None
