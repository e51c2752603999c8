"""Scheduled sampling: probability by step, and errors for unsupported models."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from lineage.configs import schema
from lineage.configs.run import Run
from lineage.models import Model
from lineage.models.transformer import Transformer
from lineage.tasks import TASKS
from lineage.tasks.sequence_to_sequence import DECAYS, SequenceToSequence
from lineage.train.step import init_state, make_forward_step, make_train_step
from tests.tiers import tiered

TOKENS = jnp.zeros((4, 3), jnp.int32)
BATCH = dict.fromkeys(("inputs", "tokens", "targets"), TOKENS) | dict.fromkeys(("inputs_mask", "mask"), TOKENS == 0)


class Tell(Model):
    """Model whose loss encodes the sampling probability: ln(1 + e^-rate) per token, and ln(1 + e^-7) without one."""

    @nn.compact
    def __call__(self, inputs, tokens, *, inputs_mask, own_rate=None):
        logit = self.param("one", nn.initializers.ones, ()) * (7.0 if own_rate is None else own_rate)
        return jnp.stack([jnp.full(tokens.shape, logit), jnp.zeros(tokens.shape)], axis=-1)


def told(loss):
    return -np.log(np.expm1(loss))


@tiered("grad_accum_steps", [1, 2])
@pytest.mark.parametrize(
    ("decay", "rates"),
    [("linear", [0, 0.4, 0.8]), ("exponential", [0, 1 - 0.2**0.5, 0.8]), ("inverse_sigmoid", [1 / 101, 1 / 6, 0.8])],
)
def test_probability_follows_the_step_in_training_only(decay, rates, grad_accum_steps):
    objective = SequenceToSequence(scheduled_sampling=0.8, decay=decay).loss
    optimizer = optax.sgd(0.0)
    state = init_state(Tell(), optimizer, objective, BATCH, seed=0)
    step = jax.jit(
        make_train_step(Tell(), objective, optimizer, Run(grad_accum_steps=grad_accum_steps), total_steps=10)
    )
    for at, rate in zip((0, 5, 10), rates):
        after, metrics = step(state.replace(step=jnp.asarray(at, jnp.int32)), BATCH)
        np.testing.assert_allclose(told(metrics["loss"]), rate, atol=1e-4)
        assert after.collections == state.collections == {}
    _, _, metrics = make_forward_step(Tell(), objective)(state.variables(), BATCH)
    np.testing.assert_allclose(told(metrics["loss"].compute()), 7, atol=1e-2)


def test_schedules_decrease_to_their_final_value():
    for decay in DECAYS.values():
        chances = [decay(progress, 0.25) for progress in np.linspace(0, 1, 11)]
        assert chances[0] == pytest.approx(1, abs=0.011)
        assert chances[-1] == pytest.approx(0.25)
        assert (np.diff(chances) < 0).all()


def test_invalid_scheduled_sampling_raises():
    section = schema.section(TASKS, "sequence_to_sequence", scheduled_sampling=0.5, decay="cosine")
    with pytest.raises(ValueError, match=r"task.decay is 'cosine'\. Available: linear, exponential, inverse_sigmoid"):
        schema.build(TASKS, section)
    with pytest.raises(ValueError, match=r"scheduled_sampling is 0\.5: it must be 0 for Transformer, which reads all"):
        SequenceToSequence(scheduled_sampling=0.5).check_model(Transformer(vocab_size=11))
    with pytest.raises(ValueError, match=r"task\.scheduled_sampling is 1\.0: it must be 0 or more and below 1"):
        SequenceToSequence(scheduled_sampling=1.0)
