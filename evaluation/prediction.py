"""Predictions of a trained model for any number of inputs, for the command `predict`.

Predictions are written as JSON lines, in the order of the inputs, as they are computed.
"""

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import cached_property, partial
from itertools import chain, islice, tee
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import numpy as np

from lineage.configs.atomic import naming, regular, replacing, write_atomic
from lineage.data import Facts, Loader
from lineage.data.examples.encoded import Encoded
from lineage.data.fingerprint import fingerprint
from lineage.data.inputs import Inputs
from lineage.data.inputs.images import BOXES, Readable
from lineage.data.inputs.rows import skip
from lineage.data.loader import ExampleSource
from lineage.data.sources.parquet import write_features
from lineage.data.transforms.pillow import png
from lineage.evaluation.base import Context
from lineage.evaluation.sampling import Sampler
from lineage.models import Model
from lineage.models.convert.companions import UNUSED
from lineage.runs.folder import flatten, plain, read_json
from lineage.runs.locks import lock

FEATURES = ".npz", ".parquet"
FORMATS = ".jsonl", ".json", *FEATURES
IMAGE = re.compile(r"\d{6,}_\w+\.png")  # file name of an image in a prediction
BATCHES = 4  # number of input batches encoded and written at a time


def identity(model: Any) -> dict[str, Any]:
    """Return everything that determines the predictions of a `train.trained.Trained`, apart from the inputs.

    A folder in the layout of `transformers` has no step.
    """
    experiment, step, checksums = model.experiment, model.step, dict[str, list[int]]()
    folder = experiment.workdir / "checkpoints"
    place = folder / str(step) / "about" if folder.is_dir() else experiment.workdir
    with suppress(FileNotFoundError):  # a run in progress has deleted the checkpoint since it was read
        checksums = fingerprint([str(place)])
    config = flatten(plain(experiment.config))
    kept = {f"config.{key}": value for key, value in config.items() if not key.startswith(("mesh.", "cluster."))}
    return {"checkpoint": [step, *checksums.values()], "batch_size": model.loader.batch_size} | model.others | kept


def predictions(
    context: Context,
    variables: Any,
    inputs: Inputs,
    loader: Loader,
    *,
    start: int = 0,
    errors: dict[int, str] | None = None,
    cut: list[int] | None = None,
    skip_bad: int = 0,
    as_features: bool = False,
    helpers: Mapping[str, tuple[Model, Any]] = MappingProxyType({}),
) -> Iterator[list[dict[str, Any]]]:
    """Yield the predictions in parts, as JSON objects in which images are uint8 arrays.

    The predictions do not depend on `start`. Process i of n yields the parts i, i + n, and so on.

    Args:
        variables: model variables, with the EMA of the parameters if enabled.
        loader: batch size, and threads that read ahead.
        start: number of inputs to skip.
        errors: messages for bad inputs by index, to which new ones are added.
        cut: list to which the number of truncated inputs of each part is added.
        skip_bad: maximum number of `errors`; the predictions for these inputs are an `error`.
        as_features: whether to compute feature vectors instead of predictions.
        helpers: models of the sampler, see `Sampler`.
    """
    task, size, errors = context.task, loader.batch_size * BATCHES, {} if errors is None else errors
    facts, note = with_categories(context.facts, inputs), partial(skip, errors, skip_bad)
    sampler = Sampler(context, helpers) if task.generates and not as_features else None
    if isinstance(inputs.rows, ExampleSource):
        shape, boxes = (*facts.image_size, facts.channels), task.reads == BOXES
        inputs = replace(inputs, rows=Readable(inputs.rows, shape, boxes or task.image_size > 0, boxes, note))
    count, processes = len(inputs.rows), jax.process_count()
    firsts = range(start - start % size if start < count else count, count, size)[jax.process_index() :: processes]
    encode = partial(_encode, context, loader, sampler)
    parts = ((first, _part(inputs, first, size, encode, note)) for first in firsts)
    if sampler:
        parts, ahead = tee(parts)
        if processes == 1:
            texts = sampler.texts_of(variables, (batches for _, batches in ahead), firsts.start)
        else:  # the parts are not consecutive
            texts = chain.from_iterable(sampler.texts_of(variables, [batches], first) for first, batches in ahead)
    for first, batches in parts:
        if cut is not None:
            cut.append(batches.source.cut)
        if as_features:
            rows = context.rows(task.features, variables, batches).astype(np.float32)
            if isinstance(batches.source, Encoded):  # a long text may have several sequences
                rows = batches.source.means(rows).astype(np.float32)
            predicted = [{"features": row} for row in rows.tolist()]
        elif sampler:
            predicted = task.predict(list(islice(texts, len(batches.source))), batches.source, facts)
        else:
            predicted = task.predict(context.rows(task.outputs, variables, batches), batches.source, facts)
        for number, prediction in enumerate(predicted):
            identifiers = inputs.identifiers[first + number] if inputs.identifiers else {}
            failed = errors.get(first + number)
            predicted[number] = {**identifiers, **(prediction if failed is None else {"error": failed})}
        yield predicted[max(start - first, 0) :]


