"""Quantized matrices: their error and size, and models that compute with them."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from jax.extend.core import jaxprs_in_params

from lineage.models.albert import ALBERT
from lineage.models.decoding.generate import generate
from lineage.models.decoding.speculative import speculate
from lineage.models.gpt import GPT
from lineage.models.kernels.vocabulary import Targets
from lineage.models.layers import Linear
from lineage.models.layers.quantized import Quantized
from lineage.models.quantization import input_axes, quantize
from lineage.models.seq2seq import Seq2Seq
from lineage.models.t5 import T5
from lineage.models.transformer import Transformer
from lineage.models.transformer_xl import TransformerXL
from lineage.models.vit import ViT
from tests.tiers import tiered
from tests.tolerance import assert_close

VOCAB = 13
RNG = np.random.default_rng(0)
TOKENS, INPUTS = (jnp.asarray(RNG.integers(0, VOCAB, (3, length)), jnp.int32) for length in (6, 7))
IMAGE = jnp.asarray(RNG.standard_normal((3, 8, 8, 3)), jnp.float32)
MASK = jnp.ones(INPUTS.shape, bool)
SIZES = {"vocab_size": VOCAB, "width": 16, "depth": 2, "num_heads": 2}
TEXT = {**SIZES, "max_length": 32}
MODELS = {
    "stacked": (GPT(**TEXT), TOKENS),
    "encoder-decoder": (Transformer(**TEXT), INPUTS, TOKENS),
    "unrolled": (GPT(**TEXT, unroll=2), TOKENS),
    "one set of layers": (ALBERT(**TEXT, head="masked_lm"), TOKENS),
    "recurrent": (Seq2Seq(vocab_size=VOCAB, width=16, embed_width=6), INPUTS, TOKENS),
    "separate output layer": (T5(**SIZES, tied=False), INPUTS, TOKENS),
    "relative positions": (TransformerXL(**SIZES), TOKENS),
    "images": (ViT(image_size=8, patch_size=4, num_classes=5, width=16, depth=2, num_heads=2), IMAGE),
}
KINDS = ("int8", "fp8")


def call(model, *args):
    return model(*args)


def random(model, *args, scale=0.3, seed=1):
    """Return random variables of a model, whose matrices are not those of an initializer."""
    rng = np.random.default_rng(seed)
    shapes = jax.eval_shape(model.init, jax.random.key(0), *args)
    return {"params": jax.tree.map(lambda x: jnp.asarray(rng.normal(0, scale, x.shape), x.dtype), shapes["params"])}


@cache
def pair(name, kind):
    """Return a model, its inputs, its quantized variables, and float ones with exactly the same values."""
    model, *args = MODELS[name]
    variables = random(model, *args)
    inputs = input_axes(call, model, *args)
    quantized = {"params": jax.jit(partial(quantize, inputs=inputs, kind=kind))(variables["params"])}

    def rounded(path, leaf):
        axes = inputs.get("/".join(key.key for key in path))
        return leaf if axes is None else leaf.values.astype(jnp.float32) * jnp.expand_dims(leaf.scale, axes)

    plain = jax.tree_util.tree_map_with_path(
        rounded, quantized["params"], is_leaf=lambda leaf: isinstance(leaf, Quantized)
    )
    return model, args, variables, quantized, {"params": plain}


@tiered(
    ("name", "kind"),
    [(name, kind) for name in MODELS for kind in KINDS],
    first=lambda name, kind: name in ("stacked", "encoder-decoder"),
)
def test_models_compute_with_the_quantized_values(name, kind):
    model, args, _, quantized, plain = pair(name, kind)
    apply = jax.jit(model.apply)
    assert_close(apply(quantized, *args), apply(plain, *args), n=80)


@pytest.mark.parametrize(("kind", "step"), [("int8", lambda w, top: top / 255), ("fp8", lambda w, top: abs(w) / 16)])
def test_weights_are_rounded_by_output(kind, step):
    """Check the distance to the nearest number: half of the 255 steps, or half a unit of a mantissa of three bits."""
    for name in ("stacked", "encoder-decoder"):
        model, args, variables, _, plain = pair(name, kind)
        inputs = input_axes(call, model, *args)
        assert inputs
        flat, rounded = (flatten_dict(tree["params"], sep="/") for tree in (variables, plain))
        for path, axes in inputs.items():
            weights = np.asarray(flat[path], np.float64)
            top = abs(weights).max(axis=axes, keepdims=True)
            bound = np.maximum(step(weights, top), top / 448 * 2**-10) * (1 + 1e-4)  # the latter: of subnormal numbers
            assert (abs(weights - rounded[path]) <= bound).all()
            assert (weights != rounded[path]).any()
        for path in flat.keys() - inputs.keys():
            np.testing.assert_array_equal(flat[path], rounded[path])


def test_the_error_of_a_product_is_bounded_by_the_steps(variables, normal):
    """Check |x W - x W'| <= |x|_1 step / 2, where 255 steps span the weights of an output."""
    layer, x = Linear((2, 5), axes=2), normal(4, 3, 6)
    params = variables(layer, x)["params"]
    quantized = quantize(params, input_axes(call, layer, x), "int8")
    error = abs(layer.apply({"params": quantized}, x) - layer.apply({"params": params}, x))
    step = 2 * abs(params["kernel"]).max(axis=(0, 1)) / 255
    bound = abs(x).sum(axis=(1, 2))[:, None, None] * step / 2
    assert (error <= bound * (1 + 1e-4)).all()
    assert error.max() > bound.max() / 100  # it is quantized at all


