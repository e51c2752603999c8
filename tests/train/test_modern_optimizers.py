"""Optimizers of recent years: formulas, references, resuming, and sharding of their states."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax import contrib

from lineage.runs.folder import read_metrics
from lineage.train import loop
from lineage.train.experiment import Experiment
from lineage.train.optimizer import OPTIMIZERS, averaged, map_paths
from lineage.train.optimizer.modern import rising, schedule_free
from lineage.train.preparation import jit_step
from tests.train.test_optimizer import LAYERED, PARAMS, Layered, gradients, make, rate, run

NEW = ("muon", "ademamix", "sophia", "prodigy", "schedule_free_adamw")
INPUTS = {"stack/layers/up/kernel": (-2,), "patch_embed/kernel": (-2,), "classifier/kernel": (-2,)}


def layered(seed):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda p: rng.normal(size=p.shape).astype(np.float32), LAYERED)


def muon(**options):
    return OPTIMIZERS.build("muon", clip_norm=0.0, **options).make(lambda n: 1.0, Layered(), lambda: INPUTS)


def test_muon_orthogonalizes_the_matrices_of_each_layer():
    optimizer = muon(iterations=10, rms=0.0)
    updates, _ = optimizer.update(layered(1), optimizer.init(LAYERED), LAYERED)
    kernel = updates["stack"]["layers"]["up"]["kernel"]  # three layers of 4 inputs and 2 outputs
    for layer, gradient in zip(kernel, layered(1)["stack"]["layers"]["up"]["kernel"]):
        left, _, right = np.linalg.svd(gradient, full_matrices=False)
        values = np.linalg.svd(layer, compute_uv=False)
        assert (values > 0.6).all()
        assert (values < 1.3).all()
        assert np.vdot(-left @ right, layer) > 0.9 * np.linalg.norm(left @ right) * np.linalg.norm(layer)
    scaled, _ = muon(iterations=10, rms=0.5).update(layered(1), optimizer.init(LAYERED), LAYERED)
    np.testing.assert_allclose(scaled["stack"]["layers"]["up"]["kernel"], kernel * 0.5 * 2, rtol=1e-5)


def test_muon_leaves_other_parameters_to_adamw():
    optimizer, adamw = muon(b2=0.9, weight_decay=0.1), make("adamw", lambda n: 1.0, b2=0.9, weight_decay=0.1)
    ours, theirs = (one.update(layered(1), one.init(LAYERED), LAYERED)[0] for one in (optimizer, adamw))
    same = map_paths(lambda path, u: np.allclose(u, _at(theirs, path), rtol=1e-6), ours)
    assert [same["patch_embed"]["kernel"], same["class_token"], same["norm"]["scale"]] == [True] * 3
    assert same["classifier"]["kernel"]
    assert same["stack"]["layers"]["up"] == {"kernel": False, "bias": True}


def _at(tree, path):
    for name in path.split("/"):
        tree = tree[name]
    return tree


def test_muon_needs_the_model():
    with pytest.raises(ValueError, match="muon"):
        make("muon", lambda n: 1.0)


@pytest.mark.parametrize("inputs", [{}, {"classifier/kernel": (-2,)}])
def test_muon_needs_matrices_in_the_layers(inputs):
    with pytest.raises(ValueError, match=r"the model Layered have no Linear of lineage\.models\.layers\."):
        OPTIMIZERS.build("muon").make(lambda n: 1.0, Layered(), lambda: inputs)


def test_ademamix_matches_the_paper():
    options = {"b1": 0.8, "b2": 0.9, "b3": 0.99, "alpha": 3.0, "epsilon": 1e-3}
    ours = run(make("ademamix", lambda n: 0.1, **options), steps=3)["norm"]["scale"]
    p, fast, slow, second = np.full(4, 2.0), 0.0, 0.0, 0.0
    for n in range(3):
        g = gradients(n)["norm"]["scale"].astype(float)
        fast, slow, second = 0.8 * fast + 0.2 * g, 0.99 * slow + 0.01 * g, 0.9 * second + 0.1 * g * g
        corrected = fast / (1 - 0.8 ** (n + 1)), second / (1 - 0.9 ** (n + 1))
        p = p - 0.1 * (corrected[0] + 3.0 * slow) / (np.sqrt(corrected[1]) + 1e-3)
    np.testing.assert_allclose(ours, p, rtol=1e-5)


def test_rise_of_ademamix_matches_the_authors_code():
    """Check the first steps, which the authors' code counts from 1."""
    options = {"b1": 0.8, "b2": 0.9, "b3": 0.99, "alpha": 3.0, "epsilon": 1e-3, "rise_steps": 4}
    ours = run(make("ademamix", lambda n: 0.1, **options), steps=6)["norm"]["scale"]
    p, fast, slow, second = np.full(4, 2.0), 0.0, 0.0, 0.0
    for n in range(6):
        done = min((n + 1) / 4, 1)
        half_life = (1 - done) * np.log(0.5) / np.log(0.8) + done * np.log(0.5) / np.log(0.99)
        alpha, b3, g = 3.0 * done, 0.5 ** (1 / half_life), gradients(n)["norm"]["scale"].astype(float)
        fast, slow, second = 0.8 * fast + 0.2 * g, b3 * slow + (1 - b3) * g, 0.9 * second + 0.1 * g * g
        corrected = fast / (1 - 0.8 ** (n + 1)), second / (1 - 0.9 ** (n + 1))
        p = p - 0.1 * (corrected[0] + alpha * slow) / (np.sqrt(corrected[1]) + 1e-3)
    np.testing.assert_allclose(ours, p, rtol=1e-5)