def _encode(context, loader, sampler, rows, first):
    """Return the batches of inputs, none of which may be an error; a sampler checks their prompts."""
    if not isinstance(rows, ExampleSource) and (wrong := [row for row in rows if isinstance(row, ValueError)]):
        raise wrong[0]
    batches = context.inputs(rows, loader, first)
    if sampler:
        sampler.check_prompts(batches)
    return batches


def _part(inputs, first, size, encode, note):
    """Return the batches of a part; another input replaces those that are errors or cannot be encoded."""
    rows = inputs.part(first, first + size)
    with suppress(ValueError):
        return encode(rows, first)
    errors = [_error(encode, row, number) for number, row in enumerate(rows, first)]
    sound = [row for row, error in zip(rows, errors) if not error]
    sound = sound or [row for row in inputs.part(0, size) if not _error(encode, row, 0)]
    for number, error in enumerate(errors):
        if error and sound:
            note(first + number, error)
            rows[number] = sound[0]
    return encode(rows, first)


def _error(encode, row, number):
    """Return the error of an input, None if there is none."""
    try:
        encode([row], number)
    except ValueError as error:
        return error
    return None


def with_categories(facts: Facts, inputs: Inputs) -> Facts:
    """Return the metadata with the category ids that the inputs use for the classes, 0 for labels without a class."""
    if not inputs.categories:
        return facts
    known = {UNUSED: 0, **inputs.categories}
    if missing := [name for name in facts.class_names if name not in known]:
        raise ValueError(f"The inputs have no category {missing[0]!r}: the model's classes must be among theirs.")
    return replace(facts, category_ids=tuple(known[name] for name in facts.class_names))


