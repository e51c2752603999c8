"""Text generation by greedy search, sampling or beam search, on the device in one compiled loop.

A decoder is any model with the field `vocab_size` and the methods

* `encode(inputs) -> memory`: a pytree that is computed once (None for a decoder-only model);
* `init_cache(batch_size, max_length, rewinds) -> cache`: an empty pytree with room for `max_length` tokens of each
  sequence, which may be rewound by at most `rewinds` tokens;
* `decode(tokens [B, T], cache, memory) -> (logits [B, T, V], cache)`: the logits after each of T more tokens.

Cache and memory have the methods `gather(rows)`, which selects and reorders sequences (beam search), and
`put(rows, others)`, which replaces sequences (continuous batching). The cache also has `until(length)`, which makes the
next call keep at most the first `length` tokens of each sequence (prompts of different lengths), and `rewind(length)`,
which removes all but the first `length` tokens (speculative decoding). See `models.layers.cache`.
"""

import math
from functools import partial
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Integer
from numpy.typing import ArrayLike

from lineage.models.decoding.beam_search import Decode, beam_search
from lineage.models.decoding.logits_processors import LogitsProcessors, check, row_keys
from lineage.models.kernels.compiler import computed_once

CacheFormat = str | None  # "int8" or None


class Generation(NamedTuple):
    """Generated sequences.

    Attributes:
        tokens: the prompt, the new tokens (including the stop token) and padding; S is the width of the prompts plus
            `max_new_tokens`.
        lengths: number of tokens of the prompt and of the continuation.
        scores: sum of the new tokens' log-probabilities under the model. In beam search, of those after all logits
            processors, divided by ((k + n) / (k + 1))^length_penalty for n new tokens and k = `length_offset`.
    """

    tokens: Int[Array, "B S"]
    lengths: Int[Array, "B"]
    scores: Float[Array, "B"]

    @classmethod
    def padded(cls, tokens, lengths, scores, pad_token) -> "Generation":
        """Return sequences whose tokens after their lengths are replaced by a padding token."""
        real = jnp.arange(tokens.shape[1]) < lengths[:, None]
        return cls(jnp.where(real, tokens, pad_token), lengths, scores)


def generate(
    model: nn.Module,
    variables: Any,
    prompts: ArrayLike,
    lengths: ArrayLike | None = None,
    *,
    max_new_tokens: int,
    inputs: Any = None,
    seed: int = 0,
    first_index: int = 0,
    pad_token: int = 0,
    num_beams: int = 1,
    length_penalty: float = 1.0,
    length_offset: int = 0,
    cache_format: CacheFormat = None,
    **processors,
) -> Generation:
    """Continue every prompt until a stop token, or by `max_new_tokens` tokens.

    A new model, shape, `max_new_tokens`, `top_k`, `num_beams`, n-gram size or set of processors causes compilation;
    other values (weights, tokens, lengths, seed, temperature, top-p, penalties) do not. The tokens of a sequence depend
    on its prompt, the seed and its index, not on other sequences: to draw several samples of a prompt, repeat it.
    Sampling and beam search follow `transformers.GenerationMixin.generate`.

    Args:
        model, variables: a decoder (see the module's documentation) and its variables.
        prompts: [B, T], padded on the right with any tokens.
        lengths: [B], lengths of the prompts, each at least 1; None: no prompt is padded.
        max_new_tokens: maximum number of new tokens of a sequence.
        inputs: the argument of `model.encode`.
        first_index: index of the first sequence, for the later batches of a longer list.
        pad_token: token that fills the sequences after their last token.
        num_beams: more than 1 is beam search; the best hypothesis is returned.
        length_penalty: exponent in beam search: above 0 favors long hypotheses, below 0 short ones, see `Generation`.
        length_offset: k in the normalization of beam search, see `Generation`: 0 as in `transformers`, 5 in GNMT (arXiv
            1609.08144, equation 14).
        cache_format: "int8" stores keys and values as 8-bit integers, with a scale for each token and head; None stores
            them in the dtype of the parameters.
        processors: `temperature`, `top_k`, `top_p`, `stop_tokens`..., see `LogitsProcessors.create`.

    Raises:
        ValueError: an argument is out of its range, or prompt and new tokens exceed the model's `max_length`.
    """
    prompts, lengths = validate_prompts(model, prompts, lengths, max_new_tokens)
    check(num_beams >= 1, f"num_beams must be at least 1, not {num_beams}.")
    temperature = processors.get("temperature", 1.0)
    check(num_beams == 1 or temperature == 0, f"beam search does not sample: set temperature to 0, not {temperature}.")
    check(math.isfinite(length_penalty), f"length_penalty must be finite, not {length_penalty}.")
    check(0 <= length_offset < math.inf, f"length_offset must be finite and at least 0, not {length_offset}.")
    processors = LogitsProcessors.create(model, **processors)
    indices = np.arange(first_index, first_index + len(prompts), dtype=np.uint32)
    scalars = np.uint32(seed % 2**32), np.int32(pad_token), (float(length_penalty), float(length_offset))
    static = {"num_beams": num_beams, "max_new_tokens": max_new_tokens, "cache_format": cache_format}
    return _generate(model, variables, prompts, lengths, inputs, indices, processors, *scalars, **static)


