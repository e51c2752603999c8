from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lineage import models
from lineage.models.decoding.generate import generate
from lineage.models.seq2seq import Seq2Seq
from tests.tiers import tiered
from tests.tolerance import assert_close

VOCAB = 13
RNG = np.random.default_rng(0)
INPUTS, TOKENS = (jnp.asarray(RNG.integers(0, VOCAB, (2, length)), jnp.int32) for length in (7, 6))
MASK = jnp.arange(7) < jnp.array([[7], [4]])
SIZES = {"vocab_size": VOCAB, "width": 8, "embed_width": 6}
LOCAL = {"bidirectional": False, "window": 2}
KINDS = {
    "fixed": Seq2Seq(**SIZES, cell="lstm", depth=2, attention="fixed"),
    "additive": Seq2Seq(**SIZES, cell="gru", attention="additive"),
    "general": Seq2Seq(**SIZES, **LOCAL, cell="lstm", depth=2, attention="general", span="predictive"),
    "dot": Seq2Seq(**SIZES, **LOCAL, cell="rnn", attention="dot", span="monotonic"),
}


@pytest.fixture(scope="module", params=KINDS)
def model(request):
    """Return a model, random parameters, and the logits of two sequences, the second of which is padded."""
    module = KINDS[request.param]
    shapes = jax.eval_shape(module.init, jax.random.key(0), INPUTS, TOKENS)["params"]
    rng = np.random.default_rng(1)
    params = {"params": jax.tree.map(lambda x: jnp.asarray(0.7 * rng.standard_normal(x.shape), x.dtype), shapes)}
    return module, params, jax.jit(module.apply)(params, INPUTS, TOKENS, inputs_mask=MASK)


@pytest.mark.parametrize(
    ("variant", "count"),
    [
        # Vocabulary of 30,000: two tables; gates of input, context and state; alignment, initial state, readout,
        # output.
        ("rnnsearch", 2 * 30_000 * 620 + 2 * 3 * (620 + 1000 + 2) * 1000 + 3 * (620 + 2000 + 1000 + 2) * 1000
            + (1000 + 2000 + 1) * 1000 + 1001 * 1000 + (1000 + 2000 + 620 + 1) * 1000 + 501 * 30_000),
        # Vocabulary of 50,000, four layers of 1000 cells on each side, input feeding.
        ("luong", 3 * 50_000 * 1000 + 50_000 + 8 * 4 * (2000 + 1) * 1000 + 4 * 1000 * 1000 + 2000 * 1000),
    ],
)  # fmt: skip
def test_parameter_counts_match_the_papers(variant, count):
    module = models.build("seq2seq", variant, vocab_size=30_000 if variant == "rnnsearch" else 50_000)
    shapes = jax.eval_shape(module.init, jax.random.key(0), INPUTS, TOKENS)["params"]
    assert sum(leaf.size for leaf in jax.tree.leaves(shapes)) == count


def test_cached_equals_uncached_and_rewinds(model):
    module, params, expected = model
    decode = jax.jit(lambda *args: module.apply(params, *args, method="decode"))
    memory = jax.jit(lambda inputs: module.apply(params, inputs, method="encode"))((INPUTS, MASK))
    cache = module.apply(params, 2, 6, method="init_cache")
    for start, stop in ((0, 3), (3, 4)):
        logits, cache = decode(TOKENS[:, start:stop], cache, memory)
        assert_close(logits, expected[:, start:stop])
    starts = jnp.array([3, 0])  # each sequence continues from its own position
    logits, _ = decode(TOKENS[jnp.arange(2)[:, None], starts[:, None] + jnp.arange(3)], cache.rewind(starts), memory)
    for row, start in enumerate(starts):
        assert_close(logits[row], expected[row, start : start + 3])


@pytest.mark.thorough
def test_padding_has_no_effect(model):
    """Check padding at the end of the inputs, and anywhere in the outputs."""
    module, params, expected = model
    apply = jax.jit(module.apply)
    assert_close(apply(params, INPUTS[1:, :4], TOKENS[1:]), expected[1:])
    places = jnp.array([1, 2, 4, 5, 6, 8])
    padded = jnp.zeros((2, 9), jnp.int32).at[:, places].set(TOKENS)
    mask = jnp.zeros((2, 9), bool).at[:, places].set(True)
    logits = apply(params, INPUTS, padded, inputs_mask=MASK, mask=mask)
    assert_close(logits[:, places], expected)


@tiered("model", ["fixed", "additive", "general"], indirect=True)
def test_gradients_are_causal_in_tokens_and_reach_all_inputs(model):
    """Check gradients with respect to the embedding tables, for inputs and tokens that all differ."""
    module, params, _ = model
    module = module.clone(span="global")  # a local window would limit the direct attention to inputs

    def logits(source, target):
        tables = {"encoder_embed": {"table": source}, "decoder_embed": {"table": target}}
        places = jnp.arange(7, dtype=jnp.int32)[None]
        return module.apply({"params": params["params"] | tables}, places, places[:, :6])[0].sum(-1)

    tables = [params["params"][f"{side}_embed"]["table"] for side in ("encoder", "decoder")]
    source, target = (np.abs(part).max(-1) > 0 for part in jax.jit(jax.jacobian(logits, (0, 1)))(*tables))
    np.testing.assert_array_equal(source, np.tile(np.arange(VOCAB) < 7, (6, 1)))
    np.testing.assert_array_equal(target, np.tril(np.ones((6, VOCAB))))


