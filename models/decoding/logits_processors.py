"""Logits processors: functions that change the logits before the next token is chosen.

Pure functions of the logits and of the tokens so far, and `LogitsProcessors`, which applies them in the order of
`transformers`: repetition penalty, n-gram blocking, excluded tokens, minimum length, forced first token, temperature,
top-k, top-p.
"""

import math
from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int, Integer

Logits = Float[Array, "B V"]
Tokens = Int[Array, "B S"]
Lengths = Int[Array, "B"]
Number = Float[Array, ""] | float


def repetition_penalty(logits: Logits, tokens: Tokens, lengths: Lengths, penalty: Number) -> Logits:
    """Divide the positive and multiply the negative logits of a sequence's tokens (arXiv 1909.05858, section 4.1)."""
    seen = _occurrences(logits, tokens, jnp.arange(tokens.shape[1]) < lengths[:, None])
    return jnp.where(seen, jnp.where(logits < 0, logits * penalty, logits / penalty), logits)


def no_repeat_ngrams(logits: Logits, tokens: Tokens, lengths: Lengths, size: int) -> Logits:
    """Set the logits of tokens that would repeat an n-gram of n = `size` to -inf (arXiv 1705.04304, section 2.5)."""
    positions = jnp.arange(tokens.shape[1])
    repeats = (positions >= size - 1) & (positions < lengths[:, None])
    for back in range(1, size):  # whether the tokens before a position equal the last ones
        last = jnp.take_along_axis(tokens, jnp.maximum(lengths - back, 0)[:, None], axis=1)
        repeats &= jnp.roll(tokens, back, axis=1) == last
    return jnp.where(_occurrences(logits, tokens, repeats), -jnp.inf, logits)


def _occurrences(logits, tokens, where):
    """Return a mask [B, V] of the tokens that occur in a sequence at a position where `where` [B, S] is True."""
    rows = jnp.arange(tokens.shape[0])[:, None]
    return jnp.zeros(logits.shape, bool).at[rows, tokens].max(where)


def top_k(logits: Logits, k: int) -> Logits:
    """Keep the k largest logits and ties with the last of them; set the others to -inf (arXiv 1805.04833)."""
    kth_largest = jax.lax.top_k(logits, min(k, logits.shape[-1]))[0][:, -1:]
    return jnp.where(logits < kth_largest, -jnp.inf, logits)


def top_p(logits: Logits, p: Number) -> Logits:
    """Keep the fewest tokens with a total probability of at least p; set the others to -inf (arXiv 1904.09751)."""
    order = jnp.argsort(-logits, axis=-1)
    probabilities = jnp.take_along_axis(jax.nn.softmax(logits), order, axis=-1)
    before = jnp.cumsum(probabilities, axis=-1) - probabilities
    kept = jnp.put_along_axis(jnp.zeros(logits.shape, bool), order, before < p, axis=-1, inplace=False)
    return jnp.where(kept, logits, -jnp.inf)


