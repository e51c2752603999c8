"""Construction of an experiment from its config: data, task, model, optimizer, mesh, durations and state."""

import dataclasses
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from ml_collections import ConfigDict

from lineage.configs import base, durations, modules, schema
from lineage.configs.registry import check_matches, has_effect
from lineage.configs.run import Run
from lineage.data import SOURCES, TOKENIZERS, Data, Facts, Loader, Source, Tokenizer, load, tokenizers
from lineage.evaluation import EVALUATORS, Context, Evaluation, Evaluator
from lineage.models import MODELS, Model, quantization
from lineage.runs.folder import plain
from lineage.tasks import TASKS, Batch, Task
from lineage.tasks.base import Sizes
from lineage.train import pretrained, sharding
from lineage.train.adapters import ADAPTERS, NO_ADAPTER, Adapter
from lineage.train.checkpoint import Checkpoints, retried
from lineage.train.optimizer import OPTIMIZERS, SCHEDULES, LearningRate, Optimizer, check_layers, paths_of
from lineage.train.reading import read_chosen
from lineage.train.step import TrainState, init_state, make_forward_step


@dataclasses.dataclass(frozen=True, eq=False)
class Experiment:
    """Experiment that a config describes (see `lineage.configs.base`); each part is created on first use."""

    config: ConfigDict
    workdir: Path | None = None  # folder of the run; its tokenizer and checkpoints, if any, are used
    devices: Sequence[jax.Device] | None = None  # devices of the mesh; None: all
    # Metadata of a trained model's training data, stored in the workdir with its tokenizer; None: open the data.
    saved_facts: Facts | None = None

    def __post_init__(self):
        for module in self.config.imports:
            modules.import_module(module)
        _ = self.run, self.task, self.source, self.evaluators  # raises an error for a wrong option
        if self.adapter != NO_ADAPTER and not self.config.init.path:
            raise ValueError(
                f"adapter.name is {self.config.adapter.name!r} and init.path is empty: it must name the model to adapt."
            )

    @cached_property
    def stored_config(self) -> dict[str, Any]:
        """The config in the form of `config.json`, see `base.resolved`."""
        return plain(base.resolved(self.config))

    @cached_property
    def run(self) -> Run:
        """The options of the run as a whole."""
        return schema.construct(Run, self.config)

    @cached_property
    def task(self) -> Task:
        return schema.build(TASKS, self.config.task).adapt(self.config.model.to_dict())

    @cached_property
    def source(self) -> Source:
        return schema.build(SOURCES, self.config.source)

    @cached_property
    def evaluators(self) -> dict[str, Evaluator]:
        return {name: schema.build(EVALUATORS, section) for name, section in self.config.evaluators.items()}

    @property
    def loader(self) -> Loader:
        return self.run.loader

    @cached_property
    def data(self) -> Data:
        return self.read(self.source)

    @cached_property
    def evaluation_data(self) -> Data:
        """The data; for a trained model, without the training split if the other splits can be read without it."""
        return self.data if self.saved_facts is None else self.read(self.source, self.saved_facts)

    def read(self, source: Source, known: Facts | None = None, **options: Any) -> Data:
        """Return the data of a source for the experiment's task and tokenizer, with more `options` of `data.load`."""
        tokenizer = (known and self.tokenizer) or self._initial_tokenizer()
        part, parts = sharding.share(self.mesh) if jax.process_count() > 1 else (0, 1)
        settings = {"seed": self.run.seed, "process_index": part, "process_count": parts, "workdir": self.workdir}
        return load(source, self.task, tokenizer, self.loader, known=known, **settings, **options)

    def _initial_tokenizer(self) -> tokenizers.TokenizerKind:
        """Return the tokenizer of a new run: that of its teacher or of the model in `init.path`, or the config's.

        A tokenizer in the workdir takes precedence, see `data.load`.
        """
        tokenizer = schema.build(TOKENIZERS, self.config.tokenizer)
        teacher = self.run.teacher if self.task.needs_teacher else ""
        key, origin = ("init.path", self.run.init.path) if self.run.init.path else ("teacher", teacher)
        saved = self.workdir and (self.workdir / tokenizers.FILE).is_file()
        given, has_tokens = isinstance(tokenizer, tokenizers.TokenizerFile), "vocab_size" in self.config.model
        if not origin or saved or given or not has_tokens:
            return tokenizer
        return pretrained.initial_tokenizer(key, origin, self.task, self.run.init) or tokenizer

    @property
    def facts(self) -> Facts:
        """Metadata of the training data."""
        return self.data.facts if self.saved_facts is None else self.saved_facts

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        if self.saved_facts is None:
            return self.data.tokenizer
        has_tokenizer = (self.workdir / tokenizers.FILE).is_file()
        return pretrained.tokenizer_of(self.workdir, self.task).load() if has_tokenizer else None

    @cached_property
    def model(self) -> Model:
        """The config's model; empty options are set by the task or the data."""
        settings, cls = self.config.model, MODELS[self.config.model.name]
        given = {key: value for key, value in self.task.model_options().items() if settings.get(key) is None}
        for key in Facts().model_options:
            unset = key in settings and settings[key] is None and key not in given
            if unset and has_effect(cls, key, {**settings, **given}):
                given[key] = self.facts.model_options[key]
                if given[key] is None:
                    name, source = settings.name, self.config.source.name
                    raise ValueError(f"The source {source!r} has no {key}, which the model {name!r} needs.")
        return schema.build(MODELS, settings, **given)

    def check(self) -> None:
        """Raise ValueError if the parts do not fit together; opens the data."""
        self.task.check_model(self.model)
        self.evaluation().check_metric("checkpoint.best", self.run.checkpoint.best)
        _ = self.run.checkpoint.highest  # raises an error if the metric has no direction
        for name in ("num_classes", "vocab_size"):
            has, needs = self.model.data_options[name], self.facts.model_options[name]
            if has and needs and has < needs and has_effect(type(self.model), name, self.model.settings):
                raise ValueError(
                    f"model.{name} is {has}: it must be at least {needs}, as the source {self.source.name!r} has."
                )
        if (channels := self.facts.channels) and channels != self.model.channels:
            given = f"The images of the source {self.source.name!r} have {channels} channels"
            raise ValueError(f"{given}, the model {self.model.channels}: set model.channels or that of its backbone.")
        if self.run.teacher and self.task.needs_teacher:
            pretrained.check_teacher(self)

    @cached_property
    def mesh(self) -> Mesh:
        return sharding.make_mesh(**self.config.mesh, devices=self.devices)

    def jit(self, function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        """Return `jax.jit` of a function of batches, with its activations sharded like the batches."""
        rules, sequence = self.sharding_rules, self.run.sequence_sharding
        function = sharding.on_mesh(function, self.mesh, rules, sequence)
        return jax.jit(function, compiler_options=self._compiler_options, **options)

    @cached_property
    def _compiler_options(self) -> dict[str, Any] | None:
        return sharding.compiler_options(self.mesh, self.run.compiler_options)

    @cached_property
    def total_steps(self) -> int:
        return self.steps("total")

    def steps(self, name: str, section: Any = None, default: int | None = None, total_steps: int | None = None) -> int:
        """Return a duration of a section, by default of the config, in steps (see `durations.steps`)."""
        section = self.config if section is None else section
        in_epochs = section.get(f"{name}_epochs") is not None
        return durations.steps(
            section,
            name,
            batch_size=self.loader.batch_size,
            examples_per_epoch=self.data.train.examples_per_epoch if in_epochs else None,
            total_steps=self.total_steps if total_steps is None and name != "total" else total_steps,
            default=default,
        )

    @cached_property
    def adapter(self) -> Adapter:
        return schema.build(ADAPTERS, self.config.adapter)

    @cached_property
    def schedule(self) -> LearningRate:
        return self.schedule_of(self.total_steps)

    def schedule_of(self, total_steps: int) -> LearningRate:
        """Return the schedule of the config for a run of another length."""
        warmup_steps = self.steps("warmup", self.config.schedule, default=0, total_steps=total_steps)
        return schema.build(SCHEDULES, self.config.schedule).make(total_steps, warmup_steps, self.model.width)

    @cached_property
    def optimizer(self) -> optax.GradientTransformation:
        return self.make_optimizer(self.schedule)

    def make_optimizer(self, schedule: LearningRate = lambda step: 0.0) -> optax.GradientTransformation:
        """Return the config's optimizer with another schedule; the config's own schedule may require the data."""
        optimizer = self._optimizer.make(schedule, self.model, lambda: self._input_axes)
        skipped = self.run.skip_nonfinite
        return optax.apply_if_finite(optimizer, skipped) if skipped else optimizer

    def trained(self, params: Any) -> Any:
        """Return the part of the parameters that the config's optimizer trains, see `Optimizer.trained`."""
        return self._optimizer.trained(params, self.model)

    @cached_property
    def _optimizer(self) -> Optimizer:
        return schema.build(OPTIMIZERS, self.config.optimizer)

    def zeros(self, size: int | None = None, length: int | None = None) -> Batch:
        """Return a batch of zeros: `size` examples, texts of `length` tokens, by default the sizes of the config.

        The data are opened only for sizes that the config does not set.
        """
        self.task.check_model(self.model)
        sizes = Sizes(size or self.loader.batch_size, self.model, lambda: self.facts, length)
        batch = self.task.zeros(sizes)
        if self.saved_facts is not None and self.task.needs_teacher:  # its outputs have the student's shapes
            teach = nn.init_with_output(self.task.teach, self.model)
            shapes = jax.eval_shape(teach, jax.random.key(0), batch)[0]
        else:
            shapes = jax.eval_shape(partial(self.with_teacher, step=0), batch) if self.teacher else {}
        return batch | {name: jnp.zeros(value.shape, value.dtype) for name, value in shapes.items()}

    @cached_property
    def teacher(self) -> Callable[[Batch], Batch] | None:
        """Function that adds the teacher's outputs to a batch; None for tasks without a teacher."""
        if not self.task.needs_teacher:
            if self.run.teacher:
                raise ValueError(f"teacher is {self.run.teacher!r}: it must be empty for the task {self.task.name!r}.")
            return None
        if not self.run.teacher:
            raise ValueError(f"teacher is empty: the task {self.task.name!r} needs a run's workdir or a model folder.")
        with jax.ensure_compile_time_eval():  # even if the first call is only for shapes
            return pretrained.load_teacher(self.run.teacher, self.mesh, self.task.teach)

    def with_teacher(self, batch: Batch, step: int | None = None) -> Batch:
        """Return a batch on the devices with the outputs of the teacher, if there is one.

        For a training `step`, the task transforms the batch first (see `Task.prepare`).
        """
        if not self.teacher:
            return batch
        if step is not None:
            key = jax.random.fold_in(jax.random.key(~self.run.seed), step)  # differs from the key of the step
            batch = self.task.prepare(key, batch, self.model)
        return batch | self.teacher(batch)

    def context(self) -> Context:
        """Return the context of evaluators."""
        step = partial(make_forward_step, precision=self.run.precision)
        return Context(
            model=self.model,
            task=self.task,
            facts=self.facts,
            tokenizer=self.tokenizer,
            load=lambda: self.evaluation_data,
            train=lambda: self.data.train,
            sampling=self.config.sampling,
            seed=self.run.seed,
            compile=lambda *args, **options: self.jit(step(*args, **options)),
            to_mesh=partial(sharding.to_mesh, mesh=self.mesh),
            teach=self.with_teacher,
            open=lambda text: self.read(schema.build(SOURCES, schema.parse(SOURCES, text)), self.facts, as_test=True),
        )

    def evaluation(self) -> Evaluation:
        """Return the config's evaluators."""
        if self.run.weights is not None:
            quantization.check(self._input_axes, self.run.weights)
        return Evaluation(self.context(), self.evaluators)

    def variables(self, state: TrainState) -> dict[str, Any]:
        """Return the variables for evaluation and generation: averages if they are kept, quantized if configured."""
        return self.quantized(state.variables(average=True))

    def quantized(self, variables: dict[str, Any]) -> dict[str, Any]:
        """Return variables with their parameters quantized if the config enables it."""
        if self.run.weights is None:
            return variables
        return {**variables, "params": self._quantize(variables["params"])}

    @cached_property
    def _quantize(self) -> Callable[[Any], Any]:
        return jax.jit(partial(quantization.quantize, inputs=self._input_axes, kind=self.run.weights))

    @cached_property
    def _input_axes(self) -> quantization.Inputs:
        return quantization.input_axes(self.task.loss, self.model, self.zeros())

    def state(self, checkpoints: Checkpoints, step: int | None = None) -> TrainState:
        """Return the state of a checkpoint (None: the newest), or the initial state if there is none."""
        if checkpoints.latest is None and step is None:
            # Wait for all arrays together: if memory runs out, XLA's CPU backend never finishes arrays that did fit.
            return jax.block_until_ready(jax.jit(self.make_state, out_shardings=self.state_shardings)())
        return checkpoints.restore(sharding.placed(self.abstract_state, self.state_shardings), step)

    def restore(self, which: str = "latest") -> TrainState:
        """Return the state of the "latest" or the "best" checkpoint of the workdir."""
        if which not in ("latest", "best"):
            raise ValueError(f"checkpoint is {which!r}: it must be 'latest' or 'best'.")
        if not (self.workdir / "checkpoints").is_dir():
            raise FileNotFoundError(f"There is no trained model in {self.workdir}: give the workdir of a run.")
        with Checkpoints(self.workdir, self.run.checkpoint) as checkpoints:

            def choose():
                checkpoints.reload()
                step = checkpoints.best if which == "best" else checkpoints.latest
                if step is None:
                    raise FileNotFoundError(f"There is no {which} checkpoint in {checkpoints.folder}.")
                return step

            # The listed checkpoints may all be deleted before they are looked at.
            return read_chosen(partial(retried, choose), partial(self.state, checkpoints))

    @cached_property
    def abstract_state(self) -> TrainState:
        """Shapes and dtypes of the state."""
        state = jax.eval_shape(self.make_state)
        optimizer, params = self.config.optimizer, jax.eval_shape(TrainState.variables, state)["params"]
        check_layers(self.model, params, need_all=bool(optimizer.layer_decay or optimizer.frozen_layers))
        patterns = [pattern for pattern, _ in optimizer.lr_multipliers]
        check_matches("optimizer.lr_multipliers", patterns, paths_of(state.params))
        check_matches("sharding", [pattern for pattern, _ in self.run.sharding], paths_of(state.replace(step=None)))
        if "memory" in state.collections and self.loader.order != "stream":
            raise ValueError(
                f"loader.order is {self.loader.order!r}: it must be 'stream' for a model with a memory, so that "
                "segments follow each other."
            )
        return state

    @cached_property
    def state_shardings(self) -> TrainState:
        places = sharding.shardings(self.abstract_state, self.sharding_rules, self.mesh)
        if not self.run.sequence_sharding:
            sharding.check_tensor(places, self.mesh)
        return sharding.offloaded(places, self.abstract_state) if self.run.offload else places

    @property
    def sharding_rules(self) -> tuple[sharding.Rule, ...]:
        """The config's rules, which take precedence, and the model's."""
        return (*self.run.sharding, *self.model.sharding_rules)

    def make_state(self) -> TrainState:
        """Return the state before the first step."""
        settings = {"seed": self.run.seed, "ema": bool(self.run.ema_decay), "adapter": self.adapter}
        return init_state(self.model, self.make_optimizer(), self.task.loss, self.zeros(), **settings)
