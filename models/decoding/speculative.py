"""Speculative decoding (arXiv 2211.17192): a draft model proposes tokens; the target model verifies them in one call.

A drafted token is accepted with probability min(1, p / q), where p and q are its probabilities under the target and the
draft model. The first rejected one is replaced by a sample from norm(max(0, p - q)); if all are accepted, the target
model adds one. The resulting distribution is exactly p (appendix A.1). p and q are probabilities after all logits
processors. In greedy search, drafted tokens are accepted up to the first one that differs from the most probable token
of the target model.
"""

from functools import partial
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int
from numpy.typing import ArrayLike

from lineage.models.decoding.beam_search import Decode
from lineage.models.decoding.generate import (
    CacheFormat,
    Generation,
    Running,
    decode_at,
    prefill,
    separate_layers,
    validate_prompts,
)
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
    first_index: int = 0,
    pad_token: int = 0,
    cache_format: CacheFormat = None,
    **processors,
) -> Speculation:
    """Generate as `generate` does without beam search, with fewer calls of the model.

    Args:
        draft, draft_variables: draft model and its variables: a faster decoder with the same vocabulary.
        num_drafted: number of tokens that the draft model proposes at a time.
        first_index, cache_format: as in `generate`; the format is that of both caches.

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
    indices = np.arange(first_index, first_index + len(prompts), dtype=np.uint32)
    scalars = np.uint32(seed % 2**32), np.int32(pad_token)
    return _speculate(models, variables, prompts, lengths, inputs, indices, processors, *scalars, **static)


class _State(NamedTuple):
    """State of the loop; the caches hold all tokens of each sequence but the last."""

    running: Running
    draft_cache: Any
    calls: Int[Array, ""]
    checked: Int[Array, "B"]
    accepted: Int[Array, "B"]


class _Setting(NamedTuple):
    """Constants of the loop."""

    target: Decode
    draft: Decode
    processors: LogitsProcessors
    seed: Array
    num_drafted: int
    vocab_size: int

    @property
    def greedy(self) -> bool:
        return self.processors.temperature is None


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
def _speculate(
    models, variables, prompts, lengths, inputs, indices, processors, seed, pad_token, num_drafted, **options
):
    variables = [separate_layers(*pair) for pair in zip(models, variables)]
    options["rewinds"] = num_drafted
    prefilled = [prefill(*pair, prompts, lengths, inputs, **options) for pair in zip(models, variables)]
    (tokens, starts, cache, memory), (_, _, draft_cache, draft_memory) = prefilled
    for kind in (type(cache), type(draft_cache)):
        check(hasattr(kind, "rewind"), f"a {kind.__name__} cannot be rewound, as speculative decoding requires.")
    target = partial(decode_at, models[0], variables[0], memory)
    draft = partial(decode_at, models[1], variables[1], draft_memory)
    setting = _Setting(target, draft, processors, seed, num_drafted, models[0].vocab_size)

    running = Running.begin(tokens, starts, starts + options["max_new_tokens"], indices, cache.rewind(starts - 1))
    zeros = jnp.zeros_like(starts)
    start = _State(running, draft_cache.rewind(starts - 1), 0, zeros, zeros)
    end = jax.lax.while_loop(lambda state: ~state.running.done.all(), partial(_advance, setting), start)
    running = end.running
    generation = Generation.padded(running.tokens, running.lengths, running.scores, pad_token)
    return Speculation(generation, end.checked, end.accepted, end.calls)


def _advance(setting, state):
    """Draft and verify tokens, and append the accepted ones and one more to each sequence."""
    running, draft_cache, *_ = state
    lengths, done = running.lengths, running.done
    rows, steps = jnp.arange(len(lengths)), jnp.arange(setting.num_drafted + 1)
    keys = None if setting.greedy else row_keys(setting.seed, state.calls, running.indices)
    tokens, drafted, q, draft_cache = _draft(setting, running, draft_cache, keys)

    logits, cache = setting.target(tokens, lengths[:, None] - 1 + steps, running.cache)
    before = lengths + steps[:, None]
    processed = jax.vmap(setting.processors, (1, None, 0, 0), 1)(logits, tokens, before, before - running.starts)
    if setting.greedy:
        new = processed.argmax(axis=-1)
        kept = jnp.cumprod(new[:, :-1] == drafted, axis=1).sum(axis=1)
    else:
        keys = jax.vmap(jax.random.fold_in, (0, None))(keys, len(steps))
        kept, token = jax.vmap(verify)(keys, jax.nn.softmax(processed), q, drafted)
        new = jnp.pad(drafted, [(0, 0), (0, 1)]).at[rows, kept].set(token)

    count = jnp.where(done, 0, jnp.minimum(kept + 1, running.ends - lengths))
    stops = setting.processors.stops(new) & (steps < count[:, None])
    count = jnp.where(stops.any(axis=1), stops.argmax(axis=1) + 1, count)
    new_scores = jnp.take_along_axis(logits, new[..., None], axis=-1)[..., 0] - jax.nn.logsumexp(logits, axis=-1)
    after = lengths + count
    running = running._replace(
        tokens=tokens.at[rows[:, None], lengths[:, None] + steps].set(new),  # never read after the end of a sequence
        lengths=after,
        scores=running.scores + jnp.where(steps < count[:, None], new_scores, 0).sum(axis=1),
        done=done | stops.any(axis=1) | (after == running.ends),
        cache=cache.rewind(after - 1),
    )
    return _State(
        running=running,
        draft_cache=draft_cache.rewind(after - 1),
        calls=state.calls + 1,
        checked=state.checked + jnp.minimum(count, setting.num_drafted),
        accepted=state.accepted + jnp.minimum(count, kept),
    )


def _draft(setting, running, cache, keys):
    """Return the sequences with N drafted tokens, these [B, N], their probabilities [B, N, V] and the draft's cache."""
    rows, lengths, count = jnp.arange(len(running.lengths)), running.lengths, setting.num_drafted
    noise = None
    if not setting.greedy:  # one call for all drafted tokens
        sizes = count, setting.vocab_size
        noise = jax.vmap(lambda key: jax.random.gumbel(key, sizes))(keys).swapaxes(0, 1)

    def propose(carry, inputs):
        (tokens, cache), (i, noise) = carry, inputs
        logits, cache = setting.draft(tokens, lengths[:, None] + i - 1, cache)
        logits = setting.processors(logits[:, 0], tokens, lengths + i, lengths + i - running.starts)
        token = (logits if setting.greedy else logits + noise).argmax(axis=-1)
        q = None if setting.greedy else jax.nn.softmax(logits)
        return (tokens.at[rows, lengths + i].set(token), cache), (token, q)

    (tokens, cache), chosen = jax.lax.scan(propose, (running.tokens, cache), (jnp.arange(count), noise))
    # Append the last token to the cache too. XLA removes the computation of the unused logits.
    _, cache = setting.draft(tokens, lengths[:, None] - 1 + count, cache)
    return tokens, *jax.tree.map(lambda x: x.swapaxes(0, 1), chosen), cache
