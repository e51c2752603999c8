"""Common interface of architectures: order of layers, hidden states, sharding and config sections."""

import doctest
import re
import typing
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict

from lineage import models
from lineage.models import base
from lineage.models.layers.mlp import ACTIVATIONS
from lineage.train.optimizer import SGD
from tests.tiers import tiered

TEXT = {"vocab_size": 11, "max_length": 8, "depth": 3, "width": 8, "num_heads": 2}
IMAGE = {"num_classes": 3, "image_size": 8, "channels": 1}
SMALL = {"depths": (1, 1), "widths": (8, 16), "stem_width": 4, "channels": 1, "norm": "group", "groups": 2}
TOKENS, IMAGES = jnp.ones((2, 5), jnp.int32), jnp.linspace(0, 1, 128).reshape(2, 8, 8, 1)
PAIR = (TOKENS, TOKENS[:, :4])
BERTS = ("albert", "bert", "bigbird", "distilbert", "electra", "roberta", "xlmr")
T5 = {"vocab_size": 11, "depth": 3, "width": 8, "num_heads": 2, "decoder_depth": 2}
VIT = {"patch_size": 4, "depth": 2, "width": 8, "num_heads": 2}
SWIN = {"patch_size": 1, "depths": (2, 1), "width": 8, "num_heads": (2, 4), "window": 4}
# name -> (settings, inputs, numbers of encoder and decoder layers, attention weights)
CASES = {
    **dict.fromkeys(BERTS, (TEXT, (TOKENS,), (3, 0), {"encoder": 3})),
    "gpt": (TEXT, (TOKENS,), (0, 3), {"decoder": 3}),
    "llama": (TEXT, (TOKENS,), (0, 3), {"decoder": 3}),
    "transformer_xl": (TEXT, (TOKENS,), (0, 3), {"decoder": 3}),
    "bart": (TEXT | {"decoder_depth": 2}, PAIR, (3, 2), {"encoder": 3, "decoder": 2, "cross": 2}),
    "t5": (T5, PAIR, (3, 2), {"encoder": 3, "decoder": 2, "cross": 2}),
    "transformer": (TEXT, PAIR, (3, 3), {"encoder": 3, "decoder": 3, "cross": 3}),
    "seq2seq": ({"vocab_size": 11, "width": 8, "depth": 2}, PAIR, (2, 2), {"cross": 1}),
    "elmo": ({"vocab_size": 11, "width": 8, "depth": 2, "cell_dim": 4}, (TOKENS,), (2, 0), {}),
    **dict.fromkeys(("vit", "deit"), (IMAGE | VIT, (IMAGES,), (2, 0), {"encoder": 2})),
    "mae": (
        {"image_size": 8, "channels": 1, "patch_size": 4, "depth": 2, "width": 8, "num_heads": 2}
        | {"decoder_depth": 1, "decoder_width": 8, "decoder_num_heads": 2, "mask_rate": 0.5},
        (IMAGES, jnp.linspace(0, 1, 8).reshape(2, 4)),
        (2, 1),
        {"encoder": 2, "decoder": 1},
    ),
    "swin": (IMAGE | SWIN, (IMAGES,), (3, 0), {"encoder": 3}),
    "resnet": (SMALL | {"num_classes": 3}, (IMAGES,), (2, 0), {}),
    "detr": (
        {"backbone": {"name": "resnet", "num_classes": 0, **SMALL}, "num_classes": 3, "num_queries": 4}
        | {"depth": 2, "decoder_depth": 1, "width": 8, "num_heads": 2},
        (IMAGES,),
        (2, 1),
        {"encoder": 2, "decoder": 1, "cross": 1},
    ),
}


@pytest.mark.parametrize(
    ("holds", "expected"),
    [
        (lambda model: model.is_decoder, {"bart", "gpt", "llama", "seq2seq", "t5", "transformer", "transformer_xl"}),
        (lambda model: model.has_heads, {*BERTS}),
        (lambda model: model.accepts("segments"), {"gpt", "llama"}),
        (lambda model: model.accepts("own_rate"), {"seq2seq"}),
    ],
    ids=["decoders", "heads", "segments", "own rate"],
)
def test_capabilities_follow_from_methods(holds, expected):
    assert {name for name, (settings, *_) in CASES.items() if holds(models.build(name, **settings))} == expected


