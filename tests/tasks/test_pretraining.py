"""Pre-training of BERT, T5 and BART: whole runs, and the loss against a reference."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lineage.evaluation.sampling import Sampler
from lineage.train import loop
from lineage.train.experiment import Experiment

SMALL = {"source": "stdlib", "source.max_bytes": 40_000, "task.sequence_length": 32, "loader.batch_size": 16}
SMALL |= {"model.dropout": 0.0, "model.depth": 1, "total_steps": 30, "evaluate_every_steps": 30, "save_every_steps": 30}
BERT = SMALL | {"model.head": "pretraining", "tokenizer": "wordpiece", "tokenizer.vocab_size": 300}
BERT |= {"task.name": "sentence_pair_pretraining"}
T5 = SMALL | {"model.head_size": 8, "model.mlp_dim": 32, "task.name": "span_corruption"}
BART = SMALL | {"task.name": "denoising", "sampling.num_samples": 1}
BART |= {"sampling.prompt": "import", "sampling.max_new_tokens": 4}


def test_loss_is_the_sum_of_masked_lm_and_sentence_losses(tiny):
    experiment = Experiment(tiny("bert", BERT))
    batch = jax.tree.map(jnp.asarray, list(experiment.data.splits["validation"])[-1])
    variables = {"params": jax.jit(experiment.make_state)().params}
    logits, scores = experiment.model.apply(
        variables, batch["tokens"], segments=batch["segments"], mask=batch["tokens_mask"]
    )
    picked = jnp.take_along_axis(logits, batch["masked_positions"][..., None], axis=1)
    words = jnp.take_along_axis(jax.nn.log_softmax(picked), batch["targets"][..., None], axis=-1)[..., 0]
    labels = jnp.take_along_axis(jax.nn.log_softmax(scores), batch["label"][:, None], axis=-1)[:, 0]
    rows = batch["tokens_mask"].any(axis=1)
    assert 0 < rows.sum() < len(rows)  # some of the batch is padding
    loss, weight, aux = experiment.task.loss(experiment.model.bind(variables), batch)
    expected = -words[batch["mask"]].mean() - labels[rows].mean()
    assert weight == batch["mask"].sum() < batch["mask"][rows].size  # some texts have fewer masked tokens
    np.testing.assert_allclose([loss / weight, aux["loss"].compute()], expected, rtol=1e-5)
    np.testing.assert_allclose(aux["sentence_loss"].compute(), -labels[rows].mean(), rtol=1e-5)
    right = (scores.argmax(axis=-1) == batch["label"])[rows].mean()
    np.testing.assert_allclose(aux["sentence_accuracy"].compute(), right, rtol=1e-6)


def test_pair_loss_of_parts_adds_up(tiny):
    experiment = Experiment(tiny("bert", BERT))
    batch = jax.tree.map(jnp.asarray, next(experiment.data.train.iterate(0)))
    variables = {"params": jax.jit(experiment.make_state)().params}
    whole, weight, _ = experiment.task.loss(experiment.model.bind(variables), batch)
    variables["run"] = {"real": {"mask": batch["mask"].sum(), "examples": len(batch["mask"])}}
    parts = [jax.tree.map(lambda a, part=part: a[part], batch) for part in (slice(3), slice(3, None))]
    sums, weights, _ = zip(*(experiment.task.loss(experiment.model.bind(variables), part) for part in parts))
    np.testing.assert_allclose([sum(sums), sum(weights)], [whole, weight], rtol=1e-5)


def test_padding_of_roberta_is_that_of_its_tokenizer(tiny):
    changes = {"tokenizer": "bpe", "tokenizer.vocab_size": 300, "task.name": "masked_lm", "model.head": "masked_lm"}
    experiment = Experiment(tiny("roberta", SMALL | changes))
    assert experiment.model.pad_id == experiment.tokenizer.pad != 1
    assert Experiment(tiny("roberta", SMALL | changes | {"model.pad_id": 7})).model.pad_id == 7


@pytest.mark.parametrize(("model", "changes", "name"), [("bart", BART, "<mask>"), ("t5", T5, "<extra_id_0>")])
def test_special_tokens_in_prompts_are_read_as_in_predictions(model, changes, name, tiny):
    experiment = Experiment(tiny(model, changes))
    tokenizer, text = experiment.data.tokenizer, f"import {name} as"
    actual, _ = Sampler(experiment.context())._request(text).inputs
    batch = experiment.task.input_examples([text], tokenizer, experiment.facts).source.take(np.arange(1))
    assert actual.tolist() == [batch["inputs"][batch["inputs_mask"]].tolist()]
    assert (tokenizer.mask if model == "bart" else tokenizer.sentinels[0]) in actual


@pytest.mark.slow
@pytest.mark.parametrize(("model", "changes"), [("bart", BART), ("t5", T5), ("bert", BERT)], ids=["bart", "t5", "bert"])
@pytest.mark.usefixtures("no_report")
def test_loss_falls_below_chance(model, changes, tiny, tmp_path):
    config = tiny(model, changes)
    experiment = Experiment(config)
    shapes = jax.eval_shape(lambda: experiment.zeros(config.loader.batch_size))
    batch = experiment.data.train[0]
    assert {name: (value.shape, value.dtype) for name, value in shapes.items()} == {
        name: (value.shape, value.dtype) for name, value in batch.items()
    }
    metrics = loop.train(config, tmp_path, devices=jax.devices()[:1])
    names = {"loss", "accuracy"}
    names |= {"masked_lm_loss", "sentence_loss", "sentence_accuracy"} if model == "bert" else set()
    assert set(metrics) == {f"validation/{name}" for name in names}
    assert metrics["validation/loss"] < np.log(experiment.data.facts.vocab_size) + (model == "bert") * np.log(2)
    assert (tmp_path / "tokenizer.json").is_file()
