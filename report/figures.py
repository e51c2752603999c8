"""Figures of the reports, drawn by matplotlib from plain arrays, without pyplot's global state."""

import contextlib
import io
import math
import re
import textwrap
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.text import Text
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter, PercentFormatter
from scipy.ndimage import gaussian_filter1d

from lineage.configs.atomic import write_atomic

# Colors of the pages in light and in dark mode; the series are from the palette of Okabe and Ito, which is safe for
# color-blind readers. In a page each color of a figure becomes the CSS variable of that name; PNGs are light.
PALETTE = {
    "page": ("#f6f7f9", "#0f1216"),
    "card": ("#ffffff", "#171b21"),
    "tint": ("#e8f1f8", "#17303f"),
    "ink": ("#1f2329", "#e3e7ec"),
    "soft": ("#656d76", "#99a3ae"),
    "rule": ("#dde1e6", "#2b323b"),
    "bad": ("#cc3311", "#ff7b5c"),
    "s0": ("#0072b2", "#56b4e9"),
    "s1": ("#d55e00", "#f09a4a"),
    "s2": ("#009e73", "#35c49a"),
    "s3": ("#cc79a7", "#e39cc2"),
}
COLORS = {name: light for name, (light, _) in PALETTE.items()}
SERIES = {name: color for name, color in COLORS.items() if re.fullmatch(r"s\d", name)}
STYLE = {
    "font.size": 9,
    "svg.fonttype": "none",
    "text.color": COLORS["ink"],
    "text.parse_math": False,
    "axes.edgecolor": COLORS["rule"],
    "axes.labelcolor": COLORS["soft"],
    "axes.titlesize": 9,
    "grid.color": COLORS["rule"],
    "grid.linewidth": 0.7,
    "xtick.color": COLORS["soft"],
    "ytick.color": COLORS["soft"],
} | {f"{axis}.{kind}.size": 0 for axis in ("xtick", "ytick") for kind in ("major", "minor")}
LONGEST_TEXT = 200  # characters of a text in a figure
LIGHT_FROM = 0.19  # share whose color has the same contrast with black and with white
# A square-root scale, which makes a share of 1% visible next to one of 100%.
SHARE = {"norm": PowerNorm(0.5, 0, 1), "cmap": "viridis", "interpolation": "nearest"}
Curve = tuple[np.ndarray, np.ndarray]
Line = tuple[Sequence[Any], Any]  # x values, and one or more values for each
Extent = tuple[float, float, float, float]
Drawing = Callable[..., None]


def save(draw: Callable[..., Figure], *args, name: str, folder: Path) -> str:
    """Save the figure `draw(*args)` as `folder/name.png` and return it as SVG.

    The SVG has CSS variables for the colors of the palette, and its text is not converted to paths.
    """
    with matplotlib.rc_context(STYLE | {"svg.hashsalt": name}), warnings.catch_warnings():  # reproducible, unique ids
        # Browsers have more fonts than matplotlib, and very long labels leave no room for a layout.
        warnings.filterwarnings("ignore", "Glyph .* missing|constrained_layout not applied")
        figure = draw(*args)
        for text in figure.findobj(Text):
            shown = text.get_text().encode(errors="replace").decode()  # JSON can contain lone surrogates
            if len(shown) > LONGEST_TEXT or shown != text.get_text():
                text.set_text(f"{shown[:LONGEST_TEXT]}…" if len(shown) > LONGEST_TEXT else shown)
        picture, buffer = io.BytesIO(), io.StringIO()
        figure.savefig(picture, dpi=150, facecolor="white")
        write_atomic(folder / f"{name}.png", picture.getvalue())
        figure.set_layout_engine("none")
        figure.savefig(buffer, format="svg", dpi=130, transparent=True, metadata={"Date": None, "Creator": None})
    svg = buffer.getvalue()
    svg = re.sub(r"<(metadata|style).*?</\1>", "", svg[svg.index("<svg") :], count=2, flags=re.DOTALL)
    svg = svg.replace("<g id=", "<g data-part=")  # these ids are the same in each figure
    width = f'style="--w:{72 * figure.get_figwidth():.0f}"'
    svg = re.sub(r'<svg [^>]*(viewBox="[^"]*")[^>]*>', rf"<svg {width} \1>", svg, count=1)
    for variable in ("ink", "soft", "rule", "bad", *SERIES):
        svg = svg.replace(COLORS[variable], f"var(--{variable})")
    return svg


