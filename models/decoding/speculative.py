"""Speculative decoding (arXiv 2211.17192): a draft model proposes tokens; the target model verifies them in one call.

A drafted token is accepted with probability min(1, p / q), where p and q are its probabilities under the target and the
draft model. The first rejected one is replaced by a sample from norm(max(0, p - q)); if all are accepted, the target
model adds one. The resulting distribution is exactly p (appendix A.1). p and q are probabilities after all logits
processors. In greedy search, drafted tokens are accepted up to the first one that differs from the most probable token
of the target model.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int
from numpy.typing import ArrayLike

from lineage.models.decoding.generate import CacheFormat, Generation, prefill, separate_layers, validate_prompts
from lineage.models.decoding.logits_processors import LogitsProcessors, check, row_keys


class Speculation(NamedTuple):
    """Result of speculative decoding.

    Attributes:
        generation: the generated sequences.
        checked: number of drafted tokens of each sequence that were verified, excluding those after the first rejected
            one and those after the end of the sequence.
        accepted: number of verified tokens that were accepted.
        calls: number of calls of the target model.
    """

    generation: Generation
    checked: Int[Array, "B"]
    accepted: Int[Array, "B"]
    calls: Int[Array, ""]

    @property
    def acceptance_rate(self) -> float:
        """Fraction of the verified tokens that were accepted."""
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
    cache_format: CacheFormat = None,
    **processors,
) -> Speculation:
    """Generate as `generate` does without beam search, with fewer calls of the model.

    Args:
        draft, draft_variables: draft model and its variables: a faster decoder with the same vocabulary.
        num_drafted: number of tokens that the draft model proposes at a time.
        cache_format: format of both caches, see `generate`.

    Raises:
        ValueError: as `generate`; or the vocabularies differ, or a model's cache has no `rewind`.
    """
    prompts, lengths = validate_prompts(model, prompts, lengths, max_new_tokens)
    check(num_drafted >= 1, f"num_drafted must be at least 1, not {num_drafted}.")
    sizes = model.vocab_size, draft.vocab_size
    check(sizes[0] == sizes[1], f"the model has {sizes[0]} tokens and the draft {sizes[1]}: they must be equal.")
    processors = LogitsProcessors.create(model, **processors)
    models, variables = (model, draft), (variables, draft_variables)
    static = {"max_new_tokens": max_new_tokens, "num_drafted": num_drafted, "cache_format": cache_format}
    scalars = np.uint32(seed % 2**32), np.int32(pad_token)
    return _speculate(models, variables, prompts, lengths, inputs, processors, *scalars, **static)


class _State(NamedTuple):
    """State of the loop; the caches hold the first `lengths` - 1 tokens of each sequence."""

    calls: Int[Array, ""]
    tokens: Int[Array, "B S"]
    lengths: Int[Array, "B"]
    scores: Float[Array, "B"]
    done: Bool[Array, "B"]
    cache: Any
    draft_cache: Any
    checked: Int[Array, "B"]
    accepted: Int[Array, "B"]


class _Setting(NamedTuple):
    """Constants of the loop; `target` and `draft` are functions (tokens, positions, cache) -> (logits, cache)."""

    target: Callable
    draft: Callable
    processors: LogitsProcessors
    seed: Array
    starts: Int[Array, "B"]
    ends: Int[Array, "B"]
    num_drafted: int
    vocab_size: int

    @property
    def greedy(self) -> bool:
        return self.processors.temperature is None

    def processed(self, logits, tokens, lengths):
        """Return the processed logits [B, V] of the token after the first `lengths` tokens."""
        return self.processors(logits, tokens, lengths, lengths - self.starts)


def verify(
    key: Array, p: Float[Array, "M V"], q: Float[Array, "N V"], drafted: Int[Array, "N"]
) -> tuple[Int[Array, ""], Int[Array, ""]]:
    """Return the number of accepted tokens among those drafted from q, and the next token (algorithm 1)."""
    keys, positions = jax.random.split(key), jnp.arange(len(drafted))
    kept = jax.random.uniform(keys[0], drafted.shape) * q[positions, drafted] < p[positions, drafted]
    accepted = jnp.cumprod(kept).sum()
    rest = jnp.maximum(p[accepted] - jnp.pad(q, [(0, 1), (0, 0)])[accepted], 0)
    rest = jnp.where(rest.any(), rest, p[accepted])  # all zero only by rounding
    return accepted, jax.random.categorical(keys[1], jnp.log(rest))


@partial(jax.jit, static_argnames=("models", "max_new_tokens", "num_drafted", "cache_format"))
def _speculate(models, variables, prompts, lengths, inputs, processors, seed, pad_token, num_drafted, **options):
    variables = [separate_layers(*pair) for pair in zip(models, variables)]
    options["rewinds"] = num_drafted
    prefilled = [prefill(*pair, prompts, lengths, inputs, **options) for pair in zip(models, variables)]
    (tokens, starts, cache, memory), (_, _, draft_cache, draft_memory) = prefilled
    for kind in (type(cache), type(draft_cache)):
        check(hasattr(kind, "rewind"), f"a {kind.__name__} cannot be rewound, as speculative decoding requires.")
    target = partial(_decode, models[0], variables[0], memory)
    draft = partial(_decode, models[1], variables[1], draft_memory)
    ends = starts + options["max_new_tokens"]
    setting = _Setting(target, draft, processors, seed, starts, ends, num_drafted, models[0].vocab_size)

    batch = len(tokens)
    zeros = jnp.zeros(batch, jnp.int32)
    caches = cache.rewind(starts - 1), draft_cache.rewind(starts - 1)
    start = _State(0, tokens, starts, jnp.zeros(batch), zeros > 0, *caches, zeros, zeros)
    end = jax.lax.while_loop(lambda state: ~state.done.all(), partial(_advance, setting), start)
    real = jnp.arange(tokens.shape[1]) < end.lengths[:, None]
    generation = Generation(jnp.where(real, end.tokens, pad_token), end.lengths, end.scores)
    return Speculation(generation, end.checked, end.accepted, end.calls)


def _decode(model, variables, memory, tokens, positions, cache):
    inputs = jnp.take_along_axis(tokens, positions, axis=1, mode="clip")
    logits, cache = model.apply(variables, inputs, cache, memory, method="decode")
    return logits.astype(jnp.float32), cache


def _advance(setting, state):
    """Draft and verify tokens, and append the accepted ones and one more to each sequence."""
    lengths, done = state.lengths, state.done
    rows, steps = jnp.arange(len(lengths)), jnp.arange(setting.num_drafted + 1)
    keys = None if setting.greedy else row_keys(setting.seed, state.calls, len(lengths))
    tokens, drafted, q, draft_cache = _draft(setting, state, keys)

    logits, cache = setting.target(tokens, lengths[:, None] - 1 + steps, state.cache)
    processed = jax.vmap(setting.processed, (1, None, 0), 1)(logits, tokens, lengths + steps[:, None])
    if setting.greedy:
        new = processed.argmax(axis=-1)
        kept = jnp.cumprod(new[:, :-1] == drafted, axis=1).sum(axis=1)
    else:
        keys = jax.vmap(jax.random.fold_in, (0, None))(keys, len(steps))
        kept, token = jax.vmap(verify)(keys, jax.nn.softmax(processed), q, drafted)
        new = jnp.pad(drafted, [(0, 0), (0, 1)]).at[rows, kept].set(token)

    count = jnp.where(done, 0, jnp.minimum(kept + 1, setting.ends - lengths))
    stops = setting.processors.stops(new) & (steps < count[:, None])
    count = jnp.where(stops.any(axis=1), stops.argmax(axis=1) + 1, count)
    new_scores = jnp.take_along_axis(logits, new[..., None], axis=-1)[..., 0] - jax.nn.logsumexp(logits, axis=-1)
    after = lengths + count
    return _State(
        calls=state.calls + 1,
        tokens=tokens.at[rows[:, None], lengths[:, None] + steps].set(new),  # never read after the end of a sequence
        lengths=after,
        scores=state.scores + jnp.where(steps < count[:, None], new_scores, 0).sum(axis=1),
        done=done | stops.any(axis=1) | (after == setting.ends),
        cache=cache.rewind(after - 1),
        draft_cache=draft_cache.rewind(after - 1),
        checked=state.checked + jnp.minimum(count, setting.num_drafted),
        accepted=state.accepted + jnp.minimum(count, kept),
    )


def _draft(setting, state, keys):
    """Return the sequences with N drafted tokens, these [B, N], their probabilities [B, N, V] and the draft's cache."""
    rows, lengths, count = jnp.arange(len(state.lengths)), state.lengths, setting.num_drafted
    noise = None
    if not setting.greedy:  # one call for all drafted tokens
        sizes = count, setting.vocab_size
        noise = jax.vmap(lambda key: jax.random.gumbel(key, sizes))(keys).swapaxes(0, 1)

    def propose(carry, inputs):
        (tokens, cache), (i, noise) = carry, inputs
        logits, cache = setting.draft(tokens, lengths[:, None] + i - 1, cache)
        logits = setting.processed(logits[:, 0], tokens, lengths + i)
        token = (logits if setting.greedy else logits + noise).argmax(axis=-1)
        q = None if setting.greedy else jax.nn.softmax(logits)
        return (tokens.at[rows, lengths + i].set(token), cache), (token, q)

    (tokens, cache), chosen = jax.lax.scan(propose, (state.tokens, state.draft_cache), (jnp.arange(count), noise))
    # Append the last token to the cache too. XLA removes the computation of the unused logits.
    _, cache = setting.draft(tokens, lengths[:, None] - 1 + count, cache)
    return tokens, *jax.tree.map(lambda x: x.swapaxes(0, 1), chosen), cache