def paths(model, *inputs):
    """Return the shapes of the parameters by path."""
    shapes = jax.eval_shape(model.init, jax.random.key(0), *inputs)["params"]
    return {path: leaf.shape for path, leaf in flatten_dict(shapes, sep="/").items()}


@partial(jax.jit, static_argnums=0)
def states_of(model, *inputs):
    """Return the hidden states of a model with new parameters."""
    variables = model.init(jax.random.key(0), *inputs)
    variables.pop("intermediates", None)
    return models.hidden_states(model, variables, *inputs)


def test_every_architecture_has_a_case():
    assert set(CASES) == set(models.MODELS)


@tiered("name", CASES, first=lambda name: name in ("gpt", "bert", "t5", "swin", "seq2seq", "resnet", "elmo"))
def test_hidden_states_of_every_architecture(name):
    settings, inputs, (encoder, decoder), attention = CASES[name]
    states = states_of(models.build(name, **settings), *inputs)
    assert {side: len(layers) for side, layers in states.layers.items()} == {
        side: count for side, count in {"encoder": encoder, "decoder": decoder}.items() if count
    }
    assert set(states.embedding) == set(states.layers)
    assert {kind: len(weights) for kind, weights in states.attention.items()} == attention
    for weights in states.attention.values():
        for layer in weights:
            np.testing.assert_allclose(layer.sum(axis=-1), 1, rtol=1e-5)
    for side, layers in states.layers.items():
        assert not np.array_equal(states.embedding[side], layers[0])
        shapes = {layer.shape for layer in (states.embedding[side], *layers)}
        assert len(shapes) == 1 or name in ("swin", "resnet", "seq2seq")


@pytest.mark.parametrize(
    ("name", "settings", "inputs"),
    [(name, settings, inputs) for name, (settings, inputs, *_) in CASES.items()]
    + [
        ("llama", TEXT | {"window": 2}, (TOKENS,)),
        ("bigbird", TEXT | {"block_size": 1, "num_random_blocks": 0, "max_length": 9}, (jnp.ones((2, 9), jnp.int32),)),
    ],
)
def test_batch_without_examples(name, settings, inputs):
    model = models.build(name, **settings)
    variables = jax.eval_shape(model.init, jax.random.key(0), *inputs)
    full, empty = (jax.eval_shape(model.apply, variables, *part) for part in (inputs, [x[:0] for x in inputs]))
    axis = int(name == "detr")  # after that of the layers
    for a, b in zip(jax.tree.leaves(full), jax.tree.leaves(empty), strict=True):
        assert b.shape == (*a.shape[:axis], 0, *a.shape[axis + 1 :])


def test_last_hidden_state_is_the_encoder_output():
    model = models.build("bert", head="none", **TEXT)
    params = {"params": jax.jit(model.init)(jax.random.key(0), TOKENS)["params"]}
    states, output = jax.jit(lambda x: (models.hidden_states(model, x, TOKENS), model.apply(x, TOKENS)))(params)
    np.testing.assert_array_equal(states.layers["encoder"][-1], output)


@pytest.mark.thorough
def test_example_in_the_documentation_of_hidden_states():
    names = {"jax": jax, "jnp": jnp, "build": models.build, "hidden_states": models.hidden_states}
    example = doctest.DocTestFinder().find(models.hidden_states, "hidden_states", globs=names)
    assert doctest.DocTestRunner().run(example[0]) == (0, 6)


def test_layers_of_groups():
    model = models.build("albert", num_groups=2, **TEXT)
    states = jax.eval_shape(partial(states_of, model), TOKENS)
    assert (model.num_layers, len(states.layers["encoder"]), len(states.attention["encoder"])) == (2, 3, 3)


