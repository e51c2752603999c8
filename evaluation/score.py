"""Scores of files of predictions against files of references, for the command `score`."""

import hashlib
import inspect
import json
import math
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lineage.configs.registry import typed
from lineage.data.inputs import image_files
from lineage.evaluation.scorers import METRICS, OWN_KEYS, PREDICTIONS, REFERENCES, read
from lineage.metrics import translation
from lineage.runs.folder import versions

PACKAGES = ("lineage", "numpy", "scipy", "sacrebleu", "nltk")


def write_scores(
    output: str | None,
    name: str | None,
    predictions: str | None,
    references: Sequence[str] = (),
    options: Sequence[str] = (),
    command: str = "",
) -> str:
    """Write the result of `score_files` to a file, by default PREDICTIONS.METRIC.json; return a table of the scores."""
    result = score_files(name, predictions, references, options) | {"command": command}
    path = Path(output or f"{predictions}.{name}.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=2, ensure_ascii=False), encoding="utf-8")
    scores = {key: "nan" if value is None else f"{value:.4f}" for key, value in result["scores"].items()}
    widths = [max(map(len, column)) for column in (scores, scores.values())]
    rows = [f"{key:{widths[0]}}  {value:>{widths[1]}}" for key, value in scores.items()]
    return "\n".join([*rows, result["signature"], f"scores: {path}"])


def score_files(
    name: str | None, predictions: str | None, references: Sequence[str], options: Sequence[str]
) -> dict[str, Any]:
    """Return the scores of a file by a metric of `METRICS`, with everything that is needed to reproduce them.

    The options of the metric are "name=value" each; the values of a list are separated by commas.
    """
    if name not in METRICS:
        given = "missing" if name is None else repr(name)
        raise ValueError(f"--metric is {given}: it must be one of {', '.join(METRICS)}.")
    if predictions is None:
        raise ValueError("--predictions is missing: give the file to score.")
    settings = parse(name, options)
    wanted = "references" in inspect.signature(METRICS[name]).parameters
    if wanted != bool(references):
        raise ValueError(
            f"{name} {'needs' if wanted else 'has no'} references: {'give' if wanted else 'omit'} --references."
        )
    boxes, own = name == "coco", OWN_KEYS.get(name, ())
    given = read(predictions, () if boxes else (*own, *PREDICTIONS))
    columns = [read(path, () if boxes else (*own, *REFERENCES)) for path in references]
    documents = boxes or (name == "squad" and isinstance(given, dict))
    for path, column in [] if documents else [(predictions, given), *zip(references, columns)]:
        if isinstance(column, dict):
            raise ValueError(f"{path} must be a list of texts.")
        if len(column) != len(given):
            raise ValueError(f"{predictions} has {len(given)} texts and {path} {len(column)}: they must be equal.")
    scores = METRICS[name](given, *[columns] * wanted, **settings)
    files = [predictions, *references, *filter(None, [settings.get("baseline")])]
    written = {key: ",".join(map(str, value)) if isinstance(value, tuple) else value for key, value in settings.items()}
    signature = "|".join(f"{key}:{value}" for key, value in {"metric": name, **written}.items())
    return {
        "metric": name,
        "signature": scores.pop("signature", signature),
        "scores": {key: None if math.isnan(value) else float(value) for key, value in scores.items()},
        "options": settings,
        "files": {path: hashlib.sha256(_content(Path(path))).hexdigest() for path in files},
        "versions": {"python": platform.python_version(), **versions(PACKAGES)},
    }


def _content(path):
    """Return the bytes of a file, or of a folder of images the names of its files."""
    if path.is_dir():
        return "\n".join(str(file.relative_to(path)) for file in image_files(str(path))).encode()
    return path.read_bytes()


def defaults(name: str) -> dict[str, Any]:
    """Return the options of a metric with their defaults."""
    parameters = inspect.signature(METRICS[name]).parameters.values()
    found = {each.name: each.default for each in parameters if each.kind is each.KEYWORD_ONLY}
    return found | (translation.options(name) if name in translation.SACREBLEU else {})


def parse(name: str, options: Sequence[str]) -> dict[str, Any]:
    """Return all options of a metric; the given ones, "name=value", get the types of the defaults."""
    known, given = defaults(name), {}
    for option in options:
        key, _, text = option.partition("=")
        if key not in known:
            raise ValueError(f"{name} has no option {key!r}: it has {', '.join(known) or 'none'}.")
        like, where = known[key], f"the option {key} of {name}"
        if isinstance(like, tuple):
            given[key] = tuple(typed(where, part, type(like[0])) for part in text.split(","))
        else:
            given[key] = typed(where, text, type(like), optional=like is None)
    return known | given