@struct.dataclass
class LogitsProcessors:
    """The logits processors of a generation, and the tokens that end a sequence.

    None disables a processor. Enabling or disabling one causes recompilation; changing its value does not. Tokens are
    sampled unless `temperature` is None, which selects the most probable token.
    """

    stop_tokens: Int[Any, "E"]
    repetition_penalty: Any
    no_repeat_ngram_size: int | None = struct.field(pytree_node=False)
    excluded_tokens: Any
    min_new_tokens: Any
    forced_first_token: Any
    temperature: Any
    top_k: int | None = struct.field(pytree_node=False)
    top_p: Any

    @classmethod
    def create(
        cls,
        model: nn.Module,
        *,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        repetition_penalty: float = 1.0,
        no_repeat_ngram_size: int | None = None,
        min_new_tokens: int = 0,
        forced_first_token: int | None = None,
        stop_tokens: Sequence[int] = (),
        excluded_tokens: Sequence[int] = (),
    ) -> "LogitsProcessors":
        """Return the processors for a model with the given options; raise ValueError if one is out of its range.

        Args:
            model: the decoder, with `vocab_size` tokens.
            temperature: divisor of the logits before sampling; 0, which beam search requires, disables sampling.
            top_k, top_p: sample from the most probable tokens only, see the functions of these names; None: from all.
            repetition_penalty: a value above 1 makes tokens of the prompt and generated tokens less probable.
            no_repeat_ngram_size: size of the n-grams that may occur only once, prompt included; None: no limit.
            min_new_tokens: number of new tokens before which stop tokens are excluded.
            forced_first_token: the first new token, such as the language token of multilingual translation models.
            stop_tokens: tokens that end the sequence.
            excluded_tokens: tokens that are never generated, such as the padding token of the published Marian models.
        """
        size, first, last = no_repeat_ngram_size, forced_first_token, model.vocab_size - 1
        finite = 0 <= temperature < math.inf
        check(finite, f"temperature must be finite and at least 0 (greedy), not {temperature}.")
        check(top_k is None or top_k >= 1, f"top_k must be at least 1, or None for all tokens, not {top_k}.")
        check(top_p is None or 0 < top_p <= 1, f"top_p must be above 0 and at most 1, not {top_p}.")
        finite = 0 < repetition_penalty < math.inf
        check(finite, f"repetition_penalty must be finite and above 0 (1 is none), not {repetition_penalty}.")
        check(size is None or size >= 1, f"no_repeat_ngram_size must be at least 1, or None, not {size}.")
        check(min_new_tokens >= 0, f"min_new_tokens must be at least 0, not {min_new_tokens}.")
        check(first is None or 0 <= first <= last, f"forced_first_token is {first}: it must be from 0 to {last}.")
        outside = [token for token in excluded_tokens if not 0 <= token <= last]
        check(not outside, f"excluded_tokens has {outside[:1]}: its tokens must be from 0 to {last}.")
        sampled = temperature > 0
        return cls(
            stop_tokens=np.asarray(stop_tokens, np.int32),
            repetition_penalty=float(repetition_penalty) if repetition_penalty != 1 else None,
            no_repeat_ngram_size=size,
            excluded_tokens=np.asarray(excluded_tokens, np.int32) if len(excluded_tokens) else None,
            min_new_tokens=np.int32(min_new_tokens) if min_new_tokens else None,
            forced_first_token=None if first is None else np.int32(first),
            temperature=float(temperature) if sampled else None,
            top_k=top_k if sampled else None,
            top_p=float(top_p) if sampled and top_p is not None and top_p < 1 else None,
        )

    def __call__(self, logits: Logits, tokens: Tokens, lengths: Lengths, new: Int[Array, "#B"]) -> Logits:
        """Return the processed logits of the token after the first `lengths` tokens of each sequence.

        `new` of these tokens were generated. If n-gram blocking, `excluded_tokens` and the minimum length together
        exclude every token, they are ignored.
        """
        original = logits
        if self.repetition_penalty is not None:
            logits = repetition_penalty(logits, tokens, lengths, self.repetition_penalty)
        if self.no_repeat_ngram_size is not None:
            logits = no_repeat_ngrams(logits, tokens, lengths, self.no_repeat_ngram_size)
        vocabulary = jnp.arange(logits.shape[-1])
        if self.excluded_tokens is not None:
            logits = jnp.where(jnp.isin(vocabulary, self.excluded_tokens), -jnp.inf, logits)
        if self.min_new_tokens is not None:
            early = (new < self.min_new_tokens)[:, None] & self.stops(vocabulary)
            logits = jnp.where(early, -jnp.inf, logits)
        logits = jnp.where(jnp.isneginf(logits).all(axis=-1, keepdims=True), original, logits)
        if self.forced_first_token is not None:
            forced = jnp.where(vocabulary == self.forced_first_token, 0.0, -jnp.inf)
            logits = jnp.where((new == 0)[:, None], forced, logits)
        if self.temperature is not None:
            logits = logits / self.temperature
        if self.top_k is not None:
            logits = top_k(logits, self.top_k)
        return logits if self.top_p is None else top_p(logits, self.top_p)

    def stops(self, tokens: Int[Array, "*B"]) -> Bool[Array, "*B"]:
        """Return True for the tokens that end a sequence."""
        return jnp.isin(tokens, self.stop_tokens)


def row_keys(
    seed: Integer[Array, ""], steps: Integer[Array, "B"] | Integer[Array, ""], indices: Integer[Array, "B"]
) -> Array:
    """Return the random key of a step of each sequence, which depends on its index but not on other sequences."""
    keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(seed), jnp.broadcast_to(steps, indices.shape))
    return jax.vmap(jax.random.fold_in)(keys, indices)


def check(condition: Any, message: str) -> None:
    """Raise ValueError with the message unless the condition holds."""
    if not condition:
        raise ValueError(message)
