"""From a config to its parts: data, model, objective, optimizer, mesh and durations."""

import dataclasses
import functools
import inspect
import re
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

from lineage import data, models
from lineage.configs import durations, schema
from lineage.configs.registry import field_types
from lineage.data import tokenizers
from lineage.data.examples import span_corruption
from lineage.data.examples.masking import count_masked
from lineage.tasks import batches
from lineage.tasks.mixup import mixed
from lineage.tasks.objectives import HEADS, OBJECTIVES, TASKS, TAUGHT, Batch, Objective
from lineage.train import pretrained, sharding
from lineage.train.adapters import ADAPTERS, NO_ADAPTER, Adapter
from lineage.train.checkpoint import Checkpoints
from lineage.train.optimizer import OPTIMIZERS, SCHEDULES, LearningRate, check_patterns
from lineage.train.state import TrainState
from lineage.train.step import init_state


@dataclasses.dataclass(frozen=True, eq=False)
class Experiment:
    """What a config (see `configs/base.py`) describes; each part is made when it is first asked for.

    Attributes:
        config: the whole config.
        workdir: where a trained tokenizer is kept; None keeps none.
        devices: that the mesh is made of; None is all.
    """

    config: ConfigDict
    workdir: Path | None = None
    devices: Sequence[jax.Device] | None = None

    def __post_init__(self):
        check_values(self.config)
        if self.adapter != NO_ADAPTER and not self.config.init.path:
            raise ValueError(
                f"adapter.name is {self.config.adapter.name!r} and init.path is empty: it must name the model to adapt."
            )

    @cached_property
    def data(self) -> data.Data:
        settings = self.config.data.to_dict()
        origin = self.config.init.path or self.config.teacher
        known = Path(origin) / tokenizers.FILE  # what has learned some words goes on with these
        if origin and settings["tokenizer"] in tokenizers.KINDS and known.is_file():
            settings |= {"tokenizer": str(known), "vocab_size": 0}
        if settings["task"] == "masked_images":
            settings["patch_size"] = settings["patch_size"] or self.config.model.get("patch_size", 0)
        part, parts = sharding.share(self.mesh) if jax.process_count() > 1 else (0, 1)
        return data.load(
            settings.pop("source"),
            **settings,
            seed=self.config.seed,
            process_index=part,
            process_count=parts,
            workdir=self.workdir,
        )

    @cached_property
    def model(self) -> nn.Module:
        """The config's model; what it leaves None and the data know (classes, vocabulary, sizes) is the data's."""
        settings = self.config.model.to_dict()
        fields = {field.name for field in dataclasses.fields(models.MODELS[settings["name"]])}
        wanted = [key for key in _FROM_DATA if key in fields and settings.get(key) is None]
        for key in wanted:
            try:
                settings[key] = _FROM_DATA[key](self.data.info)
            except KeyError:
                source = self.config.data.source
                raise ValueError(
                    f"the data {source!r} have no {key}, which the model {settings['name']!r} needs."
                ) from None
        if "mask_rate" in fields and settings.get("mask_rate") is None:
            settings["mask_rate"] = self.config.data.mask_rate
        return models.build(**settings)

    def check_data(self) -> None:
        """Raises ValueError if the data are for another objective, have more classes or tokens than the model, or other
        tokens than the teacher."""
        objective, task = self.config.objective.name, self.data.info["task"]
        if task not in TASKS[objective]:
            raise ValueError(
                f"the objective {objective!r} is for data.task {' or '.join(TASKS[objective])}: it is {task!r}."
            )
        for name in ("num_classes", "vocab_size"):
            has, needs = self.model.settings.get(name), self.data.info.get(name)
            if has and needs and has < needs:
                raise ValueError(f"model.{name} is {has}: the data {self.config.data.source!r} have {needs}.")
        theirs = self.config.teacher and Path(self.config.teacher) / tokenizers.FILE
        if theirs and theirs.is_file() and data.Tokenizer.load(theirs).to_str() != self.data.tokenizer.to_str():
            raise ValueError(f"data.tokenizer must be the teacher's, {theirs}: words have other numbers in this one.")

    def check_objective(self) -> None:
        """Raises ValueError for an objective that there is not, or that the model has no head for."""
        name, model = self.config.objective.name, self.config.model.name
        if name not in OBJECTIVES:
            raise ValueError(f"unknown objective {name!r}: it is one of {', '.join(OBJECTIVES)}.")
        needed = {"masked_reconstruction": "target", "distilled_classification": "heads", "detection": "num_queries"}
        needed, own = needed.get(name), {"mae": "target", "detr": "num_queries"}.get(model)
        of_images = hasattr(self.model, "image_size")
        head = None if of_images else HEADS.get(name)
        needed = needed or (head and "head")
        if (needed and not hasattr(self.model, needed)) or (own and needed != own):
            raise ValueError(f"the objective {name!r} is not for the model {model!r}.")
        if of_images and name not in batches.IMAGES:
            raise ValueError(f"the objective {name!r} is not for the model {model!r}, which reads images.")
        if head and self.model.head != head:
            raise ValueError(f"the objective {name!r} needs model.head={head!r}, not {self.model.head!r}.")

    @cached_property
    def objective(self) -> Objective:
        self.check_objective()
        settings = {key: value for key, value in self.config.objective.items() if value}
        name = settings.pop("name")
        for key in settings:
            if key not in inspect.signature(OBJECTIVES[name]).parameters:
                raise ValueError(f"the objective {name!r} has no {key!r}: leave objective.{key} at 0.")
        return partial(OBJECTIVES[name], **settings)

    @cached_property
    def mesh(self) -> Mesh:
        return sharding.make_mesh(**self.config.mesh, devices=self.devices)

    def jit(self, function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        """`jax.jit` of a function of batches, with what it computes where the mesh has it."""
        return jax.jit(sharding.with_sharded_activations(function, self.mesh, self.config.sequence_sharding), **options)

    @cached_property
    def total_steps(self) -> int:
        return self.steps("total")

    def steps(self, name: str, section: ConfigDict | None = None, default: int | None = None) -> int:
        """A duration of the config in steps, see `durations.steps`."""
        section = self.config if section is None else section
        in_epochs = section.get(f"{name}_epochs") is not None
        return durations.steps(
            section,
            name,
            batch_size=self.config.data.batch_size,
            examples_per_epoch=self.data.train.examples_per_epoch if in_epochs else None,
            total_steps=self.total_steps if name != "total" else None,
            default=default,
        )

    @cached_property
    def adapter(self) -> Adapter:
        return schema.build(ADAPTERS, self.config.adapter)

    @cached_property
    def schedule(self) -> LearningRate:
        settings = self.config.optimizer
        own = {key: settings[key] for key in field_types(SCHEDULES[settings.schedule])}
        steps = self.steps("warmup", settings, default=0)
        return SCHEDULES.build(settings.schedule, **own).make(self.total_steps, steps, self.model.width)

    @cached_property
    def optimizer(self) -> optax.GradientTransformation:
        return self.optimizer_by(self.schedule)

    def optimizer_by(self, schedule: LearningRate) -> optax.GradientTransformation:
        """The config's optimizer with another schedule."""
        settings = self.config.optimizer
        own = {key: settings[key] for key in field_types(OPTIMIZERS[settings.name])}
        optimizer = OPTIMIZERS.build(settings.name, **own).make(schedule, self.model)
        skipped = self.config.skip_nonfinite
        return optax.apply_if_finite(optimizer, skipped) if skipped else optimizer

    def zeros(self, size: int | None = None, length: int | None = None) -> Batch:
        """A batch of `size` examples of zeros; it needs no data unless the sizes are the data's.

        `length` of texts; None, as for the size, is the config's.
        """
        settings, objective, model = self.config.data, self.config.objective.name, self.model
        self.check_objective()
        if hasattr(model, "image_size"):
            height, width = (model.image_size,) * 2 if settings.image_size else self.data.info["image_size"]
            patch, arrays = getattr(model, "patch_size", 1), batches.IMAGES[objective]
            sizes = {"h": height, "w": width, "c": model.channels, "N": settings.max_boxes}
            sizes["P"] = height // patch * (width // patch)
        else:
            length, rate, arrays = length or settings.sequence_length, settings.mask_rate, batches.TEXTS[objective]
            sizes = {"S": length, "T": length, "M": count_masked(rate, length)}
            if settings.task == "span_corruption":
                sizes["T"] = span_corruption.lengths(rate, length)[1]
        batch = batches.zeros(arrays, size or settings.batch_size, sizes, numbered=objective == "regression")
        said = jax.eval_shape(partial(self.taught, step=0), batch) if self.teacher else {}
        return batch | {name: jnp.zeros(value.shape, value.dtype) for name, value in said.items()}

    @cached_property
    def teacher(self) -> Callable[[Batch], Batch] | None:
        """What it says of a batch, where the config names one."""
        if bool(self.config.teacher) != (self.config.objective.name in TAUGHT):
            name = self.config.objective.name
            if name in TAUGHT:
                raise ValueError(f"teacher is missing: the objective {name!r} needs a run's workdir, or a folder.")
            raise ValueError(f"teacher is {self.config.teacher!r}: only {' and '.join(TAUGHT)} need one.")
        with jax.ensure_compile_time_eval():  # even if it is shapes that are asked for first
            return pretrained.load_teacher(self.config.teacher, self.mesh, self.model) if self.config.teacher else None

    def taught(self, batch: Batch, step: int | None = None) -> Batch:
        """A batch on the devices, with what the teacher says of it where there is one; that of a training step is mixed
        before, if the objective has mixup or cutmix."""
        if not self.teacher:
            return batch
        amounts = self.config.objective.mixup, self.config.objective.cutmix
        if step is not None and any(amounts):
            key = jax.random.fold_in(jax.random.key(~self.config.seed), step)  # not the step's own
            batch = mixed(key, batch, self.model.num_classes, *amounts)
        return batch | self.teacher(batch)

    def state(self, checkpoints: Checkpoints, step: int | None = None) -> TrainState:
        """The state of a checkpoint (None: the newest), or without any checkpoint the one before the first step."""
        if checkpoints.latest is None and step is None:
            # Out of memory, XLA's CPU backend never finishes the arrays that did fit: all are waited for together.
            return jax.block_until_ready(jax.jit(self.make_state, out_shardings=self.state_shardings)())
        target = jax.tree.map(
            lambda a, place: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=place),
            self.abstract_state,
            self.state_shardings,
        )
        return checkpoints.restore(target, step)

    @cached_property
    def abstract_state(self) -> TrainState:
        """Shapes and dtypes of the state."""
        state = jax.eval_shape(self.make_state)
        check_patterns([pattern for pattern, _ in self.config.optimizer.lr_multipliers], state.params)
        if "memory" in state.collections and self.config.data.order != "stream":
            raise ValueError(
                "model.memory_length is above 0: the segments must follow each other, data.order='stream'."
            )
        return state

    @cached_property
    def state_shardings(self) -> TrainState:
        return sharding.shardings(self.abstract_state, self.sharding_rules, self.mesh)

    @property
    def sharding_rules(self) -> tuple[sharding.Rule, ...]:
        """The config's rules, which come first, and the model's."""
        return (*self.config.sharding, *self.model.sharding_rules)

    def make_state(self):
        optimizer = self.optimizer_by(lambda step: 0.0)  # whose rate does not matter
        settings = {"seed": self.config.seed, "ema": bool(self.config.ema_decay), "adapter": self.adapter}
        return init_state(self.model, optimizer, self.objective, self.zeros(), **settings)


