"""Loading of pre-trained models, from a run or in the layout of `transformers`, for initialization or as teachers."""

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from lineage.configs.adoption import is_run, model_of
from lineage.configs.registry import check_matches, matches
from lineage.configs.run import Init
from lineage.configs.storage import is_present, local
from lineage.data import Facts, Tokenizer, tokenizers
from lineage.data.facts import FACTS
from lineage.data.tokenizers import TokenizerFile
from lineage.models import Model, convert
from lineage.models.convert import companions
from lineage.runs import data_record
from lineage.tasks import Batch, Task
from lineage.train.adapters import ADAPTERS, MatrixAdapter, adapted_path
from lineage.train.reading import read_variables
from lineage.train.step import TrainState


def start_from(
    state: TrainState, model: Model, init: Init, make: Callable[[], TrainState] | None = None
) -> tuple[TrainState, str]:
    """Return the state with the parameters and running statistics of another model, and a sentence that describes it.

    Position tables are resampled if the models differ in resolution (see `Model.resampled`). The sentence names the
    parameters that are newly initialized, and those of the other model that are not used.

    Args:
        state: the initial state; or its shapes, if `make` is given to create it after the models were checked.
    """
    folder = local(init.path)
    if is_run(folder):
        other, loaded = model_of(folder, trusted=True), read_variables(Path(folder))
    else:
        other, loaded = convert.load(folder, target=model)
    expected = _flat(jax.eval_shape(TrainState.variables, state))
    loaded = _renamed(_flat(loaded), init.rename, init.path)
    loaded |= _computed(other, model, expected, loaded)
    taken = _fitting(expected, loaded, model, other, init)
    _check_new(state, expected.keys() - taken.keys())
    state = make() if make else state
    variables = {}
    for kind, tree in state.variables().items():
        if kind in ("params", "statistics"):
            flat = {name: taken.get(name, value) for name, value in flatten_dict(tree, sep="/").items()}
            variables[kind] = unflatten_dict(flat, sep="/")
    fresh, unused = _top_modules(expected.keys() - taken.keys()), _top_modules(loaded.keys() - taken.keys())
    message = f"starts from {init.path}; new: {fresh}; not used: {unused}"
    if state.frozen is not None:
        message += f"; trained: {sum(a.size for a in jax.tree.leaves(state.params)):,} values"
    return with_variables(state, variables), message


def _fitting(expected, loaded, model, other, init):
    """Return the parameters of another model to copy, by path; raise ValueError if some do not fit.

    A classifier of another head, or with another number of classes, is omitted.
    """
    path, layers = init.path, init.layers
    check_matches("init.skip", init.skip, expected)
    is_new = model.head_parameters and other.outputs != model.outputs
    skipped = (*init.skip, model.head_parameters) if is_new else init.skip
    names = [name for name in expected.keys() & loaded.keys() if not matches(skipped, name)]
    stacked = {name for name in names if layers and isinstance(model.layer_of(name), range)}
    depth = min((len(loaded[name]) for name in stacked), default=0)
    if layers and not 0 <= min(layers) <= max(layers) < depth:
        known = f"layers 0 to {depth - 1} in each stack" if depth else "no stacks of layers to copy"
        raise ValueError(f"init.layers is {layers}: the model in {path} has {known}.")
    taken, wrong = {}, []
    for name in names:
        value, shape = loaded[name], expected[name].shape
        if name in stacked:
            value = value[np.array(layers)]
        value = model.resampled(name, value, shape)
        if value.shape == shape:
            taken[name] = value
        elif not _differs_in_classes(model, name, shape, value.shape):
            wrong.append(f"{name} {value.shape}, here {shape}")
    if wrong:
        listed, hint = sorted(wrong), ": change the model, or add them to init.skip."
        text = f"{path} has parameters of other shapes than the model ({len(wrong)}): "
        while len(text) + len("; ".join(listed)) > 320 and len(listed) > 1:
            listed.pop()
        more = f" and {len(wrong) - len(listed)} more" if len(listed) < len(wrong) else ""
        raise ValueError(f"{text}{'; '.join(listed)}{more}{hint}")
    if not taken:
        raise ValueError(f"{path} contains none of the parameters of the model: it has {_top_modules(loaded)}.")
    return taken


