"""REINFORCE: the gradient estimate against the exact gradient of a policy whose outputs can be enumerated."""

import itertools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from lineage import models
from lineage.configs.run import Run
from lineage.tasks.reinforcement import Reinforcement, policy_loss
from lineage.train.adapters import SVF
from lineage.train.pretrained import with_variables
from lineage.train.step import init_state, make_train_step

GPT = models.build("gpt", vocab_size=3, max_length=4, depth=1, width=4, num_heads=1)
ROWS = 64
# Two given tokens are followed by two generated ones, which should be 2 and 1.
TOKENS = jnp.tile(jnp.array([1, 0, 2], jnp.int32), (ROWS, 1))
BATCH = {
    "tokens": TOKENS,
    "targets": jnp.tile(jnp.array([0, 2, 1], jnp.int32), (ROWS, 1)),
    "mask": jnp.tile(jnp.array([False, True, True]), (ROWS, 1)),
}


@pytest.fixture(scope="module")
def policies():
    """Return random parameters of a policy and of its base."""
    shapes = jax.eval_shape(GPT.init, jax.random.key(0), TOKENS)["params"]
    random = np.random.default_rng(0)

    def draw(a):
        return jnp.asarray(random.normal(size=a.shape) * 0.5, jnp.float32)

    return jax.tree.map(draw, shapes), jax.tree.map(draw, shapes)


@pytest.mark.thorough
def test_gradient_estimate_is_unbiased(policies):
    """Compare the mean estimate with the gradient of E[reward] - kl KL(policy, base), computed over all nine texts."""
    params, base = policies
    kl, texts = 0.3, jnp.array(list(itertools.product(range(3), repeat=2)))

    def likelihood(params):
        logits = GPT.apply(
            {"params": params}, jnp.concatenate([jnp.tile(TOKENS[:1, :2], (9, 1)), texts[:, :1]], axis=1)
        )
        chances = jax.nn.log_softmax(logits)[:, 1:]
        return jnp.take_along_axis(chances, texts[..., None], axis=-1).sum((1, 2))

    def gained(params):
        ours, rewards = likelihood(params), jnp.where((texts == jnp.array([2, 1])).all(axis=1), 1.0, -1.0)
        return (jnp.exp(ours) * (rewards - kl * (ours - likelihood(base)))).sum()

    def estimate(key):
        def loss(params):
            variables = {"params": params, "reference": base}
            total, weight, _ = nn.apply(Reinforcement(kl=kl).loss, GPT)(variables, BATCH, rngs={"dropout": key})
            return total / weight

        return jax.value_and_grad(loss)(params)

    losses, found = jax.jit(lambda keys: jax.lax.map(estimate, keys))(jax.random.split(jax.random.key(1), 300))
    expected_loss, expected = jax.value_and_grad(gained)(params)

    def standard_error(a):
        return a.std(axis=0) / len(a) ** 0.5 + 1e-6

    assert abs(losses.mean() + expected_loss) < 4 * standard_error(losses)
    offs = jax.tree.map(lambda a, true: (a.mean(axis=0) + true) / standard_error(a), found, expected)
    offs = np.concatenate([a.ravel() for a in jax.tree.leaves(offs)])
    assert np.abs(offs).max() < 5
    assert 0.5 < np.sqrt(np.mean(offs**2)) < 1.5
    apart = optax.tree.norm(jax.tree.map(lambda a, true: a.mean(axis=0) + true, found, expected))
    assert apart < 0.1 * optax.tree.norm(expected)


def test_single_sample_and_padding_do_not_affect_the_baseline():
    """Check that a single sample has no baseline, and that padding does not change the baseline of others."""
    likelihood, gained = jnp.array([-1.0, -2.0, -3.0]), jnp.array([1.0, -1.0, 5.0])

    def weights(real):
        return jax.grad(lambda x: jnp.where(jnp.array(real), policy_loss(x, gained, jnp.array(real)), 0).sum())(
            likelihood
        )

    np.testing.assert_allclose(weights([True, False, False]), [-1, 0, 0])
    np.testing.assert_allclose(weights([True, True, False]), [-2, 2, 0])
    np.testing.assert_allclose(policy_loss(likelihood, gained, jnp.array([True] * 3)), -gained)


def step_of(kl, params, **options):
    """Return the initial state and the training step of SVF factors for a policy."""
    objective, optimizer = Reinforcement(kl=kl).loss, optax.adam(0.05)
    adapter = SVF(**options)
    state = jax.jit(lambda: init_state(GPT, optimizer, objective, BATCH, seed=0, adapter=adapter))()
    return with_variables(state, {"params": params}), make_train_step(GPT, objective, optimizer, Run())


@pytest.mark.thorough
def test_reward_is_maximized(policies):
    """Check that rewards rise, and that the most probable tokens are then correct."""
    state, step = step_of(0.0, policies[0], trained=("^embed",))
    rates, step = [], jax.jit(step)
    for _ in range(80):
        state, metrics = step(state, BATCH)
        rates.append(float(metrics["accuracy"]))
    assert np.mean(rates[:3]) < 0.3
    assert np.mean(rates[-3:]) > 0.6
    _, _, aux = jax.jit(nn.apply(Reinforcement().loss, GPT))(state.variables(), BATCH)
    assert aux["accuracy"].compute() == 1


def test_kl_penalty_refers_to_the_base(policies):
    """Check that the penalty is zero if all factors are 1, and positive otherwise."""
    state, step = step_of(0.5, policies[0])
    step = jax.jit(step)
    near, far = state, state.replace(params=jax.tree.map(lambda a: a * 1.5, state.params))
    near, far = (step(each, BATCH)[1] for each in (near, far))
    assert abs(near["loss"] - (1 - 2 * near["accuracy"])) < 1e-5
    assert far["loss"] - (1 - 2 * far["accuracy"]) > 1e-3
    state, step = step_of(0.5, policies[0], trained=("^embed",))
    with pytest.raises(ValueError, match=r"task\.kl is 0\.5: it must be 0 without an adapter, or with"):
        jax.eval_shape(step, state, BATCH)
