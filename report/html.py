"""Building blocks of the HTML pages: sections, cards and tiles, tables and their CSV files, formatted numbers.

Pages are composed of `Markup`, whose `format` and `join` escape every text that is not `Markup` itself.
"""

import base64
import contextlib
import csv
import hashlib
import io
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib import resources
from pathlib import Path
from typing import Any
from urllib.parse import quote

from markupsafe import Markup
from matplotlib.figure import Figure

from lineage.configs.atomic import regular, write_atomic
from lineage.report import figures
from lineage.runs.folder import ARTIFACTS, CONFIG, METRICS, sealed_page

Rows = Iterable[Sequence[Any]]  # rows of a table; the first has the names of the columns
ABBREVIATIONS = {name.lower(): name for name in ("AP", "BLEU", "CER", "F1", "FLOPs", "IoU", "LM", "MFU", "MLP", "WER")}
# The beginning of a cell that is a formula, also where a spreadsheet separates cells by semicolons or tabs. The last
# characters are full-width.
FORMULA = re.compile('(^|[;\t\r\n]"*)(?=[=+\\-@\t\r\n\uff1d\uff0b\uff0d\uff20])')
# Only the style sheet and script of this package are used, images are part of the page, and nothing is loaded.
# Figures have style attributes.
POLICY = (
    "default-src 'none'; img-src data:; style-src-elem '{style}'; style-src-attr 'unsafe-inline'; script-src '{script}'"
    "; base-uri 'none'; form-action 'none'"
)
# Characters that change the direction of the text that follows: if unpaired, also of the numbers beside a name.
DIRECTIONS = *range(0x202A, 0x202F), *range(0x2066, 0x206A)
# Control characters other than white space, and noncharacters, which HTML does not allow: browsers would omit a NUL.
CONTROLS = *range(9), 0x0B, *range(0x0E, 0x20), *range(0x7F, 0xA0)
NONCHARACTERS = (
    *range(0xFDD0, 0xFDF0),
    *(plane + last for plane in range(0, 0x110000, 0x10000) for last in (0xFFFE, 0xFFFF)),
)
REPLACED = dict.fromkeys((*DIRECTIONS, *CONTROLS, *NONCHARACTERS), "\ufffd")
PAGE = Markup("""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<title>{title}</title><style>{style}</style></head>
<body><main>
{body}
</main><script>{script}</script></body></html>
""")


def write(
    path: Path, title: str, parts: Iterable[Markup], styles: Sequence[str] = (), script: str = "attention.js"
) -> Path:
    """Write a page with the `parts` as its body, atomically; return its path.

    `styles` and `script` are the names of resources; the palette and the style sheet of all pages come first.
    """
    palette = "".join(f"--{name}:light-dark({light},{dark});" for name, (light, dark) in figures.PALETTE.items())
    style = f":root{{{palette}}}\n" + "".join(map(_resource, ("page.css", *styles)))
    content = {"style": style, "script": _resource(script)}
    hashes = {name: base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for name, text in content.items()}
    policy = POLICY.format(**{name: f"sha256-{value}" for name, value in hashes.items()})
    code = {name: Markup(text) for name, text in content.items()}  # noqa: S704, files of this package
    page = PAGE.format(title=title, policy=policy, body=Markup("\n").join(parts), **code).translate(REPLACED)
    return write_atomic(path, sealed_page(page.encode(errors="replace")))  # JSON can contain lone surrogates


def _resource(name: str) -> str:
    return (resources.files("lineage.report") / name).read_text(encoding="utf-8")


@contextlib.contextmanager
def explained(path: Path) -> Iterator[None]:
    """Raise ValueError with the name of a file or run if its content is damaged, so that the block cannot show it."""
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, MemoryError, RuntimeError, TypeError, ValueError) as error:
        if str(error).startswith(f"{path.parent}{os.sep}"):  # it already names a file
            raise
        reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0][:150]}"
        raise ValueError(f"{path} cannot be shown ({reason}): move it away to write the page without it.") from None


def check_files(workdir: Path) -> None:
    """Raise ValueError if a file that a page shows, or `artifacts`, is a link to other files, a pipe or a device."""
    for path in (workdir / CONFIG, workdir / METRICS, workdir / ARTIFACTS, *(workdir / ARTIFACTS).glob("*")):
        if path.is_symlink():
            raise ValueError(f"{path} is a link: replace it with a copy, or delete it to write the page without it.")
        regular(path)


def figures_folder(folder: Path) -> Path:
    """Return the folder of the figures of a page, created if absent; raise ValueError if it is a link."""
    if folder.is_symlink():  # in somebody else's folder, it may lead to the user's own pictures
        raise ValueError(f"{folder} is a link, and the .png files in it would be replaced: delete the link.")
    folder.mkdir(exist_ok=True)
    return folder


def tile(label: str, value: str, note: str) -> Markup:
    """Return a tile with a large value, its label above and a note below."""
    return Markup("<div class=tile><span>{}</span><b>{}</b><small>{}</small></div>").format(label, value, note)