def _computed(other, model, expected, loaded):
    """Return arrays that another model computes and ours learns, such as the positions of a masked autoencoder."""
    return {
        name: value
        for name, value in other.computed.items()
        if name in expected.keys() - loaded.keys()
        and model.resampled(name, value, expected[name].shape).shape == expected[name].shape
    }


def _check_new(state, new):
    """Raise ValueError if an adapter freezes new parameters, which would stay random."""
    params = flatten_dict(jax.eval_shape(TrainState.variables, state)["params"], sep="/")
    fixed = new & params.keys() - {adapted_path(path) for path in flatten_dict(state.params, sep="/")}
    if not fixed:
        return
    if not isinstance(state.adapter, MatrixAdapter):
        raise ValueError(
            f"The adapter {ADAPTERS.name_of(state.adapter)!r} freezes new parameters, which would keep their random "
            f"values: {', '.join(sorted(fixed)[:5])}."
        )
    modules = tuple(f"^{name}/" for name in sorted({name.partition("/")[0] for name in fixed}))
    raise ValueError(
        f"adapter.trained is {state.adapter.trained}: new parameters would keep their random values, so it must "
        f"also match them, such as {modules}."
    )


def _differs_in_classes(model, name, shape, other):
    """Return whether a parameter differs from another one only in the number of classes."""
    count = model.data_options["num_classes"]  # a detector has one more: "no object"
    return count and shape[-1] in (count, count + 1) and shape[:-1] == other[:-1] and model.layer_of(name) != 0


def with_variables(state: TrainState, variables: Mapping[str, Any]) -> TrainState:
    """Return an initial state with other parameters, and optionally statistics, of the model."""
    collections = state.collections | {kind: value for kind, value in variables.items() if kind != "params"}
    params, frozen = state.adapter.rebase(state.params, state.frozen, variables["params"])
    like = state.params, state.collections, state.frozen
    params, collections, frozen = jax.tree.map(
        lambda new, old: jax.device_put(jnp.asarray(new, old.dtype), old.sharding), (params, collections, frozen), like
    )
    average = state.ema
    if average is not None:  # copies, because states are donated; they may be in the memory of the host
        average = jax.tree.map(lambda new, old: jax.device_put(jnp.copy(new), old.sharding), params, average)
    return state.replace(params=params, ema=average, collections=collections, frozen=frozen)


def load_teacher(path: str, mesh: Mesh, teach: Callable[[Model, Batch], Batch]) -> Callable[[Batch], Batch]:
    """Return a function that adds the outputs of the trained model in a folder, by `Task.teach`, to a batch.

    The teacher is replicated on all devices of the mesh.
    """
    folder = existing("teacher", path)
    if is_run(folder):
        model, variables = model_of(folder), read_variables(folder)
    else:
        model, variables = convert.load(folder)
    outputs = jax.jit(nn.apply(teach, model))
    return partial(outputs, jax.device_put(variables, NamedSharding(mesh, PartitionSpec())))


