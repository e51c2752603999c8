"""Base class, registry and context of evaluators, and the evaluation of a run."""

from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, ClassVar

import flax.linen as nn
import jax
import numpy as np
from jax.experimental.multihost_utils import process_allgather

from lineage.configs.registry import Natural, Registry, check_ranges, did_you_mean
from lineage.data import Data, EvaluationBatches, Facts, Loader, Tokenizer, TrainBatches
from lineage.models import Model
from lineage.runs.folder import UnknownMetricError
from lineage.tasks import Batch, Task

EVALUATORS: Registry = Registry("evaluator")
Function = Callable[[Any, Batch], Any]  # (bound model, batch) -> outputs
Step = Callable[[Any, Batch], Any]  # (variables, batch on the devices) -> outputs


@dataclass(frozen=True)
class Split:
    """Split of a data set, for evaluation."""

    label: str  # prefix of the metrics: the name of the split, or of the evaluator if it has its own source
    name: str  # name of the split in its data set
    batches: EvaluationBatches  # one pass over the examples
    facts: Facts  # metadata of the data set


@dataclass(eq=False)
class Context:
    """Everything that evaluators need from an experiment: model, task, data and functions.

    The method `compile` takes a model, a function of the bound model and a batch, and keyword arguments of Flax's
    `apply`; it compiles the function for the mesh and in the precision of the run.
    """

    model: Model  # architecture; variables are passed with each call
    task: Task
    facts: Facts  # metadata of the training data
    tokenizer: Tokenizer | None  # None for images
    load: Callable[[], Data]  # opens the evaluation data, which predictions and generation do not need
    train: Callable[[], TrainBatches]  # opens the training data
    sampling: Any  # config section of text generation
    seed: int  # random seed of the run
    compile: Callable[..., Step]
    to_mesh: Callable[[Mapping[str, np.ndarray]], Batch]  # moves this process's share of a batch to the devices
    teach: Callable[[Batch], Batch]  # adds the outputs of the teacher to a batch on the devices
    open: Callable[[str], Data]  # opens another source, such as "text:PATH", for the same task
    artifacts: dict[str, Any] = field(default_factory=dict)  # artifacts of the last evaluation by name: arrays, or JSON
    _steps: dict[Hashable, Step] = field(default_factory=dict)
    cache: dict[Hashable, Any] = field(default_factory=dict)  # results shared by evaluators, see `once`

    @property
    def data(self) -> Data:
        """The evaluation data."""
        return self.load()

    def inputs(self, rows: Any, loader: Loader, first: int = 0) -> EvaluationBatches:
        """Return the batches of `Inputs.rows`, prepared like evaluation batches; `first` is the first row's index."""
        source, transform = self.task.input_examples(rows, self.tokenizer, self.facts)
        return EvaluationBatches(source=source, transform=transform, loader=loader, first=first)

    def step(self, function: Function, model: Model | None = None, mutable: tuple[str, ...] = ()) -> Step:
        """Return the compiled version of a function of a bound model and a batch, cached by its arguments.

        With `mutable` collections, it returns the value of the function and the collections after the call.
        """
        key = function, model, mutable
        if key not in self._steps:
            options = {"mutable": mutable} if mutable else {}
            self._steps[key] = self.compile(model or self.model, function, **options)
        return self._steps[key]

    def rows(self, function: Function, variables: Any, batches: EvaluationBatches, model: Model | None = None) -> Any:
        """Apply a function to all batches of a split; return the concatenated results, arrays [N, ...] on the host."""
        step = self.step(function, model)
        rows = [to_host(step(variables, self.to_mesh(batch))) for batch in batches]
        return jax.tree.map(lambda *parts: np.concatenate(parts)[: len(batches.source)], *rows)

    def once(self, key: Hashable, compute: Callable[[], Any]) -> Any:
        """Return the result of `compute` for a key, computed once per evaluation."""
        if key not in self.cache:
            self.cache[key] = compute()
        return self.cache[key]


def is_shared(tree: Any) -> bool:
    """Return whether some array lies on devices of several processes."""
    return any(isinstance(leaf, jax.Array) and not leaf.is_fully_addressable for leaf in jax.tree.leaves(tree))