_FROM_DATA = {
    "num_classes": lambda info: info["num_classes"],
    "image_size": lambda info: max(info["image_size"]),
    "channels": lambda info: info["channels"],
    "vocab_size": lambda info: info["vocab_size"],
    "max_length": lambda info: info["sequence_length"],
}


_AT_LEAST_1 = (
    *("grad_accum_steps", "data.batch_size", "data.max_boxes", "model.window"),
    *(f"sampling.{name}" for name in ("max_new_tokens", "num_beams", "best_of", "num_drafted")),
    *(f"model.{name}" for name in ("depth", "width", "num_heads", "mlp_dim", "patch_size", "max_length", "unroll")),
    *(f"model.decoder_{name}" for name in ("depth", "width", "num_heads", "mlp_dim")),
    "model.depths",
)
_NOT_NEGATIVE = (
    "skip_nonfinite",
    *("data.evaluation_batch_size", "data.image_size", "data.shorter_side", "objective.mixup", "objective.cutmix"),
    *("objective.kl", "sampling.num_samples", "sampling.temperature"),
    *("model.memory_length", "model.num_registers", "model.layer_scale"),
    *("optimizer.layer_decay", "optimizer.frozen_layers"),
    *("sampling.no_repeat_ngram_size", "sampling.min_new_tokens"),
    *(f"optimizer.{name}" for name in ("learning_rate", "weight_decay", "clip_norm", "end_factor")),
)
_BELOW_1 = (
    *("ema_decay", "model.dropout", "model.stochastic_depth", "optimizer.b1", "optimizer.b2"),
    *("objective.label_smoothing", "objective.scheduled_sampling"),
)
_PATTERNS = (
    "init.skip",
    "init.rename",
    "optimizer.no_decay",
    "optimizer.frozen",
    "optimizer.lr_multipliers",
    "sharding",
)


def check_values(config: ConfigDict) -> None:
    """Raises ValueError, with the key, for a number out of its range and for what is no regular expression."""

    def value(key):
        return functools.reduce(lambda section, name: section.get(name), key.split("."), config)

    for keys, low, high in ((_AT_LEAST_1, 1, None), (_NOT_NEGATIVE, 0, None), (_BELOW_1, 0, 1)):
        for key in keys:
            given = value(key)
            numbers = given if isinstance(given, tuple) else () if given is None else (given,)
            if not all(low <= number and (high is None or number < high) for number in numbers):
                raise ValueError(f"{key} is {given}: it must be {low} or more{f', and below {high}' if high else ''}.")
    for key in _PATTERNS:
        for item in value(key):
            paired = key in ("init.rename", "optimizer.lr_multipliers", "sharding")
            if paired and (isinstance(item, str) or len(item) != 2):
                raise ValueError(f"{key} has {item!r}: it must be a pair of a regular expression and a value.")
            try:
                re.compile(item[0] if paired else item)
            except re.error as error:
                raise ValueError(f"{key} has {item!r}, which is no regular expression: {error}.") from None
