"""What a process does for `test_hosts.py`, as one of several: hosts.py COORDINATOR COUNT NUMBER FOLDER BEFORE."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np

import configs
from train import distributed
from train.checkpoint import Checkpoints
from train.evaluators import Evaluator
from train.experiment import Experiment
from train.loop import compile_step, device_batches

STEPS = 50
RUNS = {  # the model, its mesh over four devices of several processes, and what else it changes
    "data": ("vit", {"mesh.data": 4}, {"probes": "few_shot(2)"}),
    "fsdp": ("gpt", {"mesh.fsdp": 4}, {}),
    "tensor": ("gpt", {"mesh.tensor": 4}, {"model.num_heads": 4, "data.evaluation_batch_size": 56}),
    "pairs": ("transformer", {"mesh.data": 2, "mesh.fsdp": 2}, {}),
}


class Seen:
    """A source that notes which examples are taken from it."""

    def __init__(self, source):
        self.source, self.rows = source, []

    def __len__(self):
        return len(self.source)

    def take(self, indices):
        self.rows.append(np.asarray(indices).tolist())
        return self.source.take(indices)

    def __getattr__(self, name):
        return getattr(self.source, name)


def write_pairs(folder):
    """Some pairs of texts, so many that batches do not divide them."""
    for split, count in (("train", 64), ("validation", 70)):
        lines = (f"{number}\t{number + 1}\n" for number in range(count))
        (folder / f"{split}.tsv").write_text("".join(lines))


def follow(name, folder, alone="", devices=None):
    """Trains, evaluates and saves in `folder`; in the state that is in the folder `alone`, evaluates too."""
    model, mesh, changes = RUNS[name]
    config, _ = configs.load(f"{Path(__file__).parents[1]}/tiny.py:{model}")
    configs.override(config, {"optimizer.learning_rate": 3e-3} | changes | (mesh if alone else {}))
    if model == "transformer":
        pairs = (alone or folder).parent
        configs.override(
            config, {"data.source": f"pairs:{pairs}/train.tsv", "data.validation_split": f"{pairs}/validation.tsv"}
        )
    experiment = Experiment(config, None, devices)
    data, seen = experiment.data, {"train": Seen(experiment.data.train.source)}
    for split, batches in data.splits.items():
        seen[split] = Seen(batches.source)
        data.splits[split] = replace(batches, source=seen[split])
    experiment.__dict__["data"] = replace(data, train=replace(data.train, source=seen["train"]))
    evaluator, found = Evaluator(experiment), {"losses": []}
    with Checkpoints(folder) as checkpoints:
        state, batches = experiment.state(checkpoints), device_batches(experiment, 0)
        if model != "transformer":
            step = compile_step(experiment, state)
            for _ in range(STEPS):
                state, metrics = step(state, next(batches))
                found["losses"].append(float(metrics["loss"]))
        found["rows"] = seen["train"].rows[:STEPS]
        found["evaluated"] = evaluator.evaluate(state)
        checkpoints.save(state, {}, {})
    if alone:
        with Checkpoints(alone) as checkpoints:
            restored = experiment.state(checkpoints)
        assert int(restored.step) == int(state.step)
        for part in seen.values():
            part.rows.clear()
        found["evaluated_alone"] = evaluator.evaluate(restored)
        found["asked"] = {split: part.rows for split, part in seen.items()}
    return found


if __name__ == "__main__":
    coordinator, count, number, folder, alone = sys.argv[1:]
    jax.config.update("jax_default_matmul_precision", "highest")
    with distributed.joined(coordinator, int(count), int(number), heartbeat=30):
        found = {name: follow(name, Path(folder) / name, Path(alone) / name) for name in RUNS}
    (Path(folder) / f"{number}.json").write_text(json.dumps(found))