def to_host(tree: Any) -> Any:
    """Return whole arrays on the host; all processes that share an array must call this function."""
    return process_allgather(tree, tiled=True) if is_shared(tree) else jax.device_get(tree)


@dataclass(frozen=True)
class Evaluator:
    """Base class of evaluators. A subclass is a frozen dataclass whose fields are the keys of its config section.

    Attributes:
        split: name of the only split to evaluate; empty: all but the training split.
        every: interval in evaluations of the run; the evaluator always runs in the last one; 0 disables it.
        source: another source to evaluate on, such as "text:PATH", with the tokenizer and the classes of the run; if
            it has only training examples, they are its split "test". The metrics are named after the evaluator instead
            of the split; empty: the source of the run.

    Class attributes:
        returns: names of the metrics that `measure` may return; None: unknown.
        task_specific: whether it fits only the tasks that list it in `evaluators`, and their subclasses.
    """

    REQUIRED: ClassVar[tuple[str, ...]] = ("measure",)
    returns: ClassVar[tuple[str, ...] | None] = None
    task_specific: ClassVar[bool] = False

    split: str = ""
    every: Natural = 1
    source: str = ""

    def __post_init__(self):
        check_ranges(f"evaluators.{EVALUATORS.name_of(self)}", self)

    def check(self, context: Context) -> None:
        """Raise ValueError if the evaluator does not fit the task or the model; called before the training."""
        name, task = EVALUATORS.name_of(self), context.task
        if self.task_specific and not any(name in getattr(cls, "evaluators", ()) for cls in type(task).__mro__):
            raise ValueError(f"The evaluator {name!r} does not fit the task {task.name!r}.")

    def names(self, context: Context, split: Split) -> Collection[str] | None:
        """Return the names of the metrics that `measure` may return, without computing them; None: unknown."""
        return self.returns

    def measure(self, context: Context, variables: Any, split: Split) -> dict[str, float]:
        """Return the metrics of a split, for model variables with the EMA of the parameters if enabled."""
        raise NotImplementedError


EVALUATORS.base = Evaluator


@EVALUATORS.register("loss")
@dataclass(frozen=True)
class Loss(Evaluator):
    """Metrics of the task's loss over a whole split, and metrics derived from them."""

    def names(self, context: Context, split: Split) -> Collection[str]:
        batch = context.teach(context.to_mesh(split.batches[0]))
        shapes = jax.eval_shape(nn.init_with_output(context.task.loss, context.model), jax.random.key(0), batch)
        ones = dict.fromkeys(shapes[0][2], 1.0)
        return ones | context.task.derived(ones, split.facts, split.name)

    def measure(self, context: Context, variables: Any, split: Split) -> dict[str, float]:
        """Return the metrics of a split.

        The memory of the model is empty before the first batch. The states of a batch are merged on the host while the
        next batch is computed.
        """
        step = context.step(context.task.loss, mutable=("memory",))
        merged, memory, waiting = {}, {}, None
        variables = {name: value for name, value in variables.items() if name != "memory"}
        for batch in split.batches:
            (_, _, states), memory = step({**variables, **memory}, context.teach(context.to_mesh(batch)))
            merged, waiting = _merge(merged, waiting), states
        metrics = {name: float(state.compute()) for name, state in _merge(merged, waiting).items()}
        return metrics | context.task.derived(metrics, split.facts, split.name)


def _merge(merged, states):
    if states is None:
        return merged
    states = {name: state.to_host() for name, state in states.items()}
    return {name: merged[name].merge(state) if merged else state for name, state in states.items()}


def _numbers(name: str, values: Any) -> dict[str, float]:
    """Return what `measure` of the evaluator `name` returns, with each metric as a float."""
    if not isinstance(values, Mapping):
        raise ValueError(f"evaluators.{name} returns {values!r:.60}: it must return a dictionary of metrics.")
    numbers = {}
    for metric, value in values.items():
        try:
            if isinstance(value, str) or np.ndim(value):
                raise TypeError
            numbers[metric] = float(value)
        except (TypeError, ValueError, OverflowError):
            raise ValueError(f"evaluators.{name} returns {value!r:.60} as {metric!r}: it must be a number.") from None
    return numbers


