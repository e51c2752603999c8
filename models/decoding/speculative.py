"""Speculative decoding (arXiv 2211.17192): a small model drafts tokens, the large one checks them all in one call.

A drafted token is kept with probability min(1, p / q), p and q being what the large and the small model give it. The
first that is not is replaced by one from norm(max(0, p - q)), and where all are kept, the large model adds one: so each
token's distribution is p, the large model's own (appendix A.1). p and q are what all processors leave, for a greedy
choice certainties: then the tokens are the large model's likeliest.
"""

from functools import partial
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int
from numpy.typing import ArrayLike

from lineage.models.decoding.generate import Generation, begin, checked_prompts
from lineage.models.decoding.logits_processors import Choice, check, row_keys


class Speculation(NamedTuple):
    """What came out, how many drafted tokens of each row were looked at and kept, and how often the model was called.

    Of the drafts, those after the first rejected one or after the row's end are not looked at.
    """

    generation: Generation
    checked: Int[Array, "B"]
    accepted: Int[Array, "B"]
    calls: Int[Array, ""]

    @property
    def acceptance_rate(self) -> float:
        """The part of the tokens looked at that was kept."""
        return float(self.accepted.sum() / np.maximum(self.checked.sum(), 1))


def speculate(
    model: nn.Module,
    variables: Any,
    draft: nn.Module,
    draft_variables: Any,
    prompts: ArrayLike,
    lengths: ArrayLike | None = None,
    *,
    max_new_tokens: int,
    num_drafted: int = 4,
    inputs: Any = None,
    seed: int = 0,
    pad_token: int = 0,
    **choice,
) -> Speculation:
    """As `generate` without beams, whose options these are, in fewer calls of the model.

    The more often `draft`, a faster decoder of the same tokens, is right, the fewer. It proposes `num_drafted` tokens
    at a time. The caches of both must have `rewind`.

    Raises:
        ValueError: as `generate`; or the models' tokens differ, or one of them cannot go back.
    """
    prompts, lengths = checked_prompts(model, prompts, lengths, max_new_tokens)
    check(num_drafted >= 1, f"num_drafted must be at least 1, not {num_drafted}.")
    sizes = [getattr(part, "vocab_size", None) for part in (model, draft)]
    check(sizes[0] == sizes[1], f"the model has {sizes[0]} tokens and the draft {sizes[1]}: they must have the same.")
    choice = Choice.checked(model, **choice)
    models, variables = (model, draft), (variables, draft_variables)
    count, seed = {"max_new_tokens": max_new_tokens, "num_drafted": num_drafted}, np.uint32(seed % 2**32)
    return _speculate(models, variables, prompts, lengths, inputs, seed, choice, np.int32(pad_token), **count)


class _State(NamedTuple):
    calls: Int[Array, ""]
    tokens: Int[Array, "B S"]
    lengths: Int[Array, "B"]
    scores: Float[Array, "B"]
    done: Bool[Array, "B"]
    cache: Any  # of the first `lengths` - 1 tokens of each row
    draft_cache: Any
    checked: Int[Array, "B"]
    accepted: Int[Array, "B"]


def verify(
    key: Array, p: Float[Array, "M V"], q: Float[Array, "N V"], drafted: Int[Array, "N"]
) -> tuple[Int[Array, ""], Int[Array, ""]]:
    """How many of the tokens drafted from q are kept, and the one that comes after them (algorithm 1)."""
    keys, places = jax.random.split(key), jnp.arange(len(drafted))
    kept = jax.random.uniform(keys[0], drafted.shape) * q[places, drafted] < p[places, drafted]
    accepted = jnp.cumprod(kept).sum()
    rest = jnp.maximum(p.at[:-1].add(-q), 0)[accepted]
    rest = jnp.where(rest.any(), rest, p[accepted])  # p < q by rounding alone
    return accepted, jax.random.categorical(keys[1], jnp.log(rest))