def test_matrices_take_a_quarter_of_the_memory():
    model = GPT(vocab_size=1024, max_length=8, depth=2, width=128, num_heads=2)
    params = random(model, TOKENS)["params"]
    small = quantize(params, input_axes(call, model, TOKENS), "int8")
    size, whole = (sum(leaf.nbytes for leaf in jax.tree.leaves(tree)) for tree in (small, params))
    floats = sum(leaf.nbytes for leaf in jax.tree.leaves(small) if leaf.dtype == jnp.float32)
    assert (
        size - floats == (whole - 4 * (8 * 128 + 2 * (4 * 128 + 5 * 128 + 4 * 128) + 256)) / 4
    )  # all but other leaves
    assert size < 0.28 * whole


@pytest.mark.thorough
@tiered(
    ("name", "kind"),
    [("stacked", "int8"), ("encoder-decoder", "fp8"), ("unrolled", "fp8"), ("recurrent", "int8")],
    first=2,
    slow=lambda name, kind: name == "unrolled",
)
def test_generation(name, kind):
    """Check greedy and beam search, for one sequence too, which reads a table in another way."""
    model, args, _, quantized, plain = pair(name, kind)
    for rows, beams in ((1, 1), (3, 2)):
        inputs = (INPUTS[:rows], MASK[:rows]) if len(args) > 1 else None
        options = {"max_new_tokens": 5, "temperature": 0.0, "inputs": inputs, "num_beams": beams}
        out, expected = (generate(model, tree, TOKENS[:rows], **options) for tree in (quantized, plain))
        np.testing.assert_array_equal(out.tokens, expected.tokens)
        np.testing.assert_allclose(out.scores, expected.scores, rtol=1e-4)


def loops(jaxpr):
    """Yield the inputs of the while loops of a program."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "while":
            yield equation.invars
        for inner in jaxprs_in_params(equation.params):
            yield from loops(inner)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", KINDS)
def test_the_loop_over_tokens_reads_8_bit_matrices(kind):
    """Check that the loop has no other input with as many numbers as the smallest matrix."""
    model = GPT(**SIZES, max_length=11)
    params = quantize(random(model, TOKENS)["params"], input_axes(call, model, TOKENS), kind)
    write = partial(generate, model, prompts=TOKENS[:1], max_new_tokens=5, temperature=0.0)
    (inputs,) = loops(jax.make_jaxpr(write)({"params": params}).jaxpr)
    dtype = jax.tree.leaves(params["embed"])[0].dtype
    sizes = {small: [v.aval.size for v in inputs if (v.aval.dtype == dtype) == small] for small in (True, False)}
    assert len(sizes[True]) == 2 * 6 + 1  # the matrices of two layers, and the table of tokens
    assert max(sizes[False]) < min(sizes[True])


@pytest.mark.thorough
def test_speculative_decoding_with_a_quantized_draft():
    """Check that the tokens are those of the float model, most of which its quantized copy has proposed."""
    model, _, variables, quantized, _ = pair("stacked", "int8")
    options = {"max_new_tokens": 12, "temperature": 0.0}
    out = speculate(model, variables, model, quantized, TOKENS, **options)
    np.testing.assert_array_equal(out.generation.tokens, generate(model, variables, TOKENS, **options).tokens)
    assert out.acceptance_rate > 0.8


@pytest.mark.thorough
def test_fused_loss():
    model, args, _, quantized, plain = pair("stacked", "int8")
    model, targets = model.clone(fused_loss=True), Targets(TOKENS, jnp.ones(TOKENS.shape))
    losses = [model.apply(tree, *args, targets=targets).loss for tree in (quantized, plain)]
    assert_close(*losses)
