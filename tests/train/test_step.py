"""Training step: loss, gradients, frozen parameters, precision and running statistics."""

import functools
import itertools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from lineage import models
from lineage.configs.run import Run
from lineage.metrics.states import F1, Mean
from lineage.models.base import Model
from lineage.models.layers.norm import BatchNorm, PowerNorm
from lineage.tasks import TASKS
from lineage.tasks.losses import sums
from lineage.train.optimizer import AdamW, Optimizer
from lineage.train.sharding import make_mesh, to_mesh
from lineage.train.step import init_state, make_forward_step, make_train_step
from tests.tiers import tiered

CAUSAL_LM, CLASSIFICATION, SEQUENCE_TO_SEQUENCE = (
    TASKS[name]().loss for name in ("causal_lm", "image_classification", "sequence_to_sequence")
)


def setting(name):
    """Return a small model, its objective and a fixed batch whose last example is masked."""
    rng = np.random.default_rng(0)
    mask = jnp.arange(4) < 3
    if name == "gpt":
        model = models.build("gpt", vocab_size=17, max_length=8, depth=2, width=16, num_heads=2)
        tokens = jnp.asarray(rng.integers(0, 17, (4, 9)), jnp.int32)
        mask = jnp.broadcast_to(mask[:, None], (4, 8))
        return model, CAUSAL_LM, {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "mask": mask}
    sizes = {"image_size": 8, "patch_size": 4, "channels": 1, "depth": 2, "width": 16, "num_heads": 2}
    model = models.build("vit", num_classes=5, epsilon=1e-12, **sizes)
    image = jnp.asarray(rng.normal(size=(4, 8, 8, 1)), jnp.float32)
    label = jnp.asarray(rng.integers(0, 5, 4), jnp.int32)
    return model, CLASSIFICATION, {"image": image, "label": label, "mask": mask}


def compiled(name, optimizer=None, ema=False, unroll=1, **options):
    """Return the initial state and the training step with an optax optimizer or an `Optimizer`."""
    model, objective, batch = setting(name)
    model, optimizer, parts = model.clone(unroll=unroll), optimizer or optax.adamw(1e-2), {}
    if isinstance(optimizer, Optimizer):
        parts["trained"] = functools.partial(optimizer.trained, model=model)
        optimizer = optimizer.make(optax.constant_schedule(1e-2), model)
    state = jax.jit(lambda: init_state(model, optimizer, objective, batch, seed=0, ema=ema))()
    return state, jax.jit(make_train_step(model, objective, optimizer, Run(**options), **parts))


plain = functools.cache(compiled)


def steps(start, batch, count):
    """Return the states after 0..count steps on one batch, and the metrics of the steps."""
    state, step = start
    states, metrics = [state], []
    for _ in range(count):
        state, values = step(states[-1], batch)
        states.append(state)
        metrics.append({key: float(value) for key, value in values.items()})
    return states, metrics


# The losses of two steps of AdamW, which detect changes of initialization, model, objective or optimizer.
GOLDEN = {"gpt": (2.850746, 2.704954), "vit": (1.609438, 1.513975)}


@pytest.mark.parametrize("name", GOLDEN)
def test_first_losses_match_golden_values(name):
    _, metrics = steps(plain(name), setting(name)[2], 2)
    np.testing.assert_allclose([values["loss"] for values in metrics], GOLDEN[name], atol=1e-5)


@tiered("name", GOLDEN)
def test_masked_example_has_no_effect(name):
    batch = setting(name)[2]
    other = {key: value if key == "mask" else value.at[3].set(value[0]) for key, value in batch.items()}
    states, metrics = steps(plain(name), batch, 2)
    other_states, other_metrics = steps(plain(name), other, 2)
    assert metrics == other_metrics
    jax.tree.map(np.testing.assert_array_equal, states[2].params, other_states[2].params)


