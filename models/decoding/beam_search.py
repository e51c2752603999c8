"""Beam search on the device, as in `transformers`."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from lineage.models.decoding.logits_processors import LogitsProcessors

Decode = Callable[[Array, Array, Any], tuple[Array, Any]]
IMPOSSIBLE = -1e9  # score of a hypothesis that must not be chosen; finite, so that its sums and quotients are too


class _Hypotheses(NamedTuple):
    """N continuations of each sequence, the best first; `new` tokens are new, 0 if there is no such hypothesis yet."""

    tokens: Int[Array, "B N S"]
    scores: Float[Array, "B N"]
    new: Int[Array, "B N"]

    @classmethod
    def none(cls, tokens, num_beams):
        """Return `num_beams` hypotheses that must not be chosen for each of the prompts [B, S]."""
        batch = len(tokens)
        scores = jnp.full((batch, num_beams), IMPOSSIBLE)
        return cls(jnp.repeat(tokens[:, None], num_beams, axis=1), scores, jnp.zeros((batch, num_beams), jnp.int32))

    def best(self, n):
        """Return the n hypotheses with the highest scores, and their indices."""
        scores, chosen = jax.lax.top_k(self.scores, n)
        tokens = jnp.take_along_axis(self.tokens, chosen[..., None], axis=1)
        return _Hypotheses(tokens, scores, jnp.take_along_axis(self.new, chosen, axis=1)), chosen


def beam_search(
    decode: Decode, processors: LogitsProcessors, cache: Any, tokens: Int[Array, "B S"], starts: Int[Array, "B"],
    max_new_tokens: int, num_beams: int, length_penalty: Float[Array, ""],
) -> tuple[Int[Array, "B S"], Int[Array, "B"], Float[Array, "B"]]:  # fmt: skip
    """Continue the N = `num_beams` best running hypotheses of each prompt; return tokens, length, score of the best.

    A prompt is done when no running hypothesis, at its present length, would score more than the worst of `num_beams`
    finished ones. The results are those of `generate.Generation`.

    Args:
        decode: function (tokens, lengths, cache) -> (logits [B x N, V] after the last tokens, cache).
        cache: that of N copies of each prompt.
        tokens, starts: the prompts with room for the new tokens, and their lengths.
    """
    batch, length = tokens.shape
    rows = jnp.arange(batch)[:, None]
    # Enough candidates that `num_beams` remain even if all stop tokens are among them.
    keep = max(2, 1 + len(processors.stop_tokens)) * num_beams

    def unfinished(state):
        return (state[0] < max_new_tokens) & state[3].any()

    def advance(state):
        step, running, ended, improvable, cache = state
        flat, lengths = running.tokens.reshape(-1, length), jnp.repeat(starts + step, num_beams)
        logits, cache = decode(flat, lengths, cache)
        scores = processors(jax.nn.log_softmax(logits), flat, lengths, jnp.full(1, step))
        scores = scores.reshape(batch, num_beams, -1)
        vocab_size = scores.shape[-1]
        scores = (scores + running.scores[..., None]).reshape(batch, -1)

        scores, chosen = jax.lax.top_k(scores, min(keep, scores.shape[1]))
        beam, token = chosen // vocab_size, chosen % vocab_size
        candidates = running.tokens[rows, beam].at[rows, jnp.arange(chosen.shape[1]), starts[:, None] + step].set(token)
        count = jnp.full(chosen.shape, step + 1)
        stops = processors.stops(token) | (step + 1 == max_new_tokens)

        # Only the best `num_beams` candidates may end.
        ends = stops & (jnp.arange(chosen.shape[1]) < num_beams) & improvable[:, None]
        normal = (step + 1.0) ** length_penalty
        new = _Hypotheses(candidates, jnp.where(ends, scores / normal, IMPOSSIBLE), jnp.where(ends, count, 0))
        ended, _ = jax.tree.map(lambda *x: jnp.concatenate(x, axis=1), ended, new).best(num_beams)

        running, survivors = _Hypotheses(candidates, scores + jnp.where(stops, IMPOSSIBLE, 0), count).best(num_beams)
        cache = cache.gather((rows * num_beams + beam[rows, survivors]).reshape(-1))
        worst = jnp.where((ended.new > 0).all(axis=1), ended.scores[:, -1], IMPOSSIBLE)
        return step + 1, running, ended, improvable & (running.scores[:, 0] / normal > worst), cache

    ended = _Hypotheses.none(tokens, num_beams)
    # The beams start equal: only the first one may be continued in the first step.
    running = ended._replace(scores=ended.scores.at[:, 0].set(0))
    start = 0, running, ended, jnp.ones(batch, bool), cache
    _, _, ended, _, _ = jax.lax.while_loop(unfinished, advance, start)
    return ended.tokens[:, 0], starts + ended.new[:, 0], ended.scores[:, 0]
