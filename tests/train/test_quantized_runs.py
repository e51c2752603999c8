"""Evaluation and generation with quantized weights, configured by `weights`."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lineage import launch
from lineage.configs import cli, run
from lineage.models.layers.quantized import Quantized
from lineage.train import loop
from lineage.train.experiment import Experiment
from lineage.train.step import cast
from lineage.train.trained import Trained
from tests.tiers import tiered
from tests.train.conftest import without_report
from tests.train.runs import ONE

WEIGHTS = "--config.weights=int8"
MESHES = {"fsdp": {"mesh.fsdp": 8}, "mixed": {"mesh.data": 2, "mesh.fsdp": 2, "mesh.tensor": 2}}


@pytest.fixture(scope="module")
def workdir(tiny, tmp_path_factory):
    """Return the folder of a short run of a language model, whose evaluations are not quantized."""
    folder = tmp_path_factory.mktemp("run")
    with pytest.MonkeyPatch.context() as patch:
        without_report(patch)
        loop.train(tiny("gpt", {"total_steps": 40, "source.max_bytes": 8_000}), folder, devices=ONE)
    return folder


@pytest.fixture
def say(workdir, capsys):
    """Return `say(command, *arguments)`, which runs a command for the run and returns its output."""

    def say(command, *arguments):
        capsys.readouterr()
        assert launch.main([command, f"--workdir={workdir}", *arguments]) == 0
        return capsys.readouterr().out

    return say


@pytest.mark.thorough
def test_evaluate(say):
    """Check that the loss changes a little, differently for the two formats."""
    losses = [json.loads(say("evaluate", *weights))["validation/loss"] for weights in ([], [WEIGHTS])]
    losses.append(json.loads(say("evaluate", "--config.weights=fp8", "--config.precision=bfloat16", "--force-config")))
    losses[2] = losses[2]["validation/loss"]
    assert len(set(losses)) == 3
    assert losses[1:] == pytest.approx([losses[0]] * 2, rel=0.01)


def test_generate(say):
    texts = say("generate", WEIGHTS, "--prompt=def f", "--config.sampling.temperature=0")
    assert texts.startswith("def f")
    assert texts != "def f\n"


def test_draft_models_are_quantized_too(tiny, workdir):
    changes = {"source.max_bytes": 8_000, "sampling.draft": str(workdir), "weights": "int8"}
    _, variables = Trained(Experiment(tiny("gpt", changes), workdir), {}).helpers["draft"]
    assert isinstance(variables["params"]["embed"]["table"], Quantized)


@tiered("mesh", MESHES)
def test_mesh_matches_one_device(mesh, tiny, tmp_path):
    losses = []
    for changes, devices in (({}, ONE), (MESHES[mesh], jax.devices())):
        experiment = Experiment(tiny("gpt", changes | {"model.width": 32, "weights": "int8"}), None, devices)
        state = jax.jit(experiment.make_state, out_shardings=experiment.state_shardings)()
        losses.append(experiment.evaluation()(experiment.variables(state))["validation/loss"])
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)


def test_cast_keeps_8_bit_numbers():
    tree = Quantized(jnp.ones((2, 3), jnp.float8_e4m3fn), jnp.ones(3))
    assert [leaf.dtype for leaf in jax.tree.leaves(cast(tree, jnp.dtype(jnp.bfloat16)))] == [
        jnp.float8_e4m3fn,
        jnp.bfloat16,
    ]


@pytest.mark.thorough
def test_training_is_not_quantized(tiny, tmp_path, no_report):
    """Check that the parameters after some steps are the same, and the evaluations are not."""
    states, metrics = [], []
    for weights in (None, "fp8"):
        config = tiny("gpt", {"total_steps": 3, "source.max_bytes": 8_000, "weights": weights})
        metrics.append(loop.train(config, tmp_path / str(weights), devices=ONE))
        states.append(Experiment(config, tmp_path / str(weights)).restore().params)
    jax.tree.map(np.testing.assert_array_equal, *states)
    assert metrics[0]["validation/loss"] != metrics[1]["validation/loss"]


def test_models_without_matrices_to_quantize_are_refused():
    config, _ = cli.load("resnet_digits")
    config.weights = "int8"
    experiment = Experiment(config)
    message = r"weights is 'int8': it must be None, because the model has no Linear or Embed of lineage\.models\.layers"
    with pytest.raises(ValueError, match=message):
        experiment.evaluation()
    with pytest.raises(ValueError, match=message):
        experiment.quantized({"params": {"stem_conv": {"kernel": jnp.ones((3, 3, 1, 8))}}})


def test_qwix_is_missing(monkeypatch, workdir, capsys):
    monkeypatch.setattr(run.importlib.util, "find_spec", lambda name: None)
    assert launch.main(["evaluate", f"--workdir={workdir}", WEIGHTS]) == 1
    assert (
        "error: weights is 'int8': this requires Qwix: `pip install 'lineage[quantize]'`.\n" in capsys.readouterr().err
    )


def test_unknown_format(workdir, capsys):
    assert launch.main(["evaluate", f"--workdir={workdir}", "--config.weights=int4"]) == 1
    assert "weights is 'int4'. Did you mean 'int8'? Available: int8, fp8.\n" in capsys.readouterr().err
