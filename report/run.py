"""`report.html`: one self-contained page that shows what a run did, made from the files of its workdir alone."""

import base64
import io
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
from matplotlib.image import imsave

from lineage.report import attention, figures, page
from lineage.report.page import (
    Metrics,
    box,
    card,
    file_name,
    flatten,
    keys,
    number,
    section,
    series,
    text,
    words,
    write,
)
from lineage.runs.folder import METRICS, clock, read_json, read_metrics

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
MOST = {"mistakes": 36, "images": 6, "layers": 6, "explored": 3, "samples": 30, "confused": 12, "written": 30}


def write_report(workdir: str | os.PathLike) -> Path:
    """Writes `workdir/report.html` and the pictures in it as `workdir/report/*.png`; returns the page's path.

    Reads `metrics.jsonl`, `config.json` and `artifacts/`; what is absent is left out of the page.
    Raises FileNotFoundError if `workdir` is not that of a run and ValueError, naming the file, if one is damaged.
    """
    workdir = Path(workdir)
    if not any((workdir / name).exists() for name in (METRICS, "config.json")):
        raise FileNotFoundError(f"{workdir} is not the workdir of a run: it has neither {METRICS} nor config.json.")
    metrics = read_metrics(workdir) if (workdir / METRICS).exists() else []
    artifacts = workdir / "artifacts"
    config, run, cost = map(read_json, (workdir / "config.json", artifacts / "run.json", artifacts / "cost.json"))
    arrays = {path.stem: _read_npz(path) for path in sorted(artifacts.glob("*.npz"))}
    folder = workdir / "report"
    folder.mkdir(exist_ok=True)
    for old in folder.glob("*.png"):
        old.unlink()
    name = str(run.get("config_name") or workdir.resolve().name)
    parts = [
        _header(name, run, cost, metrics),
        section("Curves", _curves(metrics, folder), "cards"),
        *(_confusion(key, data, folder) for key, data in arrays.items() if key.startswith("confusion_")),
        *(_mistakes(key, data, folder) for key, data in arrays.items() if key.startswith("mistakes_")),
        *(_objects(key, data, folder) for key, data in arrays.items() if key.startswith("objects_")),
        *(_precision(key, data, folder) for key, data in arrays.items() if key.startswith("precision_")),
        _painted({key: data for key, data in arrays.items() if key.startswith("painted_")}, folder),
        section("Samples", _samples(artifacts / "samples.jsonl")),
        *(_written(path, folder) for path in sorted(artifacts.glob("written_*.json"))),
        _image_attention(arrays["attention_image"], folder) if "attention_image" in arrays else "",
        _text_attention(arrays["attention_text"]) if "attention_text" in arrays else "",
        section("What it costs", _cost(cost), "cards"),
        section("Configuration", _config(config)),
    ]
    return write(workdir / "report.html", name, parts)


def _header(name: str, run: Mapping[str, Any], cost: Mapping[str, Any], metrics: Metrics) -> str:
    run = dict(run)
    command = f"<pre class=command>{text(run.pop('command'))}</pre>" if "command" in run else ""
    seconds, device, count = run.pop("seconds", None), run.pop("device", None), run.pop("device_count", 1)
    for told_elsewhere in ("config_name", "config"):
        run.pop(told_elsewhere, None)
    facts = [f"{count} {device}" if count != 1 else device] if device else []
    facts += [f"{key} {value}" for key, value in flatten(run)]
    tiles = [_tile(key, *series(metrics, key)) for key in keys(metrics) if key.split("/")[0] not in ("train", "time")]
    tiles = tiles or [_tile(key, *series(metrics, key)) for key in ("train/loss", "train/accuracy")]
    if metrics and seconds is not None:
        tiles.append(box("training time", clock(seconds), f"{metrics[-1]['step']:,} steps"))
    _, speed = series(metrics, "time/examples_per_second")
    if np.isfinite(speed).any():
        tiles.append(box("examples per second", number(np.nanmedian(speed)), "median"))
    if (parameters := dict(flatten(cost)).get("parameters.total")) is not None:
        tiles.append(box("parameters", f"{parameters:,}", ""))
    steps, loss = series(metrics, "train/loss")
    bad = steps[~np.isfinite(loss)]
    alert = f"<p class=alert>The training loss was not finite at step {bad[0]:,}.</p>" if bad.size else ""
    facts = "".join(f"<li>{text(fact)}</li>" for fact in facts)
    head = f"<h1>{text(name)}</h1><ul class=facts>{facts}</ul>{command}{alert}"
    return f"<header>{head}<div class=tiles>{''.join(tiles)}</div></header>"


def _tile(key: str, steps: np.ndarray, values: np.ndarray) -> str:
    finite = np.flatnonzero(np.isfinite(values))
    if not finite.size:
        return ""
    show = "{:.2%}".format if "accuracy" in key else number
    best = finite[np.argmin(values[finite]) if page.LOWER_IS_BETTER.search(key) else np.argmax(values[finite])]
    note = f"best {show(values[best])} at step {steps[best]:,}"
    return box(words(key), show(values[-1]), note if best != len(values) - 1 else f"at step {steps[-1]:,}, the best")


