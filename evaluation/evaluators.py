"""What a trained model is asked: numbers over whole splits."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.experimental.multihost_utils import process_allgather
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Float
from scipy.special import softmax

from lineage.data.examples.encoded import Encoded
from lineage.data.options import called
from lineage.evaluation.probes import PROBES, accuracies
from lineage.evaluation.sampling import Sampler
from lineage.metrics import classification
from lineage.metrics.answers import exact_match, f1
from lineage.metrics.detection import Coco, Detections, coco
from lineage.metrics.likelihood import bits, perplexity
from lineage.tasks.objectives import read
from lineage.train.checkpoint import Checkpoints
from lineage.train.experiment import Experiment
from lineage.train.sharding import check_batch, to_mesh
from lineage.train.state import TrainState
from lineage.train.step import make_evaluation_step, make_forward_step


class Evaluator:
    """Asks the states of an experiment; compiled once. An average of the parameters, where one is kept, is asked.

    Attributes:
        sampler: which lets them write.
        found: of each split of images with boxes, what was found in the newest evaluation.
    """

    def __init__(self, experiment: Experiment):
        self.experiment, self.sampler = experiment, Sampler(experiment)
        self.found: dict[str, Coco] = {}
        model, precision = experiment.model, experiment.config.precision
        self._step = experiment.jit(make_evaluation_step(model, experiment.objective, precision))
        self._read = experiment.jit(make_forward_step(model, read, precision))
        self._probes = called("probes", experiment.config.probes, PROBES)
        if self._probes and (not hasattr(model, "image_size") or hasattr(model, "num_queries")):
            raise ValueError(f"probes is {experiment.config.probes!r}: they are for models of labelled images.")
        if self._probes:
            self._see = experiment.jit(make_forward_step(model.clone(num_classes=0), _see, precision))

    def evaluate(self, state: TrainState) -> dict[str, float]:
        """Metrics of every split, as "split/name"."""
        data, variables, metrics = self.experiment.data, state.variables(average=True), {}
        for split, batches in data.splits.items():
            values = with_derived(self._scored(variables, batches), data.info, split)
            if data.info["kind"] in ("pairs", "continuations"):
                values |= self.sampler.compare(variables, split, batches)
            elif data.info["kind"] == "spans":
                values |= self._answered(variables, batches)
            elif data.info["kind"] == "detection":
                values |= self._detected(variables, split, batches)
            elif data.info["kind"] == "classification" and batches.source.is_cut:
                values |= pooled_accuracy(self._logits(variables, batches), batches.source)
            elif data.info["kind"] == "regression":
                ranks = classification.spearman(self._logits(variables, batches)[:, 0], batches.source.per_row["label"])
                values |= {"spearman": np.nan_to_num(ranks).item()}  # 0 where one is constant, as Pearson's
            metrics |= {f"{split}/{key}": value for key, value in values.items()}
        return metrics | self._probed(variables) if self._probes and data.splits else metrics

    def _scored(self, variables, batches):
        """The metrics of a split, every example counted once; a memory goes from batch to batch, empty before the
        first. The states of a batch are merged on the host while the next one is computed."""
        mesh, merged, memory, waiting = self.experiment.mesh, {}, {}, None
        variables = {name: value for name, value in variables.items() if name != "memory"}
        for batch in batches:
            check_batch(len(batch["mask"]) * batches.process_count, mesh)
            batch = self.experiment.taught(to_mesh(batch, mesh))
            states, memory = self._step({**variables, **memory}, batch)
            merged, waiting = _merge(merged, waiting), states
        return {name: float(state.compute()) for name, state in _merge(merged, waiting).items()}

    def _logits(self, variables, batches):
        """What the model says of a split's rows [N, ...], in their order, on the host."""
        return self._rows(self._read, variables, batches).astype(np.float32)

    def _rows(self, step, variables, batches):
        """What a step gives for a split's rows, in their order, on the host: arrays [N, ...]."""
        mesh = self.experiment.mesh
        rows = [process_allgather(step(variables, to_mesh(batch, mesh)), tiled=True) for batch in batches]
        return jax.tree.map(lambda *parts: np.concatenate(parts)[: batches.num_examples], *rows)

    def _probed(self, variables: Any) -> dict[str, float]:
        """What probes find in the features of every split, after those of the training set as evaluations see it."""
        data = self.experiment.data
        training = replace(next(iter(data.splits.values())), source=data.train.source)
        seen = partial(self._rows, self._see, variables)
        return accuracies(self._probes, seen(training), {name: seen(batches) for name, batches in data.splits.items()})

    def _answered(self, variables, batches):
        """How the answers to a split's questions compare with the references."""
        answers = batches.source.answers(*np.moveaxis(self._logits(variables, batches), -1, 0))
        references = [question.references for question in batches.source.questions]
        return {score.__name__: float(np.mean(list(map(score, answers, references)))) for score in (exact_match, f1)}

    def _detected(self, variables, split, batches):
        """COCO's average precisions over a split; those of sizes would need the images' pixels."""
        state, mesh = Detections.empty(self.experiment.data.info["num_classes"]), self.experiment.mesh
        for batch in batches:
            batch = to_mesh(batch, mesh)
            answer = self._read(variables, batch)
            del batch["image"]
            batch, answer = process_allgather((batch, answer), tiled=True)
            for true, found in zip(*objects_of(batch, *answer)):
                state = state.update(len(state.images), **found, **{f"true_{name}": of for name, of in true.items()})
        self.found[split] = coco(state)
        values = self.found[split].summary()
        return {name: values[name] for name in ("ap", "ap_50", "ap_75")}

    def gathered(self, state: TrainState) -> Mapping[str, Any]:
        """The variables, whole on every process."""
        everywhere = NamedSharding(self.experiment.mesh, PartitionSpec())
        gather = jax.jit(lambda variables: variables, out_shardings=everywhere)
        return jax.tree.map(np.asarray, gather(state.variables(average=True)))