@pytest.mark.thorough
def test_micro_batches_of_unequal_weight_match_the_full_batch():
    batch = setting("vit")[2]
    states, metrics = steps(compiled("vit", optax.sgd(0.1)), batch, 3)
    # Three examples count: two in one micro-batch, one in the other.
    parts_states, parts_metrics = steps(compiled("vit", optax.sgd(0.1), grad_accum_steps=2), batch, 3)
    for values, parts in zip(metrics, parts_metrics):
        assert parts == pytest.approx(values, rel=1e-5)
    close = functools.partial(np.testing.assert_allclose, atol=1e-5)
    jax.tree.map(close, parts_states[3].params, states[3].params)


def test_metric_states_of_micro_batches_are_merged():
    model, _, batch = setting("vit")
    batch |= {"mask": jnp.ones(4, bool), "label": jnp.array([1, 1, 0, 1]), "guess": jnp.array([1, 0, 1, 1])}

    def objective(model, batch):
        of = 0 * model(batch["image"])[:, 0]
        f1 = F1.empty(2).update(batch["guess"], batch["label"], batch["mask"])
        return of.sum(), jnp.float32(len(of)), {"loss": Mean(of.sum(), jnp.float32(len(of))), "f1": f1}

    state = jax.jit(lambda: init_state(model, optax.sgd(0.1), objective, batch, seed=0))()
    step = jax.jit(make_train_step(model, objective, optax.sgd(0.1), Run(grad_accum_steps=2)))
    np.testing.assert_allclose(step(state, batch)[1]["f1"], 2 / 3, atol=1e-6)  # the mean of both halves is different


def test_ema_follows_the_parameters():
    states, _ = steps(compiled("vit", ema=True, ema_decay=0.75), setting("vit")[2], 3)
    expected = jax.tree.map(np.asarray, states[0].params)
    for state in states[1:]:
        expected = jax.tree.map(lambda mean, new: 0.75 * mean + 0.25 * np.asarray(new), expected, state.params)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), state.ema, expected)
    jax.tree.map(np.testing.assert_array_equal, states[3].variables(average=True)["params"], states[3].ema)
    assert states[3].variables()["params"] is states[3].params
    without, _ = plain("vit")
    assert without.ema is None
    assert without.variables(average=True)["params"] is without.params


def test_frozen_parameters_do_not_change():
    optimizer = AdamW(weight_decay=0.1, clip_norm=0.0, frozen=("attention/", "table"))
    states, _ = steps(compiled("vit", optimizer), setting("vit")[2], 2)
    paths = [
        jax.tree_util.keystr(path, simple=True, separator="/")
        for path, _ in jax.tree_util.tree_leaves_with_path(states[0].params)
    ]
    for path, *leaves in zip(paths, jax.tree.leaves(states[0].params), jax.tree.leaves(states[2].params)):
        frozen = "attention/" in path or "table" in path
        assert (np.asarray(leaves[0]).tobytes() == np.asarray(leaves[1]).tobytes()) == frozen, path


FROZEN = {"frozen": {"frozen": ("^(?!classifier)",)}, "frozen_layers": {"frozen_layers": 2}}  # the same parameters


@pytest.mark.thorough
def test_both_ways_to_freeze_give_the_same_trajectory():
    """Compare the parameters and gradient norms; the clipping, the moments and the decay are of the trained ones."""
    batch, runs = setting("vit")[2], []
    for options in FROZEN.values():
        states, metrics = steps(compiled("vit", AdamW(weight_decay=0.1, clip_norm=0.1, **options)), batch, 3)
        moved = jax.tree.map(lambda a, b: bool((a != b).any()), states[0].params, states[3].params)
        assert all(jax.tree.leaves(moved["classifier"]))
        assert not any(jax.tree.leaves(moved | {"classifier": {}}))
        assert sum(leaf.size for leaf in jax.tree.leaves(states[3].opt_state)) < 2 * (16 * 5 + 5) + 9
        runs.append((states[3].params, [values["gradient_norm"] for values in metrics]))
    jax.tree.map(np.testing.assert_array_equal, *runs)


