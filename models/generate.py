"""Text from a decoder: greedy, sampled or by beam search, on the device in one compiled loop.

A decoder is any model with the methods

* `encode(inputs) -> memory`: a pytree that is computed once (None for a decoder-only model);
* `init_cache(batch_size, max_length) -> cache`: a pytree, empty, with room for that many tokens in each row;
* `decode(tokens [B, T], cache, memory) -> (logits [B, T, V], cache)`: the logits after each of T more tokens.

Cache and memory alone know which of their axes is the batch's, so they have the operations that the searches need:
`gather(rows)`, those rows in that order (beam search), and the cache `rewind(length)`, what it was after the first
`length` tokens of each row (prompts of different lengths). `models.layers.cache` has such: `Cache`, `States`, `Memory`.

What the model computes becomes what is chosen from through processors, pure functions of the logits and of the tokens
so far, in the order repetition penalty, temperature, top-k, top-p.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int
from numpy.typing import ArrayLike

NEVER = -1e9  # the score of what must not be chosen; finite, so that sums and quotients of it are numbers


class Generation(NamedTuple):
    """What came out: each row is its prompt, the new tokens (a stop token among them) and padding.

    `lengths` counts the prompt and the new tokens; S is the prompts' length plus `max_new_tokens`. `scores` is the sum
    of the new tokens' log-probabilities under the model; of beam search, that sum after the repetition penalty, over
    the number of new tokens to the power of the length penalty.
    """

    tokens: Int[Array, "B S"]
    lengths: Int[Array, "B"]
    scores: Float[Array, "B"]


def repetition_penalty(
    logits: Float[Array, "B V"], tokens: Int[Array, "B S"], lengths: Int[Array, "B"], penalty: Float[Array, ""] | float
) -> Float[Array, "B V"]:
    """Divides the positive, multiplies the negative logits of a row's tokens (arXiv 1909.05858, section 4.1)."""
    written = jnp.arange(tokens.shape[1]) < lengths[:, None]
    rows = jnp.arange(tokens.shape[0])[:, None]
    seen = jnp.zeros(logits.shape, bool).at[rows, tokens].max(written)
    return jnp.where(seen, jnp.where(logits < 0, logits * penalty, logits / penalty), logits)


def top_k(logits: Float[Array, "B V"], k: int) -> Float[Array, "B V"]:
    """Leaves the k largest, and what equals the least of them; the others become -inf (arXiv 1805.04833)."""
    least = jax.lax.top_k(logits, min(k, logits.shape[-1]))[0][:, -1:]
    return jnp.where(logits < least, -jnp.inf, logits)


def top_p(logits: Float[Array, "B V"], p: Float[Array, ""] | float) -> Float[Array, "B V"]:
    """Leaves the fewest tokens whose probabilities sum to p or more; the others become -inf (arXiv 1904.09751)."""
    order = jnp.argsort(-logits, axis=-1)
    probabilities = jnp.take_along_axis(jax.nn.softmax(logits), order, axis=-1)
    before = jnp.cumsum(probabilities, axis=-1) - probabilities
    kept = jnp.put_along_axis(jnp.zeros(logits.shape, bool), order, before < p, axis=-1, inplace=False)
    return jnp.where(kept, logits, -jnp.inf)