class Output:
    """Append-only file of predictions, which the same command continues after an interruption.

    The file PATH.about.json beside it records what the predictions were computed from. The file is locked until `write`
    has returned.

    Attributes:
        path: the .jsonl file; for other formats, the intermediate .jsonl file beside the output.
        count: number of predictions in the file.
        errors: error messages by index of the prediction.
    """

    def __init__(self, path: str, about: Mapping[str, Any]):
        """Open a file of predictions and drop a torn last line; raise ValueError if it is another command's."""
        self.final = Path(path)
        if self.final.suffix not in FORMATS:
            raise ValueError(f"--output is {path!r}: it must end with {', '.join(FORMATS[:-1])} or {FORMATS[-1]}.")
        if self.final.suffix in FEATURES and not about.get("features"):
            raise ValueError(f"--output is {path!r}: {self.final.suffix} is for --features.")
        if self.final.exists() and any(map(partial(_is_same, self.final), about.get("inputs", [()])[-1])):
            raise ValueError(f"--output is {path!r}, which is one of the inputs: choose another one.")
        self.path = self.final.with_suffix(".jsonl")
        beside, about = self.path.with_name(f"{self.path.name}.about.json"), json.loads(json.dumps(about))
        if self.final != self.path and self.final.exists() and not (self.path.exists() and self.path.stat().st_size):
            raise ValueError(f"{self.final} exists, without {self.path.name}: choose another --output.")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = file = regular(self.path).open("a+b")
        if not lock(file.fileno()):
            raise ValueError(f"another process is writing {self.path}: wait for it, or choose another --output.")
        if file.seek(0, os.SEEK_END):
            before = read_json(beside)
            if changed := [key for key in {**before, **about} if before.get(key) != about.get(key)]:
                if not before:  # it could be the file of the inputs
                    raise ValueError(f"{self.path} is not a file of predictions: choose another --output.")
                source = "" if self.final == self.path else f", from which {self.final.name} is made,"
                given = f"{self.path}{source} has predictions with other settings ({', '.join(changed[:3])})"
                raise ValueError(f"{given}: choose another --output, or delete it.")
        else:
            write_atomic(beside, json.dumps(about, indent=2))
        self.count, self.errors = 0, dict[int, str]()
        self._read()

    def _read(self):
        """Count the predictions in the file, collect their errors, and drop a torn last line."""
        self._file.seek(0)
        size = 0
        for record in self._file:
            if not record.endswith(b"\n"):
                break
            try:
                message = json.loads(record).get("error")
            except (ValueError, AttributeError, RecursionError):
                where = f"{self.path}, line {self.count + 1}"
                raise ValueError(f"{where} is damaged: delete the file to start again.") from None
            if message:
                self.errors[self.count] = message
            size, self.count = size + len(record), self.count + 1
        self._file.truncate(size)

    def write(self, parts: Iterable[list[dict[str, Any]]]) -> None:
        """Add predictions; images are written to .png files in a folder beside the file."""
        file = self._file
        try:
            for part in parts:
                lines = [self._line(number, prediction) for number, prediction in enumerate(part, self.count)]
                with naming(self.path):
                    file.write("".join(lines).encode(errors="backslashreplace"))  # lone surrogates become JSON escapes
                    file.flush()
                    os.fsync(file.fileno())
                if not (self.path.exists() and os.path.samestat(os.fstat(file.fileno()), self.path.stat())):
                    raise ValueError(
                        f"{self.path} was moved, deleted or replaced while it was written: run the command again."
                    )
                self.count += len(part)
        finally:
            with naming(self.path):  # what could not be written is written again, and fails again
                file.close()

    @cached_property
    def _folder(self) -> Path:
        """The folder of the images; raises ValueError if it has other files."""
        folder = self.path.with_suffix("")
        folder.mkdir(exist_ok=True)
        if other := next((file for file in folder.iterdir() if not IMAGE.fullmatch(file.name)), None):
            raise ValueError(f"--output is {str(self.final)!r}: its images go to {folder}, which has {other.name}.")
        return folder

    def _line(self, number, prediction):
        for name, value in prediction.items():
            if isinstance(value, np.ndarray):
                image = self._folder / f"{number:06}_{name}.png"
                image.write_bytes(png(value))  # not atomic: without its line, which follows, it is written again
                prediction = prediction | {name: str(image.relative_to(self.path.parent))}
        return line(prediction)

    def finish(self, document: Any) -> None:
        """Write the output in its final format; `document` converts the predictions to the content of a .json."""
        if self.final == self.path:
            return
        with self.path.open(encoding="utf-8") as file, replacing(self.final) as temporary:
            rows = map(json.loads, file)
            if self.final.suffix == ".parquet":
                write_features(temporary, rows)
            elif self.final.suffix == ".npz":
                vectors = [np.array(row.get("features", ()), np.float32) for row in rows]
                if not all(map(len, vectors)):
                    raise ValueError(f"--output is {str(self.final)!r}: .npz has no place for errors, unlike .parquet.")
                with temporary.open("wb") as out:
                    np.savez_compressed(out, features=np.stack(vectors))
            else:
                content = document(rows)
                entries = (", " * (number > 0) + _json(entry) for number, entry in enumerate(content))
                with temporary.open("w", encoding="utf-8") as out:
                    out.writelines([_json(content)] if isinstance(content, dict) else chain("[", entries, "]"))


def _is_same(file, name):
    """Return whether a file, which exists, also has another name."""
    return os.path.exists(name) and file.samefile(name)


def line(prediction: Mapping[str, Any]) -> str:
    """Return the JSON line of a prediction."""
    if images := [name for name, value in prediction.items() if isinstance(value, np.ndarray)]:
        raise ValueError(f"The predictions have images ({', '.join(images)}): give an --output to write them beside.")
    return _json(prediction) + "\n"


def _json(content: Any) -> str:
    """Return JSON that only escapes characters without UTF-8 encoding, such as in file names of other encodings."""
    return json.dumps(content, ensure_ascii=False).encode(errors="backslashreplace").decode()
