"""Worker script of `test_hosts.py`, usage: hosts.py COORDINATOR COUNT NUMBER FOLDER BEFORE RUN..."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np

from lineage.configs import cli
from lineage.data import ExampleSource
from lineage.train import distributed
from lineage.train.checkpoint import Checkpoints
from lineage.train.experiment import Experiment
from lineage.train.loop import compile_step, device_batches

SMALL = {"model.depth": 1, "schedule.learning_rate": 3e-3}
RUNS = {  # model, steps, mesh of four devices, other overrides
    "fsdp": ("vit", 20, {"mesh.fsdp": 4}, {}),
    "tensor": ("gpt", 20, {"mesh.tensor": 4}, {"model.num_heads": 4, "loader.evaluation_batch_size": 56}),
    "data": ("vit", 0, {"mesh.data": 4}, {"evaluators.few": "few_shot", "evaluators.few.shots": 2}),
    "mixed": ("gpt", 20, {"mesh.fsdp": 2, "mesh.tensor": 2}, {"sampling.num_samples": 2}),
    "pairs": ("transformer", 0, {"mesh.data": 2, "mesh.fsdp": 2}, {}),
}


class Seen(ExampleSource):
    """Source that records the indices of the examples that are read."""

    def __init__(self, source):
        self.source, self.rows = source, []

    def __len__(self):
        return len(self.source)

    def take(self, indices):
        self.rows.append(np.asarray(indices).tolist())
        return self.source.take(indices)


def experiment(name, folder, mesh=False, devices=None):
    """Return the experiment of a run in a folder, with its data in the parent folder."""
    model, _, sizes, changes = RUNS[name]
    config, _ = cli.load(f"{Path(__file__).parents[1]}/tiny.py:{model}")
    if name == "pairs":
        changes = {"source": f"pairs:{folder.parent}/train.tsv"}
        changes |= {"source.validation_path": f"{folder.parent}/validation.tsv"}
    cli.override(config, SMALL | changes | (sizes if mesh else {}))
    return Experiment(config, None, devices)


def restored(experiment, folder):
    """Return the state saved in a folder."""
    with Checkpoints(folder) as checkpoints:
        assert checkpoints.latest is not None
        return experiment.state(checkpoints)


def write_pairs(folder):
    """Write pairs of texts whose number is not a multiple of the batch size."""
    for split, count in (("train", 64), ("validation", 70)):
        (folder / f"{split}.tsv").write_text("".join(f"{number}\t{number + 1}\n" for number in range(count)))


def follow(name, experiment, folder, before=None):
    """Train, evaluate and save in a folder, evaluate the state in the folder `before`, and return all results."""
    seen = Seen(experiment.data.train.source)
    experiment.__dict__["data"] = replace(experiment.data, train=replace(experiment.data.train, source=seen))
    evaluation, results = experiment.evaluation(), {"losses": []}
    with Checkpoints(folder) as checkpoints:
        state = experiment.state(checkpoints)
        if RUNS[name][1]:
            step, batches = compile_step(experiment, state), device_batches(experiment, 0)
        for _ in range(RUNS[name][1]):
            state, metrics = step(state, next(batches))
            results["losses"].append(float(metrics["loss"]))
        results["rows"] = seen.rows[: RUNS[name][1]]
        results["evaluated"] = evaluation(state.variables(average=True))
        checkpoints.save(state, {}, {})
    if before:
        results["evaluated_before"] = evaluation(restored(experiment, before).variables(average=True))
    artifacts = evaluation.context.artifacts.items()
    results["written"] = {name.removeprefix("written_"): entry["rows"] for name, entry in artifacts if "rows" in entry}
    return json.loads(json.dumps(results))


if __name__ == "__main__":
    coordinator, count, number, folder, before, *names = sys.argv[1:]
    folder, before = Path(folder), Path(before)
    jax.config.update("jax_default_matmul_precision", "highest")
    with distributed.joined(coordinator, int(count), int(number), heartbeat=30):
        experiments = {name: experiment(name, before / name, mesh=True) for name in names}
        results = {name: follow(name, experiments[name], folder / name, before / name) for name in names}
        (folder / f"{number}.json").write_text(json.dumps(results))
