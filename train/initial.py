"""What a run starts from beside its seed: the parameters of another run or of `transformers`, and a teacher."""

import json
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import models
from data import Tokenizer
from models import convert
from train.checkpoint import read_parameters
from train.objectives import Batch, read_masked
from train.state import TrainState


def start_from(state: TrainState, path: str, skip: Sequence[str], layers: Sequence[int]) -> tuple[TrainState, str]:
    """The state with the parameters that a run's workdir, or a folder in `transformers`' layout, has of its model.

    Args:
        state: before the first step.
        path: of the workdir or the folder.
        skip: regular expressions of parameters that stay as they are, such as another task's head.
        layers: those of the other model's that become ours, from 0; empty = all.

    Returns:
        The state, and a sentence that names what stays as it is and what is not used.

    Raises:
        FileNotFoundError: there is no such run.
        ValueError: a parameter has another shape there, or none of the model's is there.
    """
    ours, theirs = (flatten_dict(params, sep="/") for params in (state.params, _load(path)[1]))
    depth = next((len(value) for name, value in theirs.items() if "layers/" in name), 0)
    if layers and not 0 <= min(layers) <= max(layers) < depth:
        raise ValueError(f"init.layers is {tuple(layers)}: the model in {path} has layers 0 to {depth - 1}.")
    taken = {}
    for name in ours.keys() & theirs.keys():
        if not any(re.search(pattern, name) for pattern in skip):
            found = theirs[name][np.array(layers)] if layers and "layers/" in name else theirs[name]
            if found.shape != ours[name].shape:
                raise ValueError(
                    f"{name} is {found.shape} in {path}, but the model's is {ours[name].shape}: make them equal, or "
                    "leave it as it is with init.skip."
                )
            taken[name] = jax.device_put(jnp.asarray(found, ours[name].dtype), ours[name].sharding)
    if not taken:
        raise ValueError(f"none of the model's parameters is in {path}, which has {_parts(theirs)}.")
    params = unflatten_dict(ours | taken, sep="/")
    ema = None if state.ema is None else jax.tree.map(jnp.copy, params)
    fresh, unused = _parts(ours.keys() - taken.keys()), _parts(theirs.keys() - taken.keys())
    return state.replace(params=params, ema=ema), f"starts from {path}; new: {fresh}; not used: {unused}"


def load_teacher(path: str, mesh: Mesh) -> Callable[[Batch], Batch]:
    """What a trained model of a run's workdir, or of a folder in `transformers`' layout, says of a batch.

    That is of the batches of `masked_lm`: its last vectors `teacher_hidden` [B, T, D], and its logits of the hidden
    words `teacher_logits` [B, M, V], without dropout. Its parameters are on every device of the mesh.
    """
    model, params = _load(path)

    @jax.jit
    def say(params, batch):
        hidden, logits = nn.apply(read_masked, model)({"params": params}, batch)
        return {"teacher_hidden": hidden, "teacher_logits": logits}

    return partial(say, jax.device_put(params, NamedSharding(mesh, PartitionSpec())))


def _load(path: str) -> tuple[nn.Module, dict[str, Any]]:
    """A model of texts and its parameters."""
    if not (Path(path) / "checkpoints").is_dir():
        model, variables = convert.load(path)
        return model, variables["params"]
    config = json.loads((Path(path) / "config.json").read_text(encoding="utf-8"))
    settings = config["model"]
    if settings.get("vocab_size", 0) is None:
        settings["vocab_size"] = Tokenizer.load(path).vocab_size
    if settings.get("max_length", 0) is None:
        settings["max_length"] = config["data"]["sequence_length"]
    return models.build(**settings), read_parameters(Path(path))


def _parts(names) -> str:
    return ", ".join(sorted({name.partition("/")[0] for name in names})) or "nothing"
