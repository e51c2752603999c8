"""What a run leaves for its report, in `workdir/artifacts`: pictures' data, samples, costs and the facts of the run."""

import json
import os
import platform
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from lineage.evaluation.evaluators import Evaluator, objects_of
from lineage.metrics.states import Confusion
from lineage.models import Model, hidden_states
from lineage.models.budget import Budget
from lineage.runs.folder import plain, write_atomic
from lineage.tasks.objectives import read
from lineage.train.state import TrainState

SAMPLES = "samples.jsonl"
MISTAKES = 24  # that the model was surest of
OBJECTS, SUREST = 12, 0.5  # images with their objects, and the probability from which on one that is found is shown
IMAGES, TOKENS = 6, 32  # whose attention is kept
Variables = Facts = Mapping[str, Any]  # of a model, and of its data


def write_samples(evaluator: Evaluator, state: TrainState, step: int) -> None:
    """Adds what a language model writes at a step, if the config asks for samples.

    Samples of this step and later ones, of a run that was killed before it saved, are replaced.
    """
    settings = evaluator.experiment.config.sampling
    if not settings.num_samples:
        return
    texts = evaluator.sampler.write(state.variables(average=True), settings.prompt)
    if jax.process_index():
        return
    path = folder(evaluator) / SAMPLES
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    earlier = [line for line in lines if line.endswith("}") and json.loads(line)["step"] < step]
    new = [
        json.dumps({"step": step, "prompt": evaluator.sampler.lead(settings.prompt), "text": text}) for text in texts
    ]
    write_atomic(path, "".join(f"{line}\n" for line in earlier + new))


def write_pictures(evaluator: Evaluator, state: TrainState, step: int) -> None:
    """Adds what a masked autoencoder makes of some images at a step, if the data are masked images."""
    data = evaluator.experiment.data
    if data.info["kind"] != "masked images" or not data.splits:
        return
    variables = evaluator.gathered(state)
    if jax.process_index() == 0:
        painted = evaluator.sampler.paint(variables)
        painted = {name: to_pixels(np.asarray(image), data.info) for name, image in painted.items()}
        np.savez_compressed(folder(evaluator) / f"painted_{step:09}.npz", **painted)


def write_all(evaluator: Evaluator, state: TrainState, budget: Budget, about: Mapping[str, Any]) -> None:
    """Everything else, at the end of a run."""
    experiment = evaluator.experiment
    variables = evaluator.gathered(state)
    if jax.process_index():
        return
    out, data = folder(evaluator), experiment.data
    for split, batches in data.splits.items():
        batches = replace(batches, process_index=0, process_count=1)  # all of it, not this process's part
        if data.info["kind"] == "images":
            write_classification(out, split, experiment.model, variables, batches, data.info)
            write_image_attention(out, experiment.model, variables, batches[0], data.info)
        elif data.info["kind"] == "detection":
            write_objects(out, split, experiment.model, variables, batches[0], data.info)
        elif data.tokenizer is not None:
            write_text_attention(out, experiment.model, variables, batches[0], data.tokenizer)
    for split, found in evaluator.found.items():
        np.savez_compressed(out / f"precision_{split}.npz", precision=found.curves())
    for split, written in evaluator.sampler.compared.items():
        write_atomic(out / f"written_{split}.json", json.dumps(written, ensure_ascii=False))
    (out / "cost.json").write_text(json.dumps(budget.to_dict(), indent=2), encoding="utf-8")
    path = out / "run.json"
    seconds = json.loads(path.read_text())["seconds"] if path.exists() else 0.0  # of the parts before
    facts = dict(about) | {
        "seconds": seconds + about["seconds"],
        "steps": int(state.step),
        "config": plain(experiment.config),
        "device": device_name(),
        "device_count": experiment.mesh.size,
        "python": platform.python_version(),
        "jax": jax.__version__,
    }
    write_atomic(path, json.dumps(facts, indent=2))


def folder(evaluator: Evaluator) -> Path:
    """`workdir/artifacts`, made if absent."""
    path = evaluator.experiment.workdir / "artifacts"
    path.mkdir(exist_ok=True)
    return path


