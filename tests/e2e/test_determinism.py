"""Parameters of two runs that differ in one thing: the table of docs/determinism.md."""

import json
import os

import jax
import numpy as np
import pytest

from lineage.train.checkpoint import Checkpoints
from lineage.train.experiment import Experiment
from lineage.train.loop import compile_step, device_batches
from tests.e2e.conftest import ROOT
from tests.tiers import tiered
from tests.tiny import get_config

STEPS = 20
# The exact gradient of key biases is zero: what Adam scales up to whole steps is rounding alone.
KEY_BIAS = "stack/layers/attention/key/bias"
EQUAL = {
    "the same config again": {},
    "worker processes": {"loader.workers": 2},
    "threads that read ahead": {"loader.threads": 3},
}
CLOSE = {
    "2 devices, data": {"mesh.data": 2},
    "4 devices, data": {"mesh.data": 4},
    "8 devices, data": {"mesh.data": 8},
    "2 devices, FSDP": {"mesh.data": 1, "mesh.fsdp": 2},
    "8 devices, FSDP": {"mesh.data": 1, "mesh.fsdp": 8},
    "2 devices, tensor": {"mesh.data": 1, "mesh.tensor": 2},
    "2 micro-batches": {"grad_accum_steps": 2},
}


def parameters(changes, folder):
    """Return the parameters, by path, after some steps on the devices of the config's mesh."""
    config = get_config()
    config.mesh.data = 1
    config.update_from_flattened_dict(changes)
    devices = config.mesh.data * config.mesh.fsdp * config.mesh.tensor
    experiment = Experiment(config, None, jax.devices()[:devices])
    with Checkpoints(folder) as checkpoints:
        state = experiment.state(checkpoints)
    step, batches = compile_step(experiment, state), device_batches(experiment, 0)
    for _ in range(STEPS):
        state, _ = step(state, next(batches))
    batches.close()
    leaves = jax.tree_util.tree_leaves_with_path(state.params)
    return {"/".join(key.key for key in path): np.asarray(leaf) for path, leaf in leaves}


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return parameters({}, tmp_path_factory.mktemp("alone"))


@tiered("name", EQUAL)
def test_equal_bits(name, alone, tmp_path):
    actual = parameters(EQUAL[name], tmp_path)
    for path, leaf in alone.items():
        assert actual[path].tobytes() == leaf.tobytes(), path


@pytest.mark.thorough
@pytest.mark.parametrize("name", CLOSE)
def test_equal_up_to_rounding(name, alone, tmp_path):
    found = parameters(CLOSE[name], tmp_path)
    differences = {path: np.abs(found[path] - leaf).max() for path, leaf in alone.items()}
    assert max(value for path, value in differences.items() if path != KEY_BIAS) < 5e-5
    assert 0 < differences[KEY_BIAS] < 5e-4


@pytest.mark.slow
def test_number_of_cores(launch, tmp_path):
    cores, losses = os.sched_getaffinity(0), []
    if len(cores) == 1:
        pytest.skip("one core")
    config = f"--config={ROOT}/tests/tiny.py:gpt", "--config.model.width=128", "--config.loader.batch_size=32"
    for used in (cores, {min(cores)}):
        workdir = tmp_path / str(len(used))
        os.sched_setaffinity(0, used)
        try:
            code, output = launch(*config, f"--config.total_steps={STEPS}", f"--workdir={workdir}")
        finally:
            os.sched_setaffinity(0, cores)
        assert code == 0, output
        lines = map(json.loads, (workdir / "metrics.jsonl").read_text().splitlines())
        losses.append([line["train/loss"] for line in lines if "train/loss" in line])
    assert len(losses[0]) == STEPS
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-6)
