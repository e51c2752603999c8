"""Interactive attention maps: choose a layer and a head, then hover over a token or an image patch."""

import base64
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from lineage.report.html import resource

MAX_WEIGHTS = 1_000_000  # of a view; of more, every other layer or head is left out until they fit


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
    """
    layers, heads = (np.arange(size) for size in weights.shape[:2])
    while weights[0, 0].size * len(layers) * len(heads) > MAX_WEIGHTS and max(len(layers), len(heads)) > 1:
        layers, heads = (layers[::2], heads) if len(layers) > len(heads) else (layers, heads[::2])
    shown = np.round(255 * weights[layers][:, heads]).astype(np.uint8)
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


def explorer(views: Sequence[Mapping[str, Any]]) -> str:
    """Return the HTML of an explorer that shows one of the views at a time."""
    content = json.dumps(views, ensure_ascii=False).replace("<", "\\u003c")
    data = f'<div class="card attend"><script type="application/json">{content}</script></div>'
    return f"{data}<script>{resource('attention.js')}</script>"
