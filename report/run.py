"""HTML report of a run, `report.html`: self-contained, written only from the files in the run folder."""

import json
import math
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup

from lineage.report import artifacts, curves, figures, html
from lineage.runs.folder import ARTIFACTS, CONFIG, FACTS, MEASURED, METRICS, flatten, read_json
from lineage.runs.live import runs_in
from lineage.runs.metrics import GrowingMetrics
from lineage.runs.progress import clock

Curves = Mapping[str, figures.Curve]  # by metric
MAX_CHARTS, MAX_CURVES = 100, 1000
COSTS = {
    "parameters": "Parameters",
    "flops.forward": "FLOPs of the forward pass of a batch",
    "flops.training": "FLOPs of a training step",
    "flops.parts": "FLOPs of matrix products of the forward pass",
    "memory.training": "Memory in training, on one device",
    "memory.inference": "Memory in inference, on one device",
    "textbook": "Closed-form estimate (arXiv 2001.08361)",
}
# Labels of numbers; the others are shown by their keys, such as the path of a module.
LABELS = {
    "flops": "FLOPs",
    "model": "matrix products",
    "matmul": "matrix products, with recomputation",
    "other": "element-wise operations",
}
# Base and prefixes of the units of a quantity.
UNITS = {
    "flops": (1000, ("", "k", "M", "G", "T", "P", "E"), "FLOP"),
    "memory": (1024, ("", "Ki", "Mi", "Gi", "Ti"), "B"),
}


def write_report(workdir: str | os.PathLike) -> Path:
    """Write `workdir/report.html`, and its figures as `workdir/report/*.png`; return its path.

    Sections whose files are absent are left out.
    """
    workdir = Path(workdir)
    if not ((workdir / METRICS).exists() or runs_in(workdir) == [workdir]):
        files = f"neither {METRICS} nor the {CONFIG} of a run"
        raise FileNotFoundError(f"{workdir} is not the workdir of a run: it has {files}.")
    html.check_files(workdir)
    history = GrowingMetrics(workdir / METRICS)
    metrics = history.read() if history.path.exists() else []
    files = workdir / ARTIFACTS
    config, run, cost = map(read_json, (workdir / CONFIG, files / FACTS, files / "cost.json"))
    folder = html.figures_folder(workdir / "report")
    for old in folder.glob("*.png"):
        old.unlink(missing_ok=True)  # another report may be deleting it
    name = str(run.get("config_name") or workdir.resolve().name)
    with html.explained(workdir / CONFIG):
        settings = flatten(config)
    with html.explained(workdir / METRICS):
        series = curves.by_metric(metrics)
        charts = _charts(curves.drawable(series), settings, folder, history.left_out)
    with html.explained(files / "cost.json"):
        parameters, costs = flatten(cost).get("parameters.total"), html.section("Cost", _cost(cost), "cards")
    with html.explained(files / FACTS):
        header = _header(name, run, parameters, settings, series)
    parts = artifacts.sections(files, folder)
    configuration = html.section("Configuration", _config(settings))
    return html.write(workdir / "report.html", name, [header, charts, *parts, costs, configuration])


def _header(name: str, run: Mapping[str, Any], parameters: Any, settings: Mapping[str, Any], series: Curves) -> Markup:
    """Return the name, facts and command of the run, and tiles with its results."""
    facts = {key: value for key, value in run.items() if key not in ("config_name", "config", "packages")}
    command = html.command(facts.pop("command")) if "command" in facts else Markup()
    seconds, steps = facts.pop("seconds", None), facts.pop("steps", math.inf)
    device, count = facts.pop("device", None), facts.pop("device_count", 1)
    shown = [f"{count} {device}" if count != 1 else device] if device else []
    if git := facts.pop("git", None):
        shown.append(f"commit {git['commit'][:10]}{' with changes' if git['dirty'] else ''}")
    shown += [f"{key} {value}" for key, value in flatten(facts).items()]
    evaluated = [key for key in series if not key.startswith(("train/", *MEASURED))]
    tiles = [
        _result(key, *series[key], curves.is_higher_better(key, settings))
        for key in evaluated or ("train/loss", "train/accuracy")
        if key in series
    ]
    last = max((places[-1] for places, _ in series.values()), default=0)
    times = np.array([seconds, *series.get("time/seconds", ((), ()))[1]], float)  # newer ones, if the run has continued
    if series and (times := times[np.isfinite(times)]).size:
        tiles.append(html.tile("training time", clock(times.max()), html.steps(last)))
    _, speed = series.get("time/examples_per_second", ((), ()))
    if np.isfinite(speed).any():
        tiles.append(html.tile("examples per second", html.number(np.nanmedian(speed)), "median"))
    if isinstance(parameters, int | float):
        tiles.append(html.tile("parameters", f"{parameters:,}", ""))
    bad = [step for step, loss in zip(*series.get("train/loss", ((), ()))) if not abs(loss) < curves.LARGEST]
    if bad:
        command += html.alert(f"The training loss was not finite at step {bad[0]:,}.")
    if last > steps:
        made = "at which confusion matrices, errors, detected objects and attention were computed"
        command += html.alert(f"The run has continued since step {steps:,}, {made}.")
    return html.header(name, shown, command, tiles)


