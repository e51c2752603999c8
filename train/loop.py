"""The training loop."""

import contextlib
import itertools
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from lineage.configs.atomic import write_atomic
from lineage.data.content import FACTS
from lineage.evaluation import artifacts
from lineage.evaluation.sampling import Sampler
from lineage.runs import folder, remote
from lineage.runs.folder import StopSignal, plain
from lineage.runs.locks import locked
from lineage.train import distributed, expert_mixture, pretrained
from lineage.train.checkpoint import Checkpoints
from lineage.train.experiment import Experiment
from lineage.train.metrics_writer import Averages, MetricsWriter, ProgressBar
from lineage.train.preparation import prepare_folder, start_notes
from lineage.train.profiling import Throughput, out_of_memory_explained, resources
from lineage.train.profiling.description import parameter_table
from lineage.train.profiling.trace import Trace
from lineage.train.sharding import batch_sharding, check_batch, to_mesh
from lineage.train.step import TrainState, make_train_step


class Preempted(Exception):
    """Exception raised when a run was stopped by a signal after saving its state."""


def train(
    config: ConfigDict,
    workdir: str | os.PathLike,
    *,
    about: Mapping[str, Any] = MappingProxyType({}),
    devices: Sequence[jax.Device] | None = None,
    force_config: bool = False,
    profile: tuple[int, int] | None = None,
) -> dict[str, float]:
    """Train to the end, from the newest checkpoint in `workdir` if there is one; return the last evaluation.

    A run that was killed at any moment and is started again ends with the same parameters, bit for bit.

    Args:
        workdir: folder of the run; it may be remote, see `lineage.runs.remote`.
        about: metadata of the run, such as its command, which is kept in `run.json` and shown in the report.
        devices: devices to train on; None: all.
        force_config: accept a folder that holds a run of another config.
        profile: first and last step to trace into `workdir/profile`, see `Trace`.

    Raises:
        Preempted: the run was stopped by a signal; its state is saved.
        FloatingPointError: the loss or the gradient is not finite; the last good checkpoint is kept.
        MemoryError: the device has too little memory.
        ValueError, OSError: the config, the data, a checkpoint or the disk has a problem; the message says which.
    """
    memory: dict[str, int] = {}
    with contextlib.ExitStack() as kept, out_of_memory_explained(memory):
        with distributed.agreed():
            copy = kept.enter_context(remote.opened(workdir, training=True, primary=jax.process_index() == 0))
        distributed.check_same(f"$LINEAGE_CACHE must be shared: the copy of {workdir}", remote.holder(workdir))
        workdir = copy
        folder.make(workdir)
        with distributed.agreed():
            experiment = Experiment(config, workdir, devices)
            if jax.process_index() == 0:
                kept.enter_context(locked(workdir))
                prepare_folder(experiment, about, force_config)
        with distributed.agreed():
            folder.check_shared(config, workdir, jax.process_index())
            loader = experiment.loader
            check_batch(loader.batch_size, experiment.mesh, config.grad_accum_steps)
            check_batch(loader.evaluation_batch_size or loader.batch_size, experiment.mesh)
            experiment.check()
            known = experiment.tokenizer
            if jax.process_index() == 0:
                experiment.facts.save(workdir / FACTS)
        distributed.check_same("tokenizer", known.to_str() if known else "")
        throughput = Throughput(experiment)
        memory |= throughput.budget.memory["training"]
        with contextlib.ExitStack() as stack:
            loop = TrainingLoop(experiment, throughput, stack, profile)
            for step in range(loop.start + 1, loop.total + 1):
                loop.run(step)
        return loop.finish(about)