def best_of(
    best_of: int,
    model: nn.Module,
    variables: Any,
    prompts: ArrayLike,
    lengths: ArrayLike | None = None,
    *,
    inputs: Any = None,
    first_index: int = 0,
    contrast: tuple[nn.Module, Any] | None = None,
    **options,
) -> Generation:
    """Return, of several samples of each prompt, the one whose new tokens have the largest mean log-probability.

    Args:
        best_of: number of samples of each prompt.
        first_index: index of the first prompt.
        contrast: a weaker model with the same vocabulary and its variables, whose mean log-probability is subtracted.
            This is the objective of contrastive decoding (arXiv 2210.15097, equation 1), averaged over the tokens;
            `top_p` takes the place of its plausibility constraint.
        options: other arguments of `generate`.

    Raises:
        ValueError: as `generate`; or the contrast model has another number of tokens.
    """
    check(best_of >= 1, f"best_of must be at least 1, not {best_of}.")
    if contrast is not None:
        sizes = model.vocab_size, contrast[0].vocab_size
        message = f"the model has {sizes[0]} tokens and the contrast model {sizes[1]}: they must be equal."
        check(sizes[0] == sizes[1], message)
    options["first_index"] = first_index * best_of
    if best_of == 1:
        return generate(model, variables, prompts, lengths, inputs=inputs, **options)
    prompts, lengths = np.asarray(prompts), None if lengths is None else np.asarray(lengths)
    prompts, lengths, inputs = jax.tree.map(lambda a: np.repeat(a, best_of, axis=0), (prompts, lengths, inputs))
    out = generate(model, variables, prompts, lengths, inputs=inputs, **options)
    starts = np.full(len(prompts), prompts.shape[1]) if lengths is None else lengths
    scores = out.scores if contrast is None else out.scores - log_likelihood(*contrast, out, starts, inputs)
    best = (scores / (out.lengths - starts)).reshape(-1, best_of).argmax(axis=1)
    return jax.tree.map(lambda a: a[jnp.arange(len(best)) * best_of + best], out)


@partial(jax.jit, static_argnames="model")
def log_likelihood(
    model: nn.Module, variables: Any, generation: Generation, starts: Int[Array, "B"], inputs: Any = None
) -> Float[Array, "B"]:
    """Return the sum of the log-probabilities of the tokens after the first `starts` of each sequence."""
    positions = jnp.arange(generation.tokens.shape[1])
    real = positions < generation.lengths[:, None]
    tokens = jnp.where(real, generation.tokens, 0)
    cache = model.apply(variables, *tokens.shape, 0, method="init_cache")
    memory = model.apply(variables, inputs, method="encode")
    logits, _ = model.apply(variables, tokens[:, :-1], cache, memory, method="decode")
    scores = jnp.take_along_axis(jax.nn.log_softmax(logits.astype(jnp.float32)), tokens[:, 1:, None], axis=-1)
    new = real & (positions >= starts[:, None])
    return jnp.where(new[:, 1:], scores[..., 0], 0).sum(axis=1)