def _result(key: str, steps: np.ndarray, values: np.ndarray, is_higher_better: bool | None) -> Markup:
    """Return a tile for an evaluation metric, or for a training metric if there was no evaluation.

    The best step is named too, unless it is unknown whether higher or lower values are better, and except on a test
    split: the result on it is the last one.
    """
    finite = np.flatnonzero(np.isfinite(values))
    if not finite.size:
        return Markup()
    show = "{:.2%}".format if curves.is_fraction(key) else html.number
    ranked = values if is_higher_better else -values
    best = max(finite, key=lambda number: (ranked[number], number))  # the last one in ties, as `checkpoint.best`
    note = f"best {show(values[best])} at step {steps[best]:,}"
    if curves.is_test(key) or is_higher_better is None:
        note = f"at step {steps[-1]:,}"
    elif values[best] == values[-1]:
        note = f"at step {steps[-1]:,}, the best"
    return html.tile(html.words(key), show(values[-1]), note)


def _charts(series: Curves, settings: Mapping[str, Any], folder: Path, left_out: int) -> Markup:
    """Return the sections of the metrics and of the system: a chart for each quantity with a curve for each split.

    `left_out` is the number of lines of metrics that are not among the curves.
    """
    groups: dict[str, dict[str, figures.Curve]] = {name: {} for name in curves.TITLES}
    finite = [key for key, (_, values) in series.items() if np.isfinite(values).any()]
    names = [key for key in finite if key in curves.TITLES or not key.startswith(MEASURED)]
    splits = dict.fromkeys(key.partition("/")[0] for key in names if not key.startswith(MEASURED))
    same = Counter(map(html.words, splits))
    labels = {split: html.words(split) if same[html.words(split)] == 1 else split for split in splits}
    for key in names[:MAX_CURVES]:
        split, _, name = key.partition("/")
        split, name = ("value", key) if key.startswith(MEASURED) else (labels[split], name)
        groups.setdefault(name, {})[split] = series[key]
    groups = dict([item for item in groups.items() if item[1]][:MAX_CHARTS])
    charts: dict[bool, list[Markup]] = {False: [], True: []}  # by whether they show system metrics
    for name, drawn in groups.items():
        others = [split for split in drawn if split != "train"]
        about = curves.remark(settings, name, others) if "train" in drawn and (others or name == "loss") else ""
        chart = curves.card(name, drawn, list(labels.values()), folder, about=about)
        charts[name.startswith(MEASURED)].append(chart)
    if (count := sum(map(len, groups.values()))) < len(names):
        charts[False].append(html.note(f"{count:,} of {len(names):,} metrics are shown."))
    if left_out:
        text = f"{left_out:,} lines of {METRICS} with training metrics, evenly spaced, are not shown: "
        charts[False].append(html.note(f"{text}the curves can miss short spikes of finite values."))
    shown = html.section("Curves", html.join(charts[False]), "cards")
    return shown + html.section("System", html.join(charts[True]), "cards")


def _cost(cost: Mapping[str, Any]) -> Markup:
    """Return a card for each group of numbers (parameters, FLOPs, memory, ...), with bars where there is a total."""
    cards = []
    for group, rows in _groups(cost):
        if rows.get("matmul") == rows.get("model"):  # nothing is recomputed
            rows.pop("matmul", None)
        parts = {key: v for key, v in rows.items() if isinstance(v, int | float) and not re.search(r"\btotal$", key)}
        largest = max(parts.values(), default=0) or 1
        lines = []
        for key, value in rows.items():
            has_bar = key in parts and (len(parts) < len(rows) or group.startswith("flops"))
            bar = Markup("<i style='width:{:.1f}%'></i>").format(100 * parts[key] / largest) if has_bar else ""
            label = Markup("{}{}").format(LABELS.get(key, key), bar)
            kind, amount = "" if key in parts else "total", _amount(key if group == "textbook" else group, value)
            lines.append(html.table_row(name=label, numbers=[amount], kind=kind))
        name = COSTS.get(group, html.title(html.words(group)) or "Other")
        if lines:
            cards.append(Markup("<div class=card>{}</div>").format(html.table(name, lines, "cost")))
    return html.join(cards)


def _groups(tree: Mapping[str, Any], name: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the dotted name and the leaves of each nested dictionary."""
    yield name, {key: value for key, value in tree.items() if not isinstance(value, Mapping)}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _groups(value, f"{name}.{key}" if name else key)


def _config(settings: Mapping[str, Any]) -> Markup:
    code = Markup("<code>{}</code>")
    rows = [html.table_row(code.format(json.dumps(value)), name=key) for key, value in settings.items()]
    return html.details(f"All {len(rows)} keys", html.wide_table("Config", rows)) if rows else Markup()


def _amount(group: str, value: Any) -> str:
    """Return a cost with the unit of its group: memory in powers of 1,024 bytes, FLOPs in powers of 1,000."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return str(value)
    if quantity := next(filter(group.startswith, UNITS), None):
        base, prefixes, unit = UNITS[quantity]
        power = min(int(math.log(max(value, 1), base) + 1e-9), len(prefixes) - 1)
        return f"{value / base**power:.4g} {prefixes[power]}{unit}"
    return f"{value:,}" if isinstance(value, int) else html.number(value)
