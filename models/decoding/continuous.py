"""Continuous batching: generation of any number of sequences in a batch that they leave and enter one by one.

A batch has a fixed number of slots (iteration-level scheduling: Orca, OSDI 2022, section 3). One compiled loop decodes
a token of all slots at a time until some number of sequences have ended; then their slots get the next prompts, whose
keys and values are computed together and written into the cache. The host waits for the device only then.
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
    decode_last,
    empty,
    prefill,
    sample,
    separate_layers,
    validate_prompts,
)
from lineage.models.decoding.logits_processors import LogitsProcessors, check

NARROWEST = 16  # smallest width to which prompts of several tokens are padded


class Prompt(NamedTuple):
    """Prompt to continue.

    Attributes:
        tokens: token ids, at least one.
        max_new_tokens: largest number of new tokens.
        inputs: input of an encoder, one row of the argument of `model.encode`; all prompts have the same shapes.
    """

    tokens: Int[np.ndarray, "T"]
    max_new_tokens: int
    inputs: Any = None


class Continuation(NamedTuple):
    """New tokens of a prompt, a stop token included, and the sum of their log-probabilities under the model."""

    tokens: Int[np.ndarray, "T"]
    score: float


class Slots:
    """Slots in which a decoder continues prompts, with greedy search or sampling.

    Prompt i gets the tokens that `generate` gives to row i of one batch of all prompts, whatever the slots. The first
    use compiles, and so does each other width to which prompts are padded, a power of 2. A prompt for which the slots
    have no room waits until all others have ended; then the slots become longer.

    Attributes:
        steps: number of decoding steps so far, each of which takes as long as a token of a batch of all slots.
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
            model, variables: a decoder and its weights, see `models.decoding.generate`.
            slots: number of sequences that are decoded at a time.
            refill: number of sequences that must have ended before the next prompts, as many, take their slots: more
                leave slots idle longer, fewer compute the keys and values of prompts less efficiently.
            sharding: placement of arrays whose first axis is that of slots, or of `refill` prompts.
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
        """Yield the continuation of each prompt, in their order, while others are generated.

        Args:
            prompts: read one by one, as many in advance as there are slots.
            first: index of the first prompt, on which its samples depend.

        Raises:
            ValueError: a prompt is invalid, or with its new tokens longer than the model's sequences.
        """
        waiting, ended, due = enumerate(prompts, first), {}, first
        queue: list[tuple[int, Prompt]] = []  # prompts with their indices
        busy: dict[int, int] = {}  # slot -> index of its prompt
        size, kinds, state = 0, None, None
        while True:
            queue += islice(waiting, self.slots - len(queue))
            if not queue and not busy:
                return
            group = queue[: self.refill]
            if queue and not busy and not self._fits(group, size, kinds):
                size, kinds = max(self._size(prompt) for _, prompt in queue), _kinds(group[0][1])
                state = self._empty(group[0][1], size)
            fits = group and self._fits(group, size, kinds)
            if fits and self.slots - len(busy) >= len(group):
                chosen = [slot for slot in range(self.slots) if slot not in busy][: len(group)]
                busy |= {slot: number for slot, (number, _) in zip(chosen, group)}
                state = self._admit(state, chosen, group, size)
                del queue[: len(group)]
                continue
            (running, memory), until = state, len(group) if fits else self.slots
            running, steps = _run(self.model, self.variables, running, memory, self.processors, self.seed, until)
            state = running, memory
            kept = running.tokens, running.starts, running.lengths, running.scores, running.done, steps
            tokens, starts, lengths, scores, done, steps = jax.device_get(kept)
            self.steps, self.rounds = self.steps + int(steps), self.rounds + 1
            for slot in [slot for slot in busy if done[slot]]:
                ended[busy.pop(slot)] = Continuation(tokens[slot, starts[slot] : lengths[slot]], float(scores[slot]))
            while due in ended:
                yield ended.pop(due)
                due += 1

    def _fits(self, group, size, kinds):
        """Return whether slots have room for some prompts and take inputs like theirs."""
        return all(self._size(prompt) <= size and _kinds(prompt) == kinds for _, prompt in group)

    def _size(self, prompt):
        """Return the number of tokens that a prompt requires, including the padding to its width."""
        needed = len(prompt.tokens) + prompt.max_new_tokens
        padded = _width(len(prompt.tokens)) + prompt.max_new_tokens
        return padded if self.model.max_length is None else max(needed, min(padded, self.model.max_length))

    def _empty(self, prompt, size):
        """Return slots without sequences, and their memory."""
        inputs = jax.tree.map(lambda x: jax.ShapeDtypeStruct((self.slots, *x.shape), x.dtype), prompt.inputs)
        make = partial(_begin, self.model, inputs, self.slots, size, self.cache_format)
        return jax.jit(make, out_shardings=self.sharding)(self.variables)

    def _admit(self, state, chosen: Sequence[int], group, size):
        """Return the state after assigning prompts to free slots."""
        group = [*group, *group[-1:] * (self.refill - len(group))]  # the last one is written to its slot again
        chosen = [*chosen, *chosen[-1:] * (self.refill - len(chosen))]
        lengths = np.array([len(prompt.tokens) for _, prompt in group], np.int32)
        tokens = np.zeros((self.refill, min(_width(lengths.max()), size)), np.int32)
        for row, (_, prompt) in enumerate(group):
            tokens[row, : len(prompt.tokens)] = prompt.tokens
        new = np.array([prompt.max_new_tokens for _, prompt in group], np.int32)
        tokens, lengths = validate_prompts(self.model, tokens, lengths, int(new.min()))
        inputs = jax.tree.map(lambda *rows: np.stack(rows), *(prompt.inputs for _, prompt in group))
        numbers = np.array([number for number, _ in group], np.uint32)
        arrays = tokens, lengths, lengths + new, numbers, inputs
        if self.sharding is not None:
            arrays = jax.device_put(arrays, self.sharding)
        return _admit(self.model, self.variables, *state, np.array(chosen, np.int32), *arrays, self.cache_format)


