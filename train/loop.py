"""The training loop: the only one."""

import contextlib
import itertools
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import jax
from ml_collections import ConfigDict

from lineage.data.fingerprint import fingerprint
from lineage.evaluation import artifacts
from lineage.evaluation.evaluators import Evaluator
from lineage.report.run import write_report
from lineage.train import costs, distributed, experts, preemption, pretrained
from lineage.train.checkpoint import Checkpoints, clean
from lineage.train.experiment import Experiment
from lineage.train.progress import Progress
from lineage.train.sharding import batch_sharding, check_batch, to_mesh
from lineage.train.state import TrainState
from lineage.train.step import make_train_step
from lineage.train.writers import MetricsWriter


def train(
    config: ConfigDict,
    workdir: str | os.PathLike,
    *,
    name: str = "",
    command: str = "",
    devices: Sequence[jax.Device] | None = None,
    force_config: bool = False,
) -> dict[str, float]:
    """Trains to the end, from the newest checkpoint of `workdir` if there is one; returns the last evaluation.

    A run that was killed at any moment and started again ends with the same parameters, bit for bit.

    Args:
        config: as `configs/base.py` has it.
        workdir: where everything that the run leaves goes.
        name, command: of the run, for its report.
        devices: to train on; None is all.
        force_config: goes on even if the workdir holds a run of another config.

    Raises:
        guard.Preempted: SIGTERM or SIGINT came; the state is saved.
        FloatingPointError: the loss or the gradient is not finite; the last good checkpoint is kept.
        MemoryError: the device has too little memory.
        ValueError, OSError: what is wrong with the config, the data, a checkpoint or the disk, in a sentence.
    """
    workdir = Path(workdir)
    workdir.mkdir(parents=True, exist_ok=True)
    memory: dict[str, int] = {}
    with contextlib.ExitStack() as kept, preemption.explained(memory):
        with distributed.agreed():
            if jax.process_index() == 0:
                kept.enter_context(preemption.locked(workdir))
                preemption.keep_config(config, workdir, force_config)
                places = (config.data[name] for name in ("source", "validation_split", "test_split"))
                preemption.keep_data(fingerprint(places), workdir, force_config)
                clean(workdir)
        with distributed.agreed():
            preemption.check_shared(config, workdir)
            experiment = Experiment(config, workdir, devices)
            check_batch(config.data.batch_size, experiment.mesh, config.grad_accum_steps)
            check_batch(config.data.evaluation_batch_size or config.data.batch_size, experiment.mesh)
            known = experiment.data.tokenizer
        distributed.check_same("data.tokenizer", known.to_str() if known else "")
        clock = costs.Clock(experiment)
        memory |= clock.budget.memory["training"]
        with contextlib.ExitStack() as stack:
            loop = Loop(experiment, clock, stack)
            for step in range(loop.start + 1, loop.total + 1):
                loop.run(step)
        return loop.finish({"config_name": name, "command": command})


