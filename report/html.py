"""Building blocks of the HTML pages: sections, cards and tiles, series of metrics, formatted numbers.

Pages are put together from `Markup`, whose `format` and `join` escape every text that is not `Markup` itself.
"""

import base64
import contextlib
import hashlib
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup
from matplotlib.figure import Figure

from lineage.configs.atomic import write_atomic
from lineage.report import figures

Metrics = Sequence[Mapping[str, Any]]
# Only the style sheet and the script of this package are run, images are part of the page, and nothing is loaded.
# Figures have style attributes.
POLICY = (
    "default-src 'none'; img-src data:; style-src-elem '{style}'; style-src-attr 'unsafe-inline'; script-src '{script}'"
    "; base-uri 'none'; form-action 'none'"
)
PAGE = Markup("""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<title>{title}</title><style>{style}</style></head>
<body><main>
{body}
</main><script>{script}</script></body></html>
""")


@cache
def resource(*names: str) -> Markup:
    """Return the text of style sheets or scripts of this package."""
    texts = [(resources.files("lineage.report") / name).read_text(encoding="utf-8") for name in names]
    return Markup("".join(texts))  # noqa: S704


def write(
    path: Path, title: str, parts: Iterable[Markup], styles: Sequence[str] = (), script: str = "attention.js"
) -> Path:
    """Write a page with the `parts` as its body, atomically; return its path.

    `styles` and `script` are the names of resources; the style sheet of all pages comes first.
    """
    content = {"style": resource("page.css", *styles), "script": resource(script)}
    hashes = {name: base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for name, text in content.items()}
    policy = POLICY.format(**{name: f"sha256-{value}" for name, value in hashes.items()})
    page = PAGE.format(title=title, policy=policy, body=Markup("\n").join(parts), **content)
    return write_atomic(path, page.encode(errors="replace"))  # a name in JSON can have half of a surrogate pair


@contextlib.contextmanager
def explained(path: Path) -> Iterator[None]:
    """Raise ValueError with the name of a file if its content, which only programs write, cannot be shown."""
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0][:150]}"
        raise ValueError(f"{path} cannot be shown ({reason}): delete it to generate the report without it.") from None


def tile(label: str, value: str, note: str) -> Markup:
    """Return a tile with a large value, its label above and a note below."""
    return Markup("<div class=tile><span>{}</span><b>{}</b><small>{}</small></div>").format(label, value, note)


def card(draw: Callable[..., Figure], *args: Any, name: str, folder: Path, kind: str = "card scroll") -> Markup:
    """Return a card with the figure `draw(*args)`, which is also saved as `folder/name.png`."""
    svg = Markup(figures.save(draw, *args, name=file_name(name), folder=folder))  # noqa: S704, matplotlib escapes texts
    return Markup("<div class='{}'>{}</div>").format(kind, svg)


def header(title: str, facts: Iterable[str], below: Markup, tiles: Iterable[Markup]) -> Markup:
    """Return the top of a page: its title, a list of facts, further HTML, and tiles."""
    items = join(Markup("<li>{}</li>").format(fact) for fact in facts)
    head = Markup("<h1>{}</h1><ul class=facts>{}</ul>{}").format(title, items, below)
    return Markup("<header>{}<div class=tiles>{}</div></header>").format(head, join(tiles))


def table_row(*cells: Any, numbers: Sequence[str] = (), tag: str = "td", kind: str = "") -> Markup:
    """Return a row of a table; the numbers, which follow the cells, are right-aligned."""
    shown = [Markup("<{}>{}").format(tag, cell) for cell in cells]
    shown += [Markup("<{} class=n>{}").format(tag, value) for value in numbers]
    return Markup("<tr class='{}'>{}").format(kind, join(shown))


def table(rows: Iterable[Markup], kind: str = "") -> Markup:
    """Return a table."""
    return Markup("<table class='{}'>{}</table>").format(kind, join(rows))


def section(title: str, body: Markup, kind: str = "") -> Markup:
    """Return a section with a heading, or "" if the body is empty."""
    shown = Markup("<section><h2>{}</h2><div class='{}'>{}</div></section>").format(title, kind, body)
    return shown if body else Markup()


def details(summary: str, body: Markup, opened: bool = False) -> Markup:
    """Return a part of a page that is folded under its summary, unless it is `opened`."""
    start = Markup("<details open>") if opened else Markup("<details>")
    return start + Markup("<summary>{}</summary>{}</details>").format(summary, body)


def note(content: str) -> Markup:
    """Return an explanation in small print."""
    return Markup("<p class=note>{}</p>").format(content)


def command(line: str) -> Markup:
    """Return a command line."""
    return Markup("<pre class=command>{}</pre>").format(line)


def join(parts: Iterable[Markup]) -> Markup:
    """Return the parts one after the other."""
    return Markup().join(parts)


def keys(metrics: Metrics) -> list[str]:
    """Return the names of the metrics in the order in which they first appear."""
    return list(dict.fromkeys(key for line in metrics for key in line if key != "step"))


def series(metrics: Metrics, key: str) -> figures.Curve:
    """Return the steps and the values of a metric, [N] each."""
    points = [(line["step"], line[key]) for line in metrics if key in line]
    return np.array([step for step, _ in points], int), np.array([value for _, value in points], float)


def words(name: str) -> str:
    """Return a metric's name in words: "validation/top_5" is "validation top 5"."""
    return re.sub(r"[_/.]+", " ", name)


def file_name(name: str) -> str:
    """Return a name that is safe for a file and in HTML."""
    return re.sub(r"[^A-Za-z0-9]+", "_", name)[:200]


def number(value: float) -> str:
    """Return a number with four digits, or whole from 1,000 on."""
    return f"{value:,.0f}" if 1000 <= abs(value) < math.inf else f"{value:.4g}"