def validate_prompts(
    model: nn.Module, prompts: ArrayLike, lengths: ArrayLike | None, max_new_tokens: int
) -> tuple[Int[np.ndarray | Array, "B T"], Int[np.ndarray | Array, "B"] | None]:
    """Return prompts and lengths as int32, on their devices; raise ValueError if an argument is invalid."""
    arguments, prompts = (prompts, lengths), np.asarray(prompts)
    check(prompts.ndim == 2 and prompts.size > 0, f"prompts must be [rows, tokens] and not empty, not {prompts.shape}.")
    if lengths is not None:
        lengths = np.asarray(lengths, np.int32)
        rows, width = (len(prompts),), prompts.shape[1]
        check(lengths.shape == rows, f"lengths has shape {lengths.shape}: it must be {rows}, one for each prompt.")
        check(lengths.min() >= 1, f"prompt {lengths.argmin()} is empty: a prompt has at least 1 token.")
        longest = lengths.max()
        check(longest <= width, f"lengths contains {longest}: it must be at most {width}, the width of prompts.")
    real = prompts if lengths is None else prompts[np.arange(width) < lengths[:, None]]
    check((real == real.astype(np.int32)).all(), "prompts must be whole numbers, the ids of tokens.")
    low, high, last = real.min(), real.max(), model.vocab_size - 1
    check(0 <= low <= high <= last, f"prompts contain tokens {low} to {high}: they must be from 0 to {last}.")
    check(max_new_tokens >= 1, f"max_new_tokens must be at least 1, not {max_new_tokens}.")
    if isinstance(arguments[0], Array):
        return jax.tree.map(lambda array: array.astype(jnp.int32), arguments)
    return prompts.astype(np.int32), lengths


def prefill(
    model: nn.Module,
    variables: Any,
    prompts: Int[Array, "B T"],
    lengths: Int[Array, "B"] | None,
    inputs: Any,
    max_new_tokens: int,
    rewinds: int = 0,
    cache_format: CacheFormat = None,
) -> tuple[Int[Array, "B S"], Int[Array, "B"], Any, Any]:
    """Return the prompts padded for new tokens, their lengths, the cache without their last tokens, and the memory."""
    batch, width = prompts.shape
    positions = jnp.arange(width + max_new_tokens)
    cache, memory = empty(model, variables, inputs, batch, len(positions), rewinds, cache_format)
    starts = jnp.full(batch, width) if lengths is None else lengths
    tokens = jnp.pad(prompts, ((0, 0), (0, max_new_tokens)))
    tokens = jnp.where(positions < starts[:, None], tokens, 0)  # padding must be valid: it is embedded too
    if width > 1:
        # All but the last token, with which the loop begins. XLA removes the computation of unused logits.
        cache = cache if lengths is None else cache.until(starts - 1)
        _, cache = model.apply(variables, tokens[:, : width - 1], cache, memory, method="decode")
    return tokens, starts, cache, memory


def empty(
    model: nn.Module,
    variables: Any,
    inputs: Any,
    batch_size: int,
    max_length: int,
    rewinds: int = 0,
    cache_format: CacheFormat = None,
) -> tuple[Any, Any]:
    """Return an empty cache and the memory; raise ValueError if the model does not support the format."""
    memory = model.apply(variables, inputs, method="encode")
    cache = model.apply(variables, batch_size, max_length, rewinds, method="init_cache")
    if cache_format is None:
        return cache, memory
    check(cache_format == "int8", f"cache_format is {cache_format!r}: it must be 'int8', or None.")
    check(hasattr(cache, "in_8_bits"), f"cache_format is 'int8': a {type(cache).__name__} has no keys and values.")
    return cache.in_8_bits(), None if memory is None else memory.in_8_bits()


def separate_layers(model: nn.Module, variables: Any) -> Any:
    """Unstack the variables of a decoder's layers, for a loop over tokens, which must not slice them every time."""

    def split(tree, name, *rest):
        if name not in tree:
            return tree
        if rest:
            return {**tree, name: split(tree[name], *rest)}
        layers = tuple(jax.tree.map(lambda array, i=i: array[i], tree[name]) for i in range(group.count))
        return {**tree, name: computed_once(layers)}

    for group in model.layer_groups:
        if group.side == "decoder" and group.stacked:
            variables = {kind: split(tree, *group.path.split("/")) for kind, tree in variables.items()}
    return variables


