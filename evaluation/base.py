"""The base class of evaluators, their registry and their context."""

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np
from jax.experimental.multihost_utils import process_allgather

from lineage.configs.registry import Registry
from lineage.data import Data, EvaluationBatches, Facts
from lineage.models import Model
from lineage.tasks import Batch, Task

EVALUATORS: Registry = Registry("evaluator")
Function = Callable[[Any, Batch], Any]  # of a bound model and a batch
Step = Callable[[Any, Batch], Any]  # of variables and a batch on the devices


@dataclass(frozen=True)
class Split:
    """A split that is evaluated.

    Attributes:
        label: prefix of the metrics: the split's name, or that of the evaluator if it has a source of its own.
        name: of the split in its data.
        batches: one pass over its examples.
        facts: about its data.
    """

    label: str
    name: str
    batches: EvaluationBatches
    facts: Facts


@dataclass(eq=False)
class Context:
    """Model, task, data and functions for evaluators. An experiment makes it: evaluation does not depend on training.

    Attributes:
        model: the model; variables come with each call.
        task: what it learns.
        data: of the run.
        sampling: the config's section of text generation.
        seed: of the run.
        compile: makes a step, compiled for the mesh in the run's precision, of a function of a model and a batch.
        loss_step: the step that returns the metric states of a batch and the model's memory after it.
        to_mesh: puts this process's part of a batch on the devices.
        teach: adds what a teacher says to a batch on the devices.
        check_batch: raises ValueError for a number of examples that the mesh does not divide.
        open: opens another source, such as "text:PATH", for the same task.
        artifacts: what the report shows of the last evaluation, by name: arrays, or an object for JSON.
    """

    model: Model
    task: Task
    data: Data
    sampling: Any
    seed: int
    compile: Callable[[Model, Function], Step]
    loss_step: Step
    to_mesh: Callable[[Mapping[str, np.ndarray]], Batch]
    teach: Callable[[Batch], Batch]
    check_batch: Callable[[int], None]
    open: Callable[[str], Data]
    artifacts: dict[str, Any] = field(default_factory=dict)
    _steps: dict[Hashable, Step] = field(default_factory=dict)
    _known: dict[Hashable, Any] = field(default_factory=dict)

    def step(self, function: Function, model: Model | None = None) -> Step:
        """Return the compiled step of a function of a bound model and a batch; the same one for the same arguments."""
        key = function, model
        if key not in self._steps:
            self._steps[key] = self.compile(model or self.model, function)
        return self._steps[key]

    def rows(self, function: Function, variables: Any, batches: EvaluationBatches, model: Model | None = None) -> Any:
        """Return what a function gives for all examples of a split: arrays [N, ...] in their order, on the host."""
        step = self.step(function, model)
        rows = [process_allgather(step(variables, self.to_mesh(batch)), tiled=True) for batch in batches]
        return jax.tree.map(lambda *parts: np.concatenate(parts)[: batches.num_examples], *rows)

    def once(self, key: Hashable, compute: Callable[[], Any]) -> Any:
        """Return what `compute` gives, computed once in an evaluation, however many evaluators ask for the key."""
        if key not in self._known:
            self._known[key] = compute()
        return self._known[key]

    def forget(self) -> None:
        """Forget what `once` has kept, because the variables have changed."""
        self._known.clear()

    def training_set(self) -> EvaluationBatches:
        """Return one pass over the training set, with the transform of evaluations."""
        return replace(next(iter(self.data.splits.values())), source=self.data.train.source)


@dataclass(frozen=True)
class Evaluator:
    """Base class of evaluators. A subclass is a frozen dataclass whose fields are the keys of its config section.

    Attributes:
        split: the only split that is evaluated; "" is all but the training split.
        every: evaluate at every n-th evaluation of the run, and at the end; 0 is never.
        source: another source to evaluate on, such as "text:PATH"; "" is the run's. Metrics are then named after the
            evaluator instead of the split.
    """

    split: str = ""
    every: int = 1
    source: str = ""

    def __post_init__(self):
        if self.every < 0:
            raise ValueError(f"evaluators.every is {self.every}: it must be 0 (never) or more.")

    def check(self, context: Context) -> None:
        """Raise ValueError if the evaluator does not fit the task or the model; called before the training."""

    def measure(self, context: Context, variables: Any, split: Split) -> dict[str, float]:
        """Return the metrics of a split.

        Args:
            context: what to work with.
            variables: of the model, an average of the parameters where one is kept.
            split: to evaluate.
        """
        raise NotImplementedError