@pytest.mark.thorough
@pytest.mark.parametrize("name", CASES)
def test_every_parameter_has_a_layer_and_every_layer_has_parameters(name):
    settings, inputs, _, _ = CASES[name]
    model = models.build(name, **settings)
    found = set()
    for path, shape in paths(model, *inputs).items():
        layer = model.layer_of(path)
        if isinstance(layer, range):
            assert len(layer) == shape[0], path
        found |= {*layer} if isinstance(layer, range) else {layer}
    tied = name in ("bart", "gpt", "t5", "transformer", "transformer_xl")  # their head is tied to the embedding
    assert found == set(range(model.num_layers + (1 if tied else 2)))


def timm_layers(names, matcher):
    """Return the layer of each parameter in timm: groups ordered by their matches, numbered without gaps.

    A matcher is a list of (expression, group number, suffix). Matching parameters are ordered by group number, by the
    match, and by the suffix; 99999 joins the previous group. Other parameters come last.
    See `group_with_matcher` in timm/models/_manipulate.py.
    """

    def key(name):
        for expression, number, ending in matcher:
            if found := re.match(expression, name):
                return (number, *(int(part) for part in found.groups()), *ending)
        return (float("inf"),)

    layers, layer = {}, -1
    for group in sorted({key(name) for name in names}):
        layer += layer < 0 or group[-1] != 99999
        layers[group] = layer
    return {name: layers[key(name)] for name in names}


def timm_multipliers(names, matcher, decay):
    """Return the learning-rate multipliers of timm, `param_groups_layer_decay` in timm/optim/_param_groups.py."""
    layers = timm_layers(names, matcher)
    top = max(layers.values())
    return {name: decay ** (top - layer) for name, layer in layers.items()}


NORM = (99999,)
TIMM = {
    "vit": (
        ("vit", "B", {}),
        [(r"^cls_token|reg_token|pos_embed|patch_embed", 0, ()), (r"^blocks\.(\d+)", 1, ()), (r"^norm", 1, NORM)],
        {"class_token": "cls_token", "table/table": "pos_embed", "patch_embed/": "patch_embed."}
        | {"stack/layers/": "blocks.*.", "norm/": "norm.", "classifier/": "head."},
    ),
    "swin": (
        ("swin", "T", {}),
        [
            (r"^patch_embed", 0, ()),
            (r"^layers\.(\d+).downsample", 1, (0,)),
            (r"^layers\.(\d+)\.\w+\.(\d+)", 1, ()),
            (r"^norm", 1, NORM),
        ],
        {
            "patch_embed/": "patch_embed.",
            "embed_norm/": "patch_embed.norm.",
            **{f"merges_{i}/": f"layers.{i + 1}.downsample." for i in range(3)},
            **{f"stacks_{i}/layers/": f"layers.{i}.blocks.*." for i in range(4)},
            "norm/": "norm.",
            "classifier/": "head.fc.",
        },
    ),
    "resnet": (
        ("resnet", "50", {}),
        [(r"^conv1|bn1|maxpool", 0, ()), (r"^layer(\d+)\.(\d+)", 1, ())],
        {
            "stem_conv/": "conv1.",
            "outer_norm/": "bn1.",
            **{f"stages_{i}_{j}/": f"layer{i + 1}.{j}." for i, depth in enumerate((3, 4, 6, 3)) for j in range(depth)},
            "classifier/": "fc.",
        },
    ),
}


@pytest.fixture(scope="module", params=TIMM)
def reference(request):
    """Return a model, the shapes of its parameters, and their names in timm, one for each layer of a stacked
    parameter.
    """
    (name, variant, settings), matcher, names = TIMM[request.param]
    model = models.build(name, variant, **settings)
    shapes = paths(model, jnp.zeros((1, 224, 224, 3)))

    def theirs(path):
        ours = next(ours for ours in names if path.startswith(ours))
        renamed = names[ours] + path.removeprefix(ours)
        return [renamed.replace("*", str(i)) for i in range(shapes[path][0])] if "*" in renamed else [renamed]

    return model, shapes, {path: theirs(path) for path in shapes}, matcher