@pytest.mark.thorough
def test_gradient_norm_is_that_of_the_trained_layers():
    """Compare a model of which one of two stacked layers is frozen with gradients of all parameters."""
    model, objective, batch = setting("vit")
    optimizer, rng = AdamW(frozen_layers=1, clip_norm=0.0), np.random.default_rng(0)
    state, step = compiled("vit", optimizer)
    state = state.replace(params=jax.tree.map(lambda p: p + 0.1 * rng.normal(size=p.shape), state.params))
    states, metrics = steps((state, step), batch, 1)
    grads = jax.grad(lambda params: nn.apply(objective, model)({"params": params}, batch)[0])(state.params)
    trained = jax.tree.map(lambda g: g / 3, optimizer.trained(grads, model))
    assert metrics[0]["gradient_norm"] == pytest.approx(float(optax.tree.norm(trained)), rel=1e-5)
    assert metrics[0]["gradient_norm"] < 0.95 * float(optax.tree.norm(grads)) / 3
    layers = [jax.tree.leaves(state.params["stack"]) for state in states]
    assert all((a[0] == b[0]).all() and (a[1] != b[1]).any() for a, b in zip(*layers))


@pytest.mark.thorough
@tiered("way", FROZEN)
def test_frozen_parameters_have_no_backward_pass(way):
    def flops(**options):
        # Not a loop, of which the cost analysis counts one iteration and the compiler would keep all.
        state, step = compiled("vit", AdamW(clip_norm=1.0, **options), unroll=2)
        return step.lower(state, setting("vit")[2]).compile().cost_analysis()["flops"]

    whole = flops()
    assert flops(**FROZEN[way]) < 0.4 * whole
    assert flops(frozen_layers=1) < 0.8 * whole


@pytest.mark.thorough
@tiered("name", GOLDEN)
def test_bfloat16_computation_keeps_float32_state(name):
    model, objective, batch = setting(name)
    states, metrics = steps(compiled(name, ema=True, precision="bfloat16", ema_decay=0.9), batch, 5)
    floats = [leaf for leaf in jax.tree.leaves(states[5]) if jnp.issubdtype(leaf.dtype, jnp.floating)]
    assert {leaf.dtype for leaf in floats} == {np.dtype(np.float32)}
    _, full = steps(plain(name), batch, 5)
    for values, expected in zip(metrics, full):
        assert values["loss"] == pytest.approx(expected["loss"], rel=2e-2)
    assert metrics[-1]["loss"] != full[-1]["loss"]
    seen = []

    def spy(bound, batch):
        seen.append(jax.tree.leaves(bound.variables["params"])[0].dtype)
        return objective(bound, batch)

    _, _, metrics = jax.eval_shape(make_forward_step(model, spy, "bfloat16"), states[5].variables(), batch)
    assert seen == [jnp.bfloat16]
    assert metrics["loss"].total.dtype == np.float32


def test_dropout_depends_on_the_step_and_is_off_in_evaluation():
    model, objective, batch = setting("gpt")
    state, _ = plain("gpt")
    model = model.clone(dropout=0.5)
    step = jax.jit(make_train_step(model, objective, optax.set_to_zero(), Run()))
    evaluate = jax.jit(make_forward_step(model, objective))
    state = state.replace(opt_state=optax.set_to_zero().init(state.params))
    states, metrics = steps((state, step), batch, 2)
    assert metrics[0]["loss"] != metrics[1]["loss"]
    assert steps((state, step), batch, 1)[1] == metrics[:1]
    for state in states:
        assert evaluate(state.variables(), batch)[2]["loss"].compute() == pytest.approx(GOLDEN["gpt"][0], abs=1e-5)


class Normed(Model):
    """Image classifier with a norm over the batch."""

    norm: nn.Module
    num_classes: int = 5

    @nn.compact
    def __call__(self, image):
        return nn.Dense(5)(self.norm(nn.Dense(4)(image.reshape(len(image), -1))))


