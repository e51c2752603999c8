"""Optimizers and schedules match formulas and PyTorch."""

import functools
import inspect
import operator
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from optax import contrib

from lineage.configs import cli, schema
from lineage.configs.registry import check_matches, field_types
from lineage.models import Layers, Model
from lineage.models.transformer_xl import TransformerXL
from lineage.train.experiment import Experiment
from lineage.train.optimizer import OPTIMIZERS, SCHEDULES, Optimizer, map_paths, paths_of
from lineage.train.preparation import start_notes

PARAMS = {
    "stack": {
        "mlp": {"kernel": np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4), "bias": np.ones(4, np.float32)}
    },
    "norm": {"scale": np.full(4, 2, np.float32)},
}


def make(name, learning_rate, model=None, **options):
    return OPTIMIZERS.build(name, **{"clip_norm": 0.0} | options).make(learning_rate, model)


def gradients(seed, scale=1.0):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda p: (scale * rng.normal(size=p.shape)).astype(np.float32), PARAMS)


def run(optimizer, steps=5, params=PARAMS, scale=1.0):
    params = jax.tree.map(jnp.asarray, params)
    state = optimizer.init(params)
    for step in range(steps):
        updates, state = optimizer.update(gradients(step, scale), state, params)
        params = optax.apply_updates(params, updates)
    return params


def test_adamw_matches_pytorch():
    ours = run(make("adamw", lambda n: 0.1, b2=0.95, weight_decay=0.2))
    leaves = jax.tree.map(lambda p: torch.nn.Parameter(torch.tensor(p)), PARAMS)
    decayed, others = [leaves["stack"]["mlp"]["kernel"]], [leaves["stack"]["mlp"]["bias"], leaves["norm"]["scale"]]
    groups = [{"params": decayed, "weight_decay": 0.2}, {"params": others, "weight_decay": 0.0}]
    theirs = torch.optim.AdamW(groups, lr=0.1, betas=(0.9, 0.95), eps=1e-8)
    for step in range(5):
        jax.tree.map(lambda p, g: setattr(p, "grad", torch.tensor(g)), leaves, gradients(step))
        theirs.step()
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b.detach().numpy(), rtol=1e-5), ours, leaves)


def test_sgd_with_momentum_matches_pytorch():
    ours = run(make("sgd", lambda n: 0.1, momentum=0.8))
    leaves = jax.tree.map(lambda p: torch.nn.Parameter(torch.tensor(p)), PARAMS)
    theirs = torch.optim.SGD(jax.tree.leaves(leaves), lr=0.1, momentum=0.8)
    for step in range(5):
        jax.tree.map(lambda p, g: setattr(p, "grad", torch.tensor(g)), leaves, gradients(step))
        theirs.step()
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b.detach().numpy(), rtol=1e-5), ours, leaves)


def test_lion_matches_the_paper():
    """Compare with algorithm 2 of arXiv 2302.06675."""
    ours = run(make("lion", lambda n: 0.1, b1=0.9, b2=0.99))
    for path in (("stack", "mlp", "kernel"), ("norm", "scale")):
        take = functools.partial(functools.reduce, operator.getitem, path)
        p, m = take(PARAMS).astype(np.float64), 0.0
        for step in range(5):
            g = take(gradients(step))
            p, m = p - 0.1 * np.sign(0.9 * m + 0.1 * g), 0.99 * m + 0.01 * g
        np.testing.assert_allclose(take(ours), p, rtol=1e-5)


def test_adafactor_minimizes_a_quadratic_with_factored_state():
    optimizer = make("adafactor", lambda n: 0.05, momentum=0.0)
    params = {"kernel": jnp.ones((256, 128))}
    state = optimizer.init(params)
    stored = sum(leaf.size for leaf in jax.tree.leaves(state))
    for _ in range(100):
        updates, state = optimizer.update(jax.tree.map(lambda p: p, params), state, params)
        params = optax.apply_updates(params, updates)
    assert float(jnp.abs(params["kernel"]).max()) < 0.1
    assert stored < 0.05 * 256 * 128


