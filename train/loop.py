"""The training loop."""

import contextlib
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from lineage.configs import modules
from lineage.evaluation import artifacts
from lineage.evaluation.base import to_host
from lineage.evaluation.sampling import Sampler
from lineage.runs import data_record, folder, remote
from lineage.runs.locks import holder, locked, unmoved
from lineage.runs.process import StopSignal
from lineage.runs.progress import ProgressBar
from lineage.train import distributed
from lineage.train.checkpoint import Checkpoints
from lineage.train.experiment import Experiment
from lineage.train.metrics_writer import Log, MetricsWriter
from lineage.train.preparation import (
    check_evaluation_data,
    check_start,
    compile_step,
    device_batches,
    initial_state,
    interval,
    prepare_folder,
    start_messages,
)
from lineage.train.profiling.estimates import out_of_memory_explained
from lineage.train.profiling.throughput import Throughput, resources
from lineage.train.profiling.trace import Trace
from lineage.train.profiling.watchdog import Watchdog
from lineage.train.sharding import to_mesh


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
    """Train to the last step, from the newest checkpoint in `workdir` if there is one; return the last evaluation.

    A run that is killed at any time and restarted ends with the same parameters, bit for bit. After an error that
    leaves the state intact, such as an error of the data or of an evaluator, or a KeyboardInterrupt, the state is saved
    before the error is raised, except in runs of several processes, which can only save together.

    Args:
        workdir: folder of the run; it may be remote (see `lineage.runs.remote`).
        about: metadata of the run, such as its command, for `run.json` and the report.
        devices: devices to train on; None: all.
        force_config: accept a folder that holds a run of another config.
        profile: first and last step to trace into `workdir/profile` (see `Trace`).

    Raises:
        Preempted: the run was stopped by a signal; its state is saved.
        FloatingPointError: the loss or the gradient is not finite; the last good checkpoint is kept.
        MemoryError: the device has too little memory.
        ValueError, OSError: there is a problem with the config, the data, a checkpoint or the disk.
    """
    primary = jax.process_index() == 0
    with contextlib.ExitStack() as kept, out_of_memory_explained() as memory:
        with distributed.agreed():
            local = kept.enter_context(remote.opened(workdir, training=True, primary=primary))
        distributed.check_same(f"$LINEAGE_CACHE must be shared: the copy of {workdir}", remote.holder(workdir))
        folder.make(local)
        with distributed.agreed():
            experiment = Experiment(config, local, devices)
            if primary:
                kept.enter_context(locked(local))
                prepare_folder(experiment, about, force_config)
        with distributed.agreed():
            check_start(experiment)
        distributed.check_same(f"the workdir must be on shared storage: the folder {local}", holder(local))
        distributed.check_same("the code of the modules in imports", modules.source_code(config.imports))
        distributed.check_same("tokenizer", experiment.tokenizer.to_str() if experiment.tokenizer else "")
        distributed.check_same("data", json.dumps(asdict(experiment.facts), sort_keys=True))
        check_evaluation_data(experiment)
        throughput = Throughput(experiment)
        memory |= throughput.budget.memory["training"]
        with contextlib.ExitStack() as stack:
            loop = TrainingLoop(experiment, throughput, stack, profile)
            with loop.saved_on_error():
                loop.repeat_interrupted_evaluation()
                for step in range(loop.start + 1, loop.total + 1):
                    loop.run(step)
        return loop.finish(about)


