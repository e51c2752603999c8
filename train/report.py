"""`report.html`: one self-contained page that shows what a run did, made from the files of its workdir alone."""

import base64
import html
import io
import json
import math
import os
import re
import zipfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.image import imsave

from metrics.translation import bleu_by_length
from train import figures
from train.progress import clock
from train.writers import METRICS_FILE, read_metrics

Metrics = Sequence[Mapping[str, Any]]
LOWER_IS_BETTER = re.compile(r"loss|perplexity|error|bits|distance|\b[wt]er\b")
CURVES = {  # what is charted first, and its title
    "loss": "Loss",
    "accuracy": "Accuracy",
    "perplexity": "Perplexity",
    "learning_rate": "Learning rate",
    "gradient_norm": "Gradient norm",
    "time/examples_per_second": "Examples per second",
    "time/mfu": "Model FLOP/s utilisation",
}
GROUPS = {"flops": "FLOPs"}
MOST = {
    "mistakes": 36,
    "images": 6,
    "layers": 6,
    "heads": 8,
    "tokens": 40,
    "samples": 30,
    "confused": 12,
    "written": 30,
}


def write_report(workdir: str | os.PathLike) -> Path:
    """Writes `workdir/report.html` and the pictures in it as `workdir/report/*.png`; returns the page's path.

    Reads `metrics.jsonl`, `config.json` and `artifacts/`; what is absent is left out of the page.
    Raises FileNotFoundError if `workdir` is not that of a run and ValueError, naming the file, if one is damaged.
    """
    workdir = Path(workdir)
    if not any((workdir / name).exists() for name in (METRICS_FILE, "config.json")):
        raise FileNotFoundError(
            f"{workdir} is not the workdir of a run: it has neither {METRICS_FILE} nor config.json."
        )
    metrics = read_metrics(workdir) if (workdir / METRICS_FILE).exists() else []
    artifacts = workdir / "artifacts"
    config, run, cost = map(_read_json, (workdir / "config.json", artifacts / "run.json", artifacts / "cost.json"))
    arrays = {path.stem: _read_npz(path) for path in sorted(artifacts.glob("*.npz"))}
    folder = workdir / "report"
    folder.mkdir(exist_ok=True)
    for old in folder.glob("*.png"):
        old.unlink()
    name = str(run.get("config_name") or workdir.resolve().name)
    parts = [
        _header(name, run, cost, metrics),
        _section("Curves", _curves(metrics, folder), "cards"),
        *(_confusion(key, data, folder) for key, data in arrays.items() if key.startswith("confusion_")),
        *(_mistakes(key, data, folder) for key, data in arrays.items() if key.startswith("mistakes_")),
        *(_objects(key, data, folder) for key, data in arrays.items() if key.startswith("objects_")),
        *(_precision(key, data, folder) for key, data in arrays.items() if key.startswith("precision_")),
        _painted({key: data for key, data in arrays.items() if key.startswith("painted_")}, folder),
        _section("Samples", _samples(artifacts / "samples.jsonl")),
        *(_written(path, folder) for path in sorted(artifacts.glob("written_*.json"))),
        _image_attention(arrays["attention_image"], folder) if "attention_image" in arrays else "",
        _text_attention(arrays["attention_text"], folder) if "attention_text" in arrays else "",
        _section("What it costs", _cost(cost), "cards"),
        _section("Configuration", _config(config)),
    ]
    unfinished = workdir / "report.html.partial"
    unfinished.write_text(PAGE.format(title=_text(name), style=STYLE, body="\n".join(parts)), encoding="utf-8")
    return unfinished.replace(workdir / "report.html")