HEADS = {"out": (-3, -2), "query": (-3,)}  # input axes of [heads, channels, width] and [width, heads, channels]


@pytest.mark.thorough
def test_adafactor_factors_the_matrices_of_each_layer():
    """Compare stacked kernels with heads to the matrix of each layer in optax."""
    rng, layer = np.random.default_rng(0), "stack/layers/attention"
    params = {"out": rng.normal(size=(3, 4, 32, 160)), "query": rng.normal(size=(3, 160, 4, 32))}
    params = {f"{layer}/{name}/kernel": value.astype(np.float32) for name, value in params.items()}
    params |= {f"{layer}/query/bias": np.ones((3, 128, 160), np.float32)}  # three vectors that look like matrices
    inputs = {f"{layer}/{name}/kernel": axes for name, axes in HEADS.items()}
    optimizer = OPTIMIZERS.build("adafactor", momentum=0.0, clip_norm=0.0).make(
        lambda n: 1.0, Layered(), lambda: inputs
    )
    theirs = optax.chain(optax.scale_by_factored_rms(decay_rate=0.8), optax.clip_by_block_rms(1.0))
    shapes = {f"{layer}/out/kernel": (128, 160), f"{layer}/query/kernel": (160, 128), f"{layer}/query/bias": (-1,)}
    parts = [{path: value[i].reshape(shapes[path]) for path, value in params.items()} for i in range(3)]
    state, states = optimizer.init(params), [theirs.init(part) for part in parts]
    assert sum(leaf.size for leaf in jax.tree.leaves(state)) == 3 * (2 * (128 + 160) + 128 * 160) + 2
    for step in range(3):
        rng = np.random.default_rng(step)  # gradients of different sizes in each layer
        grads = {path: (rng.normal(size=p.shape).T * [1, 10, 0.1]).T.astype(np.float32) for path, p in params.items()}
        updates, state = optimizer.update(grads, state, params)
        for i, part in enumerate(parts):
            layer_grads = {path: grad[i].reshape(shapes[path]) for path, grad in grads.items()}
            expected, states[i] = theirs.update(layer_grads, states[i], part)
            for path, update in expected.items():
                np.testing.assert_allclose(-updates[path][i].reshape(update.shape), update, rtol=1e-4, err_msg=path)


def test_clipping_bounds_the_global_norm():
    seen = []
    spy = optax.stateless(lambda updates, params: seen.append(optax.tree.norm(updates)) or updates)
    optimizer = make("sgd", lambda n: 1.0, momentum=0.0, clip_norm=0.5)
    run(optax.chain(optimizer, spy), steps=3, scale=100.0)
    np.testing.assert_allclose(seen, 0.5, rtol=1e-5)
    seen.clear()
    run(optax.chain(optimizer, spy), steps=1, scale=1e-3)
    assert 0 < seen[0] < 0.05


def test_frozen_parameters_do_not_change():
    frozen = run(make("adamw", lambda n: 0.1, weight_decay=0.1, frozen=("norm/",)))
    np.testing.assert_array_equal(frozen["norm"]["scale"], PARAMS["norm"]["scale"])
    assert np.abs(frozen["stack"]["mlp"]["kernel"] - PARAMS["stack"]["mlp"]["kernel"]).min() > 0
    with pytest.raises(ValueError, match=r"^optimizer\.frozen is \('.',\) and .*: they leave no parameter to train\.$"):
        run(make("adamw", lambda n: 0.1, frozen=(".",)))


def test_biases_of_clusters_have_no_weight_decay():
    model = TransformerXL(vocab_size=17, max_length=4, depth=1, width=16, num_heads=2, cutoffs=(5, 9), divisor=2)
    params = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 2), jnp.int32))["params"]
    biases = [path for path in paths_of(params) if "bias" in path]
    assert {"embed/bias_0", "embed/bias_1", "embed/bias_2", "embed/tail_bias"} < set(biases)
    assert not any(map(OPTIMIZERS.build("adamw").decays, biases))


