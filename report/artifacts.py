"""Sections of the report for the files in `artifacts`: examples, generated texts, attention."""

import base64
import io
import json
import math
import zipfile
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup
from matplotlib.image import imsave

from lineage.configs.atomic import regular, write_atomic
from lineage.report import figures, html
from lineage.runs.folder import SAMPLES, parse_metrics, read_json

Arrays = Mapping[str, np.ndarray]
# Maximum number of items of each kind in a report.
LIMITS = {"mistakes": 36, "pictures": 36, "boxes": 300, "images": 6, "layers": 6, "explored": 3}
LIMITS |= {"samples": 30, "texts": 100, "characters": 20_000, "confused": 12, "written": 30}
OBJECTS_IN_A_ROW = 6
MAX_BYTES = 1 << 30  # of all arrays of a file
MAX_SAMPLES = 1 << 28  # bytes of a file of samples
MAX_TEXT = 1 << 24  # bytes of an array of texts, at least 8 for each
MAX_VALUES, MAX_MATRIX = 1 << 21, 1 << 25  # of an array that is shown completely, and of a matrix or a picture
MAX_POINTS = 1 << 16  # of all curves of a chart
MAX_LENGTHS = 1000  # of inputs by whose length BLEU is shown
PICTURES = ("image", "masked", "painted")  # names of arrays [N, h, w, c]
MAX_WEIGHTS = 1_000_000  # in a view of attention; every other layer or head is dropped until the weights fit


def sections(files: Path, folder: Path) -> list[Markup]:
    """Return the sections for the `artifacts` of a run, in the order of the report; figures are saved in `folder`."""
    parts = []
    for pattern, draw in SECTIONS.items():
        for path in sorted(files.glob(pattern)):
            with html.explained(path):
                parts.append(draw(path, folder))
    return parts


def read(path: Path, max_values: int = MAX_BYTES) -> Arrays:
    """Return the arrays of a .npz file; raise ValueError if it is damaged, or if one of them has too many values."""
    regular(path)
    try:
        with zipfile.ZipFile(path) as archive:  # `np.load` would also read a file that is a single array
            size = sum(entry.file_size for entry in archive.infolist())
        if size > MAX_BYTES:
            raise ValueError(f"its arrays have {size:,} bytes")
        with np.load(path, allow_pickle=False) as file:
            arrays = dict(file)
    except Exception as error:  # archives raise exceptions of many types
        reason = " ".join(str(error).split())[:200]
        raise ValueError(f"{path} cannot be read ({reason}): move it away to write the page without it.") from None
    for name, array in arrays.items():
        size, limit = array.size, max_values
        if array.dtype.kind not in "biuf":
            size, limit = max(8 * array.size, array.nbytes), MAX_TEXT
        axes = 3 if name in PICTURES else 2
        if size > limit or math.prod(array.shape[-axes:]) > MAX_MATRIX:
            raise ValueError(f"{name} has shape {array.shape}, which is too large for a page")
    return arrays


def _confusion(path: Path, folder: Path) -> Markup:
    """Return the confusion matrix of a split, and a table of the most frequently confused pairs."""
    key, data = path.stem, read(path, MAX_VALUES)
    counts, names = data["counts"], data["class_names"].tolist()
    share = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    wrong = counts - np.diag(np.diag(counts))
    worst = [divmod(int(k), len(names)) for k in np.argsort(-wrong, axis=None, kind="stable")[: LIMITS["confused"]]]
    rows = [
        html.table_row(names[i], names[j], numbers=(f"{wrong[i, j]:,}", f"{share[i, j]:.1%}"))
        for i, j in worst
        if wrong[i, j]
    ]
    head = html.table_head("true", "predicted", numbers=("count", "of the class"))
    table = Markup("<div class=card>{}</div>").format(html.table("Confused most often", [head, *rows]))
    about = f"{np.trace(counts):,} of {counts.sum():,} correct. Colors show the share of the true class."
    alt = f"Confusion matrix of {len(names)} classes: {np.trace(counts):,} of {counts.sum():,} correct."
    data = [("true", *names), *((name, *row) for name, row in zip(names, counts.tolist()))]
    body = html.card(figures.confusion, counts, names, name=key, folder=folder, alt=alt, data=data)
    split = Markup("<div class=split>{}{}</div>").format(body, table if rows else "")
    return html.section(f"Confusion matrix, {_split(key)}", html.note(about) + split)


