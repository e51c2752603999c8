import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lineage.models.decoding.generate import generate
from lineage.models.transformer import Transformer
from tests.tiers import tiered
from tests.tolerance import assert_close

TINY = Transformer(vocab_size=17, max_length=10, depth=2, width=16, num_heads=2)
RNG = np.random.default_rng(0)
INPUTS, TOKENS = (jnp.asarray(RNG.integers(0, 17, (2, length)), jnp.int32) for length in (7, 6))
MASK = jnp.arange(7) < jnp.array([[7], [4]])


@tiered(
    ("position", "placement"),
    itertools.product(["sinusoidal", "learned", "relative", "rotary"], ["post", "pre"]),
    first=lambda position, placement: position == "sinusoidal" and placement == "post",
    slow=lambda position, placement: (position in ("sinusoidal", "relative")) == (placement == "pre"),
)
def test_cached_equals_uncached_and_padded_equals_unpadded(position, placement, variables):
    model = TINY.clone(position=position, norm_placement=placement, norm="rms" if placement == "pre" else "layer")
    params = variables(model, INPUTS, TOKENS)
    apply = jax.jit(model.apply, static_argnames="method")
    expected = apply(params, INPUTS, TOKENS, inputs_mask=MASK)
    assert_close(apply(params, INPUTS[1:, :4], TOKENS[1:]), expected[1:])
    memory, cache = apply(params, (INPUTS, MASK), method="encode"), model.apply(params, 2, 10, method="init_cache")
    for start, stop in ((0, 3), (3, 4), (4, 6)):
        logits, cache = apply(params, TOKENS[:, start:stop], cache, memory, method="decode")
        assert_close(logits, expected[:, start:stop])


@pytest.mark.thorough
def test_order_matters_only_with_positions(variables):
    """Check that shuffling the inputs changes the logits, unless there are no positions."""
    params = variables(TINY.clone(position="learned"), INPUTS, TOKENS)
    shuffled = INPUTS[:, jnp.array([3, 1, 0, 2, 6, 5, 4])]
    for scale, same in ((1.0, False), (0.0, True)):
        params["params"]["encoder_position"] = jax.tree.map(lambda x: x * scale, params["params"]["encoder_position"])  # noqa: B023
        first, second = (TINY.clone(position="learned").apply(params, inputs, TOKENS) for inputs in (INPUTS, shuffled))
        assert np.allclose(first, second, atol=1e-5) == same


@pytest.mark.thorough
def test_generation_uses_the_inputs_of_its_sequence(variables):
    params = variables(TINY, INPUTS, TOKENS, std=0.5)
    options = {"max_new_tokens": 6, "temperature": 0.0}
    for beams in (1, 3):
        start = np.zeros((2, 1))
        together = generate(TINY, params, start, inputs=(INPUTS, MASK), num_beams=beams, **options)
        for row, length in enumerate((7, 4)):
            inputs = (INPUTS[row : row + 1, :length], jnp.ones((1, length), bool))
            alone = generate(TINY, params, start[:1], inputs=inputs, num_beams=beams, **options)
            np.testing.assert_array_equal(alone.tokens[0], together.tokens[row])