def test_first_matching_lr_multiplier_applies():
    plain = run(make("sgd", lambda n: 0.1, momentum=0.0))
    scaled = run(make("sgd", lambda n: 0.1, momentum=0.0, lr_multipliers=(("kernel", 0.25), ("mlp", 3.0))))
    moved = jax.tree.map(lambda a, b, p: (a - p) / (b - p), scaled, plain, PARAMS)
    np.testing.assert_allclose(moved["stack"]["mlp"]["kernel"], 0.25, rtol=1e-4)
    np.testing.assert_allclose(moved["stack"]["mlp"]["bias"], 3.0, rtol=1e-4)
    np.testing.assert_allclose(moved["norm"]["scale"], 1.0, rtol=1e-4)


LAYERED = {
    "patch_embed": {"kernel": np.ones((2, 3), np.float32)},
    "class_token": np.ones(3, np.float32),
    "stack": {"layers": {"up": {"kernel": np.ones((3, 4, 2), np.float32), "bias": np.ones((3, 2), np.float32)}}},
    "norm": {"scale": np.ones(3, np.float32)},
    "classifier": {"kernel": np.ones((3, 2), np.float32)},
}


class Layered(Model):
    """Model with the parameters `LAYERED`."""

    input_parameters = "^(patch_embed|class_token)"

    @property
    def layer_groups(self):
        return (Layers("stack/layers", 3),)


def moved(**options):
    """Return the relative update of each layer, and of other parameters, in one step of gradient descent."""
    optimizer = make("sgd", lambda n: 1.0, Layered(), momentum=0.0, weight_decay=1.0, no_decay=(), **options)
    updates, _ = optimizer.update(jax.tree.map(jnp.ones_like, LAYERED), optimizer.init(LAYERED), LAYERED)
    return {
        name: [float(part.min()) for part in jax.tree.leaves(value)]
        if name != "stack"
        else [[float(x.min()) for x in part] for part in jax.tree.leaves(value)]
        for name, value in jax.tree.map(lambda x: -x / 2, updates).items()
    }


def test_layer_decay_matches_mae():
    """Check the rule of MAE: decay^(L - i) for layer i of L, decay^(L + 1) before the layers, and 1 after them."""
    actual = moved(layer_decay=0.5)
    assert actual["stack"] == [[0.125, 0.25, 0.5]] * 2
    assert actual["patch_embed"] == actual["class_token"] == [0.0625]
    assert actual["norm"] == actual["classifier"] == [1.0]


def test_first_layers_can_be_frozen():
    actual = moved(frozen_layers=2)
    assert actual["stack"] == [[0, 0, 1]] * 2
    assert actual["patch_embed"] == actual["class_token"] == [0]
    assert actual["norm"] == actual["classifier"] == [1]
    assert moved(frozen_layers=1, layer_decay=0.5)["stack"] == [[0, 0.25, 0.5]] * 2
    assert moved(frozen=("^(?!classifier)",), layer_decay=0.5)["classifier"] == [1]


def test_lars_matches_the_paper():
    """Compare with equation 6 of arXiv 1708.03888, with momentum that is multiplied by the last learning rate."""
    params = {"kernel": np.full((2, 3), 2, np.float32), "bias": np.ones(3, np.float32)}
    optimizer = make("lars", lambda n: 0.5 / (1 + n), momentum=0.9)
    state = optimizer.init(params)
    gradient = {"kernel": np.arange(6, dtype=np.float32).reshape(2, 3), "bias": np.ones(3, np.float32)}
    trust = 0.001 * np.sqrt(6 * 4) / np.sqrt((gradient["kernel"] ** 2).sum())
    updates, state = optimizer.update(gradient, state, params)
    np.testing.assert_allclose(updates["kernel"], -0.5 * trust * gradient["kernel"], rtol=1e-5)
    np.testing.assert_allclose(updates["bias"], -0.5, rtol=1e-6)
    updates, _ = optimizer.update(gradient, state, params)
    np.testing.assert_allclose(updates["kernel"], -0.25 * 1.9 * trust * gradient["kernel"], rtol=1e-5)