def test_ademamix_begins_as_adam_and_ends_as_without_a_rise():
    start = run(make("ademamix", lambda n: 0.1, rise_steps=10**6), steps=2)
    np.testing.assert_allclose(
        start["norm"]["scale"], run(make("adamw", lambda n: 0.1), steps=2)["norm"]["scale"], 1e-4
    )
    b3 = rising(0.9, 0.9999, 4)
    assert float(b3(-1)) == pytest.approx(0.9)
    assert float(b3(1)) == pytest.approx(np.exp(1 / (0.5 / np.log(0.9) + 0.5 / np.log(0.9999))))
    assert float(b3(9)) == pytest.approx(0.9999)
    assert (
        np.abs(run(make("ademamix", lambda n: 0.1, rise_steps=2))["norm"]["scale"] - start["norm"]["scale"]).min() > 0
    )


def test_sophia_divides_by_the_curvature():
    """Check Sophia on a quadratic, where the estimated diagonal of the Hessian is exact for any random signs."""
    curvature = jax.tree.map(lambda p: np.linspace(1, 9, p.size, dtype=np.float32).reshape(p.shape), PARAMS)

    def loss(params):
        return sum(jnp.vdot(c * p, p) / 2 for c, p in zip(*map(jax.tree.leaves, (curvature, params))))

    optimizer = make("sophia", lambda n: 1.0, b1=0.0, b2=0.0, gamma=1.0, interval=2)
    params, state = jax.tree.map(jnp.asarray, PARAMS), optimizer.init(PARAMS)
    small = jax.tree.map(lambda c: 0.1 * c, curvature)
    for step in range(3):
        updates, state = optimizer.update(small, state, params, obj_fn=loss)
        expected = -1.0 if step == 0 else -0.1  # the first diagonal is there after the first step; updates are clipped
        for leaf in jax.tree.leaves(updates):
            np.testing.assert_allclose(leaf, expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("model", "changes"),
    [("gpt", {"task.sequence_length": 128}), ("transformer_xl", {"model.cutoffs": (20, 60)})],
    ids=["kernel", "loop of variable length"],
)
def test_sophia_differentiates_twice(model, changes, tiny):
    """Check that a step can be compiled for any platform."""
    config = tiny(model, changes | {"optimizer.name": "sophia"})
    experiment = Experiment(config, None, jax.devices()[:1])
    jax.eval_shape(jit_step(experiment), experiment.abstract_state, jax.eval_shape(experiment.zeros))