@pytest.mark.thorough
@pytest.mark.parametrize(("model", "beams"), [("additive", 1), ("general", 3)], indirect=["model"])
def test_batched_generation_matches_logits_of_single_sequences(model, beams):
    """Check inputs and prompts of different lengths; the score of beam search is that of its tokens."""
    module, params, _ = model
    prompts, lengths = TOKENS[:, :3], np.array([3, 1])
    options = {"max_new_tokens": 5, "temperature": 0.0, "num_beams": beams}
    out = generate(module, params, prompts, lengths, inputs=(INPUTS, MASK), **options)
    apply = jax.jit(module.apply)
    for row, (size, length) in enumerate(zip((7, 4), lengths)):
        tokens = out.tokens[row, : length + 5]
        logits = apply(params, INPUTS[row : row + 1, :size], tokens[None])[0]
        if beams == 1:
            np.testing.assert_array_equal(logits[length - 1 : -1].argmax(-1), tokens[length:])
        scores = jax.nn.log_softmax(logits)[jnp.arange(length - 1, length + 4), tokens[length:]]
        np.testing.assert_allclose(out.scores[row], scores.sum() / (5 if beams > 1 else 1), rtol=1e-5)


@pytest.mark.parametrize("model", ["additive"], indirect=True)
def test_full_scheduled_sampling_matches_greedy_decoding(model):
    """Check, with a sharp output distribution, that sampled tokens equal those of greedy decoding."""
    module, params, expected = model
    sharp = {"params": params["params"] | {"head": jax.tree.map(lambda x: x * 1e4, params["params"]["head"])}}

    @jax.jit
    def logits(rate):
        rngs = {"dropout": jax.random.key(0)}
        return module.apply(sharp, INPUTS, TOKENS, inputs_mask=MASK, own_rate=rate, rngs=rngs)

    given, own = logits(0.0), logits(1.0)
    assert_close(given * 1e-4, expected)
    options = {"max_new_tokens": 6, "temperature": 0.0}
    free = generate(module, sharp, TOKENS[:, :1], inputs=(INPUTS, MASK), **options)
    np.testing.assert_array_equal(own.argmax(-1), free.tokens[:, 1:])
    assert (own.argmax(-1) != given.argmax(-1)).any()


@pytest.mark.thorough
def test_scheduled_sampling_keeps_the_first_token_and_has_finite_gradients():
    module = KINDS["additive"]
    params = jax.jit(module.init)(jax.random.key(0), INPUTS, TOKENS)

    def loss(params, tokens):
        logits = module.apply(params, INPUTS, tokens, own_rate=1.0, rngs={"dropout": jax.random.key(1)})
        return logits.sum(), logits

    grad = jax.jit(jax.grad(loss, has_aux=True))
    (grads, logits), (_, same), (_, other) = (
        grad(params, tokens) for tokens in (TOKENS, TOKENS.at[:, 1:].set(0), TOKENS.at[:, 0].add(1))
    )
    np.testing.assert_array_equal(logits, same)
    assert (logits != other).any()
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(grads))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"attention": "dot"}, "attention is 'dot', which requires states of equal width: bidirectional must be False"),
        ({"attention": "fixed", "span": "monotonic"}, "span is 'monotonic' without attention"),
    ],
)
def test_incompatible_settings_raise(settings, message):
    with pytest.raises(ValueError, match=message):
        Seq2Seq(vocab_size=VOCAB, width=8, **settings).init(jax.random.key(0), INPUTS, TOKENS)


@pytest.mark.thorough
@tiered("dtype", [jnp.float32, jnp.bfloat16])
def test_scheduled_sampling_draws_from_the_predictions(dtype):
    """Check that near-uniform predictions yield tokens of the first tenth of the vocabulary in 10% of the cases.

    All parameters are zero except those by which the last logit shows whether a token is in the first tenth.
    """
    module, tokens = Seq2Seq(vocab_size=8000, width=4), jnp.full((200, 3), 7999)
    shapes = jax.eval_shape(module.init, jax.random.key(0), tokens, tokens)
    params = jax.tree.map(lambda x: jnp.zeros(x.shape, dtype), shapes)
    parts = params["params"]
    parts["decoder_embed"]["table"] = parts["decoder_embed"]["table"].at[:800].set(1)
    parts["readout"]["kernel"] = parts["readout"]["kernel"].at[-1].set(1)
    parts["head"]["kernel"] = parts["head"]["kernel"].at[:, -1].set(0.01)
    logits = jax.jit(partial(module.apply, own_rate=1.0))(params, tokens, tokens, rngs={"dropout": jax.random.key(1)})
    shown = logits[:, 1:, -1] > 0.005
    assert abs(shown.mean() - 0.1) < 4 * (0.09 / shown.size) ** 0.5
