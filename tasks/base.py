"""The base class of tasks, and their registry."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from lineage.configs.registry import Registry
from lineage.data import Examples, Facts, Loader, Tokenizer
from lineage.metrics.states import State
from lineage.models import Model

Batch = dict[str, Array]
Result = tuple[Float[Array, ""], Float[Array, ""], dict[str, State]]
Spec = dict[str, jax.ShapeDtypeStruct]
Pictures = dict[str, dict[str, Any]]  # name of an artifact -> its arrays
Request = tuple[np.ndarray, np.ndarray | None]  # token ids [T] of a prompt, and [S] of the input that goes with it

TASKS: Registry = Registry("task")


@dataclass(frozen=True)
class Task:
    """Base class of tasks. A subclass is a frozen dataclass whose fields are the keys of `config.task`.

    A task must implement `examples`, `batch_spec` and `loss`, and set `reads` and `needs`; all else has a default.

    Class attributes:
        reads: the kind of content that a source must offer, such as "documents" (see `lineage.data.sources`).
        needs: kinds of outputs (`Model.outputs`), one of which the model must have.
        head: the head that a model gets if it has several and the config does not choose one.
        special_tokens: roles of the tokens that the tokenizer must have, such as "mask".
        optional_tokens: those of them that a tokenizer from a file may lack.
        needs_teacher: whether `config.teacher` must name a trained model.
        inputs: the arrays of a batch that `forward` reads.
        arguments: the arrays of a batch that are the model's positional arguments in training.
        has_snapshots: whether the report shows something of each evaluation (see `snapshot`).
        loader_options: the options of the loader, among "order", "buckets" and "repeats", that the examples allow.
    """

    reads: ClassVar[str]
    needs: ClassVar[tuple[str, ...]]
    head: ClassVar[str | None] = None
    special_tokens: ClassVar[tuple[str, ...]] = ()
    optional_tokens: ClassVar[tuple[str, ...]] = ()
    needs_teacher: ClassVar[bool] = False
    has_snapshots: ClassVar[bool] = False
    inputs: ClassVar[tuple[str, ...]] = ("tokens",)
    arguments: ClassVar[tuple[str, ...]] = ("tokens",)
    loader_options: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self):
        """Raise ValueError for options out of their range; a subclass that adds checks calls this one first."""

    @property
    def name(self) -> str:
        """The name under which the task is registered."""
        return next((name for name, cls in TASKS.items() if cls is type(self)), type(self).__name__)

    # Data: NumPy, before training and in worker processes.

    def texts(self, content: Any) -> dict[str, Iterable[str]]:
        """Return the texts of each split that a tokenizer is trained on; {} where there is nothing to tokenise."""
        return {}

    def examples(self, content: Any, tokenizer: Tokenizer | None, seed: int) -> Examples:
        """Return the examples of each split, their transforms, and the facts about them.

        Args:
            content: what the source's method named by `reads` returns.
            tokenizer: of the texts; None where `texts` returned {}.
            seed: of random choices among the examples.
        """
        raise NotImplementedError

    def check_loader(self, loader: Loader) -> None:
        """Raise ValueError for options of the loader that these examples do not allow."""
        default = Loader(batch_size=loader.batch_size)
        for option in ("order", "buckets", "repeats"):
            value = getattr(loader, option)
            if option not in self.loader_options and value != getattr(default, option):
                raise ValueError(f"loader.{option} is {value!r}: the task {self.name!r} does not allow it.")

    # The model: shapes, loss and outputs.

    def check_model(self, model: Model) -> None:
        """Raise ValueError for a model that cannot learn this task."""
        if not {*self.needs} & {*model.outputs}:
            head = f" Set model.head={self.head!r}." if self.head and "head" in model.settings else ""
            raise ValueError(
                f"The task {self.name!r} needs a model with the outputs {' or '.join(self.needs)}: "
                f"{type(model).__name__} has {' and '.join(model.outputs)}.{head}"
            )

    def adapt(self, model: Mapping[str, Any]) -> "Task":
        """Return the task with the options that it takes from the model's config section."""
        return self

    def model_options(self) -> dict[str, Any]:
        """Return values of model options that the config leaves empty, beside those that the data give."""
        return {} if self.head is None else {"head": self.head}

    def batch_spec(self, batch_size: int, model: Model, facts: Callable[[], Facts], length: int | None = None) -> Spec:
        """Return the shapes and dtypes of a batch, without reading data where the options suffice.

        Args:
            batch_size: B, examples.
            model: for which the batch is.
            facts: returns the facts about the data; opens the data, so it is called only where they are needed.
            length: T of texts; None is the config's.
        """
        raise NotImplementedError

    def zeros(self, batch_size: int, model: Model, facts: Callable[[], Facts], length: int | None = None) -> Batch:
        """Return a batch of zeros with masks that are True. Arguments as in `batch_spec`."""
        spec = self.batch_spec(batch_size, model, facts, length)
        return {name: jnp.full(a.shape, a.dtype == bool or name == "extent", a.dtype) for name, a in spec.items()}

    def loss(self, model: Model, batch: Batch) -> Result:
        """Return `(loss_sum, weight, metric states)` of a bound model and a batch.

        The loss is the sum over examples, not their mean, so that the gradients of a batch's parts add up to the
        whole's: loss = sum of sums / sum of weights. The call is in training when the model has a "dropout" rng. The
        variable `progress` of the collection "run" is then the fraction of the run's steps that are done, and `real`
        the number of True entries of each mask in the whole batch, of which `batch` may be a part.
        """
        raise NotImplementedError

    def forward(self, model: Model, batch: Batch) -> Any:
        """Return the model's outputs for the `inputs` of a batch: logits, unless the task says otherwise."""
        return model(batch["tokens"])

    def feature_extractor(self, model: Model) -> Model:
        """Return the model whose `forward` gives one feature vector [D] per example, for probes.

        Raises:
            ValueError: the task has no such features.
        """
        raise ValueError(f"The task {self.name!r} has no features for probes: they are for labelled images.")

    # A teacher's knowledge, where the task needs one.

    def prepare(self, key: jax.Array, batch: Batch, model: Model) -> Batch:
        """Return a training batch as the teacher and the model see it, on the devices."""
        return batch

    def teach(self, teacher: Model, batch: Batch) -> Batch:
        """Return the arrays that a bound teacher adds to a batch."""
        raise NotImplementedError

    # Evaluation, generation, prediction and the report.

    def evaluators(self) -> dict[str, dict[str, Any]]:
        """Return the sections of the evaluators that run by default, by their names in `config.evaluators`."""
        return {"loss": {"name": "loss"}}

    def derived(self, metrics: dict[str, float], facts: Facts, split: str) -> dict[str, float]:
        """Return metrics that follow from those of `loss`, such as the perplexity."""
        return {}

    def request(self, tokens: np.ndarray, tokenizer: Tokenizer, facts: Facts) -> Request:
        """Return what a model generates from, for a prompt's tokens [T].

        Raises:
            ValueError: models do not learn to generate text by this task.
        """
        raise ValueError("Only decoders of texts generate: leave sampling.num_samples at 0.")

    def requests(
        self, batch: dict[str, np.ndarray], facts: Facts
    ) -> tuple[np.ndarray, np.ndarray | None, tuple[np.ndarray, np.ndarray] | None]:
        """Return what a model generates from for each example of an evaluation batch.

        Returns:
            Prompts [B, T], their lengths [B] (None: T), and inputs with their mask, both [B, S] (None: no inputs).
        """
        raise NotImplementedError

    def predict(self, outputs: Any, batch: dict[str, np.ndarray], facts: Facts) -> list[dict[str, Any]]:
        """Return one JSON object per real example of a batch, from what `forward` returned, both on the host."""
        raise ValueError(f"The task {self.name!r} has no predictions.")

    def pictures(
        self,
        split: str,
        model: Model,
        variables: Mapping[str, Any],
        batches: Iterable[dict[str, np.ndarray]],
        facts: Facts,
        tokenizer: Tokenizer | None,
    ) -> Pictures:
        """Return what the report shows of a split at the end of a run: arrays by the name of their artifact."""
        return {}

    def snapshot(
        self, model: Model, variables: Mapping[str, Any], batch: dict[str, np.ndarray], facts: Facts
    ) -> Pictures:
        """Return what the report shows of each evaluation, from the first batch of the first split."""
        return {}


def check_range(key: str, value: int | float, low: int | float = 0, below: int | float | None = None) -> None:
    """Raise ValueError unless low <= value, and value < below if that is given."""
    if not (low <= value and (below is None or value < below)):
        allowed = f"{low} or more" + (f" and below {below}" if below is not None else "")
        raise ValueError(f"task.{key} is {value}: it must be {allowed}.")


def check_rate(key: str, value: int | float) -> None:
    """Raise ValueError unless 0 < value < 1."""
    if not 0 < value < 1:
        raise ValueError(f"task.{key} is {value}: it must be between 0 and 1, both excluded.")


def check_weights(weights: tuple[float, ...], names: tuple[str, ...]) -> None:
    """Raise ValueError unless there is one weight for each loss."""
    if len(weights) != len(names):
        raise ValueError(f"task.weights is {tuple(weights)}: it must have {len(names)}, for {', '.join(names)}.")


def specs(dtype: Any, **shapes: tuple[int, ...]) -> Spec:
    """Return specs of one dtype by name."""
    return {name: jax.ShapeDtypeStruct(shape, dtype) for name, shape in shapes.items()}