def chart(
    title: str,
    curves: Mapping[str, Curve],
    splits: Sequence[str],
    *,
    percent: bool,
    smoothed: bool,
    colors: Sequence[str] = tuple(SERIES.values()),
    legend: bool = True,
) -> Figure:
    """Return a chart of one metric over the steps.

    Args:
        curves: steps and values by split (or by run). A dotted line marks the first of consecutive steps whose values
            are not finite.
        splits: all splits of the report; the index of a split here gives its color in `colors`, and its line style.
        percent: whether the values are fractions to be shown as percentages.
        smoothed: whether long curves are smoothed, and the axis is logarithmic for values of different magnitude.
    """
    figure, (axes,) = _plots()
    figure.suptitle(textwrap.fill(title, 44, break_long_words=False), x=0.02, ha="left", weight="bold", fontsize=10.5)
    shown = []
    for split, (steps, values) in curves.items():
        place = splits.index(split) if split in splits else 0
        color, style = colors[place % len(colors)], ("-", "--", ":", "-.")[place // len(colors) % 4]
        for step in steps[np.diff(np.isfinite(values) * 1, prepend=1) < 0][:50]:
            axes.axvline(step, color=COLORS["bad"], linewidth=1, linestyle=":", gid=split)
        shown.append(values[np.isfinite(values)])
        if len(values) > 30 and smoothed:
            axes.plot(*points(steps, values), color=color, linewidth=0.8, alpha=0.3, gid=split)
            values = smooth(values)
        steps, values = points(steps, values)
        finite = np.pad(np.isfinite(values), 1)  # no line leads to a value between values that are not finite
        dots = finite[1:-1] & ~finite[:-2] & ~finite[2:] | (len(values) <= 30)
        marker = {"marker": "o", "markersize": 3.2, "markevery": dots} if dots.any() else {}
        axes.plot(steps, values, style, color=color, linewidth=1.7, label=split, gid=split, **marker)
    low, high = (extreme(np.concatenate(shown)) for extreme in (np.min, np.max))
    if percent:
        axes.yaxis.set_major_formatter(PercentFormatter(1))
        if low == high and 0 <= low <= 1:
            axes.set_ylim(-0.05, 1.05)
    else:
        if smoothed and 0 < 30 * low < high:
            axes.set_yscale("log")
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.yaxis.set_major_formatter(FuncFormatter(partial(_tick, digits=_digits(low, high))))
    axes.set_xlabel("step", fontsize=8.5)
    count = max(2, min(5, 40 // len(f"{axes.dataLim.x1:,.0f}")))  # number of intervals whose labels do not overlap
    axes.xaxis.set_major_locator(MaxNLocator(count, integer=True, min_n_ticks=1, steps=[1, 2, 2.5, 5, 10]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f}"))
    if len(curves) > 1 and legend:
        box: dict[str, Any] = {"loc": "upper right", "bbox_to_anchor": (1, 1.02), "ncols": 4}
        if 1.5 * len(title) + sum(len(name) + 5 for name in curves) > 58:  # characters that fit beside each other
            columns = max(1, 58 // (max(map(len, curves)) + 5))
            box = {"loc": "outside lower left", "ncols": columns}
            figure.set_figheight(2.75 + 0.19 * math.ceil(len(curves) / columns))
        figure.legend(frameon=False, handlelength=2.4, columnspacing=1.2, **box)
    return figure


def _tick(value: float, _: int, digits: int) -> str:
    """Return a number on an axis with at least `digits` digits, and all digits before the point below 1e15."""
    return f"{value:,.{max(digits, len(str(int(abs(value)))) if abs(value) < 1e15 else 0)}g}"


def _digits(low: float, high: float) -> int:
    """Return the number of digits, at least 4, with which the ticks of an axis from `low` to `high` differ."""
    largest = max(abs(low), abs(high))
    return min(max(4, math.ceil(math.log10(largest / (high - low))) + 3), 15) if low < high else 4


def points(steps: np.ndarray, values: np.ndarray) -> Curve:
    """Return the points of a curve to draw; of more than 1,500, the ends and the extremes of 700 groups of neighbors.

    The extremes of a group are its lowest and its highest finite values, or its first value if there are none.
    """
    if len(values) <= 1500:
        return steps, values
    chosen = {0, len(values) - 1}
    for group in np.array_split(np.arange(len(values)), 700):
        finite = group[np.isfinite(values[group])]
        chosen |= {finite[values[finite].argmin()], finite[values[finite].argmax()]} if finite.size else {group[0]}
    kept = sorted(chosen)
    return steps[kept], values[kept]


def lines(panels: Mapping[str, Mapping[str, Line]], xlabel: str, *, logarithmic: bool = False) -> Figure:
    """Return panels side by side, one for each metric, with a line for each name.

    Args:
        panels: for each label of a y axis, the lines by name: x values [N], which may be words, and y values [N] or
            [N, runs], padded with NaN. Several runs are drawn as dots, with a line through their means.
    """
    figure, plots = _plots(len(panels))
    for axes, (label, curves) in zip(plots, panels.items()):
        for (name, (places, values)), color in zip(curves.items(), SERIES.values()):
            values = np.asarray(values, float).reshape(len(places), -1)
            for run in values.T:
                axes.plot(places, run, "o", color=color, markersize=3.2)
            axes.plot(places, np.ma.masked_invalid(values).mean(axis=1), color=color, linewidth=1.4, label=name)
        if logarithmic:
            axes.set(xscale="log", yscale="log", xticks=places)
            for axis in (axes.xaxis, axes.yaxis):
                axis.set_minor_formatter(NullFormatter())
                axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.4g}"))
        axes.set(xlabel=xlabel, ylabel=label)
    if len(curves) > 1:
        axes.legend(frameon=False)
    return figure


def parallel(columns: Mapping[str, Sequence[Any]], names: Sequence[str], colors: Sequence[str]) -> Figure:
    """Return a parallel-coordinates plot: an axis for each column, and a line for each name, the first on top.

    Args:
        columns: the values of each axis, in the order of `names`. Numbers are in ascending order from the bottom, on a
            logarithmic scale if they are positive and their magnitudes differ; words are below, in order of appearance.
    """
    figure = Figure((max(5.4, 1.5 * len(columns)), 3.4), layout="constrained")
    axes, heights = figure.subplots(), []
    axes.axis("off")
    axes.set_xlim(-0.4, len(columns) - 0.6)
    for place, (label, values) in enumerate(columns.items()):
        numbers = all(_is_number(value) for value in values)
        order = {str(value): value if _is_number(value) else -math.inf for value in values}
        shown = sorted(set(values)) if numbers else sorted(order, key=order.__getitem__)
        if numbers:
            scale = math.log if 0 < 20 * shown[0] < shown[-1] else float  # of integers of any size
            at = {value: float(scale(value)) for value in shown}
            words = {value: f"{value:.4g}" for value in (shown if len(shown) <= 6 else (shown[0], shown[-1]))}
        else:
            at = {value: n for n, value in enumerate(shown)}
            words = {text: text if len(text) <= 18 else f"…{text[-17:]}" for text in shown[:: -(-len(shown) // 16)]}
        low, wide = min(at.values()), max(at.values()) - min(at.values())
        at = {value: (y - low) / wide if wide else 0.5 for value, y in at.items()}
        heights.append([at[value if numbers else str(value)] for value in values])
        axes.plot([place, place], [0, 1], color=COLORS["rule"], linewidth=1.2, zorder=0)
        for value, word in words.items():
            axes.annotate(word, (place, at[value]), (-4, 0), textcoords="offset points", ha="right", va="center")
        label = textwrap.fill(label, 20)
        axes.annotate(label, (place, 1), (0, 12), textcoords="offset points", ha="center", color=COLORS["soft"])
    for name, color, line in reversed([*zip(names, colors, zip(*heights))]):
        axes.plot(range(len(columns)), line, color=color, linewidth=1.7, alpha=0.85, gid=name)
    return figure


def _is_number(value: Any) -> bool:
    """Return whether a value has a place on an axis."""
    with contextlib.suppress(OverflowError):  # an integer can be too large
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return False


def bleu_by_length(runs: Mapping[str, Sequence[tuple[int, int, int, float]]]) -> Figure:
    """Return a plot of BLEU against the number of words in the input, with a line for each run.

    The rows of a run are those of `metrics.translation.bleu_by_length`: shortest and longest length, count and BLEU.
    """
    curves = {name: ([(row[0] + row[1]) / 2 for row in rows], [row[3] for row in rows]) for name, rows in runs.items()}
    return lines({"BLEU": curves}, "words in the input")


def precision(curves: np.ndarray, thresholds: np.ndarray, recalls: np.ndarray) -> Figure:
    """Plot precision-recall curves [T, R] for IoU thresholds [T] at recalls [R]."""
    figure, (axes,) = _plots()
    shown = [round(place) for place in np.linspace(0, len(curves) - 1, len(SERIES))]
    for place, color in zip(shown, SERIES.values()):
        axes.plot(recalls, curves[place], color=color, label=f"IoU {thresholds[place]:.2f}")
    axes.set(xlabel="recall", ylabel="precision", xlim=(0, 1), ylim=(0, 1.02))
    axes.legend(frameon=False)
    return figure


def _plots(count: int = 1) -> tuple[Figure, Sequence[Axes]]:
    """Return a figure with small plots side by side, with horizontal grid lines."""
    figure = Figure(figsize=(0.9 + 3.4 * count, 2.75), layout="constrained")
    plots = list(figure.subplots(1, count, squeeze=False)[0])
    for axes in plots:
        axes.spines[["left", "top", "right"]].set_visible(False)
        axes.grid(axis="y")
    return figure, plots


def smooth(values: np.ndarray) -> np.ndarray:
    """Smooth values [N] by a Gaussian over about a thirtieth of the curve; values that are not finite become NaN."""
    width, finite = max(len(values) / 60, 1.0), np.isfinite(values)
    mean = partial(gaussian_filter1d, sigma=width, mode="constant", radius=int(3 * width))
    total, weight = mean(np.where(finite, values, 0.0)), mean(finite.astype(float))
    return np.where(finite, total / np.maximum(weight, 1e-12), np.nan)


def confusion(counts: np.ndarray, names: Sequence[str]) -> Figure:
    """Return a confusion matrix of counts [V, V] (rows: true classes), colored by the share of the row.

    The counts are written into the cells where there is room.
    """
    size, share = len(names), counts / np.maximum(counts.sum(1, keepdims=True), 1)
    small = 9 if size <= 12 else 6.5
    figure = Figure(figsize=(5.6, 5.0) if size <= 12 else (7.6, 6.8), layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(np.ma.masked_equal(share, 0), **SHARE)
    if size <= 20:
        for row, column in zip(*np.nonzero(counts)):
            color = "#ffffff" if share[row, column] < LIGHT_FROM else "#000000"
            axes.text(column, row, f"{counts[row, column]:,}", ha="center", va="center", color=color, fontsize=small)
        axes.set_xticks(np.arange(size + 1) - 0.5, minor=True)
        axes.set_yticks(np.arange(size + 1) - 0.5, minor=True)
        axes.grid(which="minor")
    ticks = range(0, size, -(-size // 40))
    labels = [str(names[i])[:24] for i in ticks]
    axes.set_xticks(ticks, labels, rotation=90 if max(map(len, labels)) > 2 else 0, fontsize=small)
    axes.set_yticks(ticks, labels, fontsize=small)
    axes.set(xlabel="prediction", ylabel="truth")
    scale = {"ticks": [0, 0.01, 0.1, 0.25, 0.5, 1], "format": PercentFormatter(1, 0)}
    bar = figure.colorbar(image, shrink=0.6, aspect=30, label="share of the true class", **scale)
    bar.outline.set_visible(False)
    return figure


def grid(rows: Sequence[Sequence[Drawing]], titles: Sequence[str] = (), side: float = 1.08) -> Figure:
    """Return pictures `draw(axes, extent)`, `side` inches wide, in rows and columns; the first row is the longest."""
    width, height = 1.07 * len(rows[0]), 1.07 * len(rows)
    figure = Figure(figsize=(side * width + 0.35, side * height + 0.35), layout="constrained")
    axes = figure.subplots()
    for y, row in enumerate(rows):
        for x, draw in enumerate(row):
            draw(axes, extent=(1.07 * x, 1.07 * x + 1, -1.07 * y - 1, -1.07 * y))
    for x, title in enumerate(titles):
        axes.text(1.07 * x + 0.5, 0.07, title, ha="center")
    axes.set(xlim=(0, width), ylim=(-height, 0))
    axes.set_axis_off()
    return figure


def overlay(axes: Axes, image: np.ndarray, heat: np.ndarray | None, extent: Extent) -> None:
    """Draw a gray image [h, w] in 0..1, or a heat map [rows, columns] under a white overlay of the image."""
    if heat is None:
        axes.imshow(image, cmap="gray", interpolation="nearest", vmin=0, vmax=1, extent=extent)
        return
    axes.imshow(heat, cmap="viridis", interpolation="bilinear", vmin=0, extent=extent)
    white = np.stack([np.ones_like(image)] * 3 + [0.55 * np.clip(image, 0, 1)], -1)
    axes.imshow(white, interpolation="nearest", extent=extent)


def objects(
    axes: Axes, image: np.ndarray, names: Sequence[str], truth: np.ndarray, found: np.ndarray, extent: Extent
) -> None:
    """Draw an image [h, w, c] in 0..1 and its objects [N, 6]: class, score, left, top, width, height in 0..1."""
    axes.imshow(np.broadcast_to(image, (*image.shape[:2], 3)), interpolation="nearest", extent=extent)
    left, top = extent[0], extent[3]
    for boxes, style in ((truth, {"linestyle": ":", "edgecolor": "#ffffff"}), (found, {"edgecolor": COLORS["s1"]})):
        for kind, score, x, y, width, height in boxes[np.argsort(boxes[:, 1])]:  # the highest score on top
            axes.add_patch(Rectangle((left + x, top - y), width, -height, fill=False, linewidth=1.2, **style))
            if boxes is found:
                text = f"{score:.0%} {names[int(kind)]}"  # a name from right to left would reverse digits after it
                ground = {"facecolor": COLORS["s1"], "edgecolor": "none", "pad": 0.5}
                axes.text(left + x, top - y, text, fontsize=6, va="bottom", color="#000000", bbox=ground)
