"""The base class of tasks, and their registry."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from lineage.configs.registry import Range, Registry, check_ranges, did_you_mean
from lineage.data import Examples, ExampleSource, Facts, Loader, Tokenizer
from lineage.data.content import Transform
from lineage.metrics.states import State
from lineage.models import Model

Batch = dict[str, Array]
Result = tuple[Float[Array, ""], Float[Array, ""], dict[str, State]]
Pictures = dict[str, dict[str, Any]]  # name of an artifact -> its arrays

# Types of options, with their ranges.
Weight = Annotated[float, Range(0)]
Weights = Annotated[tuple[float, ...], Range(0)]
MaskRate = Annotated[float, Range(above=0, below=1)]

TASKS: Registry = Registry("task")


class Sizes(NamedTuple):
    """Sizes that determine the shapes of a batch for a model."""

    batch_size: int  # number of examples, B
    model: Model
    facts: Callable[[], Facts]  # the dataset metadata; called only if needed, because it opens the data
    length: int | None = None  # sequence length of texts, T; None: that of the config


class Request(NamedTuple):
    """Input of text generation."""

    prompts: np.ndarray  # token ids [B, T]
    lengths: np.ndarray | None = None  # lengths of the prompts [B]; None: T
    inputs: tuple[np.ndarray, np.ndarray] | None = None  # encoder inputs: token ids and their mask, both [B, S]


class InputExamples(NamedTuple):
    """Examples of the inputs of predictions, and the transform of their batches, if any."""

    source: ExampleSource
    transform: Transform | None = None


@dataclass(frozen=True)
class Task:
    """Base class of tasks. A subclass is a frozen dataclass whose fields are the keys of `config.task`.

    A task must implement `examples`, `axes` and `loss`, and set `reads`, `needs` and `arrays`; all else has a default.
    """

    REQUIRED: ClassVar[tuple[str, ...]] = ("examples", "axes", "loss", "reads", "needs", "arrays")

    reads: ClassVar[str]  # kind of content that a source must offer, such as "documents" (see `lineage.data.sources`)
    needs: ClassVar[tuple[str, ...]]  # kinds of `Model.outputs`; the model must provide one of them
    arrays: ClassVar[Mapping[str, str]]  # dtype and axes (see `axes`) of the arrays of a batch: {"tokens": "int32 B T"}
    losses: ClassVar[tuple[str, ...]] = ()  # names of the losses whose weights are in the option `weights`
    head: ClassVar[str | None] = None  # default head for models with a choice of heads
    evaluators: ClassVar[tuple[str, ...]] = ("loss",)  # names of the evaluators that run by default
    special_tokens: ClassVar[tuple[str, ...]] = ()  # roles of the tokens that the tokenizer must have, such as "mask"
    ends: ClassVar[tuple[str, str]] = ("", "")  # roles of the tokens before and after an input; "": none
    optional_tokens: ClassVar[tuple[str, ...]] = ()  # special tokens that a tokenizer from a file may lack
    generates: ClassVar[bool] = False  # whether the `outputs` of inputs are the texts that the model generates
    marked: ClassVar[bool] = False  # whether names of special tokens in an input, such as <mask>, are these tokens
    unused: ClassVar[tuple[str, ...]] = ()  # options of the model that have no effect in the task, such as "dropout"
    needs_teacher: ClassVar[bool] = False  # whether `config.teacher` must name a trained model
    has_snapshots: ClassVar[bool] = False  # whether `snapshot` returns artifacts
    inputs: ClassVar[tuple[str, ...]] = ("tokens",)  # arrays of a batch that `forward` uses
    arguments: ClassVar[tuple[str, ...]] = ("tokens",)  # arrays that are the arguments of the model in training
    loader_options: ClassVar[tuple[str, ...]] = ()  # options of the loader, such as "order", that the examples allow
    problem_type = ""  # what `transformers` computes from the logits of a classifier; "": the default
    cache_dir = ""  # folder that keeps token ids and trained tokenizers between runs
    known: ClassVar[Facts | None] = None  # metadata of the training data, set by `data.facts.evaluating`

    def __post_init__(self):
        """Raise ValueError for options out of their range."""
        check_ranges("task", self)
        if self.losses and len(self.weights) != len(self.losses):
            needed = f"it must have {len(self.losses)}, for {', '.join(self.losses)}"
            raise ValueError(f"task.weights is {tuple(self.weights)}: {needed}.")

    @property
    def name(self) -> str:
        """The name under which the task is registered."""
        return TASKS.name_of(self)

    # Data, in NumPy.

    def texts(self, content: Any) -> dict[str, Iterable[str]]:
        """Return the texts of each split, for training a tokenizer; {} if the task needs no tokenizer."""
        return {}

    def examples(self, content: Any, tokenizer: Tokenizer | None, seed: int) -> Examples:
        """Return the examples of each split, their transforms and metadata, for the content that `reads` names.

        The tokenizer is None if `texts` returned {}; the seed determines random subsets of the examples.
        """
        raise NotImplementedError

    def check_loader(self, loader: Loader) -> None:
        """Raise ValueError for options of the loader that the examples do not allow."""
        for option in ("order", "buckets", "repeats"):
            value = getattr(loader, option)
            if option not in self.loader_options and value != getattr(Loader, option):
                raise ValueError(f"loader.{option} is {value!r}: the task {self.name!r} does not allow it.")

    # The model: shapes, loss and outputs.

    def check_model(self, model: Model) -> None:
        """Raise ValueError for a model that does not support this task."""
        if isinstance(given := model.outputs, str):
            tuples = f"which must be a tuple, such as ({given!r},)"
            raise ValueError(f"The model {type(model).__name__} has outputs {given!r}, {tuples}.")
        if not {*self.needs} & {*given}:
            head = f" Set model.head={self.head!r}." if self.head and model.has_heads else ""
            needed = f"The task {self.name!r} needs a model with the outputs {' or '.join(self.needs)}"
            raise ValueError(f"{needed}: {type(model).__name__} has {' and '.join(given)}.{head}")

    def known_facts(self, model: Model, tokenizer: Callable[[], Tokenizer]) -> dict[str, Any]:
        """Return the fields of `Facts` that follow from the options, for a trained model without its training data.

        `tokenizer` loads the model's tokenizer.
        """
        return {}

    def adapt(self, model: Mapping[str, Any]) -> "Task":
        """Return the task with the options that it takes from the model's config section."""
        return self

    def model_options(self) -> dict[str, Any]:
        """Return defaults for model options that neither the config nor the data set."""
        return {} if self.head is None else {"head": self.head}

    def axes(self, sizes: Sizes) -> dict[str, int]:
        """Return the sizes of the axes named in `arrays`."""
        raise NotImplementedError

    def zeros(self, sizes: Sizes) -> Batch:
        """Return a batch of zeros whose masks are True, for its shapes and dtypes."""
        axes, batch = self.axes(sizes), {}
        for name, text in self.arrays.items():
            dtype, shape = self._parse_array(name, text, axes)
            batch[name] = jnp.full(shape, dtype == "bool" or name == "extent", dtype)
        return batch

    def _parse_array(self, name, text, axes):
        """Return the dtype and the shape of an array in `arrays`; raise ValueError if its description is wrong."""
        has = f"The task {type(self).__name__} has"
        if not isinstance(text, str) or not text.split():
            raise ValueError(f"{has} {text!r} as {name}: it must be a string such as 'int32 B T'.")
        dtype, *shape = text.split()
        try:
            np.dtype(dtype)
        except TypeError:
            raise ValueError(f"{has} the dtype {dtype!r} of {name}, which does not exist.") from None
        for axis in shape:
            if axis not in axes and not axis.isdecimal():
                wrong = f"{has} the axis {axis!r} of {name}, which `axes` does not return"
                raise ValueError(f"{wrong}{did_you_mean(axis, axes) or '.'}")
        return dtype, [axes[axis] if axis in axes else int(axis) for axis in shape]

    def loss(self, model: Model, batch: Batch) -> Result:
        """Return `(loss_sum, weight, metric states)` of a bound model and a batch.

        The loss is a sum, not a mean, so that gradients of micro-batches can be added: the batch loss is the total
        `loss_sum` divided by the total `weight`. The metric states include this mean, "loss". The model is in training
        mode if it has a "dropout" rng. The variable `progress` of the collection "run" is then the completed fraction
        of the steps of the run, and `real` the number of `examples`, and of True entries of each mask, in the whole
        batch, of which `batch` may be a micro-batch.
        """
        raise NotImplementedError

    def forward(self, model: Model, batch: Batch) -> Any:
        """Return the outputs of the model for a batch, by default logits; evaluators and exported programs use it."""
        return model(batch["tokens"])

    def feature_extractor(self, model: Model) -> Model:
        """Return the model whose `forward` gives one feature vector [D] per example, for probes."""
        need = "probes need a task of labeled images; `embed` and `predict --features` also take texts with an encoder"
        raise ValueError(f"The task {self.name!r} has no features: {need}.")

    def labeled_features(self, model: Model, batch: Batch) -> tuple[Array, Array]:
        """Return the outputs of a model from `feature_extractor` for a batch, and the labels."""
        return self.forward(model, batch).astype(jnp.float32), batch["label"]

    # Predictions, which need the metadata of the training data but not the data.

    def input_examples(self, rows: Any, tokenizer: Tokenizer | None, facts: Facts) -> InputExamples:
        """Return examples of the rows of `data.inputs.Inputs`, prepared like those of the evaluation splits."""
        raise ValueError(f"The task {self.name!r} has no predictions.")

    def outputs(self, model: Model, batch: Batch) -> Any:
        """Return the arrays [B, ...] for `predict`, given a bound model and a batch of inputs."""
        return self.forward(model, batch)

    def predict(self, outputs: Any, inputs: ExampleSource, facts: Facts) -> list[dict[str, Any]]:
        """Return the prediction for each input as a JSON object in which images are uint8 arrays [h, w, c].

        Args:
            outputs: `outputs` of all inputs, on the host; the generated texts if the task `generates`.
            inputs: examples from `input_examples`.
        """
        raise ValueError(f"The task {self.name!r} has no predictions.")

    def features(self, model: Model, batch: Batch) -> Any:
        """Return the feature vectors [B, D] of a batch of inputs, for a bound model."""
        model, variables = model.unbind()
        return self.forward(self.feature_extractor(model).bind(variables), batch)

    def document(self, predictions: Iterable[dict[str, Any]]) -> dict[str, Any] | Iterable[Any]:
        """Return all predictions in the standard .json format of the task: an object, or the entries of a list."""
        return predictions

    # Distillation, for tasks that need a teacher.

    def prepare(self, key: jax.Array, batch: Batch, model: Model) -> Batch:
        """Transform a training batch on the devices, for example by mixup, before the teacher and the model see it."""
        return batch

    def teach(self, teacher: Model, batch: Batch) -> Batch:
        """Return the outputs of a bound teacher that are added to the batch."""
        raise NotImplementedError

    # Evaluation, generation and the report. `context` and `split` are those of `lineage.evaluation`.

    def derived(self, metrics: dict[str, float], facts: Facts, split: str) -> dict[str, float]:
        """Return metrics that are derived from those of `loss`, such as the perplexity."""
        return {}

    def request(self, tokens: np.ndarray, tokenizer: Tokenizer, facts: Facts) -> Request:
        """Return the inputs of text generation, with B = 1, for a prompt of tokens [T]."""
        raise ValueError("Only decoders of texts generate: leave sampling.num_samples at 0.")

    def requests(self, batch: dict[str, np.ndarray], facts: Facts) -> Request:
        """Return the inputs of text generation for each example of an evaluation batch."""
        raise NotImplementedError

    def pictures(self, context: Any, variables: Any, split: Any) -> Pictures:
        """Return artifacts of a split for the report at the end of a run, as arrays by artifact name."""
        return {}

    def snapshot(self, context: Any, variables: Any, split: Any) -> Pictures:
        """Return artifacts of an evaluation for the report, computed from the first batch of the first split."""
        return {}


TASKS.base = Task