def decode_at(
    model: nn.Module, variables: Any, memory: Any, tokens: Int[Array, "B S"], positions: Int[Array, "B T"], cache: Any
) -> tuple[Float[Array, "B T V"], Any]:
    """Decode the tokens at T positions of each sequence; return the logits after them, and the cache."""
    inputs = jnp.take_along_axis(tokens, positions, axis=1, mode="clip")
    logits, cache = model.apply(variables, inputs, cache, memory, method="decode")
    return logits.astype(jnp.float32), cache


@partial(jax.jit, static_argnames=("model", "num_beams", "max_new_tokens", "cache_format"))
def _generate(
    model, variables, prompts, lengths, inputs, indices, processors, seed, pad_token, penalty, num_beams, **options
):
    variables = separate_layers(model, variables)
    tokens, starts, cache, memory = prefill(model, variables, prompts, lengths, inputs, **options)
    batch, max_new_tokens = len(tokens), options["max_new_tokens"]
    if num_beams == 1:
        decode = partial(decode_at, model, variables, memory)
        running = Running.begin(tokens, starts, starts + max_new_tokens, indices, cache)
        running, _ = sample(decode, processors, seed, running, batch)
        return Generation.padded(running.tokens, running.lengths, running.scores, pad_token)
    rows = jnp.repeat(jnp.arange(batch), num_beams)
    decode = partial(decode_at, model, variables, None if memory is None else memory.gather(rows))
    settings, cache = (max_new_tokens, num_beams, *penalty), cache.gather(rows)
    return Generation.padded(*beam_search(decode, processors, cache, tokens, starts, *settings), pad_token)


class Running(NamedTuple):
    """Sequences that are being generated."""

    tokens: Int[Array, "B S"]  # the prompts and the new tokens, padded for more
    starts: Int[Array, "B"]  # length of the prompt
    lengths: Int[Array, "B"]  # current length
    ends: Int[Array, "B"]  # maximum length
    indices: Int[Array, "B"]  # index of the sequence, on which its samples depend
    scores: Float[Array, "B"]  # sum of the new tokens' log-probabilities
    done: Bool[Array, "B"]  # whether the sequence is finished
    cache: Any

    @classmethod
    def begin(cls, tokens, starts, ends, indices, cache) -> "Running":
        """Return sequences without new tokens."""
        return cls(tokens, starts, starts, ends, indices, jnp.zeros(len(tokens)), jnp.zeros(len(tokens), bool), cache)

    def put(self, rows: Int[Array, "N"], others: "Running") -> "Running":
        """Return the sequences with `rows` replaced by others; repeated rows must be equal."""
        arrays = (old.at[rows].set(new) for old, new in zip(self[:-1], others[:-1]))
        return Running(*arrays, self.cache.put(rows, others.cache))


def sample(
    decode: Decode,
    processors: LogitsProcessors,
    seed: Integer[Array, ""],
    running: Running,
    until: Int[Array, ""] | int,
) -> tuple[Running, Int[Array, ""]]:
    """Continue sequences by greedy search or sampling until `until` of them are finished.

    Return the sequences, and the number of decoding steps.
    """
    rows = jnp.arange(len(running.tokens))

    def advance(state):
        running, steps = state
        tokens, lengths, done = running.tokens, running.lengths, running.done
        new = lengths - running.starts
        logits, cache = decode(tokens, lengths[:, None] - 1, running.cache)
        logits = logits[:, 0]
        processed = processors(logits, tokens, lengths, new)
        if processors.temperature is None:
            token = processed.argmax(axis=-1)
        else:
            token = jax.vmap(jax.random.categorical)(row_keys(seed, new, running.indices), processed)
        lengths = lengths + ~done
        running = running._replace(
            # Never read after the end of a finished sequence.
            tokens=tokens.at[rows, running.lengths].set(token.astype(tokens.dtype)),
            lengths=lengths,
            scores=running.scores + jnp.where(done, 0, jax.nn.log_softmax(logits)[rows, token]),
            done=done | processors.stops(token) | (lengths == running.ends),
            cache=cache,
        )
        return running, steps + 1

    return jax.lax.while_loop(lambda state: state[0].done.sum() < until, advance, (running, 0))