def _mistakes(path: Path, folder: Path) -> Markup:
    """Return the misclassified images with the highest confidence."""
    key, data = path.stem, read(path)
    tiles, names, rows = [], data["class_names"], [("true", "predicted", "probability")]
    for i, image in enumerate(data["image"][: LIMITS["mistakes"]]):
        truth, guess = (names[data[kind][i]] for kind in ("label", "prediction"))
        scale = max(1, 128 // max(image.shape[:2]))  # enlarge small images, such as digits of 8 by 8 pixels
        picture = _png(image.repeat(scale, 0).repeat(scale, 1))
        write_atomic(folder / f"{html.file_name(key)}_{i + 1:02}.png", picture)
        source = f"data:image/png;base64,{base64.b64encode(picture).decode()}"
        rows.append((str(truth), str(guess), float(data["probability"][i])))
        caption = Markup("<b><bdi>{}</bdi></b> → <bdi>{}</bdi> <small>{:.0%}</small>").format(*rows[-1])
        tile = Markup('<figure><img alt="Image {}" src="{}"><figcaption>{}</figcaption></figure>')
        tiles.append(tile.format(i + 1, source, caption))
    about = html.note(Markup("True class → predicted class and its probability. {}").format(html.download(rows, key)))
    body = about + Markup("<div class=gallery>{}</div>").format(html.join(tiles))
    return html.section(f"Most confident errors, {_split(key)}", body if tiles else Markup())


def _objects(path: Path, folder: Path) -> Markup:
    """Return images with their true boxes (dotted) and detected boxes."""
    key, data = path.stem, read(path)
    pictures, names = [], data["class_names"].tolist()
    rows: list[Sequence[Any]] = [("image", "boxes", "class", "probability", "left", "top", "width", "height")]
    for n, image in enumerate(data["image"][: LIMITS["pictures"]]):
        boxes = {kind: data[kind][data[kind][:, 0] == n][: LIMITS["boxes"], 1:] for kind in ("truth", "found")}
        pictures.append(partial(figures.objects, image=image, names=names, **boxes))
        for kind, objects in boxes.items():
            rows += [(n + 1, kind, names[int(label)], *numbers) for label, *numbers in objects.tolist()]
    shown = [pictures[start : start + OBJECTS_IN_A_ROW] for start in range(0, len(pictures), OBJECTS_IN_A_ROW)]
    about = html.note("True boxes are dotted; detected ones have their probability and class.")
    alt = f"{len(pictures)} images with {len(data['truth'])} true and {len(data['found'])} detected boxes."
    body = html.card(partial(figures.grid, side=2.0), shown, name=key, folder=folder, alt=alt, data=rows)
    return html.section(f"Objects, {_split(key)}", about + body)


def _precision(path: Path, folder: Path) -> Markup:
    """Return the precision-recall curves of a detector."""
    key, data = path.stem, read(path, MAX_POINTS)
    about = html.note("Mean over all classes, by the IoU at which a box is correct. The area under a curve is the AP.")
    curves = data["precision"]
    thresholds, recalls = np.linspace(0.5, 0.95, len(curves)), np.linspace(0, 1, curves.shape[1])
    rows = [("recall", *(f"precision at IoU {threshold:.2f}" for threshold in thresholds))]
    rows += [(recall, *column) for recall, column in zip(recalls.tolist(), curves.T.tolist())]
    alt = f"Precision by recall, with an AP of {curves[0].mean():.3f} at an IoU of 0.50."
    chart = html.card(figures.precision, curves, thresholds, recalls, name=key, folder=folder, alt=alt, data=rows)
    return html.section(f"Precision and recall, {_split(key)}", about + chart)


def _reconstructions(path: Path, folder: Path) -> Markup:
    """Return images, their visible patches, and a masked autoencoder's reconstructions at some steps.

    There is a file for each step, and the section is drawn for the last one. Only the files of the steps that are
    shown are read.
    """
    paths = sorted(path.parent.glob("painted_*.npz"))
    if path != paths[-1]:
        return Markup()
    steps = {int(paths[i].stem.partition("_")[2]): read(paths[i]) for i in _spread(len(paths), LIMITS["layers"])}
    first = next(iter(steps.values()))
    columns = {"original": first["image"], "masked": first["masked"]}
    columns |= {f"step {step:,}": arrays["painted"] for step, arrays in steps.items()}
    rows, errors = [], [("image", *columns)]
    for n, original in enumerate(first["image"][: LIMITS["pictures"]]):
        images = [pictures[n] for pictures in columns.values()]
        rows.append([partial(figures.overlay, image=image, heat=None) for image in images])
        errors.append((n + 1, *(float(np.mean((image - original) ** 2)) for image in images)))
    alt = f"{len(rows)} images, their visible patches, and their reconstructions at {html.steps(len(steps))}."
    body = html.note("The file has the mean squared error of each picture.")
    body += html.card(figures.grid, rows, list(columns), name="painted", folder=folder, alt=alt, data=errors)
    return html.section("Masked images", body)


def _samples(path: Path, folder: Path) -> Markup:
    """Return a section with the samples of the last step, unfolded, and those of earlier steps, folded."""
    steps: dict[int, list[Markup]] = defaultdict(list)
    for sample in parse_metrics(regular(path, MAX_SAMPLES)):
        texts, prompt = steps[sample["step"]], sample.get("prompt", "")
        if len(texts) < LIMITS["texts"]:
            parts = (text[: LIMITS["characters"]] for text in (prompt, sample["text"].removeprefix(prompt)))
            texts.append(Markup("<pre class=sample><b>{}</b>{}</pre>").format(*parts))
        if len(steps) > LIMITS["samples"]:
            del steps[min(steps)]
    newest = sorted(steps, reverse=True)
    shown = html.join(
        html.details(f"Step {step:,}", html.join(steps[step]), opened=step == newest[0]) for step in newest
    )
    return html.section("Samples", shown)


def _generated_texts(path: Path, folder: Path) -> Markup:
    """Return BLEU by the length of the input, and the first generated texts next to their references."""
    written = read_json(path)
    head = html.table_head("input", "generated", "reference")
    texts = [[str(text)[: LIMITS["characters"]] for text in row[:3]] for row in written["rows"][: LIMITS["written"]]]
    rows = [html.table_row(*row) for row in texts]
    shown = html.wide_table("Generated texts and their references", [head, *rows], around="card")
    about = html.note(f"BLEU {written['bleu']:.2f}, {str(written['signature'])[:1000]}.")
    alt = f"BLEU by the length of the input, {written['bleu']:.2f} for all lengths."
    data = [("shortest", "longest", "inputs", "BLEU"), *written["by_length"][:MAX_LENGTHS]]
    chart = html.card(figures.bleu_by_length, {"": data[1:]}, name=path.stem, folder=folder, alt=alt, data=data)
    return html.section(f"Generated texts, {_split(path.stem)}", about + chart + shown)


def image_attention(arrays: Arrays, folder: Path) -> Markup:
    """Return the attention of the class token, or of the mean patch if there is none, by rollout and for each layer.

    Rollout is the product over the layers of the mean head, mixed with the identity (Abnar and Zuidema, 2020,
    section 3).
    """
    weights, size = arrays["weights"][:, : LIMITS["images"]].astype(np.float64), tuple(map(int, arrays["grid"]))
    images, from_class = arrays["image"][: LIMITS["images"]].mean(-1), bool(arrays["has_class_token"])

    rollout = np.eye(weights.shape[-1])
    for layer in weights.mean(2):
        rollout = (layer + np.eye(len(layer[0]))) / 2 @ rollout
    layers = _spread(len(weights), LIMITS["layers"])
    columns = ["image", "rollout", *(f"layer {i + 1}" for i in layers)]
    rows, data = [], [("image", "row", "column", *columns[1:])]
    for n, image in enumerate(images):
        matrices = np.stack([rollout[n], *(weights[i][n].mean(0) for i in layers)])
        heats = (matrices[:, 0] if from_class else matrices.mean(1))[:, -math.prod(size) :].reshape(-1, *size)
        rows.append([partial(figures.overlay, image=image, heat=heat) for heat in (None, *heats)])
        data += [(n + 1, y + 1, x + 1, *heats[:, y, x].tolist()) for y, x in np.ndindex(*size)]
    special = [f"token {i + 1}" for i in range(weights.shape[-1] - math.prod(size))]
    views = [
        view(f"image {n + 1}", weights[:, n], special, image=_png(image), grid=size)
        for n, image in enumerate(arrays["image"][: LIMITS["explored"]])
    ]
    query = "the class token" if from_class else "the mean patch"
    body = html.note(f"Attention of {query}: yellow is the maximum, each picture on its own scale.")
    alt = f"Attention of {query} over {len(images)} images: rollout, and the mean head of {len(layers)} layers."
    body += html.card(figures.grid, rows, columns, name="attention_image", folder=folder, alt=alt, data=data)
    body += html.note("Point at a patch to see its attention weights; orange is the maximum.") + explorer(views)
    return html.section("Attention over the image", body)


def _text_attention(path: Path, folder: Path) -> Markup:
    """Return the attention explorer of a text, or of an input and its target."""
    data = read(path)
    shown = str.maketrans({"\n": "⏎", "\t": "⇥", " ": "␣"})
    tokens, inputs = ([str(token).translate(shown) for token in data.get(key, ())] for key in ("tokens", "inputs"))
    sides = {
        "attention": ("self-attention", tokens),
        "encoder": ("encoder self-attention", inputs),
        "decoder": ("decoder self-attention", tokens),
        "cross": ("cross-attention", tokens, inputs),
    }
    views = [view(name, data[key], *side) for key, (name, *side) in sides.items() if key in data]
    about = html.note("Point at a token to see its attention weights; orange is the maximum.")
    return html.section("Attention over the text", about + explorer(views) if views else Markup())


def view(
    name: str,
    weights: np.ndarray,
    queries: Sequence[str],
    keys: Sequence[str] | None = None,
    *,
    image: bytes | None = None,
    grid: tuple[int, int] = (0, 0),
) -> dict[str, Any]:
    """Return the data of one text or image for `explorer`.

    Args:
        name: label in the menu, such as "cross".
        weights: attention weights [L, H, T, S] from 0 to 1.
        queries: the T query tokens; with an image, only those before the patches.
        keys: the S key tokens; None for self-attention.
        image: a PNG whose patches, `grid` rows and columns, are the last tokens.

    Raises:
        ValueError: the weights have another shape, or are not from 0 to 1.
    """
    length = len(queries) + (math.prod(grid) if image else 0)
    if weights.ndim != 4 or weights.shape[2:] != (length, length if keys is None else len(keys)):
        raise ValueError(f"{name} has weights of shape {weights.shape}, which do not fit its tokens")
    if not (weights.min(initial=0) >= 0 and weights.max(initial=1) < 1.01):  # NaN too; rounded weights exceed 1
        raise ValueError(f"{name} has weights that are not from 0 to 1")
    layers, heads = (np.arange(size) for size in weights.shape[:2])
    while weights[0, 0].size * len(layers) * len(heads) > MAX_WEIGHTS and max(len(layers), len(heads)) > 1:
        layers, heads = (layers[::2], heads) if len(layers) > len(heads) else (layers, heads[::2])
    shown = np.round(65535 * weights[layers][:, heads]).astype("<u2")  # bytes are too coarse for many keys
    return {
        "name": name,
        "layers": (layers + 1).tolist(),
        "heads": (heads + 1).tolist(),
        "queries": list(queries),
        "keys": None if keys is None else list(keys),
        "image": image and base64.b64encode(image).decode(),
        "grid": list(map(int, grid)),
        "weights": base64.b64encode(shown.tobytes()).decode(),
    }


def explorer(views: Sequence[Mapping[str, Any]]) -> Markup:
    """Return an explorer that shows one of the views at a time, by the script `attention.js`."""
    box = Markup('<div class="card attend" data-views="{}"><noscript>This view needs JavaScript.</noscript></div>')
    return box.format(json.dumps(views, ensure_ascii=False))


def _split(key: str) -> str:
    """Return the split in a file's name, such as "test" for "mistakes_test"."""
    return html.words(key.partition("_")[2])


def _png(image: np.ndarray) -> bytes:
    """Return an image [h, w, c] in 0..1 as a PNG file."""
    buffer = io.BytesIO()
    imsave(buffer, np.clip(np.broadcast_to(image, (*image.shape[:2], 3)), 0, 1), format="png")
    return buffer.getvalue()


def _spread(count: int, limit: int) -> list[int]:
    """Return at most `limit` evenly spaced indices below `count`, with the first and the last."""
    return sorted({round(i) for i in np.linspace(0, count - 1, min(count, limit))})


# Functions that draw a file, by the pattern of its name, in the order of the report.
SECTIONS: dict[str, Callable[[Path, Path], Markup]] = {
    "confusion_*.npz": _confusion,
    "mistakes_*.npz": _mistakes,
    "objects_*.npz": _objects,
    "precision_*.npz": _precision,
    "painted_*.npz": _reconstructions,
    SAMPLES: _samples,
    "written_*.json": _generated_texts,
    "attention_image.npz": lambda path, folder: image_attention(read(path), folder),
    "attention_text.npz": _text_attention,
}
