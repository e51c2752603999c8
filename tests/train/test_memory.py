"""Transformer-XL memory is carried from batch to batch in training and evaluation, and saved in checkpoints."""

import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

from lineage.configs.run import Run
from lineage.evaluation.sampling import Sampler
from lineage.runs.folder import read_metrics
from lineage.train import experiment as experiment_module
from lineage.train import loop, step
from lineage.train.experiment import Experiment
from lineage.train.sharding import shardings
from lineage.train.step import make_train_step
from tests.train.conftest import without_report
from tests.train.runs import losses, noisy

ONE = jax.devices()[:1]
# A learning rate of 0, so that the loss depends on the text only.
CHANGES = {"total_steps": 4, "save_every_steps": 2, "evaluate_every_steps": 4, "checkpoint.keep": 9}
CHANGES |= {"schedule.learning_rate": 0.0, "loader.evaluation_batch_size": 16}


@pytest.fixture(scope="module", autouse=True)
def noisy_runs():
    """Scale up the initial parameters so that the memory affects the loss, and disable reports."""

    def init_state(*args, **options):
        state = step.init_state(*args, **options)
        return state.replace(params=noisy(state.params))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(experiment_module, "init_state", init_state)
        without_report(patch)
        yield


@pytest.fixture(scope="module")
def run(tiny, tmp_path_factory):
    """Train for four steps; return config, folder and history."""
    config, workdir = tiny("transformer_xl", CHANGES), tmp_path_factory.mktemp("run")
    loop.train(config, workdir, devices=ONE)
    return config, workdir, read_metrics(workdir)


@pytest.mark.thorough
def test_generation_can_exceed_the_segment_length(tiny):
    """Check that generation is not limited by `max_length`, unlike that of other models."""
    sampling = {"sampling.num_samples": 1, "sampling.prompt": "def", "sampling.max_new_tokens": 40}
    experiment = Experiment(tiny("transformer_xl", CHANGES | sampling), devices=ONE)
    assert experiment.model.max_length < 40
    sampler, variables = Sampler(experiment.context()), experiment.make_state().variables()
    sampler.check(variables)
    (text,) = sampler.write(variables, "def")
    assert len(experiment.data.tokenizer.encode(text)) > experiment.model.max_length


def read(experiment, params, segments):
    """Return the losses [N, B, T] of consecutive segments and the final memory, computed without the training loop."""

    @jax.jit
    def step(memory, tokens, targets):
        logits, memory = experiment.model.apply({"params": params, **memory}, tokens, mutable="memory")
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets), memory

    memory, losses = {}, []
    for tokens, targets in segments:
        loss, memory = step(memory, tokens, targets)
        losses.append(loss)
    return np.stack(losses), memory


@pytest.mark.thorough
def test_training_carries_the_memory(run):
    config, workdir, history = run
    experiment = Experiment(config, workdir, ONE)
    windows = experiment.data.train.source
    params = experiment.restore().params
    starts = np.arange(8) * len(windows) // 8
    segments = [windows.take(starts + step) for step in range(4)]
    losses, memory = read(experiment, params, [(batch["tokens"], batch["targets"]) for batch in segments])
    actual = [line["train/loss"] for line in history if "train/loss" in line]
    np.testing.assert_allclose(actual, losses.mean((1, 2)), rtol=1e-5)
    alone = read(experiment, params, [(segments[3]["tokens"], segments[3]["targets"])])[0].mean()
    assert np.abs(actual[3] - alone) > 1e-3
    kept = experiment.restore().collections
    assert jax.tree.map(jnp.shape, kept) == jax.tree.map(jnp.shape, memory)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), kept, memory)