def _kinds(prompt):
    return [(array.shape, array.dtype) for array in jax.tree.leaves(prompt.inputs)]


def _width(length):
    """Return the width to which prompts of at most some length are padded."""
    return 1 if length == 1 else max(NARROWEST, 1 << (int(length) - 1).bit_length())


def _begin(model, inputs, slots, size, cache_format, variables):
    ones, inputs = jnp.ones(slots, jnp.int32), jax.tree.map(jnp.zeros_like, inputs)
    cache, memory = empty(model, variables, inputs, slots, size, cache_format=cache_format)
    cache = cache.rewind(ones)
    running = Running.begin(jnp.zeros((slots, size), jnp.int32), ones, ones, ones.astype(jnp.uint32), cache)
    return running._replace(done=ones > 0), jax.tree.map(jnp.zeros_like, memory)  # only its shapes are used


@partial(jax.jit, static_argnames=("model", "cache_format"), donate_argnames=("running", "memory"))
def _admit(model, variables, running, memory, slots, tokens, lengths, ends, numbers, inputs, cache_format):
    room = running.tokens.shape[1] - tokens.shape[1]
    tokens, starts, cache, added = prefill(model, variables, tokens, lengths, inputs, room, cache_format=cache_format)
    new = Running.begin(tokens, starts, ends, numbers, cache)._asdict() | {"cache": running.cache.put(slots, cache)}
    for name, old in running._asdict().items():
        if name != "cache":
            new[name] = old.at[slots].set(new[name])
    return Running(**new), None if memory is None else memory.put(slots, added)


@partial(jax.jit, static_argnames="model", donate_argnames="running")
def _run(model, variables, running, memory, processors, seed, until):
    def decode(tokens, lengths, cache):
        # An ended sequence decodes its last token again.
        return decode_last(model, variables, tokens, lengths, cache.rewind(lengths - 1), memory)

    return sample(decode, processors, seed, running, until)