def generate(
    model: nn.Module,
    variables: Any,
    prompts: ArrayLike,
    lengths: ArrayLike | None = None,
    *,
    max_new_tokens: int,
    inputs: Any = None,
    seed: int = 0,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    repetition_penalty: float = 1.0,
    stop_tokens: Sequence[int] = (),
    pad_token: int = 0,
    num_beams: int = 1,
    length_penalty: float = 1.0,
) -> Generation:
    """Continues every prompt until a stop token or for `max_new_tokens`.

    The first call with a model, shapes, `max_new_tokens`, `top_k`, `num_beams` and kinds of processors compiles; calls
    that differ in anything else (weights, tokens, lengths, seed, temperature, top-p, penalties) do not. A row's tokens
    depend on its prompt, the seed and its place in the batch, not on the other rows: to draw several samples of a
    prompt, repeat it. Semantics and beam search are those of `transformers.GenerationMixin.generate`.

    Args:
        model, variables: a decoder, see above, and its weights.
        prompts: [B, T], padded on the right with anything.
        lengths: [B], of the prompts, each at least 1; None means that there is no padding.
        inputs: what `model.encode` takes.
        seed: of the samples.
        temperature: what divides the logits before sampling; 0 takes the likeliest token, as does beam search.
        top_k, top_p: sample from the likeliest tokens only, see the functions of these names; None: from all.
        repetition_penalty: above 1 makes tokens less likely that the row has, prompt included; see the function.
        stop_tokens: each ends the row it appears in.
        pad_token: what fills a row up.
        num_beams: more than 1 is beam search; the best hypothesis is returned.
        length_penalty: of beam search: above 0 favours long hypotheses, below 0 short ones, see `Generation`.

    Raises:
        ValueError: an argument is out of its range, or prompt and new tokens are longer than the model's sequences.
    """
    prompts = np.asarray(prompts)
    _check(
        prompts.ndim == 2 and prompts.size > 0, f"prompts must be [rows, tokens] and not empty, not {prompts.shape}."
    )
    if lengths is not None:
        lengths = np.asarray(lengths, np.int32)
        longest = prompts.shape[1]
        _check(lengths.shape == prompts.shape[:1], f"{len(prompts)} prompts need as many lengths, not {lengths.shape}.")
        _check(lengths.min() >= 1, f"prompt {lengths.argmin()} is empty: a prompt has at least 1 token.")
        _check(lengths.max() <= longest, f"a prompt of {lengths.max()} tokens does not fit an array of {longest}.")
    real = prompts if lengths is None else prompts[np.arange(longest) < lengths[:, None]]
    _check((real == real.astype(np.int32)).all(), "prompts must be whole numbers, the ids of tokens.")
    last = getattr(model, "vocab_size", 2**31) - 1
    _check(0 <= real.min() <= real.max() <= last, f"tokens {real.min()} to {real.max()}: the model has 0 to {last}.")
    prompts = prompts.astype(np.int32)
    _check(max_new_tokens >= 1, f"max_new_tokens must be at least 1, not {max_new_tokens}.")
    _check(temperature >= 0, f"temperature must be 0 (greedy) or more, not {temperature}.")
    _check(top_k is None or top_k >= 1, f"top_k must be at least 1, or None for all tokens, not {top_k}.")
    _check(top_p is None or 0 < top_p <= 1, f"top_p must be above 0 and at most 1, not {top_p}.")
    _check(repetition_penalty > 0, f"repetition_penalty must be above 0 (1 is none), not {repetition_penalty}.")
    _check(num_beams >= 1, f"num_beams must be at least 1, not {num_beams}.")
    _check(num_beams == 1 or temperature == 0, f"beam search does not sample: set temperature to 0, not {temperature}.")
    sampled = temperature > 0
    return _generate(
        model,
        variables,
        prompts,
        lengths,
        inputs,
        np.uint32(seed % 2**32),
        np.asarray(stop_tokens, np.int32),
        np.int32(pad_token),
        float(length_penalty),
        # None, a different type to the compiler, leaves a processor out.
        penalty=float(repetition_penalty) if repetition_penalty != 1 else None,
        temperature=float(temperature) if sampled else None,
        k=top_k if sampled else None,
        p=float(top_p) if sampled and top_p is not None and top_p < 1 else None,
        num_beams=num_beams,
        max_new_tokens=max_new_tokens,
    )


def _check(condition, message):
    if not condition:
        raise ValueError(message)


@partial(jax.jit, static_argnames=("model", "k", "num_beams", "max_new_tokens"))
def _generate(
    model, variables, prompts, lengths, inputs, seed, stop_tokens, pad_token, length_penalty,
    *, penalty, temperature, k, p, num_beams, max_new_tokens
):  # fmt: skip
    def process(logits, tokens, lengths):
        if penalty is not None:
            logits = repetition_penalty(logits, tokens, lengths, penalty)
        if temperature is not None:
            logits = logits / temperature
        if k is not None:
            logits = top_k(logits, k)
        return logits if p is None else top_p(logits, p)

    def sample(logits, step):
        if temperature is None:
            return jnp.argmax(logits, axis=-1)
        fold = jax.vmap(jax.random.fold_in, (None, 0))
        keys = fold(jax.random.fold_in(jax.random.key(seed), step), jnp.arange(len(logits)))
        return jax.vmap(jax.random.categorical)(keys, logits)

    batch, longest = prompts.shape
    places = jnp.arange(longest + max_new_tokens)
    memory = model.apply(variables, inputs, method="encode")
    cache = model.apply(variables, batch, len(places), method="init_cache")
    starts = jnp.full(batch, longest) if lengths is None else lengths
    tokens = jnp.pad(prompts, ((0, 0), (0, max_new_tokens)))
    tokens = jnp.where(places < starts[:, None], tokens, 0)  # padding, too, goes through the model: valid tokens only
    if longest > 1:
        # All but the last token, whose logits are the first that anyone looks at: those of the others cost nothing.
        _, cache = model.apply(variables, tokens[:, : longest - 1], cache, memory, method="decode")
        cache = cache if lengths is None else cache.rewind(starts - 1)

    def decode(tokens, lengths, cache, memory):
        last = jnp.take_along_axis(tokens, lengths[:, None] - 1, axis=1)
        logits, cache = model.apply(variables, last, cache, memory, method="decode")
        return logits[:, -1].astype(jnp.float32), cache

    if num_beams == 1:
        decode = partial(decode, memory=memory)
        tokens, lengths, scores = _one_path(decode, process, sample, cache, tokens, starts, stop_tokens, max_new_tokens)
    else:
        rows = jnp.repeat(jnp.arange(batch), num_beams)
        decode = partial(decode, memory=None if memory is None else memory.gather(rows))
        tokens, lengths, scores = _beam_search(
            decode, process, cache.gather(rows), tokens, starts, stop_tokens, max_new_tokens, num_beams, length_penalty
        )
    return Generation(jnp.where(places < lengths[:, None], tokens, pad_token), lengths, scores)


