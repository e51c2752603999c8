"""Charts of metrics over the steps, with remarks on why training values differ from evaluation values."""

import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup

from lineage.configs.directions import higher_is_better
from lineage.report import figures, html

Metrics = Sequence[Mapping[str, Any]]
LARGEST = 1e100
# Titles of charts, in order. Metrics that start with "time/" are fractions of the time, except for speeds.
TITLES = {
    "loss": "Loss",
    "accuracy": "Accuracy",
    "perplexity": "Perplexity",
    "learning_rate": "Learning rate",
    "gradient_norm": "Gradient norm",
    "time/examples_per_second": "Examples per second",
    "time/mfu": "Model FLOP/s utilization",
    "time/waiting": "Time waiting for data",
    "time/evaluating": "Time in evaluations",
    "time/saving": "Time in saves",
    "time/goodput": "Goodput of all starts",
    "time/seconds": "Seconds of all starts",
    "system/memory_gib": "Resident memory in GiB",
    "system/device_memory_gib": "Maximum device memory in GiB",
    "system/open_files": "Open files",
}
# Descriptions of the config keys that change the loss in training only, by the last part of the key.
ONLY_IN_TRAINING = {
    "label_smoothing": "label smoothing",
    "mixup": "mixup",
    "cutmix": "CutMix",
    "augment": "augmentation",
    "dropout": "dropout",
    "attention_dropout": "attention dropout",
    "activation_dropout": "activation dropout",
    "head_dropout": "dropout of the head",
    "stochastic_depth": "stochastic depth",
    "scheduled_sampling": "scheduled sampling",
}


def only_in_training(settings: Mapping[str, Any], metric: str = "loss") -> str:
    """Return the settings of a flat config that change a metric in training only, such as "label smoothing 0.1"."""
    values = {key.rpartition(".")[2]: value for key, value in settings.items() if key.startswith(("model.", "task."))}
    if "accuracy" in metric:
        values.pop("label_smoothing", None)
    return ", ".join(f"{name} {values[key]}" for key, name in ONLY_IN_TRAINING.items() if values.get(key))


def remark(settings: Mapping[str, Any], metric: str, splits: Sequence[str]) -> str:
    """Explain why a training metric differs from the metric of the `splits`; return "" if nothing explains it."""
    enabled, others = only_in_training(settings, metric), " and ".join(splits)
    averaged = "with averaged weights (EMA)" if others and settings.get("ema_decay") else ""
    if not enabled:
        return averaged and f"{html.title(others)}: {averaged}."
    if not others:
        return f"With {enabled}."
    ours = f"without, and {averaged}" if averaged else "without"
    return f"Train can look worse than {others}: it is measured with {enabled}, {others} {ours}."


def is_fraction(metric: str) -> bool:
    """Return whether a metric, with or without its split, is a fraction of 1 that is shown as a percentage."""
    name = metric.partition("/")[2] or metric
    return "accuracy" in name or "exact_match" in name or (metric.startswith("time/") and "second" not in name)


def is_test(metric: str) -> bool:
    """Return whether a metric is that of a test split, by which neither a step nor a run should be selected."""
    return re.match(r"test[/_]", metric) is not None


def is_higher_better(metric: str, settings: Mapping[str, Any]) -> bool | None:
    """Return whether higher values of a metric are better; None if neither a flat config nor its name says so.

    The config says so for its `checkpoint.best`.
    """
    stated = settings.get("checkpoint.best_is_highest") if metric == settings.get("checkpoint.best") else None
    return higher_is_better(metric) if stated is None else stated


def by_metric(metrics: Metrics) -> dict[str, figures.Curve]:
    """Return the steps and the values, [N] each, of each metric, in the order in which they first appear."""
    points: dict[str, list[tuple[Any, Any]]] = {}
    for line in metrics:
        for key, value in line.items():
            points.setdefault(key, []).append((line["step"], value))
    return {key: _curve(*zip(*pairs)) for key, pairs in points.items() if key != "step"}


def _curve(steps: Sequence[Any], values: Sequence[Any]) -> figures.Curve:
    """Return the steps and the values as arrays."""
    return np.array(steps, int), np.array(list(map(float, values)))


def drawable(series: Mapping[str, figures.Curve]) -> dict[str, figures.Curve]:
    """Return curves with NaN in place of values that are too large to draw."""
    return {key: (steps, np.where(np.abs(values) < LARGEST, values, np.nan)) for key, (steps, values) in series.items()}


def card(
    metric: str,
    curves: Mapping[str, figures.Curve],
    names: Sequence[str],
    folder: Path,
    *,
    labels: Mapping[str, str] | None = None,
    about: str = "",
    **options: Any,
) -> Markup:
    """Return a card with the curves of a metric by split or by run.

    Args:
        names: names of all curves of the page, which determine the colors; see `figures.chart`.
        labels: labels of the names; by default the names themselves.
        about: a remark below the chart.
        options: other arguments of `figures.chart`.
    """
    shown = TITLES.get(metric, html.title(html.words(metric)))
    smoothed = metric != "learning_rate" and not metric.startswith("system/")
    draw = partial(figures.chart, percent=is_fraction(metric), smoothed=smoothed, **options)
    curves = {name: curve for name, curve in curves.items() if np.isfinite(curve[1]).any()}
    drawn = {(labels or {}).get(name, name): figures.points(*curve) for name, curve in curves.items()}
    ends = [f"{label} from {values[0]:.4g} to {values[-1]:.4g}" for label, (_, values) in drawn.items()]
    more = f" and {len(ends) - 4} more" if len(ends) > 4 else ""
    values = [dict(zip(*map(np.ndarray.tolist, curve))) for curve in drawn.values()]
    rows = ([step, *(column.get(step, "") for column in values)] for step in sorted(set().union(*values)))
    return html.card(
        draw,
        shown,
        curves,
        names,
        name=f"curve_{metric}",
        folder=folder,
        alt=f"{shown} by step: {', '.join(ends[:4])}{more}.",
        data=[["step", *drawn], *rows],
        about=about,
        kind="card",
    )