class Loop:
    """The steps of one run; `run` does the next one and whatever is due after it."""

    def __init__(self, experiment: Experiment, clock: costs.Clock, stack: contextlib.ExitStack):
        config, workdir = experiment.config, experiment.workdir
        primary = jax.process_index() == 0
        self.experiment, self.clock = experiment, clock
        self.checkpoints = stack.enter_context(Checkpoints(workdir, **config.checkpoint))
        make, said, fresh = partial(experiment.state, self.checkpoints), "", self.checkpoints.latest is None
        if config.init.path and fresh:
            start = experiment.abstract_state, experiment.model
            self.state, said = pretrained.start_from(*start, **config.init, make=make)
        else:
            self.state = make()
        if config.experts.paths and fresh:
            self.state, said = experts.choose(experiment, self.state)
        self.start, self.total = int(self.state.step), experiment.total_steps
        self.stop = stack.enter_context(preemption.StopSignal())
        self.told = distributed.Vote(experiment.mesh)
        self.writer = stack.enter_context(
            MetricsWriter(workdir, resume_step=self.start, wandb=config.wandb, primary=primary)
        )
        self.progress = stack.enter_context(Progress(self.total, primary=primary))
        self.checkpoints.say = self.progress.message
        if said:
            self.progress.message(said)
        if self.start:
            self.progress.message(f"going on from step {self.start:,}")
        self.log_every = every(experiment, "log_every", 10)
        self.evaluate_every = every(experiment, "evaluate_every", self.total)
        self.save_every = every(experiment, "save_every", self.total)
        self.evaluator = Evaluator(experiment)
        experiment.check_data()
        if config.sampling.num_samples:
            self.evaluator.sampler.check(self.state.variables(average=True))
        split = config.checkpoint.best.partition("/")[0]
        if split and split not in experiment.data.splits:
            splits = ", ".join(experiment.data.splits) or "none"
            raise ValueError(f"checkpoint.best is {config.checkpoint.best!r}, but the data's splits are {splits}.")
        self.evaluated: dict[str, float] = {}
        self.batches = device_batches(experiment, self.start)
        if self.start < self.total:
            self.progress.message("compiling the training step")
            self.step_function = compile_step(experiment, self.state)
        self.full = False  # the disk, of which that is said
        self.unseen: dict[str, jax.Array] | None = None  # metrics of the last step, which the device may still compute

    def run(self, step: int) -> None:
        """Does a step: what it gives is looked at when the next one is under way, unless something is due."""
        state, metrics = self.step_function(self.state, next(self.batches))
        self._look(step - 1)
        stop = self.told(self.stop.received)
        self.state, self.unseen = state, metrics
        last = step == self.total
        evaluate, save = last or step % self.evaluate_every == 0, last or step % self.save_every == 0
        if not (evaluate or save or stop):
            return
        self._look(step)
        with self.clock.paused():
            if evaluate:
                self.evaluated = self.evaluator.evaluate(self.state)
                self.progress.evaluation(step, self.evaluated)
                with self._disk():
                    self.writer.write(step, self.evaluated)
                    artifacts.write_samples(self.evaluator, self.state, step)
                    artifacts.write_pictures(self.evaluator, self.state, step)
            if save or stop:
                with self._disk():
                    self.writer.flush()
                metrics = self.evaluated if evaluate else {}
                self.checkpoints.save(self.state, self.experiment.config.to_dict(), metrics)
        if stop and not last:
            self.checkpoints.wait()
            raise preemption.Preempted(
                f"stopped at step {step:,} of {self.total:,}, which is saved: the same command goes on from there."
            )

    def finish(self, about: Mapping[str, str]) -> dict[str, float]:
        """Writes what the report shows, and the report; returns the last evaluation."""
        if not self.evaluated:  # the run was complete already
            self.evaluated = self.evaluator.evaluate(self.state)
        artifacts.write_all(
            self.evaluator, self.state, self.clock.budget, dict(about) | {"seconds": self.clock.seconds}
        )
        if jax.process_index() == 0:
            write_report(self.experiment.workdir)
        return self.evaluated

    @contextlib.contextmanager
    def _disk(self) -> Iterator[None]:
        """Goes on where what is written inside does not fit on the disk, if the config wants that; says so once."""
        try:
            yield
        except OSError as error:
            if self.experiment.config.checkpoint.on_error == "stop":
                raise
            if not self.full:
                self.progress.message(f"{error}. The run goes on.")
            self.full = True

    def _look(self, step: int) -> None:
        """Checks, shows and writes the metrics of a step."""
        if self.unseen is None:
            return
        metrics = {f"train/{key}": float(value) for key, value in jax.device_get(self.unseen).items()}
        self.unseen = None
        left_out = 0 < metrics.get("train/skipped_in_a_row", 0) <= self.experiment.config.skip_nonfinite
        for key in ("train/loss", "train/gradient_norm"):
            if not (math.isfinite(metrics[key]) or left_out):
                saved = self.checkpoints.latest
                kept = f"the checkpoint of step {saved:,} is kept" if saved else "there is no checkpoint yet"
                raise FloatingPointError(f"{key} is {metrics[key]} at step {step:,}: the run stops; {kept}.")
        logged = step % self.log_every == 0 or step == self.total
        if logged:
            metrics["train/learning_rate"] = float(self.experiment.schedule(step - 1))
            metrics |= self.clock.rates(step)
            with self._disk():
                self.writer.write(step, metrics)
        self.progress.update(step, metrics if logged else None)


def every(experiment: Experiment, name: str, default: int) -> int:
    """How many steps there are from one time to the next.

    Raises:
        ValueError: none.
    """
    steps = experiment.steps(name, default=max(default, 1))
    if not steps:
        raise ValueError(f"{name} is 0 steps: it must be at least 1.")
    return steps


def jit_step(experiment: Experiment):
    """The training step, (state, batch) -> (state, metrics): the old state's memory becomes the new one's."""
    config, places = experiment.config, experiment.state_shardings
    step = make_train_step(
        experiment.model,
        experiment.objective,
        experiment.optimizer,
        seed=config.seed,
        grad_accum_steps=config.grad_accum_steps,
        precision=config.precision,
        ema_decay=config.ema_decay,
        total_steps=experiment.total_steps,
    )
    batch = batch_sharding(experiment.mesh)
    return experiment.jit(step, in_shardings=(places, batch), out_shardings=(places, None), donate_argnums=0)


def compile_step(experiment: Experiment, state: TrainState):
    """The training step, compiled; with buckets, for each when it comes."""
    step = jit_step(experiment)
    if experiment.config.data.buckets:
        return step
    return step.lower(state, jax.eval_shape(experiment.zeros)).compile()


def device_batches(experiment: Experiment, start: int) -> Iterator[dict[str, jax.Array]]:
    """Training batches on the devices, from that of step `start`; the next one is on its way while one is used."""
    batches = experiment.data.train.iterate(start)
    first = next(batches)
    length = first["tokens"].shape[1] if experiment.config.data.buckets else None
    for name, like in jax.eval_shape(lambda: experiment.zeros(1, length)).items():
        if name in first and first[name].shape[1:] != like.shape[1:]:
            raise ValueError(f"{name} of the data is {first[name].shape[1:]}, but the model is for {like.shape[1:]}.")
    ahead = experiment.taught(to_mesh(first, experiment.mesh), start)
    for step in itertools.count(start + 1):
        yield ahead
        ahead = experiment.taught(to_mesh(next(batches), experiment.mesh), step)