def _header(name: str, run: Mapping[str, Any], cost: Mapping[str, Any], metrics: Metrics) -> str:
    run = dict(run)
    command = f"<pre class=command>{_text(run.pop('command'))}</pre>" if "command" in run else ""
    seconds, device, count = run.pop("seconds", None), run.pop("device", None), run.pop("device_count", 1)
    for told_elsewhere in ("config_name", "config"):
        run.pop(told_elsewhere, None)
    facts = [f"{count} {device}" if count != 1 else device] if device else []
    facts += [f"{key} {value}" for key, value in _flatten(run)]
    tiles = [_tile(key, *_series(metrics, key)) for key in _keys(metrics) if key.split("/")[0] not in ("train", "time")]
    tiles = tiles or [_tile(key, *_series(metrics, key)) for key in ("train/loss", "train/accuracy")]
    if metrics and seconds is not None:
        tiles.append(_box("training time", clock(seconds), f"{metrics[-1]['step']:,} steps"))
    _, speed = _series(metrics, "time/examples_per_second")
    if np.isfinite(speed).any():
        tiles.append(_box("examples per second", _number(np.nanmedian(speed)), "median"))
    if (parameters := dict(_flatten(cost)).get("parameters.total")) is not None:
        tiles.append(_box("parameters", f"{parameters:,}", ""))
    steps, loss = _series(metrics, "train/loss")
    bad = steps[~np.isfinite(loss)]
    alert = f"<p class=alert>The training loss was not finite at step {bad[0]:,}.</p>" if bad.size else ""
    facts = "".join(f"<li>{_text(fact)}</li>" for fact in facts)
    head = f"<h1>{_text(name)}</h1><ul class=facts>{facts}</ul>{command}{alert}"
    return f"<header>{head}<div class=tiles>{''.join(tiles)}</div></header>"


def _tile(key: str, steps: np.ndarray, values: np.ndarray) -> str:
    finite = np.flatnonzero(np.isfinite(values))
    if not finite.size:
        return ""
    show = "{:.2%}".format if "accuracy" in key else _number
    best = finite[np.argmin(values[finite]) if LOWER_IS_BETTER.search(key) else np.argmax(values[finite])]
    note = f"best {show(values[best])} at step {steps[best]:,}"
    return _box(_words(key), show(values[-1]), note if best != len(values) - 1 else f"at step {steps[-1]:,}, the best")


def _box(label: str, value: str, note: str) -> str:
    return f"<div class=tile><span>{_text(label)}</span><b>{value}</b><small>{note}</small></div>"


def _curves(metrics: Metrics, folder: Path) -> str:
    """A chart for each quantity, with a curve for each split that has it."""
    groups: dict[str, dict[str, figures.Curve]] = {name: {} for name in CURVES}
    splits = [_words(split) for split in dict.fromkeys(key.split("/")[0] for key in _keys(metrics)) if split != "time"]
    for key in _keys(metrics):
        split, _, name = key.partition("/")
        name = key if split == "time" else name
        curve = _series(metrics, key)
        if np.isfinite(curve[1]).any() and (split != "time" or name in CURVES):
            groups.setdefault(name, {})[_words(split)] = curve
    charts = []
    for name, curves in groups.items():
        if curves:
            percent, title = "accuracy" in name or name == "time/mfu", CURVES.get(name, _words(name).capitalize())
            draw = partial(figures.chart, percent=percent, smoothed=name != "learning_rate")
            charts.append(_card(draw, title, curves, splits, name=f"curve_{_file(name)}", folder=folder, kind="card"))
    return "".join(charts)


def _confusion(key: str, data: Mapping[str, np.ndarray], folder: Path) -> str:
    counts, names = data["counts"], data["class_names"].tolist()
    share = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    wrong = counts - np.diag(np.diag(counts))
    worst = [divmod(int(k), len(names)) for k in np.argsort(-wrong, axis=None, kind="stable")[: MOST["confused"]]]
    rows = "".join(
        f"<tr><td>{_text(names[i])}<td>{_text(names[j])}<td class=n>{wrong[i, j]:,}<td class=n>{share[i, j]:.1%}"
        for i, j in worst
        if wrong[i, j]
    )
    head = "<h3>Most often confused</h3><table><tr><th>truth<th>taken for<th class=n>times<th class=n>of the class"
    table = f"<div class=card>{head}{rows}</table></div>" if rows else ""
    note = f"{np.trace(counts):,} of {counts.sum():,} right. The colour is the share of the true class."
    body = _card(figures.confusion, counts, names, name=_file(key), folder=folder)
    return _section(_title(key), f"<p class=note>{note}</p><div class=split>{body}{table}</div>")


