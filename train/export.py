"""Export of a trained model: in the layout of `transformers`, or as a StableHLO program that needs only JAX."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
from jax import export

from lineage.data import tokenizers
from lineage.models import convert
from lineage.train.experiment import Experiment
from lineage.train.step import TrainState, make_forward_step

PLATFORMS = ("cpu", "cuda", "tpu")


def write(experiment: Experiment, state: TrainState, kind: str, folder: Path) -> list[Path]:
    """Write the model of a state, with the moving average of its parameters if one is kept; return the files.

    Args:
        kind: "safetensors" writes a folder that `transformers` loads, with the tokenizer; see `convert.save`.
            "stablehlo" writes `model.stablehlo`, a program that contains the parameters and takes any number of
            examples: `jax.export.deserialize(content).call` maps a dictionary of the arrays that `model.json` lists to
            the model's outputs.
    """
    folder.mkdir(parents=True, exist_ok=True)
    variables = jax.tree.map(jnp.asarray, jax.device_get(state.variables(average=True)))
    words = experiment.workdir / tokenizers.FILE
    if kind == "safetensors":
        convert.save(folder, experiment.model, variables)
    else:
        _write_program(experiment, variables, folder)
    if words.is_file():
        (folder / words.name).write_bytes(words.read_bytes())
        _write_roles(words, folder / "tokenizer_config.json")
    return sorted(folder.iterdir())


def _write_roles(words, path):
    """Write the names of the special tokens, which `transformers` needs besides the tokenizer's file."""
    added = [token["content"] for token in json.loads(words.read_text(encoding="utf-8"))["added_tokens"]]
    about = {"tokenizer_class": "PreTrainedTokenizerFast"}
    for role, name in (("end_of_text", "eos"), ("cls", "cls"), ("sep", "sep"), ("mask", "mask"), ("pad", "pad")):
        about |= {f"{name}_token": token for token in tokenizers.SPECIAL[role] if token in added}
    path.write_text(json.dumps(about, indent=2), encoding="utf-8")


def _write_program(experiment, variables, folder):
    model = experiment.model.portable()
    step = make_forward_step(model, experiment.task.forward, experiment.config.precision)
    (size,) = export.symbolic_shape("b")
    zeros = jax.eval_shape(experiment.zeros)
    inputs = {n: jax.ShapeDtypeStruct((size, *zeros[n].shape[1:]), zeros[n].dtype) for n in experiment.task.inputs}
    program = export.export(jax.jit(lambda batch: step(variables, batch)), platforms=PLATFORMS)(inputs)
    (folder / "model.stablehlo").write_bytes(program.serialize())
    arrays = {name: {"shape": ["b", *a.shape[1:]], "dtype": str(a.dtype)} for name, a in inputs.items()}
    about = {"inputs": arrays, "platforms": PLATFORMS}
    (folder / "model.json").write_text(json.dumps(about, indent=2), encoding="utf-8")