def check_teacher(experiment: Any) -> None:
    """Raise ValueError unless the teacher of an `Experiment` has its tokenizer, normalization and order of classes."""
    folder = existing("teacher", path := experiment.run.teacher)
    facts, tokenizer, file = experiment.facts, experiment.tokenizer, folder / tokenizers.FILE
    theirs = tokenizer_of(folder, experiment.task).load() if tokenizer and is_present(file) else None
    if theirs and theirs.to_str() != tokenizer.to_str():
        given = f"tokenizer must be the tokenizer of the teacher, {file}"
        raise ValueError(f"{given}: the configured one produces other tokens.")
    known = vars(Facts.load(folder / FACTS)) if is_run(folder) else companions.preprocessing(folder)
    for name in ("mean", "std") if facts.mean and known.get("mean") else ():
        ours, theirs = getattr(facts, name), known[name]
        if len({len(ours), len(theirs)} - {1}) > 1 or not np.allclose(ours, theirs, atol=1e-6):
            raise ValueError(f"task.{name} is {ours}: it must be {theirs}, with which the teacher {path} was trained.")
    names = facts.class_names, class_names(path) if facts.class_names else ()
    ours, theirs = ([name.lower() for name in classes] for classes in names)
    if ours != theirs and sorted(ours) == sorted(theirs):
        first = next(number for number, (one, other) in enumerate(zip(ours, theirs)) if one != other)
        given = f"class {first} is {ours[first]!r} in the data and {theirs[first]!r} in the teacher {path}"
        raise ValueError(f"{given}: the classes must be in the same order.")


def existing(key: str, path: str) -> Path:
    """Return the local folder of the model that a config's `key` names; raise FileNotFoundError if there is none."""
    if not (folder := Path(local(path))).exists():
        raise FileNotFoundError(
            f"{key} is {path!r}, which is not a folder: it must be the workdir of a run, a folder in the layout of "
            "transformers, or hf:ORG/NAME."
        )
    return folder


def check(experiment: Any, force: bool = False) -> None:
    """Raise ValueError if the model in `init.path` does not fit an `Experiment`, without opening the data.

    With `force`, a run whose tokenizer or metadata has changed is accepted.
    """
    init = experiment.run.init
    if not init.path:
        return
    folder = existing("init.path", init.path)
    if is_run(folder) and not force:
        data_record.check(folder)
    model = model_of(folder)
    known = _facts(model, num_classes=model.data_options["num_classes"] or 1)  # without a classifier, any number
    trial = dataclasses.replace(experiment, saved_facts=known)
    expected = _flat(jax.eval_shape(TrainState.variables, trial.abstract_state))
    if is_run(folder):
        loaded = _flat(read_variables(folder))
    else:
        loaded = {name: np.broadcast_to(np.float32(0), shape) for name, shape in convert.describe(folder)[1].items()}
    loaded = _renamed(loaded, init.rename, init.path)
    loaded |= _computed(model, trial.model, expected, loaded)
    taken = _fitting(expected, loaded, trial.model, model, init)
    _check_new(trial.abstract_state, expected.keys() - taken.keys())


def check_complete(experiment: Any, variables: Mapping[str, Any]) -> None:
    """Raise ValueError if variables lack parameters of the model of an `Experiment`, or have others in their place."""
    expected, known = _flat(jax.eval_shape(TrainState.variables, experiment.abstract_state)), _flat(variables)
    for name, value in sorted(expected.items()):
        if name not in known or known[name].shape != value.shape:
            found = f"of shape {known[name].shape}" if name in known else "missing"
            given = f"{experiment.workdir}: the parameter {name} of the changed model is {found}"
            raise ValueError(f"{given}: it must have the shape {value.shape}.")


def class_names(path: str) -> tuple[str, ...]:
    """Return the names of the classes of a model for `init.path` in their order; () if it has none."""
    folder = Path(local(path))
    if is_run(folder):
        return Facts.load(folder / FACTS).class_names
    try:
        return companions.class_names(folder) if folder.is_dir() else ()
    except ValueError:  # the names are not needed
        return ()


def _facts(model: Model, **others: Any) -> Facts:
    """Return the metadata that the options of a model imply, and `others`."""
    known = model.data_options
    size, length = known.pop("image_size"), known.pop("max_length")
    return Facts(**known | {"image_size": size and (size, size), "sequence_length": length} | others)


