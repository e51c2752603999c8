"""One step: its loss and gradient, what it trains and what it leaves, in which precision."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import models
from train.objectives import causal_lm, classification
from train.optimizer import make_optimizer
from train.step import init_state, make_evaluation_step, make_train_step


def setting(name):
    """A small model, its objective and a fixed batch whose last example does not count."""
    rng = np.random.default_rng(0)
    mask = jnp.arange(4) < 3
    if name == "gpt":
        model = models.build("gpt", vocab_size=17, max_length=8, depth=2, width=16, num_heads=2)
        tokens = jnp.asarray(rng.integers(0, 17, (4, 9)), jnp.int32)
        mask = jnp.broadcast_to(mask[:, None], (4, 8))
        return model, causal_lm, {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "mask": mask}
    model = models.build("vit", num_classes=5, image_size=8, patch_size=4, channels=1, depth=2, width=16, num_heads=2)
    image = jnp.asarray(rng.normal(size=(4, 8, 8, 1)), jnp.float32)
    label = jnp.asarray(rng.integers(0, 5, 4), jnp.int32)
    return model, classification, {"image": image, "label": label, "mask": mask}


def initial(model, optimizer, objective, batch, ema=False):
    return jax.jit(lambda: init_state(model, optimizer, objective, batch, seed=0, ema=ema))()


def steps(name, count, batch=None, optimizer=None, ema=False, **options):
    """States after 0..count steps on one batch, and their metrics."""
    model, objective, own = setting(name)
    batch = own if batch is None else batch
    optimizer = optimizer or optax.adamw(1e-2)
    state = initial(model, optimizer, objective, batch, ema)
    step = jax.jit(make_train_step(model, objective, optimizer, seed=0, **options))
    states, metrics = [state], []
    for _ in range(count):
        state, values = step(states[-1], batch)
        states.append(state)
        metrics.append({key: float(value) for key, value in values.items()})
    return states, metrics


# The loss before and after one step of AdamW on one batch: what a change of initialisation, model, objective or
# optimizer moves.
GOLDEN = {"gpt": (2.8, 2.8), "vit": (1.6, 1.6)}


@pytest.mark.parametrize("name", GOLDEN)
def test_losses_of_the_first_steps(name):
    _, metrics = steps(name, 2)
    np.testing.assert_allclose([values["loss"] for values in metrics], GOLDEN[name], atol=1e-5)


@pytest.mark.parametrize("name", GOLDEN)
def test_a_masked_example_changes_nothing(name):
    _, _, batch = setting(name)
    change = lambda key, value: value if key == "mask" else value.at[3].set(value[0] * (2 if key == "image" else 1))  # noqa: E731
    other = {key: change(key, value) for key, value in batch.items()}
    states, metrics = steps(name, 2, batch)
    other_states, other_metrics = steps(name, 2, other)
    assert metrics == other_metrics
    jax.tree.map(np.testing.assert_array_equal, states[2].params, other_states[2].params)
    kept = {key: value[:3] for key, value in batch.items()}
    assert steps(name, 2, kept)[1][1]["loss"] == pytest.approx(metrics[1]["loss"], abs=1e-6)


def test_accumulated_parts_of_unequal_weight_are_one_batch():
    states, metrics = steps("vit", 3)
    parts_states, parts_metrics = steps("vit", 3, accumulate=2)  # three examples count: 2 in one part, 1 in the other
    for values, parts in zip(metrics, parts_metrics):
        assert parts == pytest.approx(values, rel=1e-5)
    close = lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5)  # noqa: E731
    jax.tree.map(close, parts_states[3].params, states[3].params)


def test_the_average_follows_the_parameters():
    states, _ = steps("gpt", 3, ema=True, ema_decay=0.75)
    expected = jax.tree.map(np.asarray, states[0].params)
    for state in states[1:]:
        expected = jax.tree.map(lambda mean, new: 0.75 * mean + 0.25 * np.asarray(new), expected, state.params)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), state.ema, expected)
    assert states[3].variables(average=True)["params"] is states[3].ema
    assert states[3].variables()["params"] is states[3].params
    assert steps("gpt", 1)[0][1].ema is None


def test_frozen_parameters_stay():
    optimizer = make_optimizer("adamw", optax.constant_schedule(1e-2), weight_decay=0.1, frozen=("attention/", "embed"))
    states, _ = steps("gpt", 2, optimizer=optimizer)
    for path, before in jax.tree_util.tree_leaves_with_path(states[0].params):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        after = states[2].params
        for part in path:
            after = after[part.key]
        frozen = "attention/" in name or "embed" in name
        assert (np.asarray(before).tobytes() == np.asarray(after).tobytes()) == frozen, name


@pytest.mark.parametrize("name", GOLDEN)
def test_bfloat16_computes_so_and_keeps_float32(name):
    states, metrics = steps(name, 5, precision="bfloat16", ema=True, ema_decay=0.9)
    floats = [leaf for leaf in jax.tree.leaves(states[5]) if jnp.issubdtype(leaf.dtype, jnp.floating)]
    assert {leaf.dtype for leaf in floats} == {np.dtype(np.float32)}
    _, full = steps(name, 5)
    for values, expected in zip(metrics, full):
        assert values["loss"] == pytest.approx(expected["loss"], rel=2e-2)
    assert metrics[-1]["loss"] != full[-1]["loss"]
    model, objective, batch = setting(name)
    seen = []

    def spy(bound, batch):
        leaf = jax.tree.leaves(bound.variables["params"])[0]
        seen.append(leaf.dtype)
        return objective(bound, batch)

    values = make_evaluation_step(model, spy, "bfloat16")(states[5].variables(), batch)
    assert seen == [jnp.bfloat16]
    assert values["loss"].total.dtype == np.float32


def test_dropout_depends_on_the_step_and_is_off_in_evaluation():
    model, objective, batch = setting("gpt")
    model = model.clone(dropout=0.5)
    optimizer = optax.set_to_zero()
    state = initial(model, optimizer, objective, batch)
    step = jax.jit(make_train_step(model, objective, optimizer, seed=0))
    evaluate = jax.jit(make_evaluation_step(model, objective))
    losses = []
    for _ in range(2):
        assert evaluate(state.variables(), batch)["loss"].compute() == pytest.approx(GOLDEN["gpt"][0], abs=1e-5)
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    assert losses[0] != losses[1]
    assert float(step(state.replace(step=jnp.zeros((), jnp.int32)), batch)[1]["loss"]) == losses[0]
