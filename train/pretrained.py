"""What a run starts from beside its seed: the parameters of another run or of `transformers`, and a teacher."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from lineage import models
from lineage.data import Tokenizer
from lineage.models import convert
from lineage.models.layers.position import resample
from lineage.runs.folder import read_json
from lineage.tasks.objectives import Batch, read, read_masked
from lineage.train.checkpoint import read_variables
from lineage.train.state import TrainState


def start_from(
    state: TrainState,
    path: str,
    skip: Sequence[str] = (),
    layers: Sequence[int] = (),
    rename: Sequence[tuple[str, str]] = (),
    make: Callable[[], TrainState] | None = None,
) -> tuple[TrainState, str]:
    """The state with the parameters that a run's workdir, or a folder in `transformers`' layout, has of its model.

    Learned positions of another grid of patches, and Swin's of another window, are resampled. Running statistics are
    taken over too.

    Args:
        state: before the first step; or its shapes, of which `make` makes it when all else is known to fit.
        path: of the workdir or the folder.
        skip: regular expressions of parameters that stay as they are, such as another task's head.
        layers: those of the other model's that become ours, from 0; empty = all.
        rename: (regular expression, replacement) pairs, each applied to the paths of the other model's parameters.

    Returns:
        The state, and a sentence that names what stays as it is and what is not used.

    Raises:
        FileNotFoundError: there is no such run.
        ValueError: a parameter has another shape there, none of the model's is there, a pair renames
            nothing, or a pattern skips nothing.
    """
    ours = _flat(jax.eval_shape(TrainState.variables, state))
    theirs = _renamed(_flat(_variables(path)), rename, path)
    depth = next((len(value) for name, value in theirs.items() if "layers/" in name), 0)
    if layers and not 0 <= min(layers) <= max(layers) < depth:
        raise ValueError(f"init.layers is {tuple(layers)}: the model in {path} has layers 0 to {depth - 1}.")
    for pattern in skip:
        if not any(re.search(pattern, name) for name in ours):
            raise ValueError(f"init.skip: {pattern!r} is in no parameter of the model, which has {_parts(ours)}.")
    taken = {}
    for name in ours.keys() & theirs.keys():
        if not any(re.search(pattern, name) for pattern in skip):
            found = theirs[name][np.array(layers)] if layers and "layers/" in name else theirs[name]
            found = _resampled(name, found, ours[name].shape)
            if found.shape != ours[name].shape:
                raise ValueError(
                    f"{name} is {found.shape} in {path}, but the model's is {ours[name].shape}: make them equal, or "
                    "leave it as it is with init.skip."
                )
            taken[name] = found
    if not taken:
        raise ValueError(f"none of the model's parameters is in {path}, which has {_parts(theirs)}.")
    state = make() if make else state
    kinds = {
        kind: unflatten_dict(
            {name: taken.get(name, value) for name, value in flatten_dict(tree, sep="/").items()}, sep="/"
        )
        for kind, tree in state.variables().items()
        if kind in ("params", "statistics")
    }
    fresh, unused = _parts(ours.keys() - taken.keys()), _parts(theirs.keys() - taken.keys())
    said = f"starts from {path}; new: {fresh}; not used: {unused}"
    if state.frozen is not None:
        said += f"; trained: {sum(a.size for a in jax.tree.leaves(state.params)):,} numbers"
    return with_variables(state, kinds), said


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


def load_teacher(path: str, mesh: Mesh, student: nn.Module) -> Callable[[Batch], Batch]:
    """What a trained model of a run's workdir, or of a folder in `transformers`' layout, says of a batch.

    That is of images its logits `teacher_logits` [B, V]; of the batches of `masked_lm` its last vectors
    `teacher_hidden` [B, T, D], and its logits of the hidden words `teacher_logits` [B, M, V], without dropout. Its
    parameters are on every device of the mesh. A size that its run left to the data is the student's.
    """
    model, variables = _load(path, student)

    @jax.jit
    def say(variables, batch):
        if hasattr(model, "image_size"):
            return {"teacher_logits": nn.apply(read, model)(variables, batch)}
        hidden, logits = nn.apply(read_masked, model)(variables, batch)
        return {"teacher_hidden": hidden, "teacher_logits": logits}

    return partial(say, jax.device_put(variables, NamedSharding(mesh, PartitionSpec())))


def _load(path: str, student: nn.Module) -> tuple[nn.Module, dict[str, Any]]:
    if not _is_run(path):
        return convert.load(path)
    config = read_json(Path(path) / "config.json")
    settings = {key: tuple(value) if isinstance(value, list) else value for key, value in config["model"].items()}
    if settings.get("vocab_size", 0) is None:
        settings["vocab_size"] = Tokenizer.load(path).vocab_size
    if settings.get("max_length", 0) is None:
        settings["max_length"] = config["data"]["sequence_length"]
    if settings.get("image_size", 0) is None:
        settings["image_size"] = config["data"]["image_size"] or None
    like = {key: getattr(student, key) for key in ("num_classes", "image_size", "channels") if hasattr(student, key)}
    settings |= {key: value for key, value in like.items() if key in settings and settings[key] is None}
    return models.build(**settings), read_variables(Path(path))


def _flat(variables):
    """Parameters and running statistics by their paths, of which no two are the same."""
    kinds = (variables.get(kind, {}) for kind in ("params", "statistics"))
    return {name: value for tree in kinds for name, value in flatten_dict(tree, sep="/").items()}


def _variables(path: str) -> dict[str, Any]:
    return read_variables(Path(path)) if _is_run(path) else convert.load(path)[1]


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


def _resampled(name, table, shape):
    """Learned positions as those of another grid of patches, or of another window; all else as it is."""
    if table.shape == shape or table.shape[-1] != shape[-1] or table.ndim != len(shape):
        return table
    if re.search("(^|/)table/(row|column)$", name):
        return resample(jnp.asarray(table), (len(table), 1), (shape[0], 1))
    if re.search("(^|/)table/table$", name):
        return _on_grid(table, shape[0])
    if name.endswith("attention/attention/relative/table") and len(table) == shape[0]:  # Swin's, of each layer
        return jnp.stack([_on_grid(layer, shape[1]) for layer in table])
    return table


def _on_grid(table, length):
    """A table of positions of some tokens and of a square grid, for another grid if it has other patches."""
    old = math.isqrt(len(table))
    special = len(table) - old**2
    new = math.isqrt(max(length - special, 0))
    if new**2 + special != length:
        return table
    return jnp.concatenate([table[:special], resample(jnp.asarray(table[special:]), (old, old), (new, new))])


def _parts(names) -> str:
    return ", ".join(sorted({name.partition("/")[0] for name in names})) or "nothing"