def test_prodigy_decays_weights_as_its_reference_but_for_masked_ones():
    theirs = contrib.prodigy(0.5, weight_decay=0.3, estim_lr0=0.1, safeguard_warmup=True)
    options = {"weight_decay": 0.3, "start": 0.1}
    # The reference multiplies the decay by Adam's bias correction too, sqrt(1 - b2) / (1 - b1) in the first step.
    one, other = theirs.update(gradients(0), theirs.init(PARAMS), PARAMS)[0], contrib.prodigy(0.5, estim_lr0=0.1)
    bare = other.update(gradients(0), other.init(PARAMS), PARAMS)[0]
    ours = make("prodigy", lambda n: 0.5, **options)
    mine = ours.update(gradients(0), ours.init(PARAMS), PARAMS)[0]
    factor = 0.1 / (1 - 0.999) ** 0.5
    decay = jax.tree.map(lambda a, b: (a - b) * factor, one, bare)
    np.testing.assert_allclose(
        mine["stack"]["mlp"]["kernel"],
        bare["stack"]["mlp"]["kernel"] + decay["stack"]["mlp"]["kernel"],
        rtol=1e-4,
    )
    np.testing.assert_allclose(mine["norm"]["scale"], bare["norm"]["scale"], rtol=1e-5)
    assert np.abs(decay["norm"]["scale"]).min() > 1e-3


def test_prodigy_finds_a_learning_rate():
    """Check that Prodigy, unlike AdamW, minimizes a quadratic from an estimate that is a million times too small."""

    def minimized(optimizer):
        params = jnp.full(4, 3.0)
        state = optimizer.init(params)
        step = jax.jit(optimizer.update)
        for _ in range(300):
            updates, state = step(params, state, params)
            params = optax.apply_updates(params, updates)
        return float(jnp.abs(params).max())

    assert minimized(make("adamw", lambda n: 1e-6)) > 2.9
    assert minimized(make("prodigy", lambda n: 1.0)) < 0.3


def test_prodigy_is_unchanged_by_gradients_of_zero():
    optimizer = make("prodigy", lambda n: 1.0)
    updates, state = optimizer.update(jax.tree.map(jnp.zeros_like, PARAMS), optimizer.init(PARAMS), PARAMS)
    assert not any(np.asarray(update).any() for update in jax.tree.leaves(updates))
    updates, _ = optimizer.update(gradients(0), state, PARAMS)
    assert all(np.isfinite(update).all() for update in jax.tree.leaves(updates))


def test_schedule_free_matches_optax():
    adam = optax.chain(optax.scale_by_adam(0.0, 0.999), optax.scale_by_learning_rate(0.1))
    ours, theirs = schedule_free(adam, lambda n: 0.1, 0.8), contrib.schedule_free(adam, 0.1, 0.8)
    states, params = [one.init(PARAMS) for one in (ours, theirs)], [jax.tree.map(jnp.asarray, PARAMS)] * 2
    for step in range(5):
        for i, one in enumerate((ours, theirs)):
            updates, states[i] = one.update(gradients(step), states[i], params[i])
            params[i] = optax.apply_updates(params[i], updates)
    close = jax.tree_util.Partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)
    jax.tree.map(close, *params)
    jax.tree.map(close, averaged(states[0], params[0]), contrib.schedule_free_eval_params(states[1], params[1]))
    assert averaged(make("adamw", lambda n: 0.1).init(PARAMS), PARAMS) is None


@pytest.mark.parametrize("name", ["ademamix", "prodigy", "schedule_free_adamw"])
def test_frozen_and_undecayed_parameters(name):
    frozen = run(make(name, lambda n: 0.1, weight_decay=0.1, frozen=("norm/",)))
    np.testing.assert_array_equal(frozen["norm"]["scale"], PARAMS["norm"]["scale"])
    decayed, plain = (run(make(name, lambda n: 0.1, weight_decay=w)) for w in (0.5, 0.0))
    np.testing.assert_allclose(decayed["norm"]["scale"], plain["norm"]["scale"], rtol=1e-6)
    assert np.abs(decayed["stack"]["mlp"]["kernel"] - plain["stack"]["mlp"]["kernel"]).max() > 0