def test_evaluation_starts_with_empty_memory_and_carries_it(run):
    config, workdir, history = run
    experiment = Experiment(config, workdir, ONE)
    windows, size = experiment.data.splits["validation"].source, 16
    count = -(-len(windows) // size)
    places = np.arange(size)[:, None] * count + np.arange(count)
    batches = [windows.take(np.minimum(column, len(windows) - 1)) for column in places.T]
    losses, _ = read(
        experiment, experiment.restore().params, [(batch["tokens"], batch["targets"]) for batch in batches]
    )
    counted = np.stack([batch["mask"] for batch in batches]) & (len(windows) > places.T)[..., None]
    assert history[-1]["validation/loss"] == pytest.approx(losses[counted].mean(), rel=1e-5)


@pytest.mark.thorough
def test_resume_restores_the_memory(run, tmp_path):
    config, workdir, history = run
    shutil.copytree(workdir, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "4")
    loop.train(config, tmp_path / "run", devices=ONE)
    again, expected = (Experiment(config, folder, ONE).restore() for folder in (tmp_path / "run", workdir))
    jax.tree.map(np.testing.assert_array_equal, again, expected)
    assert losses(read_metrics(tmp_path / "run")) == losses(history)


@pytest.mark.slow
def test_adaptive_softmax_trains_alike_on_a_mesh(tiny, tmp_path):
    """Check losses, accuracies and gradient norms of steps and evaluations, on one device and on four."""
    changes = CHANGES | {"model.cutoffs": (64, 100, 110), "model.divisor": 2}
    loop.train(tiny("transformer_xl", changes), tmp_path / "one", devices=ONE)
    changes |= {"mesh.data": 2, "mesh.tensor": 2}
    loop.train(tiny("transformer_xl", changes), tmp_path / "four", devices=jax.devices()[:4])
    for line, other in zip(*(read_metrics(tmp_path / name) for name in ("one", "four")), strict=True):
        for name in {"train/loss", "train/accuracy", "train/gradient_norm", "validation/loss"} & line.keys():
            assert other[name] == pytest.approx(line[name], rel=1e-5)


@pytest.mark.thorough
def test_memory_is_sharded_by_sequence(run, tiny, tmp_path):
    config, _, history = run
    config = tiny("transformer_xl", CHANGES | {"mesh.data": 2, "mesh.fsdp": 2})
    experiment = Experiment(config, tmp_path, jax.devices()[:4])
    memory = experiment.state_shardings.collections["memory"]["stack"]["layers"]["attention"]
    assert memory["hidden"].spec == PartitionSpec(None, ("data", "fsdp"), None, None)
    assert memory["count"].spec == PartitionSpec(None)
    loop.train(config, tmp_path, devices=jax.devices()[:4])
    for line, expected in zip(read_metrics(tmp_path), history, strict=True):
        for name in {"train/loss", "validation/loss"} & expected.keys():
            assert line[name] == pytest.approx(expected[name], rel=1e-5)


def test_dimension_sharded_over_two_axes_must_be_divisible(run):
    mesh = Experiment(run[0], None, jax.devices()[:8]).mesh
    rules = (("a", (("data", "fsdp"), None)),)
    places = shardings({"a": np.zeros((8, 3)), "ba": np.zeros((6, 3))}, rules, mesh)
    assert places["a"].spec == PartitionSpec(("data", "fsdp"), None)
    assert places["ba"].spec == PartitionSpec(None, None)
    with pytest.raises(ValueError, match="names 'rows'"):
        shardings({}, (("a", (("data", "rows"),)),), mesh)


def test_shuffled_segments_raise(tiny, tmp_path):
    config = tiny("transformer_xl", {"loader.order": ""})
    message = r"loader.order is '': it must be 'stream' for a model with a memory, so that segments follow each other\."
    with pytest.raises(ValueError, match=message):
        loop.train(config, tmp_path, devices=ONE)


def test_gradient_accumulation_raises(run):
    config, workdir, _ = run
    experiment = Experiment(config, workdir, ONE)
    parts = make_train_step(experiment.model, experiment.task.loss, experiment.optimizer, Run(grad_accum_steps=2))
    with pytest.raises(ValueError, match="grad_accum_steps is 2: it must be 1 for a model with a memory"):
        jax.eval_shape(parts, experiment.abstract_state, jax.eval_shape(experiment.zeros))
