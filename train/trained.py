"""Use of trained models for predictions, features and text generation, without the training data."""

import contextlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import jax
import numpy as np
from ml_collections import ConfigDict

from lineage.configs import adoption, base, cli, schema
from lineage.configs.run import Mesh
from lineage.configs.storage import is_remote, local
from lineage.data import SOURCES, Facts, Loader
from lineage.data.facts import FACTS, evaluating
from lineage.data.fingerprint import fingerprint
from lineage.data.inputs import Inputs, from_files, from_memory, from_source, is_source
from lineage.data.inputs.rows import skip
from lineage.data.sources.folder import ImageFiles
from lineage.data.sources.tables import CSV
from lineage.evaluation import prediction
from lineage.evaluation.likelihood import LanguageModel
from lineage.evaluation.sampling import Sampler
from lineage.models import EXAMPLES, Model, convert, num_parts
from lineage.runs import data_record, remote
from lineage.runs.folder import CONFIG, check_config, plain
from lineage.runs.process import for_terminal, say
from lineage.train import distributed, expert_mixture, pretrained, sharding
from lineage.train.experiment import Experiment
from lineage.train.preparation import check_evaluation_data


class Trained:
    """Trained model of an experiment.

    Attributes:
        experiment: the experiment, with the metadata of its training data.
        original: variables of the model, with the moving average of the parameters if one is kept.
        step: number of training steps.
        context: model, task and metadata, for evaluators and predictions.
        experts: workdirs of the runs of which the model is a mixture, if it is one.
    """

    def __init__(self, experiment: Experiment, original: dict[str, Any], step: int = 0, experts: Sequence[str] = ()):
        self.experiment, self.original, self.step, self.experts = experiment, original, step, experts
        self.context = experiment.context()

    @cached_property
    def variables(self) -> dict[str, Any]:
        """The variables of the model, quantized if the config enables it."""
        return self.experiment.quantized(self.original)

    def evaluate(self) -> dict[str, float]:
        """Return the metrics of the evaluators of a run; print a note if its local data files have changed."""
        experiment, changed = self.experiment, []
        with contextlib.suppress(OSError, ValueError):  # the training data are not needed
            files = fingerprint(self._data_files(), cache_dir=experiment.task.cache_dir)
            changed = data_record.changed(files, experiment.workdir)
        if changed and jax.process_index() == 0:
            more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
            say(f"note: since the run in {experiment.workdir} began, {', '.join(changed[:3])}{more} changed")
        check_evaluation_data(experiment)
        metrics = experiment.evaluation()(self.variables)
        data, before = vars(experiment).get("evaluation_data"), experiment.saved_facts.examples  # None if not read
        for split, count in data.facts.examples.items() if data and jax.process_index() == 0 else ():
            if count != before.get(split, count):
                say(f"note: the split {split} has {count:,} examples and had {before[split]:,} when the run began")
        return metrics

    def _data_files(self):
        """Return the paths of the local data, without those of the training split if it was deleted."""
        source = self.experiment.source
        try:
            paths = source.files()
        except FileNotFoundError:
            paths = evaluating(source, self.experiment.saved_facts).files()
        return [path for path in paths if not is_remote(path)]

    def predict(self, inputs: Inputs | Sequence[Any]) -> list[dict[str, Any]]:
        """Return the prediction for each input, as the command `predict` writes it.

        Args:
            inputs: result of the method `inputs`, or a list of texts, pairs of texts, lists of words, pairs (question,
                context), or images (paths, or arrays uint8 [h, w, c]).
        """
        return [row for part in self.predictions(inputs) for row in part]

    def embed(self, inputs: Inputs | Sequence[Any]) -> np.ndarray:
        """Return the feature vectors float32 [N, D] of images, or of texts by an encoder (see `predict`)."""
        rows = [row["features"] for part in self.predictions(inputs, as_features=True) for row in part]
        return np.array(rows, np.float32)

    def generate(self, prompt: str) -> list[str]:
        """Return `sampling.num_samples` continuations (at least one) of a prompt, or outputs for an input."""
        if not isinstance(prompt, str):
            raise ValueError(f"prompt is {repr(prompt)[:60]}: it must be a text.")
        return self.sampler.write(self.variables, prompt)

    def predictions(self, inputs: Inputs | Sequence[Any], **options: Any) -> Iterator[list[dict[str, Any]]]:
        """Yield the predictions in parts; the options are those of `prediction.predictions`."""
        if not isinstance(inputs, Inputs):
            inputs = from_memory(inputs, self.experiment.task.reads, self.experiment.facts.channels)
        options["helpers"] = self.helpers
        parts = prediction.predictions(self.context, self.variables, inputs, self.loader, **options)
        return self._of_all_processes(parts, **options) if jax.process_count() > 1 else parts

    def _of_all_processes(self, parts, start=0, errors=None, skip_bad=0, **_):
        """Yield the predictions of all processes in the order of the inputs; add all of their errors to `errors`."""
        errors = {} if errors is None else errors
        for part in distributed.in_turns(parts):
            for number, row in enumerate(part, start):
                if "error" in row:
                    skip(errors, skip_bad, number, ValueError(row["error"]))
            start += len(part)
            yield part

    def write_predictions(self, inputs: Inputs, path: str, about: Mapping[str, Any], **options: Any) -> None:
        """Write predictions to a file (see `prediction.Output`) or print them, in the first process only.

        Args:
            path: path of the file, which may be remote; "": print the objects.
            about: metadata that must match to continue an existing file.
            options: options of `predictions`.
        """
        distributed.check_same("the model or its inputs", json.dumps(about, sort_keys=True))
        _ = self.helpers  # raise the errors of `sampling.draft` before a file is written
        with remote.written("" if jax.process_index() else path) as place:
            with distributed.agreed():
                output = prediction.Output(place, about) if place else None
            progress = distributed.shared({"start": output.count, "errors": output.errors} if output else {})[0]
            cut: list[int] = []
            parts = self.predictions(inputs, cut=cut, **progress, **options)
            if output:
                output.write(parts)
            else:
                for part in parts:
                    if not path:
                        print(for_terminal("".join(map(prediction.line, part))), end="", flush=True)
            truncated = sum(distributed.shared(sum(cut)))
            if output:
                output.finish(self.experiment.task.document)
        if truncated and jax.process_index() == 0:
            longest = f"{self.experiment.facts.sequence_length} tokens, task.sequence_length"
            say(f"note: {truncated:,} inputs are truncated to {longest}")
        if output:
            bad = f" ({len(progress['errors'])} of them errors)" * bool(progress["errors"])
            say(f"{output.count} predictions{bad}: {path}")

    def inputs(
        self, text: str | os.PathLike | None, split: str = "", columns: Sequence[str] = (), bad: int = 0
    ) -> tuple[Inputs, dict[str, Any]]:
        """Return inputs for predictions, and the fingerprints of their files.

        Args:
            text: a file or folder (see `from_files`) or a source, such as "labels:PATH"; None: the source of the run.
                Quotes in a .csv or .tsv mean what they mean in the source of the run, if it is one of these.
            split: split of a source that has several.
            columns, bad: columns and number of bad rows of a file (see `from_files`).
        """
        source, kind = self.experiment.source, self.experiment.task.reads
        if text is not None and not is_source(text := os.fspath(text)):
            if split:
                raise ValueError(f"--split is {split!r}: {text} is a file or folder, and only sources have splits.")
            # Files are read after their fingerprints are taken, as they could change meanwhile. Of images, which are
            # read later, the modification times are checked then. A folder may also have the output.
            listed = text if Path(text).exists() else text.partition(",")[0]  # after the comma is a folder of images
            files = fingerprint([] if Path(local(text, ())).is_dir() else [listed])
            quotes = source.quotes if isinstance(source, CSV) else True
            inputs = from_files(text, kind, columns, self.experiment.facts.channels, bad, quotes)
            images = inputs.rows.files if isinstance(inputs.rows, ImageFiles) else ()
            return inputs, files | fingerprint(map(str, images))
        if text not in (None, source.name):
            source = schema.build(SOURCES, schema.parse(SOURCES, text))
        if columns:
            given = f"--columns={','.join(columns)} is for files"
            raise ValueError(f"{given}: the inputs are those of the source {source.name!r}, which names its columns.")
        files = fingerprint(source.files())
        return from_source(source.read(kind), kind, split), files

    @property
    def loader(self) -> Loader:
        """Loader with the evaluation batch size, rounded up to a multiple of the devices, and prefetching threads."""
        loader, parts = self.experiment.loader, num_parts(self.experiment.mesh, EXAMPLES)
        size = loader.evaluation_batch_size or loader.batch_size
        return Loader(-(-size // parts) * parts, threads=max(loader.threads, loader.workers))

    @property
    def others(self) -> dict[str, dict[str, str]]:
        """The files, with their SHA-256, of each other model that takes part in predictions."""
        sampling = self.experiment.config.sampling
        paths = {f"sampling.{role}": sampling[role] for role in ("draft", "contrast")} | {p: p for p in self.experts}
        return {name: data_record.model_files(path) for name, path in paths.items() if path}

    @cached_property
    def sampler(self) -> Sampler:
        return Sampler(self.context, self.helpers)

    @cached_property
    def helpers(self) -> dict[str, tuple[Model, Any]]:
        """The models of `sampling.draft` and `sampling.contrast`, with their variables."""
        models, config = {}, self.experiment.config
        for role in ("draft", "contrast"):
            if folder := config.sampling[role]:
                if not adoption.is_run(local(folder)):
                    raise ValueError(f"sampling.{role} is {folder}: it must be the folder of a run.")
                adoption.check_imports(local(folder))
                quantized = {"weights": config.weights} if config.weights else {}
                other = load(folder, changes=quantized, alone=self.experiment.devices is not None)
                ours, theirs = (model.context.tokenizer and model.context.tokenizer.to_str() for model in (self, other))
                if ours != theirs:
                    where = self.experiment.workdir
                    raise ValueError(f"sampling.{role} is {folder}: its tokenizer differs from that of {where}.")
                models[role] = other.experiment.model, other.variables
        return models


def load(
    path: str | Path,
    *,
    task: str = "",
    checkpoint: Literal["latest", "best"] = "latest",
    changes: Mapping[str, Any] = MappingProxyType({}),
    force_config: bool = False,
    alone: bool = False,
) -> Trained:
    """Return the trained model in a folder; see `lineage.load` for the arguments, and `restore` for `alone`."""
    folder = Path(local(path))
    if adoption.is_run(folder):
        if task:
            raise ValueError(f"task is {task!r}: it must be empty for a run, whose task is known.")
        return restore(folder, checkpoint, changes, force=force_config, alone=alone)
    config, devices = with_changes(adoption.config_of(folder, task), changes), jax.local_devices() if alone else None
    if checkpoint != "latest":
        raise ValueError(f"checkpoint is {checkpoint!r}: it must be 'latest' for {folder}, which is not a run.")
    model, variables = convert.load(folder)
    experiment = Experiment(config, folder, devices, saved_facts=Facts())
    experiment = replace(experiment, saved_facts=pretrained.facts_of(folder, experiment.task, model))
    _check_model(experiment, variables, changes)
    places = sharding.shardings(variables, experiment.sharding_rules, experiment.mesh)
    return Trained(experiment, jax.device_put(variables, places))


def _check_model(experiment, variables, changes):
    """Raise ValueError if the model in a folder in the layout of `transformers` cannot perform the task."""
    folder, task, model = experiment.workdir, experiment.task, experiment.model
    if task.head and model.has_heads and not {*task.needs} & {*model.outputs}:
        given = f"{folder} has a model with the outputs {' and '.join(model.outputs)}, not {' or '.join(task.needs)}"
        raise ValueError(f"{given}: train it first, as --config=finetune:{task.name} does with --config.init.path.")
    task.check_model(model)
    if any(key.partition(".")[0] == "model" for key in changes):
        pretrained.check_complete(experiment, variables)


def language_model(path: str | Path) -> LanguageModel:
    """Return the causal language model of a run or of a folder in the layout of `transformers`, for likelihoods."""
    task = "" if adoption.is_run(local(path)) else "causal_lm"
    model = load(path, task=task)
    if model.context.tokenizer is None:
        raise ValueError(f"{path} has no tokenizer: likelihoods need a causal language model.")
    begin = model.experiment.facts.begin_token
    return LanguageModel(model.experiment.model, model.variables, model.context.tokenizer, begin)


def with_changes(config: ConfigDict, changes: Mapping[str, Any]) -> ConfigDict:
    """Override the config of a trained model, and reset its mesh to the devices of this machine."""
    if not (isinstance(changes, Mapping) and all(isinstance(key, str) for key in changes)):
        raise ValueError(f"changes is {repr(changes)[:60]}: it must be a dictionary of config keys and their values.")
    config.mesh.update(vars(Mesh()))
    cli.override(config, changes)
    return config


def restore(
    folder: Path,
    checkpoint: str = "latest",
    changes: Mapping[str, Any] = MappingProxyType({}),
    *,
    file: str | None = None,
    force: bool = False,
    prompted: bool = False,
    alone: bool = False,
) -> Trained:
    """Return the model of a run, without opening the data.

    If some of the changes are of `config.experts`, the mixture of experts is chosen, which may open the data.

    Args:
        checkpoint: "latest" or "best".
        changes: config keys with their values.
        file: name or path of a config to use instead of that of the run.
        force: accept changed keys on which the training depends, and another tokenizer.
        prompted: whether experts are chosen for `sampling.prompt` instead of the training data.
        alone: whether to use only the devices of this process instead of those of all processes.
    """
    with distributed.agreed():
        config = with_changes(cli.load(file or str(folder / CONFIG))[0], changes)
        facts = Facts.load(folder / FACTS)
        if not force:
            check_config(base.resolved(config), folder, earlier=config)
            data_record.check(folder)
        devices = jax.local_devices() if alone else None
        experiment = Experiment(config, folder, devices, saved_facts=facts)
    state, experts = experiment.restore(checkpoint), ()
    if not alone:
        distributed.check_same("the config or the checkpoint", f"{int(state.step)} {plain(config)}")
    if any(key.startswith("experts.") for key in changes):
        prompt = config.sampling.prompt if prompted else None
        state, message = expert_mixture.choose(experiment, state, prompt, folder)
        experts = tuple(filter(None, (*config.experts.paths, config.experts.classifier)))
        say(message)
    return Trained(experiment, state.variables(average=True), int(state.step), experts)