@pytest.mark.thorough
@tiered("norm", [BatchNorm(1e-3), PowerNorm(1e-3, warmup=1)])
def test_running_statistics_with_sharding_and_accumulation(norm):
    model, rng = Normed(norm=norm), np.random.default_rng(0)
    batch = {"image": rng.normal(size=(8, 2, 2, 1)).astype(np.float32), "label": rng.integers(0, 5, 8)}
    batch = jax.tree.map(jnp.asarray, batch | {"mask": np.ones(8, bool)})
    state = init_state(model, optax.sgd(0.1), CLASSIFICATION, batch, seed=0)

    def run(state, batches, optimizer=optax.sgd(0.1), **options):  # noqa: B008
        step = jax.jit(make_train_step(model, CLASSIFICATION, optimizer, Run(**options)))
        for batch in batches:
            state, _ = step(state, batch)
        return state

    whole = run(state, [batch] * 3)
    moved = jax.tree.map(lambda a, b: bool((a != b).all()), state.collections, whole.collections)
    assert all(jax.tree.leaves(moved))
    on_eight = run(state, [to_mesh(jax.tree.map(np.asarray, batch), make_mesh())] * 3)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)
    jax.tree.map(close, (whole.params, whole.collections), (on_eight.params, on_eight.collections))
    # Two micro-batches (even and odd rows) update the statistics as two steps with frozen parameters.
    frozen = optax.set_to_zero()
    parts = [jax.tree.map(lambda a, i=i: a[i::2], batch) for i in range(2)]
    state = state.replace(opt_state=frozen.init(state.params))
    accumulated, one_by_one = run(state, [batch], frozen, grad_accum_steps=2), run(state, parts, frozen)
    jax.tree.map(close, accumulated.collections, one_by_one.collections)


@pytest.mark.thorough
@tiered(("norm", "placement"), itertools.product(["batch", "power"], ["post", "pre"]))
def test_running_statistics_exclude_padding(norm, placement):
    sizes = {"vocab_size": 11, "max_length": 6, "depth": 1, "width": 8, "num_heads": 2, "dropout": 0.0}
    model = models.build("transformer", norm=norm, norm_placement=placement, norm_warmup=1, **sizes)
    rng = np.random.default_rng(0)
    real = {"inputs_mask": np.arange(6) < [[4], [6]], "mask": np.arange(6) < [[5], [3]]}
    tokens = {name: rng.integers(0, 11, (2, 6)) for name in ("inputs", "tokens", "targets")}
    others = {name: rng.integers(0, 11, (2, 6)) for name in tokens}
    of = {"inputs": "inputs_mask", "tokens": "mask", "targets": "mask"}
    others = {name: np.where(real[of[name]], tokens[name], others[name]) for name in tokens}
    state = init_state(model, optax.sgd(0.1), SEQUENCE_TO_SEQUENCE, jax.tree.map(jnp.asarray, tokens | real), seed=0)
    step = jax.jit(make_train_step(model, SEQUENCE_TO_SEQUENCE, optax.sgd(0.1), Run()))
    ours, theirs = (step(state, jax.tree.map(jnp.asarray, batch | real))[0] for batch in (tokens, others))
    moved = jax.tree.map(lambda a, b: bool((a != b).any()), state.collections, ours.collections)
    assert all(jax.tree.leaves(moved))
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), ours.collections, theirs.collections
    )


class Scores(Model):
    """Model that returns the image as logits."""

    num_classes: int = 5

    @nn.compact
    def __call__(self, image):
        return image[:, 0, :, 0]


