"""Training loop: number of steps, batches, and intervals of logging, evaluation and saving."""

import contextlib
import json
import math
import multiprocessing
import os
import signal
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from lineage.configs import base
from lineage.data.content import Arrays
from lineage.data.tokenizers import Tokenizer
from lineage.data.tokenizers.kinds import BPE
from lineage.evaluation import Evaluation
from lineage.evaluation.images import Neighbors
from lineage.runs.folder import MEASURED, plain
from lineage.train import loop
from lineage.train.checkpoint import Checkpoints
from lineage.train.experiment import Experiment
from lineage.train.preparation import start_notes
from lineage.train.profiling.throughput import Throughput
from tests.train.runs import ONE, noisy, run, train_lines

pytestmark = pytest.mark.usefixtures("no_report")


def test_device_does_not_wait_for_the_host(tiny, tmp_path, monkeypatch):
    """Each step is in the queue of the device while the host fetches the metrics of the step before and reads on."""
    experiment = Experiment(tiny("gpt", {"total_steps": 6, "log_every_steps": 1}), tmp_path, ONE)
    events, fetch = [], jax.device_get
    with contextlib.ExitStack() as stack:
        steps = loop.TrainingLoop(experiment, Throughput(experiment), stack)
        compiled, batches = steps.step_function, steps.batches

        def step_function(*arguments):
            events.append("start")
            return compiled(*arguments)

        def read():
            for batch in batches:
                events.append("read")
                yield batch

        def device_get(tree):
            events.append("fetch")
            return fetch(tree)

        steps.step_function, steps.batches = step_function, read()
        monkeypatch.setattr(jax, "device_get", device_get)
        with jax.transfer_guard("disallow"):  # of what no function for transfers is called with
            for step in range(1, 5):
                steps.run(step)
    assert events == ["read", "start", *["read", "start", "fetch"] * 3]


@pytest.mark.thorough
def test_trajectory_matches_plain_optax(tiny, tmp_path):
    config = tiny("gpt", {"total_steps": 6, "schedule.warmup_steps": 2, "optimizer.weight_decay": 0.1})
    history = run(config, tmp_path)
    experiment = Experiment(config, tmp_path, ONE)
    assert [line["step"] for line in train_lines(history)] == [1, 2, 3, 4, 5, 6]

    # The same in plain JAX and optax, without the classes of the project.
    def loss(params, batch):
        logits = experiment.model.apply({"params": params}, batch["tokens"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()

    with Checkpoints(tmp_path / "none") as checkpoints:
        params = experiment.state(checkpoints).params
    decayed = jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key not in ("bias", "scale"), params)
    rates = [5e-3, 1e-2, 1e-2, *(0.5 * 1e-2 * (1 + np.cos(np.pi * n / 4)) for n in (1, 2, 3))]
    gradient = jax.jit(jax.value_and_grad(loss))
    moments = None
    for step, (line, rate) in enumerate(zip(train_lines(history), rates)):
        optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate, weight_decay=0.1, mask=decayed))
        moments = optimizer.init(params) if moments is None else moments
        value, grads = gradient(params, jax.tree.map(jnp.asarray, experiment.data.train[step]))
        assert line["train/loss"] == pytest.approx(float(value), rel=1e-5), step
        assert line["train/gradient_norm"] == pytest.approx(float(optax.tree.norm(grads)), rel=1e-4), step
        assert line["train/learning_rate"] == pytest.approx(rate, rel=1e-5), step
        updates, moments = optimizer.update(grads, moments, params)
        params = optax.apply_updates(params, updates)
    final = experiment.restore()
    assert int(final.step) == 6
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), final.params, params)


@pytest.mark.thorough
def test_intervals_of_logging_evaluation_and_saving(tiny, tmp_path):
    changes = {"total_steps": 10, "log_every_steps": 4, "evaluate_every_steps": 3, "checkpoint.keep": 9}
    config = tiny("vit", changes | {"save_every_percent": 40.0})
    history = run(config, tmp_path)
    assert [line["step"] for line in train_lines(history)] == [4, 8, 10]
    assert [line["step"] for line in history if "test/loss" in line] == [3, 6, 9, 10]
    assert sorted(int(path.name) for path in (tmp_path / "checkpoints").iterdir()) == [4, 8, 10]
    assert json.loads((tmp_path / "config.json").read_text()) == plain(base.resolved(config))
    before = (tmp_path / "metrics.jsonl").read_bytes()
    again = loop.train(config, tmp_path, devices=ONE)  # is already complete
    assert (tmp_path / "metrics.jsonl").read_bytes() == before
    assert again == {key: value for key, value in history[-1].items() if key.startswith("test/")}


