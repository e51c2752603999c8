"""Sequence-to-sequence runs: training, evaluation of generated texts, and generation."""

import itertools
import json
import shutil

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from lineage.configs.atomic import unsealed
from lineage.evaluation.sampling import Sampler
from lineage.train import loop
from lineage.train.experiment import Experiment
from tests.tiers import tiered


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Write pairs of numbers and their reversed digits, few enough to be memorized."""
    folder = tmp_path_factory.mktemp("pairs")
    for name, numbers in (("train", range(1000, 1008)), ("test", range(1000, 1007))):
        (folder / f"{name}.tsv").write_text("".join(f"{n}\t{' '.join(str(n)[::-1])}\n" for n in numbers))
    return folder


@pytest.fixture(scope="module")
def trained(files, tiny, tmp_path_factory):
    changes = {
        "source": f"pairs:{files}/train.tsv",
        "source.test_path": f"{files}/test.tsv",
        "task.sequence_length": 9,
        "loader.batch_size": 8,
        "model.dropout": 0.0,
        "model.norm_placement": "pre",
        "model.width": 32,
        "sampling.num_samples": 1,
        "sampling.prompt": "1005",
        "sampling.max_new_tokens": 8,
        "evaluators.generation.metrics": ("chrf word_order=2", "rouge kinds=1,L samples=10", "distinct orders=1"),
        "total_steps": 250,
        "evaluate_every_steps": 250,
        "save_every_steps": 125,
        "log_every_steps": 50,
    }
    config, workdir = tiny("transformer", changes), tmp_path_factory.mktemp("run")
    return config, workdir, loop.train(config, workdir, devices=jax.devices()[:1])


@pytest.mark.slow
def test_memorized_targets_are_generated(trained):
    _, workdir, metrics = trained
    assert metrics["test/exact_match"] == 1
    assert metrics["test/accuracy"] == 1
    assert metrics["test/free_running_accuracy"] == 1
    assert [metrics[f"test/{name}"] for name in ("chrf", "rougeL_recall", "rouge1_f_low")] == pytest.approx([100, 1, 1])
    assert metrics["test/distinct_1"] == pytest.approx(7 / 28)  # 7 digits in 28
    sample = json.loads((workdir / "artifacts" / "samples.jsonl").read_text().splitlines()[-1])
    assert unsealed(sample) == {"step": 250, "prompt": "1005 → ", "text": "5 0 0 1"}


@pytest.mark.thorough
def test_generated_texts_are_saved_and_reported(trained, files):
    _, workdir, _ = trained
    written = json.loads((workdir / "artifacts" / "written_test.json").read_text())
    pairs = [line.split("\t") for line in (files / "test.tsv").read_text().splitlines()]
    assert written["rows"] == [[left, right, right] for left, right in pairs]
    assert written["bleu"] == pytest.approx(100)
    page = (workdir / "report.html").read_text()
    assert f"BLEU 100.00, {written['signature']}" in page
    assert "<td>1003<td>3 0 0 1<td>3 0 0 1" in page
    assert (workdir / "report" / "written_test.png").is_file()


def test_unknown_metrics_are_refused_before_training(files, tiny, tmp_path):
    changes = {"source": f"pairs:{files}/train.tsv", "task.sequence_length": 9}
    for metric, message in (
        ("rogue", "generation.metrics has 'rogue': it must"),
        ("chrf order=x", "no option 'order'"),
    ):
        config = tiny("transformer", changes | {"evaluators.generation.metrics": (metric,)})
        with pytest.raises(ValueError, match=message):
            loop.train(config, tmp_path, devices=jax.devices()[:1])
        assert not (tmp_path / "checkpoints").exists()


@tiered("size", [1, 4, 64])
def test_every_pair_counts_once_for_any_batch_size(size, trained, files):
    """Check a split in which the last 2 of 7 targets are wrong."""
    config, workdir, _ = trained
    lines = (files / "test.tsv").read_text().splitlines()
    (files / "wrong.tsv").write_text(
        "".join(f"{line}\n" for line in [*lines[:5], *(f"{line} 9" for line in lines[5:])])
    )
    config = config.copy_and_resolve_references()
    config.source.test_path, config.loader.evaluation_batch_size = f"{files}/wrong.tsv", size
    experiment = Experiment(config, workdir, jax.devices()[:1])
    metrics = experiment.evaluation()(experiment.restore().variables(average=True))
    np.testing.assert_allclose(metrics["test/exact_match"], 5 / 7)
    # A correct target has 8 tokens; a wrong one is truncated to 9, of which the model generates 7 and then ends.
    np.testing.assert_allclose(metrics["test/free_running_accuracy"], (5 * 8 + 2 * 7) / (5 * 8 + 2 * 9))
    assert 0 < metrics["test/bleu"] < 100


@pytest.mark.thorough
def test_samples_do_not_depend_on_the_batch_size(trained):
    """Check evaluations and predictions of batches whose last one is not full."""
    config, workdir, _ = trained
    config, actual = config.copy_and_resolve_references(), []
    config.sampling.temperature = 2.0
    for size in (2, 7):
        config.loader.evaluation_batch_size = size
        experiment = Experiment(config, workdir, jax.devices()[:1])
        sampler, variables = Sampler(experiment.context()), experiment.restore().variables()
        split = experiment.data.splits["test"]
        batches = sampler.batches(variables, split, experiment.facts)
        actual.append([text for *_, texts in batches for text in texts][:7])
        actual.append(list(sampler.texts_of(variables, [split])))
    assert actual == actual[:1] * 4
    assert len(set(actual[0])) > 1


def test_sampler_generates_from_prompts(trained):
    config, workdir, _ = trained
    experiment = Experiment(config, workdir, jax.devices()[:1])
    sampler, variables = Sampler(experiment.context()), experiment.restore().variables()
    assert sampler.write(variables, "1003") == ["3 0 0 1"]
    assert len(sampler.write(variables, "")) == 1  # the encoder reads the end of text
    with pytest.raises(ValueError, match="a sequence of 81 tokens is longer than the model's 64"):
        sampler.write(variables, "1" * 80)


@pytest.mark.slow
def test_training_with_buckets_resumes_exactly(files, tiny, tmp_path):
    """Check that pairs of three and of four digits are in separate batches, and that a resumed run is identical."""
    (tmp_path / "train.tsv").write_text(
        "".join(f"{n}\t{' '.join(str(n)[::-1])}\n" for n in (*range(100, 108), *range(1000, 1008)))
    )
    changes = {
        "source": f"pairs:{tmp_path}/train.tsv",
        "task.sequence_length": 9,
        "loader.buckets": (7,),
        "schedule": "constant",  # independent of total_steps
        "loader.batch_size": 8,
        "total_steps": 4,
        "save_every_steps": 2,
    }
    config = tiny("transformer", changes)
    widths = [batch["tokens"].shape for batch in itertools.islice(Experiment(config).data.train.iterate(), 4)]
    assert sorted(widths) == [(8, 7), (8, 7), (8, 9), (8, 9)]
    loop.train(config, tmp_path / "whole", devices=jax.devices()[:1])
    first = config.copy_and_resolve_references()
    first.total_steps = 2
    loop.train(first, tmp_path / "parts", devices=jax.devices()[:1])
    loop.train(config, tmp_path / "parts", devices=jax.devices()[:1])
    whole, parts = (Experiment(config, tmp_path / name).restore().params for name in ("whole", "parts"))
    jax.tree.map(np.testing.assert_array_equal, whole, parts)


@pytest.mark.slow
@pytest.mark.usefixtures("no_report")
def test_decoder_only_model_memorizes_pairs(files, tiny, tmp_path):
    """Check pairs as single texts, with prompts of different lengths in a batch."""
    (tmp_path / "train.tsv").write_text("12\ta b\n345\tc\n6\td d\n78910\te\n")
    changes = {"source": f"pairs:{tmp_path}/train.tsv", "source.test_path": f"{tmp_path}/train.tsv"}
    changes |= {"task.name": "conditional_lm", "task.sequence_length": 12, "loader.evaluation_batch_size": 3}
    changes |= {"model.max_length": 20, "model.width": 32, "sampling.temperature": 0.0, "total_steps": 120}
    changes |= {"evaluate_every_steps": 120, "save_every_steps": 120, "log_every_steps": 40}
    metrics = loop.train(tiny("gpt", changes), tmp_path / "run", devices=jax.devices()[:1])
    assert metrics["test/exact_match"] == 1
    assert metrics["test/accuracy"] == 1


@pytest.mark.slow
@pytest.mark.parametrize("norm", ["batch", "power"])
def test_running_statistics_are_resumed_exactly(norm, files, tiny, tmp_path, no_report):
    """Check resuming across the switch of PowerNorm from batch statistics to running statistics."""
    changes = {"source": f"pairs:{files}/test.tsv", "task.sequence_length": 9, "loader.batch_size": 4}
    changes |= {"model.norm": norm, "model.norm_warmup": 5, "sampling.max_new_tokens": 2, "total_steps": 8}
    changes |= {"save_every_steps": 4, "evaluate_every_steps": 8, "checkpoint.keep": 2}

    def run():
        loop.train(tiny("transformer", changes), tmp_path, devices=jax.devices()[:1])
        return ocp.StandardCheckpointer().restore(tmp_path / "checkpoints" / "8" / "state")

    whole = run()
    assert whole["collections"]["statistics"]["encoder_stack"]["layers"]
    shutil.rmtree(tmp_path / "checkpoints" / "8")
    jax.tree.map(np.testing.assert_array_equal, run(), whole)
