"""Scores of files of predictions against files of references, for the command `score`."""

import hashlib
import inspect
import json
import math
import platform
from collections.abc import Callable, Sequence
from itertools import compress
from pathlib import Path
from typing import Any

from lineage.configs.atomic import check_output, write_output
from lineage.configs.registry import typed
from lineage.data.sources.folder import image_files
from lineage.evaluation.likelihood import LanguageModel
from lineage.evaluation.records import check_same_inputs, place, source_options
from lineage.evaluation.scorers import METRICS
from lineage.metrics import translation
from lineage.runs.provenance import versions

PACKAGES = ("lineage", "numpy", "scipy", "sacrebleu", "nltk")


def write_scores(
    output: str,
    name: str | None,
    predictions: str | None,
    references: Sequence[str] = (),
    options: Sequence[str] = (),
    command: str = "",
    load: Callable[[str], LanguageModel] | None = None,
) -> str:
    """Write the result of `score_files` to a file; return a table of the scores."""
    check_output(output)  # before the computation
    result = score_files(name, predictions, references, options, load) | {"command": command}
    path = Path(output)
    if path.exists() and any(path.samefile(place(file)) for file in result["files"]):
        raise ValueError(f"--output is {output}, which is one of the files to score: choose another one.")
    write_output(path, json.dumps(result, indent=2, ensure_ascii=False))
    scores = {key: _shown(value) for key, value in result["scores"].items()}
    widths = [max(map(len, column)) for column in (scores, scores.values())]
    rows = [f"{key:{widths[0]}}  {value:>{widths[1]}}" for key, value in scores.items()]
    return "\n".join([*rows, result["signature"], f"scores: {path}"])


def _shown(value):
    """Return a score with four decimals, or three significant digits if it is below 0.001."""
    if value is None:
        return "nan"
    return f"{value:.3g}" if 0 < abs(value) < 0.001 else f"{value:.4f}"


def score_files(
    name: str | None,
    predictions: str | None,
    references: Sequence[str],
    options: Sequence[str],
    load: Callable[[str], LanguageModel] | None = None,
) -> dict[str, Any]:
    """Return the scores of a file by a metric of `METRICS`, with everything needed to reproduce them.

    Each option of the metric is "name=value"; the values of a list are separated by commas. `load` opens the language
    model of a metric that needs one. Predictions that are errors are skipped with their references, and counted.
    """
    if name not in METRICS:
        given = "missing" if name is None else repr(name)
        raise ValueError(f"--metric is {given}: it must be one of {', '.join(METRICS)}.")
    if predictions is None:
        raise ValueError("--predictions is missing: give the file to score.")
    metric, settings = METRICS[name], parse(name, options)
    wanted = needs_references(name)
    if wanted != bool(references):
        needs, action = ("needs", "give") if wanted else ("has no", "omit")
        raise ValueError(f"{name} {needs} references: {action} --references.")
    given, columns, errors = _entries(metric, predictions, references)
    model = {}
    if metric.needs_model:
        if not settings["model"] or not load:
            raise ValueError(f"--model is missing: {name} needs a causal language model, of a run or a folder.")
        model = {"model": load(settings["model"])}
    entries = (given, columns) if wanted else (given,)
    scores = metric.compute(*entries, **settings | model) | ({"errors": errors} if errors else {})
    files = [predictions, *references, *filter(None, [settings.get("baseline")])]
    written = {key: ",".join(map(str, value)) if isinstance(value, tuple) else value for key, value in settings.items()}
    signature = "|".join(f"{key}:{value}" for key, value in {"metric": name, **written}.items())
    return {
        "metric": name,
        "signature": scores.pop("signature", signature),
        "scores": {key: float(value) if math.isfinite(value) else None for key, value in scores.items()},
        "options": settings,
        "files": {path: hashlib.sha256(_content(Path(place(path)))).hexdigest() for path in files},
        "versions": {"python": platform.python_version(), **versions(PACKAGES)},
    }


def _entries(metric, predictions, references):
    """Return the entries of the predictions, those of each file of references, and the number of errors left out."""
    read_predictions, read_references = metric.readers
    options = source_options(predictions)
    given, columns = read_predictions(predictions), [read_references(path, options=options) for path in references]
    if isinstance(given, metric.unpaired):
        return given, columns, 0
    for path, column in [(predictions, given), *zip(references, columns)]:
        if isinstance(column, dict):
            other = ", or --predictions a .json of answers by id" if dict in metric.unpaired else ""
            raise ValueError(f"{path} has a JSON object: it must be a list of texts{other}.")
        if len(column) != len(given):
            raise ValueError(f"{predictions} has {len(given)} texts and {path} {len(column)}: they must be equal.")
        if not given:
            raise ValueError(f"{predictions} is empty: there is nothing to score.")
        if column is not given:
            check_same_inputs(predictions, path, options)
    sound = [entry is not None for entry in given]
    if not any(sound):
        raise ValueError(f"{predictions} has errors only: there is nothing to score.")
    given, *columns = (list(compress(column, sound)) for column in (given, *columns))
    return given, columns, sound.count(False)


def check(metric: str, where: str) -> None:
    """Raise ValueError unless a text is the name of a metric of `METRICS`, followed by its options, if any."""
    name, *options = metric.split() or [""]
    if name not in (known := [name for name, declared in METRICS.items() if not declared.needs_model]):
        raise ValueError(f"{where} has {metric!r}: it must begin with one of {', '.join(known)}.")
    parse(name, options)


def score_texts(metric: str, outputs: list[str], references: list[str]) -> dict[str, float]:
    """Return the values of a metric with its options, such as "rouge kinds=1,2", for texts with one reference each."""
    name, *options = metric.split()
    entries = (outputs, [references]) if needs_references(name) else (outputs,)
    values = METRICS[name].compute(*entries, **parse(name, options))
    return {key: float(value) for key, value in values.items() if key != "signature"}


def needs_references(name: str) -> bool:
    """Return whether a metric compares the predictions with references."""
    return "references" in inspect.signature(METRICS[name].compute).parameters


def _content(path):
    """Return the bytes of a file, or the file names of a folder of images."""
    if path.is_dir():
        return "\n".join(str(file.relative_to(path)) for file in image_files(str(path))).encode()
    return path.read_bytes()


def defaults(name: str) -> dict[str, Any]:
    """Return the options of a metric with their defaults."""
    parameters = inspect.signature(METRICS[name].compute).parameters.values()
    options = {one.name: one.default for one in parameters if one.kind is one.KEYWORD_ONLY}
    return options | (translation.options(name) if name in translation.SACREBLEU else {})


def parse(name: str, options: Sequence[str]) -> dict[str, Any]:
    """Return all options of a metric; the given ones, "name=value", are converted to the types of the defaults."""
    known, given = defaults(name), {}
    for option in options:
        key, _, text = option.partition("=")
        if key not in known:
            raise ValueError(f"{name} has no option {key!r}: it has {', '.join(known) or 'none'}.")
        like, where = known[key], f"the option {key} of {name}"
        if isinstance(like, tuple):
            given[key] = tuple(typed(where, part, type(like[0])) for part in text.split(","))
        elif key == "tokenize":  # of sacreBLEU, whose tokenizer "none" is not None, its default
            given[key] = text
        else:
            given[key] = typed(where, text, type(like), optional=like is None)
    return known | given
