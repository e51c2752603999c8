"""LoRA and singular-value fine-tuning (SVF) of the parameters of any model."""

import dataclasses
import json
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict

from lineage import models
from lineage.configs import schema
from lineage.train.adapters import ADAPTERS, SVF, Adapter, LoRA, recording
from lineage.train.optimizer import SGD
from tests.tiers import tiered
from tests.tolerance import assert_close

TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 20, (2, 6)))
GPT = models.build("gpt", vocab_size=20, max_length=8, depth=2, width=8, num_heads=2)
IMAGES = jnp.asarray(np.random.default_rng(1).normal(size=(2, 8, 8, 1)), jnp.float32)
SWIN = {"num_classes": 3, "image_size": 8, "patch_size": 2, "channels": 1, "depths": (2,), "num_heads": (2,)}
RESNET = {"num_classes": 3, "image_size": 8, "channels": 1, "depths": (1,), "widths": (4,), "stem": "small"}
ZOO = {
    "gpt": (GPT, (TOKENS,), "layers/"),
    "llama": (
        models.build("llama", vocab_size=20, max_length=8, depth=2, width=8, num_heads=2, num_kv_heads=1),
        (TOKENS,),
        "query|gate",
    ),
    "albert": (models.build("albert", vocab_size=20, max_length=8, depth=2, width=8, num_heads=2), (TOKENS,), "layers"),
    "seq2seq": (models.build("seq2seq", vocab_size=20, depth=1, width=8), (TOKENS, TOKENS), "recurrent"),
    "swin": (models.build("swin", "mu", width=4, window=2, **SWIN), (IMAGES,), "layers/"),
    "resnet": (models.build("resnet", "18", stem_width=4, **RESNET), (IMAGES,), "."),
}


def started(model, inputs):
    """Return random parameters of a model, and the axes of its kernels."""
    axes = {}
    with nn.intercept_methods(recording(axes)):
        variables = jax.eval_shape(model.init, jax.random.key(0), *inputs)
    random = np.random.default_rng(3)
    return jax.tree.map(lambda a: random.normal(size=a.shape).astype(np.float32), variables["params"]), axes


def adapted(adapter, params, axes, change=0.0):
    """Return the trained parameters, perturbed by noise of scale `change`, and the merged parameters."""

    @jax.jit
    def compute(params):
        trained, frozen = adapter.rebase(*adapter.init(params, axes, jax.random.key(1)), params)
        random = np.random.default_rng(7)
        noise = jax.tree.map(lambda a: random.normal(size=a.shape).astype(np.float32), trained)
        trained = jax.tree.map(lambda a, b: a + np.float32(change) * b, trained, noise)
        return trained, adapter.apply(frozen, trained)

    return jax.device_get(compute(params))


@pytest.fixture(scope="module")
def gpt():
    return started(GPT, (TOKENS,))


@tiered("kind", ZOO, first=3)
def test_adapter_is_initially_the_identity_and_changes_selected_matrices(kind):
    """Check that initial merged parameters are exact, and that only selected matrices change, with the right rank."""
    model, inputs, pattern = ZOO[kind]
    params, axes = started(model, inputs)
    assert any(re.search(pattern, path) for path in axes)
    for adapter in (LoRA(patterns=(pattern,), rank=1), SVF(patterns=(pattern,))):
        jax.tree.map(np.testing.assert_array_equal, adapted(adapter, params, axes)[1], params)
        after = flatten_dict(adapted(adapter, params, axes, 0.3)[1], sep="/")
        for path, before in flatten_dict(params, sep="/").items():
            change = after[path] - before
            if not (path in axes and re.search(pattern, path)):
                assert not change.any(), path
                continue
            inputs_, outputs = axes[path]
            layers, rows = change.shape[: change.ndim - inputs_ - outputs], before.shape[-inputs_ - outputs : -outputs]
            change = change.reshape(*layers, np.prod(rows), -1)
            rank = 1 if isinstance(adapter, LoRA) else min(change.shape[-2:])
            assert (np.linalg.matrix_rank(change, tol=1e-4) == rank).all(), path


def test_projections_into_heads_are_adapted_as_one_matrix(gpt):
    """Check the shapes of factors for kernels with several input or output axes."""
    params, axes = gpt
    assert axes["stack/layers/attention/query/kernel"] == (1, 2)
    assert axes["stack/layers/attention/out/kernel"] == (2, 1)
    adapter = LoRA(patterns=("query|out",), rank=3, trained=("norm",))
    trained, _ = jax.eval_shape(lambda: adapter.init(params, axes, jax.random.key(1)))
    shapes = {path: value.shape for path, value in flatten_dict(trained, sep="/").items() if "norm" not in path}
    assert shapes == {
        "lora/stack/layers/attention/query/a": (2, 8, 3),
        "lora/stack/layers/attention/query/b": (2, 3, 2, 4),
        "lora/stack/layers/attention/out/a": (2, 2, 4, 3),
        "lora/stack/layers/attention/out/b": (2, 3, 8),
    }
    assert trained["norm"]["scale"].shape == (8,)