def card(
    draw: Callable[..., Figure],
    *args: Any,
    name: str,
    folder: Path,
    alt: str,
    data: Rows,
    about: str = "",
    kind: str = "card scroll",
) -> Markup:
    """Return a card with the figure `draw(*args)`, which is also saved as `folder/name.png`.

    Args:
        alt: alternative text for readers who do not see the figure.
        data: the values that the figure shows, which can be downloaded.
        about: a remark below the figure.
    """
    name = file_name(name)
    svg = Markup(figures.save(draw, *args, name=name, folder=folder))  # noqa: S704, matplotlib escapes texts
    svg = svg.replace("<svg ", Markup('<svg role="img" aria-label="{}" ').format(alt), 1)
    figure = Markup('<figure class="{}">{}<figcaption>{} {}</figcaption></figure>')
    return figure.format(kind, svg, about, download(data, name))


def download(data: Rows, name: str) -> Markup:
    """Return a link that saves a table as the CSV file `name.csv`; the file is part of the page."""
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="\n").writerows([cell(value) for value in row] for row in data)
    text = quote(buffer.getvalue(), safe=",:;()", errors="replace")
    link = Markup('<a class=data download="{0}.csv" href="data:text/csv;charset=utf-8,{1}">{0}.csv</a>')
    return link.format(name, text)


def cell(value: Any) -> Any:
    """Return a number with six digits, or a text that spreadsheets do not interpret as a formula."""
    if isinstance(value, float):
        return f"{value:.6g}"
    return FORMULA.sub(r"\1'", value) if isinstance(value, str) else value


def header(title: str, facts: Iterable[str], below: Markup, tiles: Iterable[Markup]) -> Markup:
    """Return the top of a page: its title, a list of facts, further HTML, and tiles."""
    items = join(Markup("<li>{}</li>").format(fact) for fact in facts)
    head = Markup("<h1>{}</h1><ul class=facts>{}</ul>{}").format(title, items, below)
    return Markup("<header>{}<div class=tiles>{}</div></header>").format(head, join(tiles))


def table_head(*names: str, numbers: Sequence[str] = ()) -> Markup:
    """Return the row with the names of the columns of a table; those of `numbers` are right-aligned."""
    shown = [Markup("<th scope=col>{}").format(name) for name in names]
    shown += [Markup("<th scope=col class=n>{}").format(name) for name in numbers]
    return Markup("<tr>{}").format(join(shown))


def table_row(*cells: Any, numbers: Sequence[str] = (), name: Any = None, kind: str = "") -> Markup:
    """Return a row of a table: its `name`, if it has one, its cells and its numbers, which are right-aligned."""
    shown = [] if name is None else [Markup("<th scope=row>{}").format(name)]
    shown += [Markup("<td>{}").format(cell) for cell in cells]
    shown += [Markup("<td class=n>{}").format(value) for value in numbers]
    return Markup("<tr class='{}'>{}").format(kind, join(shown))


def table(title: str, rows: Iterable[Markup], kind: str = "") -> Markup:
    """Return a table with its title above."""
    return Markup("<table class='{}'><caption>{}</caption>{}</table>").format(kind, title, join(rows))


def wide_table(title: str, rows: Iterable[Markup], kind: str = "", around: str = "") -> Markup:
    """Return a table that can be scrolled, also by keyboard, with a title that only screen readers read."""
    region = Markup("<div class='{} scroll' tabindex=0 role=region aria-label='{}'>{}</div>")
    return region.format(around, title, table(title, rows, kind))


def section(title: str, body: Markup, kind: str = "") -> Markup:
    """Return a section with a heading, or "" if the body is empty."""
    shown = Markup("<section><h2>{}</h2><div class='{}'>{}</div></section>").format(title, kind, body)
    return shown if body else Markup()


def details(summary: str, body: Markup, opened: bool = False) -> Markup:
    """Return a part of a page that is collapsed under its summary, unless it is `opened`."""
    attribute = " open" if opened else ""
    return Markup("<details{}><summary>{}</summary>{}</details>").format(attribute, summary, body)


def note(content: str | Markup) -> Markup:
    """Return an explanation in small print."""
    return Markup("<p class=note>{}</p>").format(content)


def alert(text: str) -> Markup:
    """Return a warning."""
    return Markup("<p class=alert>{}</p>").format(text)


def command(line: str) -> Markup:
    """Return a command line."""
    return Markup("<pre class=command>{}</pre>").format(line)


def join(parts: Iterable[Markup]) -> Markup:
    """Return the concatenated parts."""
    return Markup().join(parts)


def words(name: str) -> str:
    """Return a metric's name in words: "validation/top_5" is "validation top 5", and "test/bleu" is "test BLEU"."""
    return " ".join(ABBREVIATIONS.get(word, word) for word in re.split(r"[_/.]+", name))


def title(name: str) -> str:
    """Return words with the first letter capitalized."""
    return name[:1].upper() + name[1:]


def file_name(name: str) -> str:
    """Return a name that is safe for a file and in HTML, with a hash if other characters than slashes are replaced."""
    safe = re.sub(r"[^A-Za-z0-9_]", "_", name)[:200]
    digest = hashlib.sha256(name.encode(errors="replace")).hexdigest()
    return safe if safe == name.replace("/", "_") else f"{safe}_{digest[:8]}"


def number(value: float) -> str:
    """Return a number with four digits, or whole from 1,000 on."""
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e15 else f"{value:.4g}"


def steps(count: int) -> str:
    """Return a number of steps, such as "1 step" or "2,000 steps"."""
    return "1 step" if count == 1 else f"{count:,} steps"
