"""Continuous batching: generation of any number of sequences, which enter and leave the batch one by one.

The batch has a fixed number of slots (iteration-level scheduling: Orca, OSDI 2022, section 3). One compiled loop
decodes a token of every slot in each step until a given number of sequences are finished. Their slots are then refilled
with the next prompts, whose keys and values are computed together and written into the cache. The host waits for the
device only at this point.
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from lineage.models.decoding.generate import (
    CacheFormat,
    Running,
    decode_at,
    empty,
    prefill,
    sample,
    separate_layers,
    validate_prompts,
)
from lineage.models.decoding.logits_processors import LogitsProcessors, check

MIN_WIDTH = 16  # minimum width to which prompts of more than one token are padded


class Prompt(NamedTuple):
    """Prompt to continue.

    Attributes:
        tokens: token ids, at least one.
        max_new_tokens: maximum number of new tokens.
        inputs: input of the encoder, one row of the argument of `model.encode`.
    """

    tokens: Int[np.ndarray, "T"]
    max_new_tokens: int
    inputs: Any = None


class Continuation(NamedTuple):
    """New tokens, including the stop token, the sum of their log-probabilities under the model, and their prompt."""

    tokens: Int[np.ndarray, "T"]
    score: float
    prompt: Int[np.ndarray, "T"]


class Slots:
    """Slots in which a decoder continues prompts, by greedy search or sampling.

    The continuation of prompt i equals that of row i in `generate` with all prompts in one batch, for any number of
    slots. The first use causes compilation, as does each new width to which prompts are padded, a power of 2. A prompt
    that is too long for the slots, or has inputs of other shapes, waits until all slots are empty; then they are
    reallocated.

    Attributes:
        steps: number of decoding steps so far, in each of which all slots decode a token.
        rounds: number of times that the host has waited for the device.
    """

    def __init__(
        self,
        model: nn.Module,
        variables: Any,
        slots: int,
        refill: int = 1,
        *,
        seed: int = 0,
        sharding: jax.sharding.Sharding | None = None,
        cache_format: CacheFormat = None,
        **processors,
    ):
        """Prepare the slots.

        Args:
            model, variables: a decoder and its variables, see `models.decoding.generate`.
            slots: number of sequences that are decoded at a time.
            refill: number of finished sequences after which their slots are refilled, all at once: a larger number
                leaves slots idle longer, a smaller one computes the keys and values of prompts less efficiently.
            sharding: sharding of arrays whose first axis is that of slots, or of `refill` prompts.
            cache_format: see `generate`.
            processors: see `LogitsProcessors.create`.

        Raises:
            ValueError: an argument is out of its range.
        """
        check(slots >= 1, f"slots must be at least 1, not {slots}.")
        check(1 <= refill <= slots, f"refill must be from 1 to the number of slots, {slots}, not {refill}.")
        self.model, self.slots, self.refill, self.sharding = model, slots, refill, sharding
        self.cache_format: CacheFormat = cache_format
        self.variables = jax.jit(separate_layers, static_argnums=0)(model, variables)
        self.processors, self.seed = LogitsProcessors.create(model, **processors), np.uint32(seed % 2**32)
        self.steps = self.rounds = 0

    def generate(self, prompts: Iterable[Prompt], first: int = 0) -> Iterator[Continuation]:
        """Yield the continuations in the order of the prompts, each as soon as it and those before it are finished.

        Args:
            prompts: prompts, of which at most as many as there are slots are read in advance.
            first: index of the first prompt; samples depend on the index.

        Raises:
            ValueError: a prompt is invalid, or exceeds the model's `max_length` with its new tokens.
        """
        waiting, finished, next_index = enumerate(prompts, first), {}, first
        queue: list[tuple[int, Prompt]] = []  # prompts with their indices
        busy: dict[int, int] = {}  # slot -> index of its prompt
        size, specs, state = 0, None, None
        while True:
            queue += islice(waiting, self.slots - len(queue))
            if not queue and not busy:
                return
            group = queue[: self.refill]
            if queue and not busy and not self._fits(group, size, specs):
                size, specs = max(self._size(prompt) for _, prompt in queue), _input_specs(group[0][1])
                state = self._empty(group[0][1], size)
            fits = group and self._fits(group, size, specs)
            if fits and self.slots - len(busy) >= len(group):
                chosen = [slot for slot in range(self.slots) if slot not in busy][: len(group)]
                busy |= {slot: index for slot, (index, _) in zip(chosen, group)}
                state = self._admit(state, chosen, group, size)
                del queue[: len(group)]
                continue
            state, done = self._decode(state, busy, until=len(group) if fits else self.slots)
            for slot, continuation in done.items():
                finished[busy.pop(slot)] = continuation
            while next_index in finished:
                yield finished.pop(next_index)
                next_index += 1

    def _fits(self, group, size, specs):
        """Return whether prompts fit into slots of `size` tokens, with inputs of these shapes and dtypes."""
        return all(self._size(prompt) <= size and _input_specs(prompt) == specs for _, prompt in group)

    def _size(self, prompt):
        """Return the number of tokens that a slot must hold for a prompt, including its padding."""
        needed = len(prompt.tokens) + prompt.max_new_tokens
        padded = _width(len(prompt.tokens)) + prompt.max_new_tokens
        return padded if self.model.max_length is None else max(needed, min(padded, self.model.max_length))

    def _empty(self, prompt, size):
        """Return empty slots, and their memory."""
        inputs = jax.tree.map(lambda x: jax.ShapeDtypeStruct((self.slots, *x.shape), x.dtype), prompt.inputs)
        make = partial(_begin, self.model, inputs, self.slots, size, self.cache_format)
        return jax.jit(make, out_shardings=self.sharding)(self.variables)

    def _admit(self, state, chosen: Sequence[int], group, size):
        """Return the state after assigning prompts to free slots."""
        group = [*group, *group[-1:] * (self.refill - len(group))]  # repeats write to the same slot
        chosen = [*chosen, *chosen[-1:] * (self.refill - len(chosen))]
        lengths = np.array([len(prompt.tokens) for _, prompt in group], np.int32)
        tokens = np.zeros((self.refill, min(_width(lengths.max()), size)), np.int32)
        for row, (_, prompt) in enumerate(group):
            tokens[row, : len(prompt.tokens)] = prompt.tokens
        new = np.array([prompt.max_new_tokens for _, prompt in group], np.int32)
        tokens, lengths = validate_prompts(self.model, tokens, lengths, int(new.min()))
        inputs = jax.tree.map(lambda *rows: np.stack(rows), *(prompt.inputs for _, prompt in group))
        indices = np.array([index for index, _ in group], np.uint32)
        arrays = tokens, lengths, lengths + new, indices, inputs
        if self.sharding is not None:
            arrays = jax.device_put(arrays, self.sharding)
        return _admit(self.model, self.variables, *state, np.array(chosen, np.int32), *arrays, self.cache_format)

    def _decode(self, state, busy, until):
        """Return the state after `until` slots are done, and the continuations in the busy ones among them."""
        running, memory = state
        running, steps = _run(self.model, self.variables, running, memory, self.processors, self.seed, until)
        arrays = running.tokens, running.starts, running.lengths, running.scores, running.done, steps
        tokens, starts, lengths, scores, done, steps = jax.device_get(arrays)
        self.steps, self.rounds = self.steps + int(steps), self.rounds + 1
        continuations = {}
        for slot in busy:
            if done[slot]:
                prompt, new = np.split(tokens[slot, : lengths[slot]], [starts[slot]])
                continuations[slot] = Continuation(new, float(scores[slot]), prompt)
        return (running, memory), continuations


def _input_specs(prompt):
    return [(array.shape, array.dtype) for array in jax.tree.leaves(prompt.inputs)]


def _width(length):
    """Return the width to which prompts of at most this length are padded."""
    return 1 if length == 1 else max(MIN_WIDTH, 1 << (int(length) - 1).bit_length())


def _begin(model, inputs, slots, size, cache_format, variables):
    ones, inputs = jnp.ones(slots, jnp.int32), jax.tree.map(jnp.zeros_like, inputs)
    cache, memory = empty(model, variables, inputs, slots, size, cache_format=cache_format)
    cache = cache.rewind(ones)
    running = Running.begin(jnp.zeros((slots, size), jnp.int32), ones, ones, ones.astype(jnp.uint32), cache)
    return running._replace(done=ones > 0), jax.tree.map(jnp.zeros_like, memory)  # only its shapes are used


@partial(jax.jit, static_argnames=("model", "cache_format"), donate_argnames=("running", "memory"))
def _admit(model, variables, running, memory, slots, tokens, lengths, ends, indices, inputs, cache_format):
    room = running.tokens.shape[1] - tokens.shape[1]
    tokens, starts, cache, added = prefill(model, variables, tokens, lengths, inputs, room, cache_format=cache_format)
    running = running.put(slots, Running.begin(tokens, starts, ends, indices, cache))
    return running, None if memory is None else memory.put(slots, added)


@partial(jax.jit, static_argnames="model", donate_argnames="running")
def _run(model, variables, running, memory, processors, seed, until):
    def decode(tokens, positions, cache):
        # A finished sequence decodes its last token again.
        return decode_at(model, variables, memory, tokens, positions, cache.rewind(positions[:, 0]))

    return sample(decode, processors, seed, running, until)