def test_schedule_free_keeps_frozen_layers_and_averages_them():
    optimizer = OPTIMIZERS.build("schedule_free_adamw", frozen_layers=2).make(lambda n: 0.1, Layered())
    params, state = jax.tree.map(jnp.asarray, LAYERED), optimizer.init(LAYERED)
    for step in range(3):
        updates, state = optimizer.update(layered(step), state, params)
        params = optax.apply_updates(params, updates)
    kernel = params["stack"]["layers"]["up"]["kernel"]
    np.testing.assert_array_equal(kernel[:2], LAYERED["stack"]["layers"]["up"]["kernel"][:2])
    assert np.abs(kernel[2] - 1).min() > 1e-3
    mean = averaged(state, params)["stack"]["layers"]["up"]["kernel"]
    np.testing.assert_array_equal(mean[:2], kernel[:2])
    assert np.abs(mean[2] - kernel[2]).min() > 0
    masked = OPTIMIZERS.build("schedule_free_adamw", frozen=("norm/",)).make(lambda n: 0.1)
    np.testing.assert_array_equal(averaged(masked.init(PARAMS), PARAMS)["norm"]["scale"], PARAMS["norm"]["scale"])


@pytest.mark.parametrize(("shape", "half"), [("linear", 0.5), ("sqrt", 1 - 0.5**0.5)])
def test_wsd_is_constant_and_then_decays(shape, half):
    rates = [rate("wsd", n, 10, decay_percent=20.0, shape=shape, end_factor=0.1) for n in range(101)]
    np.testing.assert_allclose(rates[:10], 2.0 * np.arange(1, 11) / 10, rtol=1e-5)
    np.testing.assert_allclose(rates[10:81], 2.0, rtol=1e-6)
    np.testing.assert_allclose(rates[90], 2.0 * (1 - 0.9 * (1 - half)), rtol=1e-5)
    np.testing.assert_allclose(rates[100], 0.2, rtol=1e-5)
    assert rate("wsd", 99, decay_percent=0.0) == 2.0


@pytest.mark.thorough
@pytest.mark.usefixtures("no_report")
@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name != "muon")) for name in NEW])
def test_run_resumes_exactly_with_a_sharded_state(name, tiny, tmp_path):
    changes = {"optimizer.name": name, "optimizer.weight_decay": 0.01, "schedule.name": "wsd", "mesh.fsdp": 8}
    changes |= {"mesh.data": 1, "total_steps": 6, "save_every_steps": 3, "evaluate_every_steps": 6, "mesh.fsdp": 8}
    if name == "sophia":
        changes["optimizer.interval"] = 2
    histories = []
    for folder, stops in (("whole", [6]), ("parts", [3, 6])):
        for stop in stops:
            # A run of 6 steps that is preempted after 3.
            with pytest.MonkeyPatch.context() as patch:
                if stop == 3:
                    patch.setattr(loop.TrainingLoop, "run", _stopping(loop.TrainingLoop.run, 3))
                try:
                    loop.train(tiny("gpt", changes), tmp_path / folder)
                except loop.Preempted:
                    assert stop == 3
        histories.append([line["train/loss"] for line in read_metrics(tmp_path / folder) if "train/loss" in line])
    assert histories[0] == histories[1]
    assert len(histories[0]) == 6
    experiments = [Experiment(tiny("gpt", changes), tmp_path / folder) for folder in ("whole", "parts")]
    states = [one.restore() for one in experiments]
    for ours, theirs in zip(*map(jax.tree.leaves, states), strict=True):
        assert np.asarray(ours).tobytes() == np.asarray(theirs).tobytes()
    leaves = jax.tree.leaves(states[0].opt_state)
    here = sum(leaf.addressable_shards[0].data.nbytes for leaf in leaves) / sum(leaf.nbytes for leaf in leaves)
    assert here < 0.3
    if name == "schedule_free_adamw":
        jax.tree.map(np.testing.assert_array_equal, states[0].variables(average=True)["params"], states[0].ema)
        jax.tree.map(
            lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6),
            states[0].ema,
            averaged(states[0].opt_state, states[0].params),
        )


def _stopping(run, last):
    def stopping(self, step):
        self.requests.stop.received |= step == last
        run(self, step)

    return stopping


@pytest.mark.thorough
@pytest.mark.usefixtures("no_report")
def test_averages_of_two_kinds_are_refused(tiny, tmp_path):
    config = tiny("gpt", {"optimizer.name": "schedule_free_adamw", "ema_decay": 0.9})
    with pytest.raises(ValueError, match="ema_decay is above 0: it must be 0 for an optimizer that averages"):
        loop.train(config, tmp_path)