def _one_path(decode, process, sample, cache, tokens, lengths, stop_tokens, max_new_tokens):
    """Each row goes on with the token that `sample` takes."""
    rows = jnp.arange(len(tokens))

    def unfinished(state):
        step, _, _, _, done, _ = state
        return (step < max_new_tokens) & ~done.all()

    def advance(state):
        step, tokens, lengths, scores, done, cache = state
        logits, cache = decode(tokens, lengths, cache)
        token = sample(process(logits, tokens, lengths), step).astype(jnp.int32)
        tokens = tokens.at[rows, lengths].set(token)  # beyond the end of a row that is done, where nobody looks
        scores = scores + jnp.where(done, 0, jax.nn.log_softmax(logits)[rows, token])
        return step + 1, tokens, lengths + ~done, scores, done | jnp.isin(token, stop_tokens), cache

    start = 0, tokens, lengths, jnp.zeros(len(tokens)), jnp.zeros(len(tokens), bool), cache
    _, tokens, lengths, scores, _, _ = jax.lax.while_loop(unfinished, advance, start)
    return tokens, lengths, scores


class _Hypotheses(NamedTuple):
    """N continuations of each row, the best first."""

    tokens: Int[Array, "B N S"]
    scores: Float[Array, "B N"]
    new: Int[Array, "B N"]  # how many tokens are new; 0: none has been found yet

    def best(self, n):
        """The n with the highest scores, and which they are."""
        scores, chosen = jax.lax.top_k(self.scores, n)
        tokens = jnp.take_along_axis(self.tokens, chosen[..., None], axis=1)
        return _Hypotheses(tokens, scores, jnp.take_along_axis(self.new, chosen, axis=1)), chosen


def _beam_search(decode, process, cache, tokens, starts, stop_tokens, max_new_tokens, num_beams, length_penalty):
    """The `num_beams` best open continuations of each row go on; the best that ended is the result.

    A row goes on until no open one, at its present length, would score more than the worst of `num_beams` ended ones.
    """
    batch, length = tokens.shape
    rows = jnp.arange(batch)[:, None]
    # With so many candidates, `num_beams` remain even if all of them could end.
    keep = max(2, 1 + len(stop_tokens)) * num_beams

    def unfinished(state):
        step, _, _, improvable, _ = state
        return (step < max_new_tokens) & improvable.any()

    def advance(state):
        step, running, ended, improvable, cache = state
        flat, lengths = running.tokens.reshape(-1, length), jnp.repeat(starts + step, num_beams)
        logits, cache = decode(flat, lengths, cache)
        scores = process(jax.nn.log_softmax(logits), flat, lengths).reshape(batch, num_beams, -1)
        vocab_size = scores.shape[-1]
        scores = (scores + running.scores[..., None]).reshape(batch, -1)

        scores, chosen = jax.lax.top_k(scores, min(keep, scores.shape[1]))
        beam, token = chosen // vocab_size, chosen % vocab_size
        candidates = running.tokens[rows, beam].at[rows, jnp.arange(chosen.shape[1]), starts[:, None] + step].set(token)
        count = jnp.full(chosen.shape, step + 1)
        stops = jnp.isin(token, stop_tokens) | (step + 1 == max_new_tokens)

        # What was not among the best `num_beams` is there to go on, not to end.
        ends = stops & (jnp.arange(chosen.shape[1]) < num_beams) & improvable[:, None]
        normal = (step + 1.0) ** length_penalty
        new = _Hypotheses(candidates, jnp.where(ends, scores / normal, NEVER), jnp.where(ends, count, 0))
        ended, _ = jax.tree.map(lambda *x: jnp.concatenate(x, axis=1), ended, new).best(num_beams)

        running, survivors = _Hypotheses(candidates, scores + jnp.where(stops, NEVER, 0), count).best(num_beams)
        cache = cache.gather((rows * num_beams + beam[rows, survivors]).reshape(-1))
        worst = jnp.where((ended.new > 0).all(axis=1), ended.scores[:, -1], NEVER)
        return step + 1, running, ended, improvable & (running.scores[:, 0] / normal > worst), cache

    tokens = jnp.repeat(tokens[:, None], num_beams, axis=1)
    count, never = jnp.zeros((batch, num_beams), jnp.int32), jnp.full((batch, num_beams), NEVER)
    # The beams start equal: only the first may be continued at first.
    running, ended = _Hypotheses(tokens, never.at[:, 0].set(0), count), _Hypotheses(tokens, never, count)
    start = 0, running, ended, jnp.ones(batch, bool), cache
    _, _, ended, _, _ = jax.lax.while_loop(unfinished, advance, start)
    return ended.tokens[:, 0], starts + ended.new[:, 0], ended.scores[:, 0]