@pytest.mark.thorough
def test_logged_metrics_are_means_of_the_steps_since_the_last_line(tiny, tmp_path, interrupted):
    """Check the means of an uninterrupted run, and of one that is killed between two lines and resumed."""
    changes = {"total_steps": 11, "evaluate_every_steps": 11, "save_every_steps": 3}
    each = train_lines(run(tiny("vit", changes), tmp_path / "each"))
    config = tiny("vit", changes | {"log_every_steps": 4})
    lines = train_lines(run(config, tmp_path / "whole"))
    assert [line["step"] for line in lines] == [4, 8, 11]
    for line, first in zip(lines, (0, 4, 8)):
        for name in ("train/loss", "train/accuracy", "train/gradient_norm"):
            assert line[name] == pytest.approx(np.mean([one[name] for one in each[first : line["step"]]]), rel=1e-12)
    interrupted(8, lambda: run(config, tmp_path / "parts"))
    resumed = train_lines(run(config, tmp_path / "parts"))
    plain = [
        [{key: line[key] for key in line if not key.startswith(MEASURED)} for line in one] for one in (lines, resumed)
    ]
    assert plain[0] == plain[1]


@pytest.mark.thorough
def test_slow_source_shows_as_time_waiting_for_data(tiny, tmp_path, monkeypatch):
    def slow(seconds):
        whole = Arrays.take
        monkeypatch.setattr(Arrays, "take", lambda self, rows: (time.sleep(seconds), whole(self, rows))[1])

    slow(0.4)
    changes = {"total_steps": 8, "log_every_steps": 4, "save_every_steps": 8, "evaluate_every_steps": 8}
    first, last = train_lines(run(tiny("vit", changes), tmp_path))
    assert "time/waiting" not in first
    assert last["time/waiting"] > 0.4  # near 1 where steps are not delayed by other programs
    assert last["time/goodput"] < 0.6
    assert last["system/memory_gib"] > 0.05
    assert last["system/open_files"] > 3
    assert "time/mfu" not in last  # a CPU has no known peak


@pytest.mark.thorough
def test_goodput_counts_lost_steps_and_earlier_starts(tiny, tmp_path, interrupted):
    facts = tmp_path / "artifacts/run.json"
    config = tiny("vit", {"total_steps": 8, "log_every_steps": 1, "save_every_steps": 3, "evaluate_every_steps": 8})
    interrupted(6, lambda: run(config, tmp_path))
    killed = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])
    first, *resumed = train_lines(run(config, tmp_path))[3:]
    assert (killed["step"], first["step"]) == (4, 4)  # step 5 was not logged
    assert "time/goodput" not in first
    useful = [line["time/goodput"] * line["time/seconds"] for line in (killed, *resumed)]
    assert all(line["time/seconds"] > killed["time/seconds"] for line in resumed)
    assert 0 < useful[1] < useful[-1] < resumed[-1]["time/seconds"] - (killed["time/seconds"] - useful[0])
    seconds = json.loads(facts.read_text())["seconds"]
    assert seconds > resumed[-1]["time/seconds"]  # of both starts
    run(config, tmp_path)  # complete already
    assert json.loads(facts.read_text())["seconds"] > seconds


