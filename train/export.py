"""Export of a trained model: in the layout of `transformers`, or as a StableHLO program that needs only JAX."""

import contextlib
import hashlib
import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import export

from lineage.configs.atomic import write_atomic
from lineage.data import tokenizers
from lineage.models import convert
from lineage.models.convert import companions
from lineage.runs.folder import CONFIG, is_run_config, read_json
from lineage.runs.locks import locked_file
from lineage.train.experiment import Experiment
from lineage.train.step import make_forward_step

PLATFORMS = ("cpu", "cuda", "tpu")
LAST = CONFIG, "model.json"  # files without which an export cannot be loaded
OWNER = ".exported"  # file with a hash of the path of the run whose export a folder is


def write(experiment: Experiment, variables: Mapping[str, Any], kind: str, folder: Path) -> list[Path]:
    """Write a model with its variables; return the files.

    Args:
        kind: "safetensors" writes a folder that `transformers` loads, with the tokenizer; see `convert.save`.
            "stablehlo" writes `model.stablehlo`, a program with the parameters for batches of any size:
            `jax.export.deserialize(content).call` maps a dictionary of the arrays listed in `model.json` to the model's
            outputs.

    Raises:
        ValueError: the folder has files other than those of an earlier export of the run, another process is exporting
            to it, or `transformers` has no such model.
        OSError: the folder cannot be used.
    """
    owner, mark = _check_folder(folder, experiment.workdir.resolve()), folder / OWNER
    if kind == "safetensors":
        try:
            convert.config_of(experiment.model)
        except ValueError as error:
            raise ValueError(f"{error} Any model can be exported with --format=stablehlo.") from None
    variables = jax.tree.map(jnp.asarray, jax.device_get(dict(variables)))
    with _together(folder, owner) as place:
        if kind == "safetensors":
            convert.save(place, experiment.model, variables)
            companions.save_labels(place, experiment.facts.class_names, experiment.task.problem_type)
            if experiment.facts.mean:  # images
                companions.save_preprocessing(place, experiment.model, vars(experiment.task))
            if experiment.tokenizer and experiment.model.is_decoder:
                tokenizer, facts = experiment.tokenizer, experiment.facts
                ids = facts.begin_token, tokenizer.ends, _padding(experiment), facts.start_token, tokenizer.excluded
                companions.save_token_ids(place, *ids)
        else:
            _write_program(experiment, variables, place)
        if experiment.tokenizer:
            content, task, facts = experiment.tokenizer.to_str(marked=False), experiment.task, experiment.facts
            if task.generates or any(task.ends):
                first, last = (getattr(experiment.tokenizer, role) if role else None for role in task.ends)
                content = experiment.tokenizer.exported(facts.begin_token if first is None else first, last)
            write_atomic(place / tokenizers.FILE, content)
            added = {token["id"]: token["content"] for token in json.loads(content)["added_tokens"]}
            roles = {role: getattr(experiment.tokenizer, role) for role in tokenizers.SPECIAL}
            roles |= {"begin_of_text": facts.begin_token, "pad": _padding(experiment)}
            names = {role: added[id] for role, id in roles.items() if id in added}
            longest = None if facts.start_token is None else facts.sequence_length  # of an encoder-decoder's input
            companions.save_tokenizer(place, names, experiment.model, experiment.model.max_length or longest)
    return sorted(path for path in folder.iterdir() if path != mark)


def _padding(experiment: Experiment) -> int | None:
    """Return the padding token; without one, encoder-decoders pad with the end of text, as in training."""
    tokenizer, start = experiment.tokenizer, experiment.facts.start_token
    return tokenizer.end_of_text if tokenizer.pad is None and start is not None else tokenizer.pad


@contextlib.contextmanager
def _together(folder: Path, owner: str) -> Iterator[Path]:
    """Yield a temporary folder whose files are moved to `folder` if the block succeeds, `LAST` after all others.

    If the process is killed before the last file is moved, the export cannot be loaded. Raises ValueError if another
    process is exporting to the folder.
    """
    place, mark = folder / ".export.partial", folder / OWNER
    with locked_file(mark) as is_free:
        if not is_free:
            raise ValueError(f"another process is exporting to {folder}: wait for it, or choose another --output.")
        if mark.read_text(errors="replace") != owner:
            mark.write_text(owner)
        shutil.rmtree(place, ignore_errors=True)  # of a killed process
        place.mkdir()
        try:
            yield place
            paths = sorted(place.iterdir(), key=lambda path: path.name in LAST)
            (folder / paths[-1].name).unlink(missing_ok=True)  # of an earlier export
            for path in paths:
                path.replace(folder / path.name)
        finally:
            shutil.rmtree(place, ignore_errors=True)


def _check_folder(folder, workdir):
    """Raise ValueError if the folder has other files than an export of the run; return what identifies the run."""
    owner = hashlib.sha256(bytes(workdir)).hexdigest()
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"--output is {folder}, which is not a folder: choose another one.")
    is_empty = not folder.is_dir() or all(path.match(".*.partial") or path.name == OWNER for path in folder.iterdir())
    if is_empty or folder.resolve() == workdir / "export":
        return owner
    if is_run_config(read_json(folder / CONFIG)):
        raise ValueError(f"{folder} is the folder of a run: choose another --output.")
    if not (folder / OWNER).is_file() or (folder / OWNER).read_text(errors="replace") != owner:
        raise ValueError(f"{folder} has other files than an export of this run: choose another --output, or delete it.")
    return owner


def _write_program(experiment, variables, folder):
    model = experiment.model.portable()
    step = make_forward_step(model, experiment.task.forward, experiment.config.precision)
    (size,) = export.symbolic_shape("b")
    zeros = jax.eval_shape(experiment.zeros)
    inputs = {n: jax.ShapeDtypeStruct((size, *zeros[n].shape[1:]), zeros[n].dtype) for n in experiment.task.inputs}
    program = export.export(jax.jit(lambda batch: step(variables, batch)), platforms=PLATFORMS)(inputs)
    write_atomic(folder / "model.stablehlo", bytes(program.serialize()))
    arrays = {name: {"shape": ["b", *a.shape[1:]], "dtype": str(a.dtype)} for name, a in inputs.items()}
    about = {"inputs": arrays, "platforms": PLATFORMS}
    write_atomic(folder / "model.json", json.dumps(about, indent=2))