def steps(model, shapes, **options):
    """Return the update of each parameter in one step of gradient descent, for each layer of a stacked parameter."""
    optimizer = SGD(momentum=0.0, clip_norm=0.0, **options).make(lambda n: 1.0, model)
    # Only the first axis is needed: the others are reduced to 1.
    ones = {path: jnp.ones((shape[0], *[1] * (len(shape) - 1))) for path, shape in shapes.items()}
    updates, _ = optimizer.update(ones, optimizer.init(ones), ones)
    return {path: -np.asarray(update).reshape(len(update), -1)[:, 0] for path, update in updates.items()}


def test_layer_wise_decay_matches_timm(reference):
    model, shapes, names, matcher = reference
    expected = timm_multipliers([name for found in names.values() for name in found], matcher, 0.75)
    moved = steps(model, shapes, layer_decay=0.75)
    assert len(set(expected.values())) == model.num_layers + 2
    for path, found in names.items():
        rates = [expected[name] for name in found]
        np.testing.assert_allclose(moved[path], np.resize(rates, len(moved[path])), rtol=1e-6)


@pytest.mark.parametrize("frozen", [1, 3])
def test_frozen_layers_match_timm(reference, frozen):
    model, shapes, names, matcher = reference
    layers = timm_layers([name for found in names.values() for name in found], matcher)
    moved = steps(model, shapes, frozen_layers=frozen)
    for path, found in names.items():
        still = [layers[name] <= frozen for name in found]
        np.testing.assert_array_equal(moved[path] == 0, np.resize(still, len(moved[path])))


@pytest.mark.parametrize(
    ("name", "layers"),
    [
        (
            "bart",
            {"embed/table": 0, "encoder_position/table": 0, "encoder_norm/scale": 0, "decoder_position/table": 4}
            | {"decoder_norm/scale": 4, "encoder_stack/layers/x": range(1, 4), "decoder_stack/layers/x": range(4, 6)},
        ),
        (
            "t5",
            {"embed/table": 0, "encoder_relative/table": 0, "encoder_norm/scale": 3, "decoder_relative/table": 4}
            | {"decoder_norm/scale": 5, "head/kernel": 6, "decoder_stack/layers/mlp/up/kernel": range(4, 6)},
        ),
        (
            "mae",
            {"class_token": 0, "patch_embed/kernel": 0, "norm/scale": 2, "decoder_embed/kernel": 3, "mask_token": 3}
            | {"decoder_stack/layers/x": range(3, 4), "decoder_norm/scale": 3, "decoder_head/kernel": 4},
        ),
        (
            "detr",
            {"backbone/stem_conv/kernel": 0, "backbone/outer_norm/scale": 0, "backbone/stages_0_0/conv_0/kernel": 1}
            | {"backbone/stages_1_0/conv_0/kernel": 2, "projection/kernel": 3, "encoder_stack/layers/x": range(3, 5)}
            | {"queries/table": 5, "decoder_stack/layers/x": range(5, 6), "decoder_norm/scale": 5, "box_0/kernel": 6},
        ),
        ("albert", {"embed/table": 0, "projection/kernel": 0, "stack/layers/mlp/up/kernel": 1, "pooler/kernel": 2}),
        ("seq2seq", {"encoder_embed/table": 0, "encoder/backward_1/cell/x": 2, "cells_0/x": 3, "fed/kernel": 3}),
        ("elmo", {"embed/table": 0, "forward_0/cell/x": 1, "backward_1/cell/x": 2, "head/kernel": 3}),
        ("gpt", {"embed/table": 0, "position/table": 0, "stack/layers/x": range(1, 4), "norm/scale": 3}),
    ],
)
def test_order_of_layers_in_several_stacks(name, layers):
    model = models.build(name, **CASES[name][0])
    assert {path: model.layer_of(path) for path in layers} == layers


def test_unknown_activation_raises():
    assert set(typing.get_args(base.Activation)) == set(ACTIVATIONS)