@partial(jax.jit, static_argnames=("models", "max_new_tokens", "num_drafted"))
def _speculate(
    models, variables, prompts, lengths, inputs, seed, choice, pad_token, *, max_new_tokens, num_drafted
):  # fmt: skip
    begun = [begin(*both, prompts, lengths, inputs, max_new_tokens) for both in zip(models, variables)]
    (tokens, starts, cache, memory), (_, _, draft_cache, draft_memory) = begun
    for kept in (cache, draft_cache):
        check(
            hasattr(kept, "rewind"),
            f"a {type(kept).__name__} cannot be rewound: such a model neither drafts nor checks.",
        )
    batch, ends = len(tokens), starts + max_new_tokens
    rows, steps = jnp.arange(batch), jnp.arange(num_drafted + 1)

    def decode(which, tokens, places, cache, memory):
        read = jnp.take_along_axis(tokens, places, axis=1, mode="clip")
        logits, cache = models[which].apply(variables[which], read, cache, memory, method="decode")
        return logits.astype(jnp.float32), cache

    def probabilities(logits, tokens, lengths):
        logits = choice.process(logits, tokens, lengths, lengths - starts)
        if choice.temperature is None:
            return jax.nn.one_hot(logits.argmax(axis=-1), logits.shape[-1])
        return jax.nn.softmax(logits)

    def advance(state):
        calls, tokens, lengths, scores, done, cache, draft_cache, checked, accepted = state
        keys = row_keys(seed, calls, batch)

        def propose(carry, i):
            tokens, cache = carry
            logits, cache = decode(1, tokens, lengths[:, None] + i - 1, cache, draft_memory)
            q = probabilities(logits[:, 0], tokens, lengths + i)
            token = jax.vmap(lambda key, q: jax.random.categorical(jax.random.fold_in(key, i), jnp.log(q)))(keys, q)
            return (tokens.at[rows, lengths + i].set(token), cache), (token, q)

        # One more than is checked, so that the last one that is checked is in the draft's cache, too.
        (tokens, draft_cache), (drafted, q) = jax.lax.scan(propose, (tokens, draft_cache), steps)
        logits, cache = decode(0, tokens, lengths[:, None] - 1 + steps, cache, memory)
        p = jax.vmap(probabilities, (1, None, 0), 1)(logits, tokens, lengths + steps[:, None])
        keys = jax.vmap(jax.random.fold_in, (0, None))(keys, len(steps))
        kept, token = jax.vmap(verify, (0, 0, 1, 1))(keys, p, q[:-1], drafted[:-1])
        tokens = tokens.at[rows, lengths + kept].set(token)

        count = jnp.where(done, 0, jnp.minimum(kept + 1, ends - lengths))
        new = jnp.take_along_axis(tokens, lengths[:, None] + steps, axis=1, mode="clip")
        stops = choice.stops(new) & (steps < count[:, None])
        count = jnp.where(stops.any(axis=1), stops.argmax(axis=1) + 1, count)
        new_scores = jnp.take_along_axis(jax.nn.log_softmax(logits), new[..., None], axis=-1)[..., 0]
        scores += jnp.where(steps < count[:, None], new_scores, 0).sum(axis=1)
        lengths += count
        return _State(
            calls + 1,
            tokens,
            lengths,
            scores,
            done | stops.any(axis=1) | (lengths == ends),
            cache.rewind(lengths - 1),
            draft_cache.rewind(lengths - 1),
            checked + jnp.minimum(count, num_drafted),
            accepted + jnp.minimum(count, kept),
        )

    none = jnp.zeros(batch, jnp.int32)
    start = _State(0, tokens, starts, jnp.zeros(batch), none > 0, cache, draft_cache, none, none)
    end = jax.lax.while_loop(lambda state: ~state.done.all(), advance, start)
    written = jnp.arange(tokens.shape[1]) < end.lengths[:, None]
    generation = Generation(jnp.where(written, end.tokens, pad_token), end.lengths, end.scores)
    return Speculation(generation, end.checked, end.accepted, end.calls)