@pytest.mark.thorough
@pytest.mark.parametrize("share", [0.3, 0.7])
def test_mixup_and_label_smoothing_in_training_only(share, monkeypatch):
    monkeypatch.setattr(jax.random, "beta", lambda key, a, b: jnp.asarray(share))
    image = np.random.default_rng(0).normal(size=(4, 1, 5, 1)).astype(np.float32)
    label, mask = np.array([0, 1, 2, 4]), np.array([True, True, True, False])
    batch = {"image": jnp.asarray(image), "label": jnp.asarray(label), "mask": jnp.asarray(mask)}

    def expected(image, targets):
        logits = image[:, 0, :, 0]
        losses = -(targets * (logits - np.log(np.exp(logits).sum(-1, keepdims=True)))).sum(-1)
        return losses[mask].sum()

    def found(rngs, **options):
        return nn.apply(TASKS["image_classification"](**options).loss, Scores())({}, batch, rngs=rngs)[0]

    training, hot = {"dropout": jax.random.key(0)}, np.eye(5)[label]
    smooth = 0.9 * hot + 0.1 / 5

    def mix(x):
        return 0.7 * x + 0.3 * np.roll(x, 1, axis=0)  # the larger weight is that of the example itself

    np.testing.assert_allclose(found(training, mixup=0.2), expected(mix(image), mix(hot)), rtol=1e-5)
    options = {"mixup": 0.2, "label_smoothing": 0.1}
    np.testing.assert_allclose(found(training, **options), expected(mix(image), mix(smooth)), rtol=1e-5)
    np.testing.assert_allclose(found(training, label_smoothing=0.1), expected(image, smooth), rtol=1e-5)
    np.testing.assert_allclose(found({}, **options), expected(image, hot), rtol=1e-5)
    batch = {name: value[:1] for name, value in batch.items()}
    with pytest.raises(ValueError, match="mixup and cutmix need at least 2 examples"):
        found(training, mixup=0.2)


class Constant(Model):
    outputs = ("classes",)

    def __call__(self, image):
        return jnp.zeros((len(image), 5))


def test_models_without_parameters_are_refused():
    with pytest.raises(ValueError, match=r"^The model Constant has no parameters to train\.$"):
        init_state(Constant(), optax.sgd(0.1), lambda model, batch: model(batch["image"]), setting("vit")[2], seed=0)


def test_losses_without_the_metric_loss_are_refused():
    model, objective, batch = setting("vit")

    def renamed(model, batch):
        loss, weight, states = objective(model, batch)
        return loss, weight, {"cost": states["loss"]}

    step = make_train_step(model, renamed, optax.sgd(0.1), Run())
    state = init_state(model, optax.sgd(0.1), renamed, batch, seed=0)
    with pytest.raises(ValueError, match="returns the metrics cost: they must include 'loss'"):
        step(state, batch)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda loss, weight, states: (loss, weight), r"returns 2 values: they must be \(loss_sum, weight, metric sta"),
        (lambda loss, weight, states: loss, r"returns an array of shape \(\): it must be"),
        (lambda loss, weight, states: (jnp.ones(8), weight, states), r"loss_sum of shape \(8,\): it must be a scalar"),
        (lambda loss, weight, states: (loss, jnp.ones(8), states), r"weight of shape \(8,\): it must be a scalar"),
        (
            lambda loss, weight, states: (loss, weight, {"loss": loss / weight}),
            "the metric 'loss' of the type Array: it must",
        ),
        (
            lambda loss, weight, states: (loss, weight, states["loss"]),
            "metrics in a Mean: they must be in a dictionary",
        ),
    ],
    ids=["two", "one", "losses", "weights", "number", "state"],
)
def test_results_of_losses_are_checked(change, message):
    model, objective, batch = setting("vit")

    def changed(model, batch):
        return change(*objective(model, batch))

    step = make_train_step(model, changed, optax.sgd(0.1), Run())
    state = init_state(model, optax.sgd(0.1), changed, batch, seed=0)
    with pytest.raises(ValueError, match=message):
        step(state, batch)


@pytest.mark.parametrize("shape", [(4, 1), (1,), (2, 4)])
def test_losses_and_masks_of_different_shapes_are_refused(shape):
    """Otherwise, the loss of a column [B, 1] would be broadcast to [B, B], and be B times as large."""
    with pytest.raises(
        ValueError, match=r"values have the shape .* and weights have the shape \(4,\): they must be equal"
    ):
        sums(jnp.ones(shape), jnp.ones(4, bool))