def write_classification(
    out: Path, split: str, model: nn.Module, variables: Variables, batches: Iterable[dict], info: Facts
) -> None:
    """A split's confusion matrix, and the mistakes that the model was surest of."""
    names = np.asarray(info["class_names"])
    predict = jax.jit(lambda variables, image: jax.nn.softmax(model.apply(variables, image).astype(jnp.float32)))
    confusion = Confusion.empty(len(names))
    mistakes: list[tuple[float, np.ndarray, int, int]] = []
    for batch in batches:
        probabilities = np.asarray(predict(variables, batch["image"]))
        predictions = probabilities.argmax(axis=-1)
        confusion = confusion.update(*map(jnp.asarray, (predictions, batch["label"], batch["mask"])))
        for i in np.flatnonzero((predictions != batch["label"]) & batch["mask"]):
            mistakes.append((probabilities[i].max(), batch["image"][i], batch["label"][i], predictions[i]))
        mistakes = sorted(mistakes, key=lambda mistake: -mistake[0])[:MISTAKES]
    np.savez_compressed(out / f"confusion_{split}.npz", counts=np.asarray(confusion.counts), class_names=names)
    if mistakes:
        probability, image, label, prediction = map(np.stack, zip(*mistakes))
        np.savez_compressed(
            out / f"mistakes_{split}.npz",
            image=to_pixels(image, info),
            label=label,
            prediction=prediction,
            probability=probability,
            class_names=names,
        )


def write_objects(out: Path, split: str, model: nn.Module, variables: Variables, batch: dict, info: Facts) -> None:
    """Some images with their true objects and those that the model is sure of.

    Objects are rows (image, class, score, left, top, width, height), the boxes relative to the frame of the image.
    """
    batch = {name: value[:OBJECTS] for name, value in batch.items()}
    answer = jax.jit(nn.apply(read, model))(variables, {name: jnp.asarray(value) for name, value in batch.items()})
    arrays = {"image": to_pixels(batch["image"], info), "class_names": np.asarray(info["class_names"])}
    for name, images in zip(("truth", "found"), objects_of(batch, *map(np.asarray, answer))):
        rows = []
        for number, (objects, extent) in enumerate(zip(images, batch["extent"])):
            scores = objects.get("scores", np.ones(len(objects["classes"])))
            numbers, boxes = np.full(len(scores), number), objects["boxes"] * np.tile(extent[::-1], 2)
            rows.append(np.column_stack([numbers, objects["classes"], scores, boxes])[scores >= SUREST])
        arrays[name] = np.concatenate(rows).astype(np.float32)
    np.savez_compressed(out / f"objects_{split}.npz", **arrays)


def write_image_attention(out: Path, model: Model, variables: Variables, batch: dict, info: Facts) -> None:
    """What some images' tokens attend to, layer by layer, if the model's attention can be looked at."""
    image = batch["image"][:IMAGES]
    weights = attention_weights(model, variables, image).get("attention") if model.has_patch_attention else None
    if weights is not None:
        rows, columns = (size // model.patch_size for size in image.shape[1:3])
        np.savez_compressed(
            out / "attention_image.npz",
            image=to_pixels(image, info),
            weights=weights,
            has_class_token=model.has_class_token,
            grid=(rows, columns),
        )


def write_text_attention(out: Path, model: Model, variables: Variables, batch: dict, tokenizer: Any) -> None:
    """What the first tokens of a text, or of an input and its target, attend to, layer by layer."""
    real = {"inputs": batch.get("inputs_mask"), "tokens": batch.get("tokens_mask", batch["mask"])}
    texts = {name: batch[name][:1, :TOKENS][:, mask[0, :TOKENS]] for name, mask in real.items() if name in batch}
    weights = attention_weights(model, variables, *texts.values())
    if weights:
        pieces = {name: np.asarray([tokenizer.decode([token]) for token in ids[0]]) for name, ids in texts.items()}
        np.savez_compressed(
            out / "attention_text.npz", **pieces, **{name: values[:, 0] for name, values in weights.items()}
        )


def attention_weights(model: Model, variables: Variables, *inputs: np.ndarray) -> dict[str, np.ndarray]:
    """Return the attention weights [L, B, H, T, S] of the "encoder", the "decoder" and "cross"-attention.

    Those of a model that has one of the first two alone are called "attention".
    """
    look = jax.jit(lambda variables, *inputs: hidden_states(model, variables, *inputs))
    found = look(variables, *inputs).attention
    names = {} if len(found) > 1 else {"encoder": "attention", "decoder": "attention"}
    return {names.get(name, name): np.stack(weights).astype(np.float32) for name, weights in found.items()}


def to_pixels(image: np.ndarray, info: Facts) -> np.ndarray:
    """Normalised images as pixel values from 0 to 1."""
    return np.clip(image * np.asarray(info["std"]) + np.asarray(info["mean"]), 0, 1).astype(np.float32)


def device_name() -> str:
    """The accelerator's name, or the processor's with its cores."""
    kind = jax.devices()[0].device_kind
    return f"{platform.machine()} CPU, {os.cpu_count()} cores" if kind == "cpu" else kind