def test_lars_matches_optax():
    options = {"weight_decay_mask": matrices, "trust_ratio_mask": matrices, "momentum": 0.8}
    ours = run(make("lars", lambda n: 3.0, momentum=0.8, weight_decay=0.3))
    theirs = run(optax.lars(3.0, 0.3, **options))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), ours, theirs)


def matrices(params):
    return jax.tree.map(lambda leaf: leaf.ndim > 1, params)


def test_lamb_matches_optax():
    parts = (optax.scale_by_adam(0.9, 0.95, 1e-6), optax.add_decayed_weights(0.3, matrices))
    scaled = optax.masked(optax.scale_by_trust_ratio(), matrices)
    ours = run(make("lamb", lambda n: 0.1, b2=0.95, weight_decay=0.3))
    theirs = run(optax.chain(*parts, scaled, optax.scale_by_learning_rate(0.1)))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), ours, theirs)
    ours = run(make("lamb", lambda n: 0.1, weight_decay=0.3, no_decay=()))
    theirs = run(optax.lamb(0.1, weight_decay=0.3))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), ours, theirs)


@pytest.mark.parametrize("name", ["lars", "lamb"])
def test_trust_ratios_are_those_of_each_of_the_stacked_layers(name):
    """Compare with the layers as separate parameters; a stacked bias is a vector in each layer."""
    rng = np.random.default_rng(0)
    params, grads = (jax.tree.map(lambda p: rng.normal(size=p.shape).astype(np.float32), LAYERED) for _ in range(2))
    layers = grads["stack"]["layers"]["up"]["kernel"]
    layers *= np.array([1, 10, 0.1], np.float32).reshape(3, 1, 1)
    optimizer = make(name, lambda n: 0.5, Layered(), weight_decay=0.1)
    updates, _ = optimizer.update(grads, optimizer.init(params), params)
    theirs = make(name, lambda n: 0.5, weight_decay=0.1)
    for i in range(3):
        p, g = (
            {name: tree["stack"]["layers"]["up"][name][i] for name in ("kernel", "bias")} for tree in (params, grads)
        )
        expected, _ = theirs.update(g, theirs.init(p), p)
        for name, update in expected.items():
            np.testing.assert_allclose(updates["stack"]["layers"]["up"][name][i], update, rtol=1e-5)


def rate(name, n, warmup_steps=0, width=512, learning_rate=2.0, **options):
    schedule = SCHEDULES.build(name, learning_rate=learning_rate, **options)
    return float(schedule.make(100, warmup_steps, width)(n))


def test_schedules_match_their_formulas():
    assert rate("constant", 57) == 2.0
    np.testing.assert_allclose(rate("cosine", 50, end_factor=0.1), 2 * (0.1 + 0.9 * 0.5), rtol=1e-6)
    np.testing.assert_allclose(rate("cosine", 100, end_factor=0.1), 0.2, rtol=1e-6)
    np.testing.assert_allclose(rate("linear", 25), 1.5, rtol=1e-6)
    np.testing.assert_allclose(rate("rsqrt", 10 + 30, warmup_steps=10), 2 * (10 / 40) ** 0.5, rtol=1e-6)
    for n in (0, 3, 9, 10, 50):
        expected = 2 * 64**-0.5 * min((n + 1) ** -0.5, (n + 1) * 10**-1.5)
        np.testing.assert_allclose(rate("transformer", n, warmup_steps=10, width=64), expected, rtol=1e-6)


def test_transformer_schedule_is_that_of_the_paper_by_default():
    default = SCHEDULES.build("transformer").make(100_000, 4000, 512)
    assert float(default(3999)) == pytest.approx(512**-0.5 * 4000**-0.5)