def _curves(metrics: Metrics, folder: Path) -> str:
    """A chart for each quantity, with a curve for each split that has it."""
    groups: dict[str, dict[str, figures.Curve]] = {name: {} for name in CURVES}
    splits = [words(split) for split in dict.fromkeys(key.split("/")[0] for key in keys(metrics)) if split != "time"]
    for key in keys(metrics):
        split, _, name = key.partition("/")
        name = key if split == "time" else name
        curve = series(metrics, key)
        if np.isfinite(curve[1]).any() and (split != "time" or name in CURVES):
            groups.setdefault(name, {})[words(split)] = curve
    charts = []
    for name, curves in groups.items():
        if curves:
            percent, title = "accuracy" in name or name == "time/mfu", CURVES.get(name, words(name).capitalize())
            draw = partial(figures.chart, percent=percent, smoothed=name != "learning_rate")
            charts.append(
                card(draw, title, curves, splits, name=f"curve_{file_name(name)}", folder=folder, kind="card")
            )
    return "".join(charts)


def _confusion(key: str, data: Mapping[str, np.ndarray], folder: Path) -> str:
    counts, names = data["counts"], data["class_names"].tolist()
    share = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    wrong = counts - np.diag(np.diag(counts))
    worst = [divmod(int(k), len(names)) for k in np.argsort(-wrong, axis=None, kind="stable")[: MOST["confused"]]]
    rows = "".join(
        f"<tr><td>{text(names[i])}<td>{text(names[j])}<td class=n>{wrong[i, j]:,}<td class=n>{share[i, j]:.1%}"
        for i, j in worst
        if wrong[i, j]
    )
    head = "<h3>Most often confused</h3><table><tr><th>truth<th>taken for<th class=n>times<th class=n>of the class"
    table = f"<div class=card>{head}{rows}</table></div>" if rows else ""
    note = f"{np.trace(counts):,} of {counts.sum():,} right. The colour is the share of the true class."
    body = card(figures.confusion, counts, names, name=file_name(key), folder=folder)
    return section(_title(key), f"<p class=note>{note}</p><div class=split>{body}{table}</div>")


