"""Beam search on the device, as in `transformers`."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from lineage.models.decoding.logits_processors import LogitsProcessors

# Function (tokens [B, S], positions [B, T], cache) -> (logits [B, T, V] after the tokens at these positions, cache).
Decode = Callable[[Array, Array, Any], tuple[Array, Any]]
EXCLUDED = -1e9  # score of a hypothesis that must not be selected; finite, so that sums and quotients stay finite


class _Hypotheses(NamedTuple):
    """N hypotheses of each sequence, sorted by score; `new` is the number of new tokens, 0 for an empty entry."""

    tokens: Int[Array, "B N S"]
    scores: Float[Array, "B N"]
    new: Int[Array, "B N"]

    def best(self, n):
        """Return the n hypotheses with the highest scores, and their indices."""
        scores, chosen = jax.lax.top_k(self.scores, n)
        tokens = jnp.take_along_axis(self.tokens, chosen[..., None], axis=1)
        return _Hypotheses(tokens, scores, jnp.take_along_axis(self.new, chosen, axis=1)), chosen


def beam_search(
    decode: Decode, processors: LogitsProcessors, cache: Any, tokens: Int[Array, "B S"], starts: Int[Array, "B"],
    max_new_tokens: int, num_beams: int, length_penalty: Float[Array, ""], length_offset: Float[Array, ""],
) -> tuple[Int[Array, "B S"], Int[Array, "B"], Float[Array, "B"]]:  # fmt: skip
    """Continue the N = `num_beams` best running hypotheses of each prompt; return the fields of a `Generation`.

    A prompt is finished when no running hypothesis, normalized by its current length, scores higher than the worst of
    `num_beams` finished ones.

    Args:
        decode: see `Decode`.
        cache: cache of N copies of each prompt.
        tokens, starts: prompts, padded for the new tokens, and their lengths.
        length_penalty, length_offset: see `generate`.
    """
    batch, length = tokens.shape
    rows = jnp.arange(batch)[:, None]
    # Enough for `num_beams` of them to remain even if they include all stop tokens.
    num_candidates = max(2, 1 + len(processors.stop_tokens)) * num_beams

    def unfinished(state):
        return (state[0] < max_new_tokens) & state[3].any()

    def advance(state):
        step, running, finished, improvable, cache = state
        flat, lengths = running.tokens.reshape(-1, length), jnp.repeat(starts + step, num_beams)
        logits, cache = decode(flat, lengths[:, None] - 1, cache)
        scores = processors(jax.nn.log_softmax(logits[:, 0]), flat, lengths, jnp.full(1, step))
        scores = scores.reshape(batch, num_beams, -1)
        vocab_size = scores.shape[-1]
        scores = (scores + running.scores[..., None]).reshape(batch, -1)

        scores, chosen = jax.lax.top_k(scores, min(num_candidates, scores.shape[1]))
        beam, token = chosen // vocab_size, chosen % vocab_size
        candidates = running.tokens[rows, beam].at[rows, jnp.arange(chosen.shape[1]), starts[:, None] + step].set(token)
        count = jnp.full(chosen.shape, step + 1)
        stops = processors.stops(token) | (step + 1 == max_new_tokens)

        # Only the best `num_beams` candidates may finish.
        finishing = stops & (jnp.arange(chosen.shape[1]) < num_beams) & improvable[:, None]
        normalizer = ((length_offset + step + 1) / (length_offset + 1)) ** length_penalty
        final = jnp.where(finishing, scores / normalizer, EXCLUDED)
        new = _Hypotheses(candidates, final, jnp.where(finishing, count, 0))
        finished, _ = jax.tree.map(lambda *x: jnp.concatenate(x, axis=1), finished, new).best(num_beams)

        running, survivors = _Hypotheses(candidates, scores + jnp.where(stops, EXCLUDED, 0), count).best(num_beams)
        cache = cache.gather((rows * num_beams + beam[rows, survivors]).reshape(-1))
        worst = jnp.where((finished.new > 0).all(axis=1), finished.scores[:, -1], EXCLUDED)
        return step + 1, running, finished, improvable & (running.scores[:, 0] / normalizer > worst), cache

    scores = jnp.full((batch, num_beams), EXCLUDED)
    copies = jnp.repeat(tokens[:, None], num_beams, axis=1)
    finished = _Hypotheses(copies, scores, jnp.zeros((batch, num_beams), jnp.int32))
    # The beams start equal: only the first one may be continued in the first step.
    running = finished._replace(scores=finished.scores.at[:, 0].set(0))
    start = jnp.int32(0), running, finished, jnp.ones(batch, bool), cache
    _, _, finished, _, _ = jax.lax.while_loop(unfinished, advance, start)
    return finished.tokens[:, 0], starts + finished.new[:, 0], finished.scores[:, 0]