def test_merged_parameters_match_the_formulas(gpt):
    """Check x (W + alpha / r A B) = x W + alpha / r (x A) B, and U diag(z s) V^T, for the second layer."""
    params, axes = gpt
    kernel = params["stack"]["layers"]["attention"]["query"]["kernel"][1].reshape(8, 8)
    x = np.random.default_rng(2).normal(size=(5, 8))

    def query(adapter):
        trained, actual = adapted(adapter, params, axes, 0.3)
        actual = actual["stack"]["layers"]["attention"]["query"]["kernel"][1].reshape(8, 8)
        return next(iter(trained.values()))["stack"]["layers"]["attention"]["query"], actual

    trained, actual = query(LoRA(patterns=("query",), rank=2, alpha=6.0))
    assert_close(x @ actual, x @ kernel + 3 * (x @ trained["a"][1]) @ trained["b"][1].reshape(2, 8))
    trained, actual = query(SVF(patterns=("query",)))
    u, s, v = np.linalg.svd(kernel.astype(np.float64))
    assert_close(actual, u @ np.diag(s * trained["scale"][1]) @ v)


def test_gradient_of_svf_factors_matches_the_formula(gpt):
    """Check that a function of U diag(z s) V^T with gradient G has the gradient diag(U^T G V) s."""
    params, axes = gpt
    adapter = SVF(patterns=("up",))
    trained, frozen = adapter.rebase(*adapter.init(params, axes, jax.random.key(1)), params)
    goal = np.random.default_rng(4).normal(size=(2, 8, 32))

    def loss(trained):
        kernel = adapter.apply(frozen, trained)["stack"]["layers"]["mlp"]["up"]["kernel"]
        return jnp.sum(kernel**2 * goal)

    actual = jax.jit(jax.grad(loss))(trained)["svf"]["stack"]["layers"]["mlp"]["up"]["scale"]
    kernel = params["stack"]["layers"]["mlp"]["up"]["kernel"].astype(np.float64)
    u, s, v = np.linalg.svd(kernel, full_matrices=False)
    np.testing.assert_allclose(actual, np.einsum("Lik,Lij,Lkj->Lk", u, 2 * kernel * goal, v) * s, rtol=1e-4, atol=1e-3)


def test_mixture_interpolates_factors():
    experts = [{"a": jnp.array([1.0, 2.0])}, {"a": jnp.array([0.5, 1.0])}]
    np.testing.assert_allclose(SVF().mixture(jnp.array([0.5, 2.0]), experts)["a"], [0.0, 1.5])
    np.testing.assert_array_equal(SVF().mixture(jnp.array([0.0, 0.0]), experts)["a"], [1, 1])
    np.testing.assert_array_equal(SVF().mixture(jnp.array([0.0, 1.0]), experts)["a"], [0.5, 1])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "dora"}, "Unknown adapter 'dora'. Did you mean 'lora'"),
        ({"patterns": ("querry",)}, "adapter.patterns has 'querry', which matches no matrix; one is 'stack/layers/"),
        ({"trained": ("clasifier",)}, "adapter.trained has 'clasifier', which matches no parameter; one is "),
        ({"patterns": ("[",)}, r"adapter.patterns has '\[', which is not a regular expression"),
        ({"rank": 9}, "adapter.rank is 9: for stack/layers/attention/key/kernel it must be 1 to 8"),
    ],
)
def test_invalid_adapters_raise(changes, message, gpt):
    params, axes = gpt
    options = {"name": "lora"} | changes

    def start():
        adapter = schema.build(ADAPTERS, schema.section(ADAPTERS, options.pop("name"), **options))
        adapter.init(params, axes, jax.random.key(0))

    with pytest.raises(ValueError, match=message):
        start()


def test_no_adapter_trains_everything(gpt):
    params, axes = gpt
    trained, frozen = Adapter().init(params, axes, jax.random.key(0))
    assert frozen is None
    assert Adapter().reference(frozen) is None
    assert Adapter().apply(frozen, trained) is params
    assert Adapter().rebase(trained, frozen, {"other": 1}) == ({"other": 1}, None)


@pytest.mark.parametrize("adapter", [Adapter(), LoRA(("up",), ("norm",), 3, 2.0), SVF(("up",))], ids=repr)
def test_adapter_config_round_trip(adapter):
    section = {"name": ADAPTERS.name_of(adapter)} | dataclasses.asdict(adapter)
    assert schema.build(ADAPTERS, schema.tuples(json.loads(json.dumps(section)))) == adapter
    assert not jax.tree.leaves(adapter)


@pytest.mark.parametrize("adapter", [LoRA(patterns=(".",), rank=1), SVF(patterns=(".",))])
def test_adapters_belong_to_the_layers_of_their_matrices(adapter):
    """Check that layer-wise decay and frozen layers treat factors like the matrices, also before the first layer."""
    model = ZOO["swin"][0]
    params, axes = started(*ZOO["swin"][:2])
    trained = adapted(adapter, params, axes)[0]

    def update(tree, **options):
        optimizer = SGD(momentum=0.0, clip_norm=0.0, **options).make(lambda n: 1.0, model)
        moved = optimizer.update(jax.tree.map(jnp.ones_like, tree), optimizer.init(tree), tree)[0]
        return {path: np.unique(value).tolist() for path, value in flatten_dict(moved, sep="/").items()}

    for options in ({"layer_decay": 0.5}, {"frozen_layers": 1}):
        expected, factors = update(params, **options), update(trained, **options)
        assert "patch_embed/projection/kernel" in expected
        for path, values in factors.items():
            owner = path.removeprefix(f"{adapter.prefix}/").rpartition("/")[0]
            assert values == expected[f"{owner}/kernel"], path
