"""Start of a run: checks and notes, the initial state, intervals, the compiled step and the batches."""

import contextlib
import itertools
import json
import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from lineage.configs import base, schema
from lineage.configs.atomic import write_atomic, write_record
from lineage.configs.storage import is_present, local
from lineage.data import SOURCES, Tokenizer, tokenizers
from lineage.data.facts import FACTS, Facts, evaluating
from lineage.data.fingerprint import fingerprint
from lineage.data.notes import check_examples, notes
from lineage.evaluation import artifacts
from lineage.runs import data_record, folder
from lineage.runs.folder import START
from lineage.runs.progress import number
from lineage.train import distributed, expert_mixture, pretrained
from lineage.train.checkpoint import Checkpoints, clean
from lineage.train.experiment import Experiment
from lineage.train.metrics_writer import history_problem
from lineage.train.optimizer import OPTIMIZERS, SCHEDULES
from lineage.train.profiling.description import parameter_table
from lineage.train.sharding import batch_sharding, check_batch, to_mesh
from lineage.train.step import TrainState, make_train_step

# Fields of `Facts` that must not change during a run, and their names in messages.
COMPARED = {
    "begin_token": "the token before each text",
    "class_names": "the list of class names",
    "examples": "the number of examples",
    "tokens": "the number of tokens",
}


def prepare_folder(experiment: Experiment, about: Mapping[str, Any], force_config: bool) -> None:
    """Check that an experiment can start or resume in its folder, and write its config and metadata there."""
    config, workdir, done = experiment.config, experiment.workdir, folder.last_step(experiment.workdir)
    if not done:
        if not force_config:
            folder.check_results(base.resolved(config), workdir)
        folder.discard(workdir, force_config)
        experiment.source.check_files()
        for path in filter(Path.is_dir, map(Path, experiment.source.files())):
            if workdir.resolve().is_relative_to(path.resolve()):  # its files would be read as data
                raise ValueError(f"the workdir {workdir} is in the folder of the data, {path}: choose another workdir.")
        pretrained.check(experiment, force_config)  # before the data are opened
    elif done > (total := experiment.total_steps):
        allowed = f"at least {done:,}, the last step in {workdir}"
        raise ValueError(f"the length of the run is {total:,} steps: it must be {allowed}.")
    # Earlier versions wrote the config without the values of variants.
    keep_config = partial(folder.keep_config, base.resolved(config), workdir, force_config, earlier=config)
    keep_config(write=not done)  # marks a new run folder; a run that cannot be resumed keeps its files
    files = _fingerprints(experiment)
    experiment.check()
    if not done:
        check_examples(experiment.data)
    if changed := data_record.differing(files, _fingerprints(experiment)):
        raise ValueError(f"{changed[0]} changed while the data were read: start again when they do not change.")
    if experiment.tokenizer and not (workdir / tokenizers.FILE).exists():
        experiment.tokenizer.save(workdir)
    if not done:
        folder.discard_artifacts(workdir)
    artifacts.check(workdir)
    data_record.keep(files, workdir, force_config, config.teacher)
    if done and not force_config:
        check_facts(experiment.facts, workdir)
    keep_config()
    write_record(workdir / START, about)
    clean(workdir)
    probe = workdir / "checkpoints" / "probe.orbax-checkpoint-tmp"  # raises OSError if checkpoints cannot be written
    probe.mkdir(parents=True, exist_ok=True)
    probe.rmdir()


def _fingerprints(experiment):
    return fingerprint(experiment.source.files(), cache_dir=experiment.task.cache_dir)


def check_facts(facts: Facts, workdir: Path) -> None:
    """Raise ValueError if the data of a resumed run have changed in a way that fingerprints of files may not show.

    Data that user code creates may have no files. Old versions put no token before each text.
    """
    try:
        before = Facts.load(workdir / FACTS)
    except (ValueError, OSError):  # a damaged or missing file is written again
        return
    for name, label in COMPARED.items():
        old, new = getattr(before, name), getattr(facts, name)
        if old != new and old not in ((), {}):  # which earlier versions may have left out
            raise ValueError(
                f"{label} was {str(old)[:100]} in the run in {workdir}, and is now {str(new)[:100]}: choose another "
                f"workdir, or {folder.FORCE}."
            )


def check_start(experiment: Experiment) -> None:
    """Check that this process can train the experiment with the others, and save the metadata of the data."""
    config, loader = experiment.config, experiment.loader
    folder.check_shared(base.resolved(config), experiment.workdir, jax.process_index())
    check_batch(loader.batch_size, experiment.mesh, config.grad_accum_steps)
    check_batch(loader.evaluation_batch_size or loader.batch_size, experiment.mesh)
    if process := jax.process_index():  # process 0 has checked the experiment in `prepare_folder`
        experiment.check()
        if changed := data_record.changed(_fingerprints(experiment), experiment.workdir):
            raise ValueError(f"{changed[0]} of process {process} differs from that of process 0.")
    else:
        experiment.facts.save(experiment.workdir / FACTS)