@pytest.mark.slow
@pytest.mark.parametrize("steps", [3000, 20_000])
def test_many_steps_need_no_more_memory_and_files(steps, tiny, tmp_path):
    changes = {"total_steps": steps, "log_every_steps": 50, "save_every_steps": 500, "evaluate_every_steps": 500}
    lines = train_lines(run(tiny("vit", changes), tmp_path))
    memory, files = ({line["step"]: line[f"system/{name}"] for line in lines} for name in ("memory_gib", "open_files"))
    assert len(memory) == steps / 50
    assert memory[steps] - memory[1000] < 0.02
    growth = [memory[start + 500] - memory[start + 100] for start in range(1000, steps, 500)]  # between two saves
    assert sorted(growth)[len(growth) // 2 - 1] < 0.0003
    assert files[steps] <= files[1000]
    assert all(0 <= line[f"time/{name}"] < 1 for line in lines[1:] for name in ("waiting", "saving", "evaluating"))
    assert lines[-1]["time/goodput"] > 0.8 * lines[len(lines) // 2]["time/goodput"]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("schedule", "notes"),
    [
        (
            {"schedule.name": "cosine"},
            "the run had 4 steps and now has 8: the learning rate after step 4 changes from 0.00 to 0.000500.",
        ),
        ({"schedule.name": "constant"}, ""),
        (
            {"schedule.name": "constant", "schedule.warmup_percent": 100.0},
            "the run had 4 steps and now has 8: the learning rate after step 4 changes from 0.00100 to 0.000625.",
        ),
        ({"schedule.name": "constant", "schedule.warmup_steps": 3}, ""),
    ],
)
def test_longer_run_notes_a_jump_of_the_learning_rate(tiny, tmp_path, schedule, notes):
    changes = {"total_steps": 8, "schedule.learning_rate": 1e-3, "schedule.warmup_steps": None}
    experiment = Experiment(tiny("gpt", changes | schedule), tmp_path, ONE)
    assert " ".join(start_notes(experiment, 4, {"total_steps": 4, "total_epochs": None})) == notes
    assert not [*start_notes(experiment, 4, {"total_steps": 8}), *start_notes(experiment, 4, {})]


@pytest.mark.thorough
def test_a_run_resumes_with_other_readers_and_evaluators(tiny, tmp_path):
    changes = {"total_steps": 6, "save_every_steps": 3, "schedule.name": "constant"}
    whole = run(tiny("vit", changes), tmp_path / "whole")
    run(tiny("vit", changes | {"total_steps": 3}), tmp_path / "parts")
    others = {"loader.workers": 1, "loader.threads": 1, "loader.evaluation_batch_size": 32, "evaluators.loss.every": 2}
    resumed = run(tiny("vit", changes | others), tmp_path / "parts")
    losses = [[line["train/loss"] for line in train_lines(history)] for history in (whole, resumed)]
    assert len(losses[0]) == 6
    assert losses[0] == losses[1]


@pytest.mark.thorough
def test_workers_end_with_the_loop(tiny, tmp_path, monkeypatch):
    """Check that workers and the memory shared with them are not left to the end of the process."""
    left, finish = [], loop.TrainingLoop.finish
    children = multiprocessing.active_children
    monkeypatch.setattr(loop.TrainingLoop, "finish", lambda *args: left.extend(children()) or finish(*args))
    run(tiny("vit", {"total_steps": 3, "loader.workers": 1}), tmp_path)
    assert not left


@pytest.mark.thorough
def test_offloaded_state_changes_nothing(tiny, tmp_path):
    """Check a run whose optimizer state is kept on the host, and that it is there; the second half is resumed."""
    changes = {"evaluate_every_steps": 6, "ema_decay": 0.9, "skip_nonfinite": 2}
    histories = []
    for offload in (False, True):
        for steps in (3, 6):
            config = tiny("vit", changes | {"schedule.name": "constant", "total_steps": steps, "offload": offload})
            history = run(config, tmp_path / str(offload))
        histories.append(history)
    assert [len(train_lines(one)) for one in histories] == [6, 6]
    for one, other in zip(*histories):
        ignored = {key for key in one if key.startswith(MEASURED)}
        assert {key: one[key] for key in one.keys() - ignored} == {key: other[key] for key in other.keys() - ignored}
    state = Experiment(config, tmp_path / "True", ONE).restore()
    places = [leaf.sharding.memory_kind for leaf in jax.tree.leaves((state.opt_state, state.ema)) if leaf.ndim]
    assert set(places) == {"pinned_host"} != {leaf.sharding.memory_kind for leaf in jax.tree.leaves(state.params)}


@pytest.mark.thorough
def test_shorter_run_than_its_checkpoint_is_refused(tiny, tmp_path):
    config = tiny("vit", {"total_steps": 2})
    loop.train(config, tmp_path, devices=ONE)
    before = (tmp_path / "config.json").read_text()
    config.total_steps = 1
    with pytest.raises(ValueError, match=r"the length of the run is 1 steps: it must be at least 2"):
        loop.train(config, tmp_path, devices=ONE)
    assert (tmp_path / "config.json").read_text() == before


@pytest.mark.thorough
def test_evaluation_counts_every_example_once_for_any_batch_size(tiny, tmp_path, monkeypatch):
    for model, split, number, text in (
        ("vit", "test", 359, {}),
        ("gpt", "validation", 193, {"task.sequence_length": 14}),
    ):
        results = []
        for size in (1, 7, 64):
            config = tiny(model, {"loader.evaluation_batch_size": size} | text)
            experiment = Experiment(config, tmp_path / model, ONE)
            (tmp_path / model).mkdir(exist_ok=True)
            batches = experiment.data.splits[split]
            assert len(batches.source) == number or model == "gpt"  # the library depends on the Python version
            assert size == 1 or len(batches.source) % size  # the batch size does not divide the split
            with Checkpoints(tmp_path / "none") as checkpoints:
                state = experiment.state(checkpoints)
            results.append(experiment.evaluation()({"params": noisy(state.params)}))
        for result in results[1:]:
            assert result[f"{split}/accuracy"] == results[0][f"{split}/accuracy"]
            assert result == pytest.approx(results[0], rel=1e-6)
        # All examples at once, without batches.
        whole = batches.source.take(np.arange(len(batches.source)))
        whole = batches.transform(whole, None) if batches.transform else whole
        inputs, labels = (whole["image"], whole["label"]) if model == "vit" else (whole["tokens"], whole["targets"])
        logits = experiment.model.apply({"params": noisy(state.params)}, jnp.asarray(inputs))
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        mask = whole.get("mask", np.ones(labels.shape, bool))
        assert results[0][f"{split}/loss"] == pytest.approx(float(losses[mask].mean()), rel=1e-5)
        right = (np.asarray(logits).argmax(-1) == labels)[mask]
        assert results[0][f"{split}/accuracy"] == right.sum() / mask.sum()


@pytest.mark.thorough
def test_evaluation_uses_the_parameter_average(tiny, tmp_path):
    config = tiny("vit", {"total_steps": 4, "ema_decay": 0.9})
    metrics = loop.train(config, tmp_path, devices=ONE)
    experiment = Experiment(config, tmp_path, ONE)
    state, evaluation = experiment.restore(), experiment.evaluation()
    swapped = state.replace(ema=state.params)
    assert evaluation(state.variables(average=True)) == metrics
    assert evaluation(swapped.variables(average=True))["test/loss"] != metrics["test/loss"]


@pytest.mark.thorough
def test_best_and_newest_checkpoints_are_kept(tiny, tmp_path, monkeypatch):
    losses = iter([3.0, 1.0, 2.0, 4.0])
    monkeypatch.setattr(Evaluation, "__call__", lambda *args: {"test/loss": next(losses)})
    every = {"evaluate_every_steps": 4, "save_every_steps": 2}
    config = tiny("vit", {"total_steps": 15, "checkpoint.best": "test/loss"} | every)
    loop.train(config, tmp_path, devices=ONE)
    assert sorted(int(path.name) for path in (tmp_path / "checkpoints").iterdir()) == [8, 14, 15]
    experiment = Experiment(config, tmp_path, ONE)
    assert int(experiment.restore("best").step) == 8
    assert int(experiment.restore().step) == 15


@pytest.mark.thorough
def test_the_best_evaluation_is_saved_between_saves(tiny, tmp_path, monkeypatch):
    """Check that a checkpoint is written after an evaluation that is better than those before, nan aside."""
    losses = iter([math.nan, 3.0, 1.0, 1.0, 2.0])
    monkeypatch.setattr(Evaluation, "__call__", lambda *args: {"test/loss": next(losses)})
    saved, save = [], Checkpoints.save
    monkeypatch.setattr(
        Checkpoints,
        "save",
        lambda self, state, *args, **more: (saved.append(int(state.step)), save(self, state, *args, **more)),
    )
    every = {"evaluate_every_steps": 2, "save_every_steps": 10}
    config = tiny("vit", {"total_steps": 10, "checkpoint.best": "test/loss"} | every)
    loop.train(config, tmp_path, devices=ONE)
    assert saved == [4, 6, 10]
    assert int(Experiment(config, tmp_path, ONE).restore("best").step) == 6


@pytest.mark.thorough
def test_best_by_the_metric_of_an_evaluator_that_is_not_always_due(tiny, tmp_path, monkeypatch):
    accuracies = iter([0.9, 0.1, 0.5])
    monkeypatch.setattr(Neighbors, "measure", lambda *args: {"knn_accuracy": next(accuracies)})
    changes = {"evaluators.knn": "knn", "evaluators.knn.every": 2, "checkpoint.best": "test/knn_accuracy"}
    every = {"total_steps": 6, "evaluate_every_steps": 1, "save_every_steps": 1, "checkpoint.keep": 1}
    loop.train(tiny("vit", changes | every), tmp_path, devices=ONE)
    assert sorted(int(path.name) for path in (tmp_path / "checkpoints").iterdir()) == [2, 6]


@pytest.mark.thorough
def test_best_by_an_unknown_metric_raises_and_loses_nothing(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(Evaluation, "check_metric", lambda *args: None)  # as if it were that of an unknown evaluator
    config = tiny("vit", {"total_steps": 4, "evaluate_every_steps": 2, "checkpoint.best": "test/other_accuracy"})
    with pytest.raises(
        ValueError, match=r"^checkpoint\.best is 'test/other_accuracy': it must be one of test/accuracy, test/loss\.$"
    ):
        loop.train(config, tmp_path, devices=ONE)
    assert int(Experiment(config, tmp_path, ONE).restore().step) == 2


def test_signal_during_compilation_stops_the_run(tiny, tmp_path, monkeypatch, capsys):
    whole = loop.compile_step

    def told(*args):
        assert "compiling the training step" in capsys.readouterr().err
        os.kill(os.getpid(), signal.SIGTERM)
        return whole(*args)

    monkeypatch.setattr(loop, "compile_step", told)
    with pytest.raises(loop.Preempted, match="stopped at step 1 of 40 after saving a checkpoint"):
        loop.train(tiny("vit"), tmp_path, devices=ONE)


@pytest.mark.thorough
def test_finished_run_is_shown_as_finished(tiny, tmp_path, capsys):
    config = tiny("vit", {"total_steps": 2})
    loop.train(config, tmp_path, devices=ONE)
    assert capsys.readouterr().err.startswith(f"writing to {tmp_path}\ncompiling the training step\n")
    loop.train(config, tmp_path, devices=ONE)
    assert capsys.readouterr().err == f"writing to {tmp_path}\nthe run has all of its 2 steps\nstep 2/2 100%\n"


def test_tokenizer_with_other_ids_than_the_initial_model_is_noted(tiny, tmp_path):
    Experiment(tiny("gpt"), devices=ONE).tokenizer.save(tmp_path / "model")
    spec = json.loads((tmp_path / "model" / "tokenizer.json").read_text())
    ids = spec["model"]["vocab"]
    ids["a"], ids["b"] = ids["b"], ids["a"]
    (tmp_path / "other.json").write_text(json.dumps(spec))
    expected = (
        f"not that of {tmp_path}/model: 2 ids stand for other tokens, the first one is {min(ids['a'], ids['b'])};"
    )
    for tokenizer, noted in (("other.json", True), ("model/tokenizer.json", False)):
        config = tiny("gpt", {"tokenizer": f"file:{tmp_path}/{tokenizer}"})
        config.init.path = str(tmp_path / "model")
        assert (expected in " ".join(start_notes(Experiment(config, devices=ONE), 0, {}))) == noted
    (tmp_path / "model" / "tokenizer.json").write_text("{")
    config.tokenizer.path = f"{tmp_path}/other.json"
    assert "the tokenizer" not in " ".join(start_notes(Experiment(config, devices=ONE), 0, {}))


def test_tokenizer_of_the_config_that_is_not_used_is_noted(tiny, tmp_path):
    """Check configs with another tokenizer than that of the initial model or of the teacher, and with the same one."""
    trained = tiny("gpt", {"tokenizer": "bpe", "tokenizer.vocab_size": 270})
    special = ("end_of_text", "cls", "sep", "pad", "mask")
    BPE(vocab_size=270).train(["a text"], special).save(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"tokenizer": trained.tokenizer.to_dict()}))
    distillation = {"model.name": "bert", "model.width": 16, "task.name": "masked_lm_distillation"}
    distillation |= {"task.sequence_length": 16, "source.max_bytes": 20_000, "model.head": "masked_lm"}
    for key, others in (("init.path", {}), ("teacher", distillation)):
        for kind, size, noted in (("bpe", 280, True), ("bpe", 270, False), ("bytes", None, False)):
            config = tiny("gpt", {"tokenizer": kind, **({"tokenizer.vocab_size": size} if size else {}), **others})
            (config.init if key == "init.path" else config)[key.removeprefix("init.")] = str(tmp_path)
            experiment = Experiment(config, devices=ONE)
            assert experiment.tokenizer.vocab_size == len(Tokenizer.load(tmp_path).vocabulary)
            note = f"the tokenizer is that of {key}, {tmp_path}: tokenizer.name={kind} has no effect"
            assert (note in " ".join(start_notes(experiment, 0, {}))) == noted