class TrainingLoop:
    """The steps of one run; `run` does one step and whatever is due after it.

    Attributes:
        start: number of steps that were completed before.
        total: number of steps of the run.
        state: after the last step.
        evaluated: metrics of the last evaluation.
    """

    def __init__(
        self,
        experiment: Experiment,
        throughput: Throughput,
        stack: contextlib.ExitStack,
        profile: tuple[int, int] | None = None,
    ):
        config, workdir = experiment.config, experiment.workdir
        primary = jax.process_index() == 0
        self.experiment, self.throughput = experiment, throughput
        stack.callback(throughput.close)
        self.checkpoints = stack.enter_context(Checkpoints(workdir, experiment.run.checkpoint))
        self.state, message = initial_state(experiment, self.checkpoints)
        self.start, self.total = int(self.state.step), experiment.total_steps
        if not self.start:
            table = parameter_table(experiment, self.state.params)
            if primary:
                write_atomic(workdir / folder.PARAMETERS, table + "\n")
        self.stop = stack.enter_context(StopSignal())
        self.any_stopped = distributed.DelayedAny(experiment.mesh)
        self.writer = stack.enter_context(
            MetricsWriter(workdir, resume_step=self.start, wandb=config.wandb, config=plain(config), primary=primary)
        )
        self.progress = stack.enter_context(ProgressBar(self.total, primary=primary))
        self.checkpoints.say = self.progress.message
        self.trace = stack.enter_context(Trace(workdir, profile, self.total, self.progress.message))
        if profile and self.start >= profile[0]:
            raise ValueError(
                f"the profile begins at step {profile[0]:,}, but the run continues after step {self.start:,}."
            )
        if message:
            self.progress.message(message)
        for note in start_notes(experiment, self.start):
            self.progress.message(f"note: {note}")
        self.averages = Averages()
        if self.start:
            self.progress.message(f"resuming from step {self.start:,}")
            record = self.checkpoints.record(self.start)
            self.averages, lost = Averages(record.get("averages", {})), record.get("lines", 0) - self.writer.lines
            if primary and lost > 0:
                self.progress.message(f"{workdir / folder.METRICS} has lost {lost:,} lines of the steps before")
        self.log_every = interval(experiment, "log_every", 10)
        self.evaluate_every = interval(experiment, "evaluate_every", self.total)
        self.save_every = interval(experiment, "save_every", self.total)
        self.evaluation = experiment.evaluation()
        if config.sampling.num_samples:
            Sampler(self.evaluation.context).check(experiment.variables(self.state))
        self.evaluated: dict[str, float] = {}
        self.batches = device_batches(experiment, self.start)
        if self.start < self.total:
            self.progress.message("compiling the training step")
            self.step_function = compile_step(experiment, self.state)
            # In advance: computed while a step is in progress, they would wait for the end of that step.
            self.learning_rates = jax.device_get(jax.vmap(experiment.schedule)(np.arange(self.total)))
        self.disk_full = False  # whether a full disk has been reported
        self.pending: dict[str, jax.Array] | None = None  # metrics of the last step, which may still be computed

    def run(self, step: int) -> None:
        """Do a step, and evaluate and save if due.

        The metrics of a step are fetched after the next step has been dispatched, unless something is due before.
        """
        with self.throughput.waiting():
            batch = next(self.batches)
        with self.trace.step(step):
            state, metrics = self.step_function(self.state, batch)
        self.throughput.dispatched(metrics)
        self._log(step - 1)
        self.trace.after(step, metrics)
        stop = self.any_stopped(self.stop.received)
        self.state, self.pending = state, metrics
        last = step == self.total
        evaluate, save = last or step % self.evaluate_every == 0, last or step % self.save_every == 0
        if not (evaluate or save or stop):
            return
        self._log(step)
        if evaluate:
            with self.throughput.spent("evaluating"):
                self._evaluate(step)
        if save or stop:
            with self.throughput.spent("saving"):
                with self._disk_errors():
                    self.writer.flush()
                history = {"lines": self.writer.lines, "averages": self.averages.sums}
                metrics = self.evaluated if evaluate else {}
                self.checkpoints.save(self.state, plain(self.experiment.config), metrics, **history)
        if stop and not last:
            self.checkpoints.wait()
            raise Preempted(
                f"stopped at step {step:,} of {self.total:,} after saving a checkpoint: run the same command to resume."
            )

    def finish(self, about: Mapping[str, str]) -> dict[str, float]:
        """Write the artifacts and the report; return the last evaluation."""
        if not self.evaluated:  # the run was complete before
            self.evaluated = self.evaluation(self.experiment.variables(self.state))
        experiment, about = self.experiment, dict(about)
        about |= {"seconds": self.throughput.seconds, "steps": int(self.state.step)}
        about |= {"config": plain(experiment.config), "device_count": experiment.mesh.size}
        variables, budget = experiment.gathered(self.state), self.throughput.budget
        artifacts.write_all(self.evaluation.context, variables, experiment.workdir, budget, about)
        if jax.process_index() == 0:
            write_report(self.experiment.workdir)
        return self.evaluated

    def _evaluate(self, step: int) -> None:
        context, workdir = self.evaluation.context, self.experiment.workdir
        variables = self.experiment.variables(self.state)
        self.evaluated = self.evaluation(variables, None if step == self.total else step // self.evaluate_every)
        self.progress.evaluation(step, self.evaluated)
        with self._disk_errors():
            self.writer.write(step, self.evaluated)
            artifacts.write_samples(context, variables, workdir, step)
            if context.task.has_snapshots:
                artifacts.write_snapshot(context, self.experiment.gathered(self.state), workdir, step)

    @contextlib.contextmanager
    def _disk_errors(self) -> Iterator[None]:
        """Report an OSError once and continue, if `checkpoint.on_error` is "continue"."""
        try:
            yield
        except OSError as error:
            if self.experiment.config.checkpoint.on_error == "stop":
                raise
            if not self.disk_full:
                self.progress.message(f"{error}. The run continues.")
            self.disk_full = True

    def _log(self, step: int) -> None:
        """Fetch the pending metrics of `step`, check that they are finite, and log the means since the last log."""
        if self.pending is None:
            return
        metrics = {f"train/{key}": float(value) for key, value in jax.device_get(self.pending).items()}
        self.pending = None
        skipped = 0 < metrics.get("train/skipped_in_a_row", 0) <= self.experiment.config.skip_nonfinite
        for key in ("train/loss", "train/gradient_norm"):
            if not (math.isfinite(metrics[key]) or skipped):
                saved = self.checkpoints.latest
                kept = f"the checkpoint of step {saved:,} is kept" if saved else "there is no checkpoint yet"
                raise FloatingPointError(f"{key} is {metrics[key]} at step {step:,}: the run stops; {kept}.")
        self.throughput.skipped += skipped
        self.averages.add(metrics)
        logged = step % self.log_every == 0 or step == self.total
        if logged:
            metrics = self.averages.take() | {"train/learning_rate": float(self.learning_rates[step - 1])}
            metrics |= self.throughput.rates(step) | resources()
            with self._disk_errors():
                self.writer.write(step, metrics)
        self.progress.update(step, metrics if logged else None)


def write_report(workdir: Path) -> None:
    """Write the report of a run."""
    from lineage.report import run  # imported here because Matplotlib takes long

    run.write_report(workdir)


def initial_state(experiment: Experiment, checkpoints: Checkpoints) -> tuple[TrainState, str]:
    """Return the state to start from, and a message about other models that it was made of ("" for none).

    It is that of the newest checkpoint; without one, new parameters or those of `init.path`, changed by `experts`.
    """
    config, make, message = experiment.config, partial(experiment.state, checkpoints), ""
    fresh = checkpoints.latest is None
    if config.init.path and fresh:
        state, message = pretrained.start_from(experiment.abstract_state, experiment.model, experiment.run.init, make)
    else:
        state = make()
    if config.experts.paths and fresh:
        state, message = expert_mixture.choose(experiment, state)
    return state, message


def interval(experiment: Experiment, name: str, default: int) -> int:
    """Return a duration of the config in steps; raise ValueError if it is 0."""
    steps = experiment.steps(name, default=max(default, 1))
    if not steps:
        raise ValueError(f"{name} is 0 steps: it must be at least 1.")
    return steps


def jit_step(experiment: Experiment):
    """Return the jitted training step, (state, batch) -> (state, metrics); the memory of the old state is donated."""
    loss, total_steps, places = experiment.task.loss, experiment.total_steps, experiment.state_shardings
    step = make_train_step(experiment.model, loss, experiment.optimizer, experiment.run, total_steps)
    batch = batch_sharding(experiment.mesh)
    return experiment.jit(step, in_shardings=(places, batch), out_shardings=(places, None), donate_argnums=0)


def compile_step(experiment: Experiment, state: TrainState):
    """Return the compiled training step; with buckets of lengths, it is compiled for each when it first occurs.

    With `jax.debug_nans`, it stays a jitted function, which JAX repeats operation by operation where it makes a nan.
    """
    step = jit_step(experiment)
    return (
        step
        if experiment.loader.buckets or jax.config.jax_debug_nans
        else step.lower(state, jax.eval_shape(experiment.zeros)).compile()
    )


def device_batches(experiment: Experiment, start: int) -> Iterator[dict[str, jax.Array]]:
    """Yield training batches on the devices, from step `start`; each is transferred while the one before is used."""
    batches = experiment.data.train.iterate(start)
    first = next(batches)
    length = first["tokens"].shape[1] if experiment.loader.buckets else None
    for name, like in jax.eval_shape(lambda: experiment.zeros(1, length)).items():
        if name in first and first[name].shape[1:] != like.shape[1:]:
            raise ValueError(
                f"{name} has shape {first[name].shape[1:]} in the data: it must be {like.shape[1:]}, as in the model."
            )
    ahead = experiment.taught(to_mesh(first, experiment.mesh), start)
    for step in itertools.count(start + 1):
        yield ahead
        ahead = experiment.taught(to_mesh(next(batches), experiment.mesh), step)