def facts_of(folder: Path, task: Task, model: Model) -> Facts:
    """Return the metadata for predictions of a model in a folder in the layout of `transformers`.

    Raise ValueError if its images have another number of channels than their normalization.
    """
    options = task.known_facts(model, lambda: _present_tokenizer(folder, task).load())
    if task.generates:
        options["stop_tokens"] = companions.end_tokens(folder)
    options["category_ids"] = companions.category_ids(folder)
    unnamed = (f"LABEL_{label}" for label in range(model.data_options["num_classes"] or 0))  # as in the reference
    facts = _facts(model, class_names=companions.class_names(folder) or tuple(unnamed), **options)
    if facts.channels and not {len(facts.mean), len(facts.std)} <= {0, 1, facts.channels}:
        given = f"{folder / companions.PREPROCESSOR} gives the mean {facts.mean} and the standard deviation {facts.std}"
        raise ValueError(f"{given}: they need 1 number, or one for each of the model's channels ({facts.channels}).")
    return facts


@dataclasses.dataclass(frozen=True)
class PretrainedTokenizer(TokenizerFile):
    """Tokenizer of a pre-trained model.

    Attributes:
        ends: ids of the tokens that end a text according to the model; (): those that the file has.
        excluded: ids of the tokens that are never generated according to the model; (): those that the file has.
    """

    ends: tuple[int, ...] = dataclasses.field(default=(), repr=False)
    excluded: tuple[int, ...] = dataclasses.field(default=(), repr=False)

    def load(self) -> Tokenizer:
        return self.train(())

    def train(self, texts: Iterable[str], special_tokens: Sequence[str] = ()) -> Tokenizer:
        return super().train(texts).ending(self.ends).excluding(self.excluded)


def tokenizer_of(folder: Path, task: Task) -> PretrainedTokenizer:
    """Return the tokenizer of a run, or of a folder in the layout of `transformers`, for a task."""
    known = task.generates and not is_run(folder) and (folder / "config.json").is_file()
    roles = (companions.end_tokens(folder), companions.excluded_tokens(folder)) if known else ()
    return PretrainedTokenizer(str(folder / tokenizers.FILE), *roles)


def initial_tokenizer(key: str, path: str, task: Task, init: Init) -> PretrainedTokenizer | None:
    """Return the tokenizer of the model that a config's `key` names, for a new run.

    The result is None if the model has none and the run may have another.

    Raises:
        FileNotFoundError: the folder does not exist, or it is in the layout of `transformers` and has no tokenizer, and
            all its parameters are to be loaded, which were trained with the tokens of that tokenizer.
    """
    folder = Path(local(path))
    if (init.skip or init.rename or is_run(folder)) and not is_present(folder / tokenizers.FILE):
        return None
    return _present_tokenizer(existing(key, path), task, ", or name another with tokenizer=file:PATH")


def _present_tokenizer(folder, task, other=""):
    """Return the tokenizer of a folder; without one, raise FileNotFoundError, which says how to write it."""
    if not is_present(file := folder / tokenizers.FILE):
        how = f"AutoTokenizer.from_pretrained({str(folder)!r}).save_pretrained({str(folder)!r}) of transformers"
        raise FileNotFoundError(f"There is no {file}: write it with {how}{other}.")
    return tokenizer_of(folder, task)


def _flat(variables):
    """Return parameters and running statistics by path; no path occurs in both."""
    kinds = (variables.get(kind, {}) for kind in ("params", "statistics"))
    return {name: value for tree in kinds for name, value in flatten_dict(tree, sep="/").items()}


def _renamed(variables, rename, path):
    for pattern, replacement in rename:
        names = [re.sub(pattern, replacement, name) for name in variables]
        if names == list(variables) or len(set(names)) < len(names):
            what = "one name to two parameters" if names != list(variables) else "no parameter another name"
            raise ValueError(f"init.rename: {pattern!r} -> {replacement!r} gives {what} of {path}.")
        variables = dict(zip(names, variables.values()))
    return variables


def _top_modules(names) -> str:
    """Return the top-level modules of some parameters, separated by commas."""
    return ", ".join(sorted({name.partition("/")[0] for name in names})) or "nothing"