def check_evaluation_data(experiment: Experiment) -> None:
    """Raise ValueError unless all processes have the same data for evaluation.

    These are the files of the evaluators' own sources and, for a trained model, those of its splits. For a run,
    `check_start` has compared the others.
    """
    if jax.process_count() == 1:
        return
    named = [evaluator.source for evaluator in experiment.evaluators.values() if evaluator.source]
    sources = [schema.build(SOURCES, schema.parse(SOURCES, text)) for text in named]
    if experiment.saved_facts is not None:
        sources.append(evaluating(experiment.source, experiment.saved_facts))
    with distributed.agreed():
        paths = [path for source in sources for path in source.files()]
        files = fingerprint(paths, cache_dir=experiment.task.cache_dir)
    first, *others = distributed.shared(files)
    for process, other in enumerate(others, 1):
        if different := sorted(path for path in {*first, *other} if first.get(path) != other.get(path)):
            differs = f"the data for evaluation of process {process} differs from that of process 0"
            raise ValueError(f"{differs}: {different[0]} is missing on one of them, or has other content.")


def start_messages(experiment: Experiment, start: int, record: Mapping[str, Any]) -> Iterator[str]:
    """Yield messages about a run that starts, or resumes after `start` steps; the record is that of its checkpoint."""
    workdir, total = experiment.workdir, experiment.total_steps
    yield f"writing to {workdir}"
    for note in start_notes(experiment, start, record.get("config", {})):
        yield f"note: {note}"
    if start:
        yield f"the run has all of its {total:,} steps" if start >= total else f"resuming from step {start:,}"
        if jax.process_index() == 0 and (problem := history_problem(workdir / folder.METRICS, record)):
            yield f"{workdir / folder.METRICS}: {problem}"


def start_notes(experiment: Experiment, start: int, before: Mapping[str, Any]) -> Iterator[str]:
    """Yield notes about the options, the data and the learning rate; `before` is the checkpoint's config, if any."""
    if not start:
        yield from base.without_effect(experiment.config)
        classes = experiment.model.data_options["num_classes"] if "label" in experiment.task.arrays else None
        yield from notes(experiment.source, experiment.data, classes)
        yield from _class_order_notes(experiment)
        yield from _unused_tokenizer_notes(experiment)
        yield from _tokenizer_notes(experiment)
    yield from _learning_rate_notes(experiment, start)
    if before and (total := experiment.steps("total", before)) != experiment.total_steps > start:
        old, new = (float(experiment.schedule_of(length)(start)) for length in (total, experiment.total_steps))
        if not math.isclose(old, new, rel_tol=1e-3):
            yield (
                f"the run had {total:,} steps and now has {experiment.total_steps:,}: the learning rate after step "
                f"{start:,} changes from {number(old)} to {number(new)}."
            )


def _class_order_notes(experiment):
    names, path = experiment.facts.class_names, experiment.config.init.path
    others = pretrained.class_names(path) if names and path else ()
    ours, theirs = ([name.lower() for name in classes] for classes in (names, others))
    if ours != theirs and sorted(ours) == sorted(theirs):
        yield (
            f"the order of the classes is {', '.join(names)}, in {path} it is {', '.join(others)}: the classifier is "
            "loaded as it is, unless init.skip leaves it out."
        )


def _unused_tokenizer_notes(experiment):
    config, chosen = experiment.config, experiment.config.tokenizer
    key, path = ("init.path", config.init.path) if config.init.path else ("teacher", config.teacher)
    if not path or experiment.tokenizer is None or chosen.name in ("bytes", "file"):  # the default, or one that is used
        return
    other = Path(local(path))
    if not is_present(other / tokenizers.FILE):
        return
    if folder.read_json(other / folder.CONFIG).get("tokenizer") != chosen.to_dict():
        yield (
            f"the tokenizer is that of {key}, {path}: tokenizer.name={chosen.name} has no effect; "
            "tokenizer=file:PATH names another one."
        )


def _tokenizer_notes(experiment):
    path, ours = experiment.config.init.path, experiment.tokenizer
    if not path or ours is None or not is_present(file := Path(local(path)) / tokenizers.FILE):
        return
    try:
        names = {id: token for token, id in Tokenizer.load(file).vocabulary.items()}
    except ValueError:  # the run does not need it
        return
    moved = sorted(id for token, id in ours.vocabulary.items() if names.get(id, token) != token)
    if moved:
        yield (
            f"the tokenizer is not that of {path}: {len(moved):,} ids stand for other tokens, the first one is "
            f"{moved[0]}; their embeddings are loaded as they are, unless init.skip leaves them out."
        )


