"""What the HTML pages share: one style, cards and sections, the series of metrics, numbers as a reader wants them."""

import html
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lineage.report import figures
from lineage.runs.folder import write_atomic

Metrics = Sequence[Mapping[str, Any]]
LOWER_IS_BETTER = re.compile(r"loss|perplexity|error|bits|distance|\b[wt]er\b")


def write(path: Path, title: str, parts: Sequence[str]) -> Path:
    """Writes a page of these parts, whole or not at all."""
    return write_atomic(path, PAGE.format(title=text(title), style=STYLE, body="\n".join(parts)))


def box(label: str, value: str, note: str) -> str:
    return f"<div class=tile><span>{text(label)}</span><b>{value}</b><small>{note}</small></div>"


def card(draw, *args, name: str, folder: Path, kind: str = "card scroll") -> str:
    return f"<div class='{kind}'>{figures.save(draw, *args, name=name, folder=folder)}</div>"


def section(title: str, body: str, kind: str = "") -> str:
    return f"<section><h2>{text(title)}</h2><div class='{kind}'>{body}</div></section>" if body else ""


def keys(metrics: Metrics) -> list[str]:
    return list(dict.fromkeys(key for line in metrics for key in line if key != "step"))


def series(metrics: Metrics, key: str) -> figures.Curve:
    points = [(line["step"], line[key]) for line in metrics if key in line]
    return np.array([step for step, _ in points], int), np.array([value for _, value in points], float)


def flatten(tree: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """The leaves of nested dictionaries with their dotted keys."""
    leaves = []
    for key, value in tree.items():
        nested = isinstance(value, Mapping) and value
        leaves += flatten(value, f"{prefix}{key}.") if nested else [(f"{prefix}{key}", value)]
    return leaves


def text(value: Any) -> str:
    return html.escape(str(value))


def words(name: str) -> str:
    return re.sub(r"[_/.]+", " ", name)


def file_name(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9]+", "_", name)


def number(value: float) -> str:
    return f"{value:,.0f}" if 1000 <= abs(value) < math.inf else f"{value:.4g}"


STYLE = """
:root { color-scheme: light dark; --page: #f6f7f9; --card: #fff; --ink: #1f2329; --soft: #656d76; --rule: #dde1e6;
  --bad: #cc3311; --s0: #0072b2; --s1: #d55e00; --s2: #009e73; --s3: #cc79a7; --tint: #e8f1f8; }
@media (prefers-color-scheme: dark) { :root { --page: #0f1216; --card: #171b21; --ink: #e3e7ec; --soft: #99a3ae;
  --rule: #2b323b; --bad: #ff7b5c; --s0: #56b4e9; --s1: #f09a4a; --s2: #35c49a; --s3: #e39cc2; --tint: #17303f; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
main { max-width: 1240px; margin: 0 auto; padding: 40px 24px 64px; }
h1 { font-size: 30px; line-height: 1.2; letter-spacing: -.02em; margin: 0 0 8px; overflow-wrap: anywhere; }
h2 { font-size: 19px; letter-spacing: -.01em; margin: 44px 0 12px; }
h3 { font-size: 14px; margin: 0 0 8px; }
.facts { list-style: none; margin: 0; padding: 0; color: var(--soft); font-size: 14px; }
.facts li { display: inline-block; } .facts li + li::before { content: "·"; margin: 0 8px; }
pre, code { font: 13px/1.55 ui-monospace, SFMono-Regular, Menlo, Consolas, "Liberation Mono", monospace; }
.command { margin: 14px 0 0; padding: 9px 14px; white-space: pre-wrap; overflow-wrap: anywhere; }
.alert { border-left: 4px solid var(--bad); padding: 8px 14px; background: var(--card); margin: 16px 0 0; }
.tiles { display: grid; grid-template-columns: repeat(auto-fill, minmax(165px, 1fr)); gap: 12px; margin-top: 22px; }
.command, .tile, .card, details { background: var(--card); border: 1px solid var(--rule); border-radius: 10px; }
.tile, .card { padding: 14px 16px; }
.tile span, .tile small { display: block; color: var(--soft); font-size: 13px; }
.tile b { display: block; font-size: 27px; line-height: 1.3; font-weight: 650; letter-spacing: -.02em;
  font-variant-numeric: tabular-nums; }
.cards, .split { display: grid; gap: 14px; align-items: start; }
.cards { grid-template-columns: repeat(auto-fill, minmax(min(100%, 350px), 1fr)); }
.split { grid-template-columns: minmax(0, 3fr) minmax(0, 2fr); }
.scroll { overflow-x: auto; }
.note { color: var(--soft); font-size: 14px; margin: 0 0 10px; }
.card + .note { margin-top: 20px; }
svg { display: block; width: 100%; height: auto; max-width: calc(var(--w) * 1.6px); margin: 0 auto; }
.scroll svg { min-width: min(calc(var(--w) * .9px), 900px); }
svg text { font-family: inherit !important; }
table { width: 100%; border-collapse: collapse; font-size: 14px; }
th { text-align: left; color: var(--soft); font-weight: 500; }
th, td { padding: 5px 10px 5px 0; border-bottom: 1px solid var(--rule); vertical-align: top; }
tr:last-child td { border-bottom: 0; }
.n { text-align: right; padding: 5px 0 5px 10px; font-variant-numeric: tabular-nums; white-space: nowrap; }
.cost i { display: block; height: 4px; min-width: 1px; border-radius: 2px; background: var(--s0); margin-top: 3px; }
.total td { font-weight: 650; }
.gallery { display: grid; grid-template-columns: repeat(auto-fill, minmax(108px, 1fr)); gap: 14px 12px; }
figure { margin: 0; } figure img { display: block; width: 100%; border-radius: 6px; image-rendering: pixelated; }
figcaption { font-size: 14px; margin-top: 4px; overflow-wrap: anywhere; line-height: 1.35; }
figcaption small { color: var(--soft); font-variant-numeric: tabular-nums; }
details { margin-bottom: 8px; padding: 0 16px; }
summary { cursor: pointer; padding: 10px 0; font-weight: 600; }
.sample { white-space: pre-wrap; overflow-wrap: anywhere; margin: 0 0 14px; padding-left: 12px;
  border-left: 2px solid var(--rule); }
.sample b { background: var(--tint); font-weight: 600; border-radius: 3px; }
details table { margin-bottom: 14px; } details td:first-child { white-space: nowrap; color: var(--soft); }
.attend select { font: inherit; color: inherit; background: var(--page); border: 1px solid var(--rule);
  border-radius: 6px; margin: 0 12px 12px 4px; padding: 2px 4px; }
.attend p { margin: 0 0 10px; font: 14px/2 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
.attend span { cursor: pointer; white-space: pre; }
.attend p span { padding: 2px 3px; border-radius: 3px; border: 1px solid var(--rule); margin-right: 2px; }
.attend .picked { outline: 2px solid var(--s1); }
.attend .patches { display: grid; width: 336px; max-width: 100%; background-size: 100% 100%;
  image-rendering: pixelated; }
.attend .patches span { aspect-ratio: 1; }
@media (max-width: 760px) {
  main { padding: 24px 14px 40px; } h1 { font-size: 25px; } .tile b { font-size: 23px; } .card { padding: 12px; }
  .tiles { grid-template-columns: repeat(2, 1fr); } .split { grid-template-columns: minmax(0, 1fr); }
  .gallery { grid-template-columns: repeat(auto-fill, minmax(84px, 1fr)); } }
"""

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title><style>{style}</style></head>
<body><main>
{body}
</main></body></html>
"""