def _mistakes(key: str, data: Mapping[str, np.ndarray], folder: Path) -> str:
    tiles, names = [], data["class_names"]
    for i, image in enumerate(data["image"][: MOST["mistakes"]]):
        truth, guess = (_text(names[data[of][i]]) for of in ("label", "prediction"))
        scale = max(1, 128 // max(image.shape[:2]))  # a digit of 8 by 8 pixels is too small to look at
        image = np.clip(np.broadcast_to(image, (*image.shape[:2], 3)), 0, 1).repeat(scale, 0).repeat(scale, 1)
        buffer = io.BytesIO()
        imsave(buffer, image, format="png")
        (folder / f"{_file(key)}_{i + 1:02}.png").write_bytes(buffer.getvalue())
        source = f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
        caption = f"<b>{truth}</b> → {guess} <small>{data['probability'][i]:.0%}</small>"
        tiles.append(f'<figure><img alt="{truth}" src="{source}"><figcaption>{caption}</figcaption></figure>')
    note = "<p class=note>Truth → prediction, and the probability that the model gave to its prediction.</p>"
    return _section(_title(key), note + f"<div class=gallery>{''.join(tiles)}</div>" if tiles else "")


def _objects(key: str, data: Mapping[str, np.ndarray], folder: Path) -> str:
    """Images with the boxes of what is in them, dashed, and of what was found."""
    pictures = []
    for number, image in enumerate(data["image"]):
        boxes = {name: data[name][data[name][:, 0] == number][:, 1:] for name in ("truth", "found")}
        pictures.append(partial(figures.objects, image=image, names=data["class_names"].tolist(), **boxes))
    rows = {
        " " * start: {" " * n: picture for n, picture in enumerate(pictures[start : start + 6])}
        for start in range(0, len(pictures), 6)
    }
    note = "<p class=note>Dashed is the truth; what was found has its class and its probability.</p>"
    return _section(_title(key), note + _card(partial(figures.grid, side=2.0), rows, name=_file(key), folder=folder))


def _precision(key: str, data: Mapping[str, np.ndarray], folder: Path) -> str:
    note = "<p class=note>The mean of all classes; a box counts as right from this IoU on. Below a curve is the AP.</p>"
    return _section(_title(key), note + _card(figures.precision, data["precision"], name=_file(key), folder=folder))


def _painted(steps: Mapping[str, Mapping[str, np.ndarray]], folder: Path) -> str:
    """Images, what was seen of them, and what the model made of that, step by step."""
    if not steps:
        return ""
    names, first = list(steps), next(iter(steps.values()))
    columns = {"original": first["image"], "masked": first["masked"]}
    for i in _spread(len(names), MOST["layers"]):
        columns[f"step {int(names[i].partition('_')[2]):,}"] = steps[names[i]]["painted"]
    rows = {
        " " * n: {
            title: partial(figures.overlay, image=images[n].squeeze(), heat=None) for title, images in columns.items()
        }
        for n in range(len(first["image"]))
    }
    return _section("Masked images", _card(figures.grid, rows, name="painted", folder=folder))


def _samples(path: Path) -> str:
    """The newest step's samples open, the earlier ones behind a click."""
    steps: dict[int, str] = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            sample = json.loads(line)
        except json.JSONDecodeError:  # torn by a kill in the middle of a write
            continue
        prompt, text = sample.get("prompt", ""), sample["text"].removeprefix(sample.get("prompt", ""))
        block = f"<pre class=sample><b>{_text(prompt)}</b>{_text(text)}</pre>"
        steps[sample["step"]] = steps.get(sample["step"], "") + block
    newest = sorted(steps, reverse=True)[: MOST["samples"]]
    return "".join(
        f"<details{' open' * (step == newest[0])}><summary>Step {step:,}</summary>{steps[step]}</details>"
        for step in newest
    )


def _written(path: Path, folder: Path) -> str:
    """BLEU by the length of the input, and the first texts beside what they should be."""
    written = _read_json(path)
    inputs, outputs, references = zip(*written["rows"])
    groups = {"": bleu_by_length(outputs, references, [len(text.split()) for text in inputs])}
    rows = "".join(f"<tr><td>{'<td>'.join(map(_text, row))}" for row in written["rows"][: MOST["written"]])
    table = f"<div class='card scroll'><table><tr><th>input<th>written<th>reference{rows}</table></div>"
    note = f"<p class=note>BLEU {written['bleu']:.2f}, {_text(written['signature'])}.</p>"
    body = _card(figures.bleu_by_length, groups, name=_file(path.stem), folder=folder) + table
    return _section(_title(path.stem), note + body)


def _image_attention(data: Mapping[str, np.ndarray], folder: Path) -> str:
    """Where the class token (without one: the mean patch) looks: rollout, each layer, and the heads of one image."""
    weights, size = data["weights"].astype(np.float64), tuple(map(int, data["grid"]))
    images, from_class = data["image"][: MOST["images"]].mean(-1), bool(data["has_class_token"])

    def draw(n: int, matrix: np.ndarray):
        heat = (matrix[0] if from_class else matrix.mean(0))[-math.prod(size) :]
        return partial(figures.overlay, image=images[n], heat=heat.reshape(size))

    # Rollout (Abnar and Zuidema, 2020, section 3): the product over layers of the mean head mixed with the identity.
    rollout = np.eye(weights.shape[-1])
    for layer in weights.mean(2):
        rollout = (layer + np.eye(len(layer[0]))) / 2 @ rollout
    layers = {f"layer {i + 1}": weights[i] for i in _spread(len(weights), MOST["layers"])}
    heads = _spread(weights.shape[2], MOST["heads"])
    by_image = {
        " " * n: {"image": partial(figures.overlay, image=image, heat=None), "rollout": draw(n, rollout[n])}
        | {layer: draw(n, values[n].mean(0)) for layer, values in layers.items()}
        for n, image in enumerate(images)
    }
    by_head = {layer: {f"head {h + 1}": draw(0, values[0, h]) for h in heads} for layer, values in layers.items()}
    who = "the class token" if from_class else "the mean patch"
    return _section(
        "Attention over the image",
        f"<p class=note>Where {who} looks: yellow is most, each picture on its own scale.</p>"
        + _card(figures.grid, by_image, name="attention_image", folder=folder)
        + "<p class=note>The heads, on the first image.</p>"
        + _card(figures.grid, by_head, name="attention_image_heads", folder=folder),
    )


def _text_attention(data: Mapping[str, np.ndarray], folder: Path) -> str:
    """Token by token: the mean over the heads of some layers with the tokens at the edges, then the heads small."""
    shown = str.maketrans({"\n": "⏎", "\t": "⇥", " ": "␣"})
    tokens = [str(token).translate(shown)[:12] for token in data["tokens"][: MOST["tokens"]]]
    weights = data["weights"][:, :, : len(tokens), : len(tokens)].astype(np.float64)
    means = {f"layer {i + 1}, mean of the heads": weights[i].mean(0) for i in _spread(len(weights), 3)}
    heads = {
        f"layer {i + 1}": {
            f"head {h + 1}": partial(figures.matrix, weights=weights[i, h])
            for h in _spread(weights.shape[1], MOST["heads"])
        }
        for i in _spread(len(weights), MOST["layers"])
    }
    return _section(
        "Attention over the text",
        "<p class=note>Each row is a token that looks, each column one that is looked at; yellow is most.</p>"
        + _card(figures.token_matrices, means, tokens, name="attention_text", folder=folder)
        + "<p class=note>The heads.</p>"
        + _card(figures.grid, heads, name="attention_text_heads", folder=folder),
    )


def _cost(cost: Mapping[str, Any]) -> str:
    """A card for each group of numbers (parameters, FLOPs, memory, ...); with a total, a bar for each part."""
    groups = {key: _flatten(value) for key, value in cost.items() if isinstance(value, Mapping)}
    groups["other"] = [(key, value) for key, value in cost.items() if not isinstance(value, Mapping)]
    cards = []
    for group, rows in groups.items():
        parts = {key: v for key, v in rows if isinstance(v, int | float) and not re.search(r"\btotal$", key)}
        largest = max(parts.values(), default=0) or 1
        lines = ""
        for key, value in rows:
            share = f"<i style='width:{100 * parts[key] / largest:.1f}%'></i>" if key in parts else ""
            name = _text(_words(key)) + (share if len(parts) < len(rows) else "")
            kind = "" if key in parts else " class=total"
            lines += f"<tr{kind}><td>{name}<td class=n>{_text(_amount(f'{group} {key}', value))}"
        if lines:
            title = GROUPS.get(group, _words(group).capitalize())
            cards.append(f"<div class=card><h3>{_text(title)}</h3><table class=cost>{lines}</table></div>")
    return "".join(cards)


def _config(config: Mapping[str, Any]) -> str:
    rows = [f"<tr><td>{_text(key)}<td><code>{_text(json.dumps(value))}</code>" for key, value in _flatten(config)]
    table = f"<summary>All {len(rows)} keys</summary><div class=scroll><table>{''.join(rows)}</table></div>"
    return f"<details>{table}</details>" if rows else ""


def _card(draw, *args, name: str, folder: Path, kind: str = "card scroll") -> str:
    return f"<div class='{kind}'>{figures.save(draw, *args, name=name, folder=folder)}</div>"


def _section(title: str, body: str, kind: str = "") -> str:
    return f"<section><h2>{_text(title)}</h2><div class='{kind}'>{body}</div></section>" if body else ""


def _title(key: str) -> str:
    what, _, split = key.partition("_")
    titles = {"confusion": "Confusion matrix", "mistakes": "Worst mistakes", "written": "What it wrote"}
    titles["precision"] = "Precision and recall"
    return f"{titles.get(what, 'Objects')}, {_words(split)}"


def _keys(metrics: Metrics) -> list[str]:
    return list(dict.fromkeys(key for line in metrics for key in line if key != "step"))


def _series(metrics: Metrics, key: str) -> figures.Curve:
    points = [(line["step"], line[key]) for line in metrics if key in line]
    return np.array([step for step, _ in points], int), np.array([value for _, value in points], float)


def _spread(count: int, most: int) -> list[int]:
    """At most so many indices below `count`, from the first to the last."""
    return sorted({round(i) for i in np.linspace(0, count - 1, min(count, most))})


def _flatten(tree: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    leaves = []
    for key, value in tree.items():
        nested = isinstance(value, Mapping) and value
        leaves += _flatten(value, f"{prefix}{key}.") if nested else [(f"{prefix}{key}", value)]
    return leaves


def _text(value: Any) -> str:
    return html.escape(str(value))


def _words(name: str) -> str:
    return re.sub(r"[_/.]+", " ", name)


def _file(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9]+", "_", name)


def _number(value: float) -> str:
    return f"{value:,.0f}" if 1000 <= abs(value) < math.inf else f"{value:.4g}"


def _amount(what: str, value: Any) -> str:
    """A cost with the unit that its name tells: bytes by 1,024, FLOPs by 1,000, times, plain numbers."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if re.search("second|time", what):
        return f"{value:.3g} s" if value < 60 else clock(value)
    flops = re.search("flop", what, re.IGNORECASE)
    if flops or re.search("memory|bytes|cache", what):
        base, prefixes, unit = (1000, ",k,M,G,T,P,E", "FLOP") if flops else (1024, ",Ki,Mi,Gi,Ti", "B")
        prefixes = prefixes.split(",")
        power = min(int(math.log(max(value, 1), base) + 1e-9), len(prefixes) - 1)
        return f"{value / base**power:.4g} {prefixes[power]}{unit}"
    return f"{value:,}" if isinstance(value, int) else _number(value)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else {}
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path} is not a JSON object ({error}); without that file the report can be made.") from None


def _read_npz(path: Path) -> dict[str, np.ndarray]:
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            return dict(arrays)
    except (ValueError, OSError, EOFError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path} cannot be read ({error}); without that file the report can be made.") from None


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