@pytest.mark.parametrize(
    ("changes", "name"), [({"optimizer.name": "prodigy"}, "prodigy"), ({"schedule.name": "transformer"}, "transformer")]
)
def test_small_factors_of_a_learning_rate_are_noted(changes, name, tiny):
    def notes(**rate):
        config = tiny("gpt", changes | {f"schedule.{key}": value for key, value in rate.items()})
        return [note for note in start_notes(Experiment(config), 1, {}) if "learning_rate" in note]

    note = f"schedule.learning_rate is 0.003: {name} multiplies its own learning rate by it, usually by 1."
    assert notes(learning_rate=3e-3) == [note]
    assert notes(learning_rate=1.0) == []


def test_step_schedule_falls_at_its_milestones():
    rates = [rate("step", n, 10, milestones_percent=(100 / 3, 60.0), factor=0.1) for n in range(100)]
    np.testing.assert_allclose(rates[:10], 0.2 * np.arange(1, 11), rtol=1e-5)
    np.testing.assert_allclose(rates[10:], [2.0] * 24 + [0.2] * 26 + [0.02] * 40, rtol=1e-5)


def test_paper_schedules_fall_at_their_epochs():
    """Check the epochs of arXiv 1706.02677, section 5.1, and of arXiv 2005.12872, section 4."""
    for name, peak, steps in (
        ("resnet50_imagenet", 0.1, {29: 1, 30: 0.1, 59: 0.1, 60: 0.01, 79: 0.01, 80: 1e-3, 89: 1e-3}),
        ("detr_coco", 1e-4, {0: 1, 399: 1, 400: 0.1, 499: 0.1}),
    ):
        config, _ = cli.load(name)
        schedule = schema.build(SCHEDULES, config.schedule).make(int(config.total_epochs))
        for epoch, factor in steps.items():
            assert float(schedule(epoch)) == pytest.approx(peak * factor), (name, epoch)


@pytest.mark.parametrize("name", ["constant", "cosine", "linear", "rsqrt", "step"])
@pytest.mark.parametrize("warmup", [1, 2, 10])
def test_warmup_is_linear_and_positive(name, warmup):
    rates = [rate(name, n, warmup, learning_rate=3.0) for n in range(warmup + 1)]
    np.testing.assert_allclose(rates[:warmup], 3.0 * np.arange(1, warmup + 1) / warmup, rtol=1e-5)
    assert rates[warmup] <= 3.0
    assert rates[warmup] > 2.8


def test_unknown_names_and_unmatched_patterns_raise():
    with pytest.raises(ValueError, match=r"Unknown optimizer 'adamx'\. Did you mean 'adamw'\? Available: .*sgd"):
        make("adamx", lambda n: 0.1)
    with pytest.raises(ValueError, match=r"Unknown schedule 'cosin'\. Did you mean 'cosine'"):
        rate("cosin", 0)
    with pytest.raises(ValueError, match=r"optimizer\.frozen has 'nrom', which matches no parameter; one is '"):
        make("adamw", lambda n: 0.1, frozen=("nrom",)).init(PARAMS)
    check_matches("optimizer.frozen", ["mlp/kernel$"], paths_of(PARAMS))


def test_paths_are_joined_by_slashes():
    assert map_paths(lambda path, _: path, PARAMS)["stack"]["mlp"]["bias"] == "stack/mlp/bias"