def _see(model, batch):
    """Features and labels."""
    return read(model, batch).astype(np.float32), batch["label"]


def restore(experiment: Experiment, which: str = "latest") -> TrainState:
    """The state of the newest or the "best" checkpoint of the experiment's workdir.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it is damaged or of another model.
    """
    folder = experiment.workdir
    if not (folder / "checkpoints").is_dir():
        raise FileNotFoundError(f"there is no trained model in {folder}: give the --workdir of a run.")
    with Checkpoints(folder, **experiment.config.checkpoint) as checkpoints:
        step = checkpoints.best if which == "best" else checkpoints.latest
        if step is None:
            raise FileNotFoundError(f"there is no {which} checkpoint in {checkpoints.folder}.")
        return experiment.state(checkpoints, step)


def objects_of(
    batch: Mapping[str, np.ndarray], logits: Float[np.ndarray, "L B Q V"], boxes: Float[np.ndarray, "L B Q 4"]
) -> tuple[list[dict], list[dict]]:
    """The true objects of each real image of a batch, and those that a detector finds, as `Detections` has them."""
    chances = softmax(logits[-1].astype(np.float32), axis=-1)[..., :-1]
    found = {"boxes": _placed(boxes[-1]), "classes": chances.argmax(axis=-1), "scores": chances.max(axis=-1)}
    truth = {"boxes": _placed(batch["boxes"])} | {name: batch[name] for name in ("classes", "crowd")}
    real, rows = batch["boxes_mask"] | batch["crowd"], np.flatnonzero(batch["mask"])
    return (
        [{name: value[row][real[row]] for name, value in truth.items()} for row in rows],
        [{name: value[row] for name, value in found.items()} for row in rows],
    )


def _placed(boxes):
    """(centre x, centre y, width, height) as (left, top, width, height)."""
    return np.concatenate([boxes[..., :2] - boxes[..., 2:] / 2, boxes[..., 2:]], axis=-1)


def pooled_accuracy(logits: Float[np.ndarray, "N V"], source: Encoded) -> dict[str, float]:
    """How often the class of a whole text is right, by the mean and by the highest of its rows' probabilities."""
    probabilities = softmax(logits, axis=-1)
    first = np.flatnonzero(np.diff(source.origins, prepend=-1))
    pools = {"mean": np.add, "max": np.maximum}
    pooled = {name: pool.reduceat(probabilities, first).argmax(axis=-1) for name, pool in pools.items()}
    return {f"{k}_pooled_accuracy": float((v == source.per_row["label"][first]).mean()) for k, v in pooled.items()}


def with_derived(metrics: dict[str, float], info: Mapping[str, Any], split: str) -> dict[str, float]:
    """A language model's metrics with those that follow from its loss; others' as they are."""
    if info["kind"] != "text":
        return metrics
    loss = metrics["loss"]
    per = {unit: info[f"{unit}s_per_token"][split] for unit in ("character", "byte")}
    return metrics | {"perplexity": perplexity(loss)} | {f"bits_per_{unit}": bits(loss, per[unit]) for unit in per}


def _merge(merged, states):
    if states is None:
        return merged
    states = {name: state.to_host() for name, state in states.items()}
    return {name: merged[name].merge(state) if merged else state for name, state in states.items()}