def _learning_rate_notes(experiment, start):
    schedule, optimizer = experiment.config.schedule, experiment.config.optimizer
    warmup = experiment.steps("warmup", schedule, default=0)
    if warmup > experiment.total_steps > start:
        yield f"the warm-up has {warmup:,} steps and the run {experiment.total_steps:,}: its peak is not reached."
    factor = schedule.learning_rate
    scaled = {schedule.name: SCHEDULES[schedule.name].scales, optimizer.name: OPTIMIZERS[optimizer.name].estimates_rate}
    for name, scales in scaled.items():
        if scales and factor < 0.1:
            yield f"schedule.learning_rate is {factor:g}: {name} multiplies its own learning rate by it, usually by 1."


def initial_state(experiment: Experiment, checkpoints: Checkpoints, notify: Callable[[str], None]) -> TrainState:
    """Return the state of the newest checkpoint, or a new one, with the parameters of `init.path` and `experts` if set.

    New runs report the other models to `notify`, and write a table of the parameters to `parameters.txt`.
    """
    config, make = experiment.config, partial(experiment.state, checkpoints)
    if checkpoints.latest is not None:
        return make()
    if path := config.init.path:
        files = json.dumps(data_record.model_files(path)) if jax.process_count() > 1 else ""
        distributed.check_same(f"the model in {path}", files)
        state, message = pretrained.start_from(experiment.abstract_state, experiment.model, experiment.run.init, make)
        notify(message)
    else:
        state = make()
    if config.experts.paths:
        state, message = expert_mixture.choose(experiment, state, base_path=path)
        notify(message)
    if path or config.experts.paths:
        state = state.replace(opt_state=None)  # frees its memory before the new one is allocated
        state = state.replace(opt_state=_optimizer_state(experiment, state.params))
    table = parameter_table(experiment, state.params)
    if jax.process_index() == 0:
        write_atomic(experiment.workdir / folder.PARAMETERS, table + "\n")
    return state


def _optimizer_state(experiment: Experiment, params: Any) -> Any:
    """Return the optimizer's state before the first step; that of some optimizers contains the initial parameters."""

    def init(params):
        return experiment.make_optimizer().init(jax.tree.map(jnp.copy, params))  # arrays of its own, for donation

    return jax.jit(init, out_shardings=experiment.state_shardings.opt_state)(params)


def interval(experiment: Experiment, name: str, default: int) -> int:
    """Return an interval of the config in steps, at least 1."""
    return max(1, experiment.steps(name, default=default))


def jit_step(experiment: Experiment):
    """Return the jitted training step, (state, batch) -> (state, metrics); the old state is donated."""
    loss, total_steps, places = experiment.task.loss, experiment.total_steps, experiment.state_shardings
    parts = experiment.model, loss, experiment.optimizer, experiment.run, total_steps
    step = make_train_step(*parts, trained=experiment.trained)
    batch = batch_sharding(experiment.mesh)
    return experiment.jit(step, in_shardings=(places, batch), out_shardings=(places, None), donate_argnums=0)


def compile_step(experiment: Experiment, state: TrainState):
    """Return the compiled training step; with length buckets, it is compiled for each length on first use.

    With `jax.debug_nans`, return a jitted function, which JAX reruns operation by operation if it produces a NaN.
    """
    step = jit_step(experiment)
    if experiment.loader.buckets or jax.config.jax_debug_nans:
        return step
    return step.lower(state, jax.eval_shape(experiment.zeros)).compile()


def device_batches(experiment: Experiment, start: int) -> Iterator[dict[str, jax.Array]]:
    """Yield training batches on the devices, from step `start`; each is transferred while the previous one is used."""
    with contextlib.closing(experiment.data.train.iterate(start)) as batches:  # frees the memory shared with workers
        first = next(batches)
        length = first["tokens"].shape[1] if experiment.loader.buckets else None
        for name, like in jax.eval_shape(lambda: experiment.zeros(1, length)).items():
            if name in first and first[name].shape[1:] != like.shape[1:]:
                shape, needed = first[name].shape[1:], like.shape[1:]
                raise ValueError(f"{name} has shape {shape} in the data: it must be {needed}, as in the model.")
        ahead = experiment.with_teacher(to_mesh(first, experiment.mesh), start)
        _check_arrays(experiment, ahead, length)
        for step in itertools.count(start + 1):
            yield ahead
            ahead = experiment.with_teacher(to_mesh(next(batches), experiment.mesh), step)


def _check_arrays(experiment, batch, length):
    """Raise ValueError if the arrays of a training batch are not those that the training step is compiled for."""
    needed, owner = jax.eval_shape(lambda: experiment.zeros(length=length)), type(experiment.task).__name__
    for name, like in needed.items():
        if name not in batch:
            raise ValueError(f"The training batches have no {name}, which the `arrays` of {owner} have.")
        given, expected = (f"{array.dtype} {list(array.shape)}" for array in (batch[name], like))
        if given != expected:
            raise ValueError(f"The training batches have {name} as {given}, but the `arrays` of {owner} as {expected}.")
    if unknown := sorted(batch.keys() - needed.keys()):
        raise ValueError(f"The training batches have {', '.join(unknown)}, which the `arrays` of {owner} lack.")