@pytest.mark.parametrize(
    ("registry", "name", "options", "message"),
    [
        (OPTIMIZERS, "adamw", {"b2": 1.0}, "optimizer.b2 is 1.0: it must be 0 or more and below 1."),
        (OPTIMIZERS, "sgd", {"momentum": -0.1}, "optimizer.momentum is -0.1: it must be 0 or more and below 1."),
        (OPTIMIZERS, "lion", {"b2": 1.5}, "optimizer.b2 is 1.5: it must be 0 or more and below 1."),
        (OPTIMIZERS, "lars", {"weight_decay": -1.0}, "optimizer.weight_decay is -1.0: it must be 0 or more."),
        (OPTIMIZERS, "adafactor", {"frozen_layers": -1}, "optimizer.frozen_layers is -1: it must be 0 or more."),
        (SCHEDULES, "cosine", {"end_factor": -1.0}, "schedule.end_factor is -1.0: it must be 0 or more."),
        (SCHEDULES, "rsqrt", {"learning_rate": -1.0}, "schedule.learning_rate is -1.0: it must be 0 or more."),
        (
            SCHEDULES,
            "step",
            {"milestones_percent": (50.0, 101.0)},
            "schedule.milestones_percent is (50.0, 101.0): it must be 0 or more and at most 100.",
        ),
        (
            SCHEDULES,
            "wsd",
            {"decay_percent": 150.0},
            "schedule.decay_percent is 150.0: it must be 0 or more and at most 100.",
        ),
        (SCHEDULES, "constant", {"warmup_steps": -1}, "schedule.warmup_steps is -1: it must be 0 or more."),
    ],
)
def test_values_out_of_range_raise(registry, name, options, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        registry.build(name, **options)


@pytest.mark.parametrize(
    ("name", "reference"),
    [
        ("adamw", optax.adamw),
        ("lion", optax.lion),
        ("lamb", optax.lamb),
        ("lars", optax.lars),
        ("ademamix", contrib.ademamix),
        ("prodigy", contrib.prodigy),
        ("schedule_free_adamw", contrib.schedule_free_adamw),
    ],
)
def test_decay_rates_are_those_of_optax(name, reference):
    parameters = inspect.signature(reference).parameters
    rates = {key: parameters[key].default for key in ("b1", "b2", "b3", "momentum") if key in parameters}
    rates |= dict(zip(("b1", "b2"), parameters["betas"].default)) if "betas" in parameters else {}
    assert rates
    assert {key: getattr(OPTIMIZERS.build(name), key) for key in rates} == rates


def test_optimizers_and_schedules_have_no_unused_keys():
    fields = {name: set(field_types(cls)) - set(field_types(Optimizer)) for name, cls in OPTIMIZERS.items()}
    assert fields == {
        "adamw": {"b1", "b2", "epsilon"},
        "sgd": {"momentum"},
        "adafactor": {"momentum"},
        "lion": {"b1", "b2"},
        "lars": {"momentum"},
        "lamb": {"b1", "b2", "epsilon"},
        "muon": {"b1", "b2", "epsilon", "momentum", "iterations", "rms"},
        "ademamix": {"b1", "b2", "epsilon", "b3", "alpha", "rise_steps"},
        "sophia": {"b1", "b2", "gamma", "epsilon", "interval"},
        "prodigy": {"b1", "b2", "epsilon", "start", "growth", "safeguard_warmup"},
        "schedule_free_adamw": {"b1", "b2", "epsilon"},
    }
    assert {name for name, cls in SCHEDULES.items() if "end_factor" in field_types(cls)} == {"cosine", "linear", "wsd"}
    for registry in (OPTIMIZERS, SCHEDULES):
        for cls in registry.values():
            assert all(key.documentation for key in schema.keys(cls))


def test_layer_options_without_a_model_raise():
    with pytest.raises(ValueError, match=r"layer_decay and optimizer\.frozen_layers need the model"):
        make("sgd", lambda n: 1.0, layer_decay=0.5)
    with pytest.raises(ValueError, match=r"optimizer\.frozen_layers is 4: it must be at most 3"):
        moved(frozen_layers=4)
    with pytest.raises(ValueError, match=r"optimizer\.layer_decay is 0\.5: .* the model Model has no layer_groups"):
        make("sgd", lambda n: 1.0, Model(), layer_decay=0.5)
    with pytest.raises(ValueError, match="requires a model with a single width"):
        rate("transformer", 0, width=0)
