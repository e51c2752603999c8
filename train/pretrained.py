"""Loading of pre-trained parameters, for initialization or as a teacher, from a run or from `transformers`."""

import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from lineage.configs import base, schema
from lineage.configs.run import Init
from lineage.configs.storage import local
from lineage.data import Tokenizer
from lineage.models import MODELS, Model, convert
from lineage.runs.folder import CONFIG, read_json
from lineage.tasks import TASKS, Batch
from lineage.train.checkpoint import read_variables
from lineage.train.step import TrainState


def start_from(
    state: TrainState, model: Model, init: Init, make: Callable[[], TrainState] | None = None
) -> tuple[TrainState, str]:
    """Return the state with the parameters and running statistics of another model, and a sentence that describes it.

    Position tables are resampled where the models differ in resolution, see `Model.resampled`. The sentence names the
    parameters that stay new and those of the other model that are not used.

    Args:
        state: the state before the first step; or its shapes, if `make` is given, which makes it once the models are
            known to fit.
    """
    path, layers, folder = init.path, init.layers, local(init.path)
    ours = _flat(jax.eval_shape(TrainState.variables, state))
    theirs = _flat(read_variables(Path(folder)) if _is_run(folder) else convert.load(folder)[1])
    theirs = _renamed(theirs, init.rename, path)
    depth = next((len(value) for name, value in theirs.items() if isinstance(model.layer_of(name), range)), 0)
    if layers and not 0 <= min(layers) <= max(layers) < depth:
        raise ValueError(f"init.layers is {layers}: the model in {path} has layers 0 to {depth - 1}.")
    for pattern in init.skip:
        if not any(re.search(pattern, name) for name in ours):
            raise ValueError(f"init.skip: {pattern!r} matches no parameter of the model: it has {_parts(ours)}.")
    taken = {}
    for name in ours.keys() & theirs.keys():
        if not any(re.search(pattern, name) for pattern in init.skip):
            chosen = layers and isinstance(model.layer_of(name), range)
            found = theirs[name][np.array(layers)] if chosen else theirs[name]
            taken[name] = model.resampled(name, found, ours[name].shape)
            if taken[name].shape != ours[name].shape:
                raise ValueError(
                    f"{name} has shape {taken[name].shape} in {path}, but {ours[name].shape} in the model: change the "
                    "model, or add the parameter to init.skip."
                )
    if not taken:
        raise ValueError(f"{path} contains none of the parameters of the model: it has {_parts(theirs)}.")
    state = make() if make else state
    variables = {}
    for kind, tree in state.variables().items():
        if kind in ("params", "statistics"):
            flat = {name: taken.get(name, value) for name, value in flatten_dict(tree, sep="/").items()}
            variables[kind] = unflatten_dict(flat, sep="/")
    fresh, unused = _parts(ours.keys() - taken.keys()), _parts(theirs.keys() - taken.keys())
    message = f"starts from {path}; new: {fresh}; not used: {unused}"
    if state.frozen is not None:
        message += f"; trained: {sum(a.size for a in jax.tree.leaves(state.params)):,} values"
    return with_variables(state, variables), message


def with_variables(state: TrainState, variables: Mapping[str, Any]) -> TrainState:
    """Return a state before the first step with other parameters, and perhaps statistics, of the model."""
    collections = state.collections | {kind: value for kind, value in variables.items() if kind != "params"}
    params, frozen = state.adapter.rebase(state.params, state.frozen, variables["params"])
    like = state.params, state.collections, state.frozen
    params, collections, frozen = jax.tree.map(
        lambda new, old: jax.device_put(jnp.asarray(new, old.dtype), old.sharding), (params, collections, frozen), like
    )
    ema = None if state.ema is None else jax.tree.map(jnp.copy, params)
    return state.replace(params=params, ema=ema, collections=collections, frozen=frozen)


def load_teacher(
    path: str, mesh: Mesh, student: Model, teach: Callable[[Model, Batch], Batch]
) -> Callable[[Batch], Batch]:
    """Return a function that adds the outputs of the trained model in a folder, by `Task.teach`, to a batch.

    The teacher, which each device of the mesh holds whole, has the sizes of the student where its run left them to the
    data.
    """
    model, variables = _load(path, student)
    outputs = jax.jit(nn.apply(teach, model))
    return partial(outputs, jax.device_put(variables, NamedSharding(mesh, PartitionSpec())))


def _load(path: str, student: Model) -> tuple[Model, dict[str, Any]]:
    path = local(path)
    if not _is_run(path):
        return convert.load(path)
    config = base.from_json(read_json(Path(path) / CONFIG))
    known = {key: student.settings.get(key) for key in ("num_classes", "image_size", "channels")}
    known |= schema.build(TASKS, config.task).model_options()
    known["image_size"] = config.task.get("image_size") or known["image_size"]
    known["max_length"] = config.task.get("sequence_length")
    if config.model.get("vocab_size", 0) is None:
        known["vocab_size"] = Tokenizer.load(path).vocab_size
    return schema.build(MODELS, config.model, **known), read_variables(Path(path))


def _flat(variables):
    """Return parameters and running statistics by their paths, which differ."""
    kinds = (variables.get(kind, {}) for kind in ("params", "statistics"))
    return {name: value for tree in kinds for name, value in flatten_dict(tree, sep="/").items()}


def _is_run(path: str) -> bool:
    return (Path(path) / "checkpoints").is_dir()


def _renamed(variables, rename, path):
    for pattern, replacement in rename:
        names = [re.sub(pattern, replacement, name) for name in variables]
        if names == list(variables) or len(set(names)) < len(names):
            what = "one name to two parameters" if names != list(variables) else "no parameter another name"
            raise ValueError(f"init.rename: {pattern!r} -> {replacement!r} gives {what} of {path}.")
        variables = dict(zip(names, variables.values()))
    return variables


def _parts(names) -> str:
    return ", ".join(sorted({name.partition("/")[0] for name in names})) or "nothing"
