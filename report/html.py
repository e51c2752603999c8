"""Building blocks of the HTML pages: sections, cards and tiles, series of metrics, formatted numbers."""

import html
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from lineage.configs.atomic import write_atomic
from lineage.report import figures

Metrics = Sequence[Mapping[str, Any]]
LOWER_IS_BETTER = re.compile(r"loss|perplexity|error|bits|distance|\b[wt]er\b")
PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title><style>{style}</style></head>
<body><main>
{body}
</main></body></html>
"""


@cache
def resource(name: str) -> str:
    """Return the text of a style sheet or script of this package."""
    return (resources.files("lineage.report") / name).read_text(encoding="utf-8")


def write(path: Path, title: str, parts: Sequence[str]) -> Path:
    """Write a page with the HTML `parts` as its body, atomically; return its path."""
    body = "\n".join(parts)
    return write_atomic(path, PAGE.format(title=text(title), style=resource("page.css"), body=body))


def tile(label: str, value: str, note: str) -> str:
    """Return a tile with a large value, its label above and a note below."""
    return f"<div class=tile><span>{text(label)}</span><b>{value}</b><small>{note}</small></div>"


def card(draw: Callable[..., Figure], *args: Any, name: str, folder: Path, kind: str = "card scroll") -> str:
    """Return a card with the figure `draw(*args)`, which is also saved as `folder/name.png`."""
    return f"<div class='{kind}'>{figures.save(draw, *args, name=name, folder=folder)}</div>"


def header(title: str, facts: Iterable[str], below: str, tiles: Iterable[str]) -> str:
    """Return the top of a page: its title, a list of facts, further HTML, and tiles."""
    items = "".join(f"<li>{text(fact)}</li>" for fact in facts)
    head = f"<h1>{text(title)}</h1><ul class=facts>{items}</ul>{below}"
    return f"<header>{head}<div class=tiles>{''.join(tiles)}</div></header>"


def table_row(*cells: Any, numbers: Sequence[str] = (), tag: str = "td") -> str:
    """Return a row of a table; the cells are text, and the numbers, which follow, are right-aligned."""
    shown = [f"<{tag}>{text(cell)}" for cell in cells] + [f"<{tag} class=n>{value}" for value in numbers]
    return f"<tr>{''.join(shown)}"


def section(title: str, body: str, kind: str = "") -> str:
    """Return a section with a heading, or "" if the body is empty."""
    return f"<section><h2>{text(title)}</h2><div class='{kind}'>{body}</div></section>" if body else ""


def note(content: str) -> str:
    """Return an explanation in small print."""
    return f"<p class=note>{content}</p>"


def keys(metrics: Metrics) -> list[str]:
    """Return the names of the metrics in the order in which they first appear."""
    return list(dict.fromkeys(key for line in metrics for key in line if key != "step"))


def series(metrics: Metrics, key: str) -> figures.Curve:
    """Return the steps and the values of a metric, [N] each."""
    points = [(line["step"], line[key]) for line in metrics if key in line]
    return np.array([step for step, _ in points], int), np.array([value for _, value in points], float)


def text(value: Any) -> str:
    """Return a value as escaped text."""
    return html.escape(str(value))


def words(name: str) -> str:
    """Return a metric's name in words: "validation/top_5" is "validation top 5"."""
    return re.sub(r"[_/.]+", " ", name)


def file_name(name: str) -> str:
    """Return a name that is safe for a file."""
    return re.sub(r"[^A-Za-z0-9]+", "_", name)


def number(value: float) -> str:
    """Return a number with four digits, or whole from 1,000 on."""
    return f"{value:,.0f}" if 1000 <= abs(value) < math.inf else f"{value:.4g}"