def _check_owner(owners: dict[str, str], metric: str, name: str) -> None:
    """Record that the evaluator `name` returns a metric; raise ValueError if another evaluator returns it, too."""
    if (other := owners.setdefault(metric, name)) != name:
        both = f"evaluators.{other} and evaluators.{name} both return {metric}"
        raise ValueError(f"{both}: give one of them another split, or its own source and another name.")


class Evaluation:
    """Evaluators of a run, by name in `config.evaluators`."""

    def __init__(self, context: Context, evaluators: Mapping[str, Evaluator]):
        """Raise ValueError for an evaluator that does not fit the task or the model, or whose split does not exist.

        ValueError is also raised for two evaluators that return the same metric of a split, of which one would be lost.
        """
        self.context, self.evaluators, self._open = context, evaluators, cache(context.open)
        for name, evaluator in evaluators.items():
            evaluator.check(context)
            known = self._data(evaluator).splits
            if evaluator.split not in ("", *known) or (evaluator.source and not known):
                splits = f"{evaluator.source or 'the data'}'s splits are {', '.join(known) or 'none'}"
                raise ValueError(f"evaluators.{name}.split is {evaluator.split!r}, but {splits}.")
        self._check_owners()

    def __call__(self, variables: Any, number: int | None = None) -> dict[str, float]:
        """Return the metrics of all splits, as "split/metric".

        Args:
            variables: model variables, with the EMA of the parameters if enabled.
            number: number of this evaluation in the run, starting at 1; evaluators that are not due are skipped. None:
                run all evaluators.
        """
        self.context.cache.clear()
        metrics: dict[str, float] = {}
        owners: dict[str, str] = {}
        for name, evaluator, split in self._enabled(number):
            for metric, value in _numbers(name, evaluator.measure(self.context, variables, split)).items():
                _check_owner(owners, f"{split.label}/{metric}", name)
                metrics[f"{split.label}/{metric}"] = value
        order = {split: place for place, split in enumerate(self.context.data.splits)}
        return dict(sorted(metrics.items(), key=lambda item: order.get(item[0].partition("/")[0], len(order))))

    def due(self, number: int | None) -> dict[str, Evaluator]:
        """Return the evaluators that run in evaluation `number`, see `__call__`."""
        return {
            name: evaluator
            for name, evaluator in self.evaluators.items()
            if evaluator.every and (number is None or not number % evaluator.every)
        }

    def check_metric(self, key: str, metric: str) -> None:
        """Raise UnknownMetricError if no evaluator returns the metric, such as "test/accuracy", of a config's `key`."""
        if not metric:
            return
        known: list[str] = []
        for _, evaluator, split in self._enabled():
            # Every task has a loss; its other metrics are only found by tracing it.
            if isinstance(evaluator, Loss) and metric == f"{split.label}/loss":
                return
            if (names := evaluator.names(self.context, split)) is None:
                return
            known += [f"{split.label}/{name}" for name in names]
        if not known:
            raise UnknownMetricError(f"{key} is {metric!r}, but nothing is evaluated: the data have no split for it.")
        if metric not in known:
            hint = did_you_mean(metric, known) or f": the metrics are {', '.join(known)}."
            raise UnknownMetricError(f"{key} is {metric!r}{hint}")

    def _check_owners(self) -> None:
        owners: dict[str, str] = {}
        for name, evaluator, split in self._enabled():
            loss = isinstance(evaluator, Loss)  # whose other metrics are only found by tracing
            for metric in ("loss",) if loss else evaluator.names(self.context, split) or ():
                _check_owner(owners, f"{split.label}/{metric}", name)

    def _data(self, evaluator: Evaluator) -> Data:
        return self._open(evaluator.source) if evaluator.source else self.context.data

    def _enabled(self, number: int | None = None) -> Iterator[tuple[str, Evaluator, Split]]:
        """Yield the evaluators that are `due`, with their names, once for each of their splits."""
        for name, evaluator in self.due(number).items():
            data = self._data(evaluator)
            chosen = {split: batches for split, batches in data.splits.items() if evaluator.split in ("", split)}
            for split, batches in chosen.items():
                label = split
                if evaluator.source:
                    label = name if len(chosen) == 1 else f"{name}_{split}"
                yield name, evaluator, Split(label, split, batches, data.facts)