class TrainingLoop:
    """Training loop of one run; `run` executes a step and whatever is due after it.

    Attributes:
        start: number of steps completed before this invocation.
        total: number of steps of the run.
        step: number of the last completed step.
        state: training state after the last step.
        evaluated: metrics of the evaluation after the last step.
        evaluating: whether the evaluation after the last step is due or in progress.
    """

    def __init__(
        self,
        experiment: Experiment,
        throughput: Throughput,
        stack: contextlib.ExitStack,
        profile: tuple[int, int] | None = None,
    ):
        config, workdir, primary = experiment.config, experiment.workdir, jax.process_index() == 0
        self.experiment, self.throughput, self.total = experiment, throughput, experiment.total_steps
        stack.callback(throughput.close)
        progress = stack.enter_context(ProgressBar(self.total, primary=primary))
        self.notify = notify = progress.message
        self.unmoved = unmoved(workdir)
        self.checkpoints = stack.enter_context(Checkpoints(workdir, experiment.run.checkpoint, notify))
        self.state = initial_state(experiment, self.checkpoints, notify)
        self.start = progress.step = int(self.state.step)
        self.data_checksums = data_record.checksums(workdir)
        self.step = self.attempted = self.start  # the last step, and the step of the last attempt to save
        stop = stack.enter_context(StopSignal())
        self.watchdog = stack.enter_context(Watchdog(config.step_timeout_minutes))
        logged = {"wandb": config.wandb, "config": experiment.stored_config, "primary": primary}
        writer = stack.enter_context(MetricsWriter(workdir, resume_step=self.start, **logged))
        if writer.history:
            throughput.earlier = writer.history.earlier
        self.trace = stack.enter_context(Trace(workdir, profile, self.start, self.total, notify))
        record = self.checkpoints.record(self.start) if self.start else {}
        for message in start_messages(experiment, self.start, record):
            notify(message)
        every, continues = interval(experiment, "log_every", 10), config.checkpoint.on_error == "continue"
        self.log = Log(progress, writer, record.get("averages", {}), every, continues)
        self.evaluate_every = interval(experiment, "evaluate_every", self.total)
        self.save_every = interval(experiment, "save_every", self.total)
        self.evaluation, self.evaluating, self.evaluated = experiment.evaluation(), False, {}
        self.evaluation.context.to_mesh = self._to_mesh  # interrupts an evaluation if the run must stop
        if config.sampling.num_samples:
            Sampler(self.evaluation.context).check(experiment.variables(self.state))
        self.batches = stack.enter_context(contextlib.closing(device_batches(experiment, self.start)))
        if self.start < self.total:
            notify("compiling the training step")
            with distributed.agreed():  # Gloo waits only 30 s for a process that compiles for longer than the others
                self.step_function = compile_step(experiment, self.state)
            # Computed in advance: during a step, the computation would wait for the end of that step.
            self.learning_rates = jax.device_get(jax.vmap(experiment.schedule)(np.arange(self.total)))
        self.pending: tuple[int, dict[str, jax.Array]] | None = None  # the last step and its metrics, if not yet logged
        self.requests = distributed.Requests(stop, experiment.mesh, experiment.run.checkpoint.every_minutes)

    def repeat_interrupted_evaluation(self) -> None:
        """Repeat the evaluation after the last completed step if it was interrupted."""
        if self.start and self.checkpoints.record(self.start).get("evaluating"):
            self._finish_step(evaluate=True, save=False, stop=False)
            self.checkpoints.amend(self.start, **self._history())

    def run(self, step: int) -> None:
        """Dispatch a step, then log the previous one; evaluate and save if due.

        The metrics of a step are fetched after the next step was dispatched, unless an evaluation or a save is due.
        """
        with self.watchdog.step(step):
            with self.throughput.waiting():
                batch = next(self.batches)
            with self.trace.step(step):
                self.state, metrics = self.step_function(self.state, batch)
            self.step, self.evaluated = step, {}
            self.throughput.dispatched(metrics)
            self._log((step, metrics))
            self.trace.after(step, metrics)
            stop, last = self.requests.must_stop(), step == self.total
            evaluate = last or step % self.evaluate_every == 0
            save = last or self.requests.save or step % self.save_every == 0
            if not (evaluate or save or stop):
                return
            self._log()
        self._finish_step(evaluate, save, stop)

    def _to_mesh(self, batch: Mapping[str, np.ndarray]) -> dict[str, jax.Array]:
        """Move a batch of an evaluation to the devices; raise Preempted if the run must stop during an evaluation."""
        self.watchdog.progress()
        if self.evaluating and self.requests.must_stop():
            raise Preempted
        return to_mesh(batch, self.experiment.mesh)

    def _finish_step(self, evaluate: bool, save: bool, stop: bool) -> None:
        """Evaluate, and save the state if due or the best so far; raise Preempted if the run must stop."""
        with self._in_its_folder():
            self.evaluating = evaluate
            if evaluate and not stop:
                try:
                    with self.throughput.spent("evaluating"), self.watchdog.step(self.step, "evaluating"):
                        self._evaluate()
                except Preempted:
                    stop = True
                else:
                    self.evaluating = False
                    save = save or self.checkpoints.improves(self.evaluated)
            if save or stop:
                self._save()
                stop = stop or self.requests.must_stop()  # during the save
            if stop or self.step == self.total:
                with self.watchdog.step(self.step, "saving"):
                    self.checkpoints.wait()
            if stop and (self.step < self.total or self.evaluating):
                saved = f"step {self.step:,} of {self.total:,} after saving a checkpoint"
                raise Preempted(f"stopped at {saved}: run the same command to resume.")

    def _check_folder(self) -> None:
        """Raise OSError if the run folder was moved, deleted or replaced: another run may have its files there."""
        if jax.process_index() == 0:  # which holds the lock
            self.unmoved()

    @contextlib.contextmanager
    def _in_its_folder(self) -> Iterator[None]:
        """Check the run folder (see `_check_folder`), and again if the block raises an OSError."""
        self._check_folder()
        try:
            yield
        except OSError:
            self._check_folder()
            raise

    def _save(self) -> None:
        """Save the state after the last step."""
        self.attempted = self.step
        self._check_folder()
        with self.throughput.spent("saving"), self.watchdog.step(self.step, "saving"):
            self.log.flush()
            self.checkpoints.save(self.state, self.experiment.stored_config, **self._history())
        self.requests.saved()

    def _history(self):
        """Return the entries of the record of a checkpoint besides the state and the config."""
        written = self.log.record() | self.data_checksums
        return written | {"evaluating": self.evaluating, "metrics": {} if self.evaluating else self.evaluated}

    @contextlib.contextmanager
    def saved_on_error(self) -> Iterator[None]:
        """Save the state after the last step if the block raises and the state is complete and finite.

        The state is not saved after an error in the step itself or in a save, nor in runs of several processes.
        """
        try:
            yield
        except (Preempted, FloatingPointError, MemoryError, jax.errors.JaxRuntimeError):
            raise
        except (Exception, KeyboardInterrupt):
            donated = any(leaf.is_deleted() for leaf in jax.tree.leaves(self.state))  # to a step that failed
            if jax.process_count() == 1 and self.attempted < self.step and not donated:
                try:
                    self._log()
                    if int(self.state.step) != self.step:
                        raise RuntimeError("the next step has begun")
                    self._save()
                    self.checkpoints.wait()
                    self.notify(f"the state after step {self.step:,} was saved before the run ends")
                except Exception as error:  # the original error is raised
                    self.notify(f"the state after step {self.step:,} was not saved: {error}")
            raise

    def finish(self, about: Mapping[str, str]) -> dict[str, float]:
        """Write the artifacts and the report; return the last evaluation."""
        if not self.evaluated:  # the run was complete before
            self.evaluated = self.evaluation(self.experiment.variables(self.state))
        experiment, about = self.experiment, {**about, "device_count": self.experiment.mesh.size}
        recorded = folder.read_json(experiment.workdir / folder.ARTIFACTS / folder.FACTS).get("seconds", 0.0)
        earlier = max(recorded, self.throughput.earlier[0])  # a start that was killed is in the metrics only
        about |= {"seconds": earlier + self.throughput.seconds, "steps": int(self.state.step)}
        variables, workdir = to_host(experiment.variables(self.state)), experiment.workdir
        with self._in_its_folder():
            artifacts.write_all(self.evaluation.context, variables, workdir, self.throughput.budget)
            if jax.process_index() == 0:
                artifacts.write_facts(workdir, about)
                write_report(workdir)
                artifacts.write_facts(workdir, about | {"config": experiment.stored_config})  # see `Run.is_done`
        return self.evaluated

    def _evaluate(self) -> None:
        context, workdir, step = self.evaluation.context, self.experiment.workdir, self.step
        variables = self.experiment.variables(self.state)
        number = None if step == self.total else step // self.evaluate_every
        self.evaluated = metrics = self.evaluation(variables, number)
        self.log.evaluation(step, metrics)
        best = self.experiment.run.checkpoint.best
        if metrics and best not in ("", *metrics) and self.evaluation.due(number) == self.evaluation.due(None):
            raise folder.UnknownMetricError(f"checkpoint.best is {best!r}: it must be one of {', '.join(metrics)}.")
        with self.log.disk_errors():
            artifacts.write_samples(context, variables, workdir, step)
            if context.task.has_snapshots:
                artifacts.write_snapshot(context, to_host(variables), workdir, step)

    def _log(self, following: tuple[int, dict[str, jax.Array]] | None = None) -> None:
        """Log the pending step; the `following` one becomes pending.

        The metrics are fetched and must be finite.
        """
        pending, self.pending = self.pending, following
        if pending is None:
            return
        step, metrics = pending
        metrics = {f"train/{key}": float(value) for key, value in jax.device_get(metrics).items()}
        skipped = 0 < metrics.get("train/skipped_in_a_row", 0) <= self.experiment.config.skip_nonfinite
        for key in ("train/loss", "train/gradient_norm"):
            if not (math.isfinite(metrics[key]) or skipped):
                saved = self.checkpoints.latest
                kept = f"the checkpoint of step {saved:,} is kept" if saved else "there is no checkpoint yet"
                raise FloatingPointError(f"{key} is {metrics[key]} at step {step:,}: the run stops; {kept}.")
        self.throughput.skipped += skipped
        updates = step - int(metrics.get("train/skipped", 0))  # the schedule only counts these
        rate = {"train/learning_rate": float(self.learning_rates[max(updates, 1) - 1])}
        self.log.step(step, metrics, lambda: rate | self.throughput.rates(step) | resources())


def write_report(workdir: Path) -> None:
    """Write the report of a run."""
    from lineage.report import run  # imported here because importing Matplotlib is slow

    run.write_report(workdir)
