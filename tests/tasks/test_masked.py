"""Masked language modeling with BERT: a whole run, and the loss against a reference."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lineage.train import loop
from lineage.train.experiment import Experiment

CHANGES = {"model.head": "masked_lm", "model.dropout": 0.0, "source": "stdlib", "source.max_bytes": 20_000}
CHANGES |= {"task.sequence_length": 16, "task.mask_rate": 0.2, "task.name": "masked_lm"}


def test_loss_matches_cross_entropy_of_masked_tokens(tiny):
    experiment = Experiment(tiny("bert", CHANGES))
    batch = jax.tree.map(jnp.asarray, experiment.data.splits["validation"][0])
    variables = {"params": jax.jit(experiment.make_state)().params}
    logits = experiment.model.apply(variables, batch["tokens"], mask=batch["tokens_mask"])
    picked = jnp.take_along_axis(logits, batch["masked_positions"][..., None], axis=1)
    scores = jnp.take_along_axis(jax.nn.log_softmax(picked), batch["targets"][..., None], axis=-1)[..., 0]
    loss, weight, _ = experiment.task.loss(experiment.model.bind(variables), batch)
    assert weight == batch["mask"].sum()
    np.testing.assert_allclose(loss, -scores[batch["mask"]].sum(), rtol=1e-5)


@pytest.mark.slow
@pytest.mark.usefixtures("no_report")
def test_loss_falls_below_chance(tiny, tmp_path):
    config = tiny("bert", CHANGES | {"total_steps": 60, "model.width": 32})
    metrics = loop.train(config, tmp_path, devices=jax.devices()[:1])
    assert set(metrics) == {"validation/loss", "validation/accuracy"}
    assert metrics["validation/loss"] < 4.5  # ln 258 = 5.55 for uniform predictions