def _mistakes(key: str, data: Mapping[str, np.ndarray], folder: Path) -> str:
    tiles, names = [], data["class_names"]
    for i, image in enumerate(data["image"][: MOST["mistakes"]]):
        truth, guess = (text(names[data[of][i]]) for of in ("label", "prediction"))
        scale = max(1, 128 // max(image.shape[:2]))  # a digit of 8 by 8 pixels is too small to look at
        image = image.repeat(scale, 0).repeat(scale, 1)
        picture = _png(image)
        (folder / f"{file_name(key)}_{i + 1:02}.png").write_bytes(picture)
        source = f"data:image/png;base64,{base64.b64encode(picture).decode()}"
        caption = f"<b>{truth}</b> → {guess} <small>{data['probability'][i]:.0%}</small>"
        tiles.append(f'<figure><img alt="{truth}" src="{source}"><figcaption>{caption}</figcaption></figure>')
    note = "<p class=note>Truth → prediction, and the probability that the model gave to its prediction.</p>"
    return section(_title(key), note + f"<div class=gallery>{''.join(tiles)}</div>" if tiles else "")


def _objects(key: str, data: Mapping[str, np.ndarray], folder: Path) -> str:
    """Images with the boxes of what is in them, dashed, and of what was found."""
    pictures = []
    for n, image in enumerate(data["image"]):
        boxes = {name: data[name][data[name][:, 0] == n][:, 1:] for name in ("truth", "found")}
        pictures.append(partial(figures.objects, image=image, names=data["class_names"].tolist(), **boxes))
    rows = {
        " " * start: {" " * n: picture for n, picture in enumerate(pictures[start : start + 6])}
        for start in range(0, len(pictures), 6)
    }
    note = "<p class=note>Dashed is the truth; what was found has its class and its probability.</p>"
    return section(_title(key), note + card(partial(figures.grid, side=2.0), rows, name=file_name(key), folder=folder))


def _precision(key: str, data: Mapping[str, np.ndarray], folder: Path) -> str:
    note = "<p class=note>The mean of all classes; a box counts as right from this IoU on. Below a curve is the AP.</p>"
    return section(_title(key), note + card(figures.precision, data["precision"], name=file_name(key), folder=folder))


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
    return section("Masked images", card(figures.grid, rows, name="painted", folder=folder))


def _samples(path: Path) -> str:
    """The newest step's samples open, the earlier ones behind a click."""
    steps: dict[int, str] = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            sample = json.loads(line)
        except json.JSONDecodeError:  # torn by a kill in the middle of a write
            continue
        prompt = sample.get("prompt", "")
        block = f"<pre class=sample><b>{text(prompt)}</b>{text(sample['text'].removeprefix(prompt))}</pre>"
        steps[sample["step"]] = steps.get(sample["step"], "") + block
    newest = sorted(steps, reverse=True)[: MOST["samples"]]
    return "".join(
        f"<details{' open' * (step == newest[0])}><summary>Step {step:,}</summary>{steps[step]}</details>"
        for step in newest
    )


def _written(path: Path, folder: Path) -> str:
    """BLEU by the length of the input, and the first texts beside what they should be."""
    written = read_json(path)
    rows = "".join(f"<tr><td>{'<td>'.join(map(text, row))}" for row in written["rows"][: MOST["written"]])
    table = f"<div class='card scroll'><table><tr><th>input<th>written<th>reference{rows}</table></div>"
    note = f"<p class=note>BLEU {written['bleu']:.2f}, {text(written['signature'])}.</p>"
    body = card(figures.bleu_by_length, {"": written["by_length"]}, name=file_name(path.stem), folder=folder) + table
    return section(_title(path.stem), note + body)


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
    by_image = {
        " " * n: {"image": partial(figures.overlay, image=image, heat=None), "rollout": draw(n, rollout[n])}
        | {layer: draw(n, values[n].mean(0)) for layer, values in layers.items()}
        for n, image in enumerate(images)
    }
    who = "the class token" if from_class else "the mean patch"
    special = [f"token {i + 1}" for i in range(weights.shape[-1] - math.prod(size))]
    views = [
        attention.view(f"image {n + 1}", weights[:, n], special, image=_png(image), grid=size)
        for n, image in enumerate(data["image"][: MOST["explored"]])
    ]
    return section(
        "Attention over the image",
        f"<p class=note>Where {who} looks: yellow is most, each picture on its own scale.</p>"
        + card(figures.grid, by_image, name="attention_image", folder=folder)
        + "<p class=note>Where a patch looks that is pointed at: red is most.</p>"
        + attention.explorer(views),
    )


def _text_attention(data: Mapping[str, np.ndarray]) -> str:
    shown = str.maketrans({"\n": "⏎", "\t": "⇥", " ": "␣"})
    tokens, inputs = ([str(token).translate(shown) for token in data.get(key, ())] for key in ("tokens", "inputs"))
    sides = {"attention": (tokens,), "encoder": (inputs,), "decoder": (tokens,), "cross": (tokens, inputs)}
    views = [attention.view(name, data[name], *side) for name, side in sides.items() if name in data]
    note = "<p class=note>Where a token looks that is pointed at: red is most.</p>"
    return section("Attention over the text", note + attention.explorer(views) if views else "")


def _cost(cost: Mapping[str, Any]) -> str:
    """A card for each group of numbers (parameters, FLOPs, memory, ...); with a total, a bar for each part."""
    groups = {key: flatten(value) for key, value in cost.items() if isinstance(value, Mapping)}
    groups["other"] = [(key, value) for key, value in cost.items() if not isinstance(value, Mapping)]
    cards = []
    for group, rows in groups.items():
        parts = {key: v for key, v in rows if isinstance(v, int | float) and not re.search(r"\btotal$", key)}
        largest = max(parts.values(), default=0) or 1
        lines = ""
        for key, value in rows:
            share = f"<i style='width:{100 * parts[key] / largest:.1f}%'></i>" if key in parts else ""
            name = text(words(key)) + (share if len(parts) < len(rows) else "")
            kind = "" if key in parts else " class=total"
            lines += f"<tr{kind}><td>{name}<td class=n>{text(_amount(f'{group} {key}', value))}"
        if lines:
            title = GROUPS.get(group, words(group).capitalize())
            cards.append(f"<div class=card><h3>{text(title)}</h3><table class=cost>{lines}</table></div>")
    return "".join(cards)


def _config(config: Mapping[str, Any]) -> str:
    rows = [f"<tr><td>{text(key)}<td><code>{text(json.dumps(value))}</code>" for key, value in flatten(config)]
    table = f"<summary>All {len(rows)} keys</summary><div class=scroll><table>{''.join(rows)}</table></div>"
    return f"<details>{table}</details>" if rows else ""


def _title(key: str) -> str:
    what, _, split = key.partition("_")
    titles = {"confusion": "Confusion matrix", "mistakes": "Worst mistakes", "written": "What it wrote"}
    titles["precision"] = "Precision and recall"
    return f"{titles.get(what, 'Objects')}, {words(split)}"


def _png(image: np.ndarray) -> bytes:
    """An image [h, w, c] in 0..1 as a file."""
    buffer = io.BytesIO()
    imsave(buffer, np.clip(np.broadcast_to(image, (*image.shape[:2], 3)), 0, 1), format="png")
    return buffer.getvalue()


def _spread(count: int, most: int) -> list[int]:
    """At most so many indices below `count`, from the first to the last."""
    return sorted({round(i) for i in np.linspace(0, count - 1, min(count, most))})


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
    return f"{value:,}" if isinstance(value, int) else number(value)


def _read_npz(path: Path) -> dict[str, np.ndarray]:
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            return dict(arrays)
    except (ValueError, OSError, EOFError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path} cannot be read ({error}); without that file the report can be made.") from None
