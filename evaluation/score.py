"""Scores of files of predictions against files of references: the command `score`.

A file has one text a line; or it is a .jsonl of texts, lists of texts, or objects that have one of them as `prediction`
or `text`, of references as `references`, `reference` or `text`; or a .json document, COCO's or SQuAD's. Tags of a
sentence are a list, or separated by spaces. Either may be gzipped.
"""

import hashlib
import inspect
import json
import math
import platform
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from lineage.data.sources.rows import read_lines
from lineage.evaluation import structured_scores as structured
from lineage.metrics import diversity, embedding, summary, translation

PREDICTIONS, REFERENCES = ("prediction", "text"), ("references", "reference", "text")  # keys of objects in a .jsonl
PACKAGES = ("lineage", "numpy", "scipy", "sacrebleu", "nltk")
Entries = Sequence[Any]  # of a file: texts, or lists of texts


def write_scores(output: str | None, name: str | None, predictions: str | None, *args: Any) -> str:
    """Writes what `score_files` gives into a file, PREDICTIONS.METRIC.json if it has no name; returns a table."""
    result = score_files(name, predictions, *args)
    path = Path(output or f"{predictions}.{name}.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=2, ensure_ascii=False), encoding="utf-8")
    scores = {key: "nan" if value is None else f"{value:.4f}" for key, value in result["scores"].items()}
    widths = [max(map(len, column)) for column in (scores, scores.values())]
    rows = [f"{key:{widths[0]}}  {value:>{widths[1]}}" for key, value in scores.items()]
    return "\n".join([*rows, result["signature"], f"scores: {path}"])


def score_files(
    name: str | None,
    predictions: str | None,
    references: Sequence[str] = (),
    options: Sequence[str] = (),
    command: str = "",
) -> dict[str, Any]:
    """The scores of a metric, with what it takes to get them again.

    Args:
        name: of `METRICS`.
        predictions, references: files; of references several, with one more of each text in each.
        options: of the metric, each "name=value"; a list's values are separated by commas.
        command: is kept beside the result.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the metric, an option or its value is unknown, a file is missing, is not what it must be, or has
            not as many texts.
    """
    if name not in METRICS:
        given = "missing" if name is None else repr(name)
        raise ValueError(f"--metric is {given}: it must be one of {', '.join(METRICS)}.")
    if predictions is None:
        raise ValueError("--predictions is missing: give the file that is to be scored.")
    settings = parse(name, options)
    wanted = "references" in inspect.signature(METRICS[name]).parameters
    if wanted != bool(references):
        raise ValueError(
            f"{name} {'needs' if wanted else 'has no'} references: {'give' if wanted else 'omit'} --references."
        )
    boxes = name == "coco"
    given = read(predictions, () if boxes else PREDICTIONS)
    columns = [read(path, () if boxes else REFERENCES) for path in references]
    if name == "squad" and isinstance(given, dict):
        given, columns = structured.by_question(given, structured.one(columns))
    for path, column in [] if boxes else [(predictions, given), *zip(references, columns)]:
        if isinstance(column, dict):
            raise ValueError(f"{path} must be a list of texts.")
        if len(column) != len(given):
            raise ValueError(f"{predictions} has {len(given)} texts and {path} {len(column)}: as many of each.")
    scores = METRICS[name](given, *[columns] * wanted, **settings)
    files = [predictions, *references, *filter(None, [settings.get("baseline")])]
    written = {key: ",".join(map(str, value)) if isinstance(value, tuple) else value for key, value in settings.items()}
    signature = "|".join(f"{key}:{value}" for key, value in {"metric": name, **written}.items())
    return {
        "metric": name,
        "signature": scores.pop("signature", signature),
        "scores": {key: None if math.isnan(value) else float(value) for key, value in scores.items()},
        "options": settings,
        "files": {path: hashlib.sha256(Path(path).read_bytes()).hexdigest() for path in files},
        "versions": {"python": platform.python_version(), **dict(_versions())},
        "command": command,
    }


def defaults(name: str) -> dict[str, Any]:
    """The options of a metric, with what they are if not given."""
    parameters = inspect.signature(METRICS[name]).parameters.values()
    found = {each.name: each.default for each in parameters if each.kind is each.KEYWORD_ONLY}
    return found | (translation.options(name) if name in translation.SACREBLEU else {})


def parse(name: str, options: Sequence[str]) -> dict[str, Any]:
    """All options of a metric, those of "name=value" as values of the defaults' types."""
    found = defaults(name)
    for option in options:
        key, _, text = option.partition("=")
        if key not in found:
            raise ValueError(f"{name} has no option {key!r}: it has {', '.join(found) or 'none'}.")
        default = defaults(name)[key]
        try:
            found[key] = _value(text, default)
        except ValueError:
            kind = type(default).__name__
            raise ValueError(f"the option {key} of {name} is {text!r}: it must be like {default!r}, {kind}.") from None
    return found


def _value(text, default):
    if isinstance(default, tuple):
        return tuple(_value(part, default[0]) for part in text.split(","))
    if isinstance(default, str):
        return text
    try:
        value = json.loads({"True": "true", "False": "false"}.get(text, text))
    except ValueError:
        value = text
    if type(default) is float and type(value) is int:
        return float(value)
    if default is not None and type(value) is not type(default):
        raise ValueError
    return value


def read(path: str, keys: Sequence[str] = ()) -> Any:
    """The entries of a file, of objects that of the first of the `keys` which they have; without keys as they are."""
    lines, suffix = read_lines(path), Path(path.removesuffix(".gz")).suffix
    if not lines:
        raise ValueError(f"{path} is empty: there is nothing to score.")
    if suffix not in (".json", ".jsonl"):
        return lines
    if suffix == ".json":
        rows = _parsed("\n".join(lines), path)
    else:
        rows = [_parsed(line, f"{path}, line {number}") for number, line in enumerate(lines, 1)]
    if not keys or isinstance(rows, dict):
        return rows
    for number, row in enumerate(rows):
        if isinstance(row, dict):
            rows[number] = row = next((row[key] for key in keys if key in row), None)
        if not isinstance(row, str) and not (isinstance(row, list) and all(isinstance(text, str) for text in row)):
            known = " or ".join(keys)
            raise ValueError(f"{path}, entry {number + 1} must be a text or texts, or an object with {known}.")
    return rows


def _parsed(text, where):
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueError(f"{where} is not JSON: {error}") from None


def _versions() -> Iterator[tuple[str, str | None]]:
    for name in PACKAGES:
        try:
            yield name, metadata.version(name)
        except metadata.PackageNotFoundError:
            yield name, None


def _sacrebleu(name, predictions, references, *, samples=0, baseline="", test="bs", **settings):
    """With a `baseline`, a file, the probability of so large a difference from it if both were equally good."""
    outputs, rows = structured.texts(predictions), structured.several(references)
    score = translation.corpus_score(name, outputs, rows, samples=samples, **settings)
    found = {name: score.score, "signature": score.signature}
    if samples > 1:
        found |= {"mean": score.mean, "interval": score.interval}
    if baseline:
        systems = {"baseline": structured.texts(read(baseline, PREDICTIONS)), "this": outputs}
        if len(systems["baseline"]) != len(outputs):
            count = len(systems["baseline"])
            raise ValueError(f"{baseline} has {count} texts and the predictions {len(outputs)}: as many of each.")
        both, found["signature"] = translation.compare(name, systems, rows, test=test, samples=samples, **settings)
        found |= {"baseline": both["baseline"].score, "p_value": both["this"].p_value}
    return found


def _d2l_bleu(predictions, references, *, order=2):
    ours, theirs = (
        [text.split() for text in structured.texts(some)] for some in (predictions, structured.several(references))
    )
    return {"d2l_bleu": translation.d2l_bleu(ours, theirs, order)}


def _rouge(
    predictions,
    references,
    *,
    kinds=("1", "2", "L", "Lsum"),
    beta=1.0,
    tokenize="ascii",
    stem=False,
    samples=1000,
    confidence=0.95,
    seed=0,
):
    """`tokenize` is "ascii", or "words" of any script."""
    tokenizers = {"ascii": partial(summary.tokens, stem=stem), "words": summary.words}
    if tokenize not in tokenizers or (stem and tokenize == "words"):
        raise ValueError(f"tokenize is {tokenize!r}, stem {stem}: it must be ascii, or words without stem.")
    if samples < 1:
        raise ValueError(f"samples is {samples}: it must be at least 1.")
    if not 0 < confidence < 1:
        raise ValueError(f"confidence is {confidence}: it must be between 0 and 1.")
    options = {"beta": beta, "tokenize": tokenizers[tokenize], "confidence": confidence, "seed": seed}
    texts, rows = structured.texts(predictions), structured.several(references)
    found = {}
    for kind, ends in summary.corpus_rouge(texts, rows, kinds, samples=samples, **options).items():
        found |= {f"rouge{kind}_{part}": value for part, value in ends["mean"]._asdict().items()}
        found |= {f"rouge{kind}_f_{end}": ends[end].f for end in ("low", "high")}
    return found


def _distinct(predictions, *, orders=(1, 2, 3)):
    tokens = [summary.words(text) for text in structured.texts(predictions)]
    return {f"distinct_{order}": diversity.distinct(tokens, order) for order in orders}


def _repetition(predictions, *, order=4):
    return {"repetition": diversity.repetition(map(summary.words, structured.texts(predictions)), order)}


def _self_bleu(predictions, *, order=4):
    return {"self_bleu": diversity.self_bleu(structured.texts(predictions), order)}


def _burstiness(predictions, *, least=3):
    """Return the burstiness of sentence lengths, and the mean of that of words that occur `least` times or more."""
    text = "\n".join(structured.texts(predictions))
    words = diversity.word_burstiness(summary.words(text), least)
    mean = float(np.mean(list(words.values()))) if words else math.nan
    return {"sentence_burstiness": diversity.sentence_burstiness(text), "word_burstiness": mean}


def _bert_score(predictions, references, *, model="", layer=-1, idf=False, baseline=""):
    """`model` is a folder, see `Encoder`, and `baseline` a file of bert-score's."""
    zero = embedding.read_baseline(baseline, layer) if baseline else None
    texts, rows, encoder = structured.texts(predictions), structured.several(references), _encoder(model, layer)
    scores = embedding.bert_score(texts, rows, encoder, idf=idf, baseline=zero)
    return {f"bert_score_{part}": float(values.mean()) for part, values in scores._asdict().items()}


def _mover_score(predictions, references, *, model="", version=1, size=1, idf=True, entropy=0.0):
    """`model` is a folder, see `Encoder`; without punctuation and what goes on a word."""
    encoder = _encoder(model, tuple(range(-5, 0)) if version == 1 else -1)
    options = {"version": version, "size": size, "idf": idf, "skip": encoder.skip(), "entropy": entropy}
    scores = embedding.mover_score(structured.texts(predictions), structured.several(references), encoder, **options)
    return {"mover_score": float(scores.mean())}


def _encoder(model, layer):
    from lineage.evaluation.encoder import Encoder

    if not model:
        raise ValueError("the option model is missing: give the folder of a checkpoint of the BERT family.")
    return Encoder(model, layer)


# (predictions, references by file, options) -> numbers by name, and a `signature` if it has one of its own; without
# `references` where there are none to compare with.
METRICS: dict[str, Callable[..., dict[str, Any]]] = {
    **{name: partial(_sacrebleu, name) for name in translation.SACREBLEU},
    "d2l_bleu": _d2l_bleu,
    "rouge": _rouge,
    "bert_score": _bert_score,
    "mover_score": _mover_score,
    "distinct": _distinct,
    "self_bleu": _self_bleu,
    "repetition": _repetition,
    "burstiness": _burstiness,
    "squad": structured.squad,
    "tagging": structured.tagging,
    "coco": structured.boxes,
}
