"""Text generation with a trained model and the config's `sampling` options."""

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, islice
from types import MappingProxyType
from typing import Any

import jax
import numpy as np

from lineage.data import EvaluationBatches, Facts
from lineage.evaluation.base import Context, is_shared, to_host
from lineage.models import Model
from lineage.models.decoding.continuous import Prompt, Slots
from lineage.models.decoding.generate import best_of
from lineage.models.decoding.speculative import speculate
from lineage.tasks.base import Batch, Request

BEAMS = "num_beams", "length_penalty", "length_offset"  # options of beam search


class Sampler:
    """Text generator; `helpers` are other models and their variables.

    The helper "draft" is for speculative decoding, "contrast" ranks samples.
    """

    def __init__(self, context: Context, helpers: Mapping[str, tuple[Model, Any]] = MappingProxyType({})):
        count, temperature = context.sampling.best_of, context.sampling.temperature
        given = f"sampling.best_of is {count} and sampling.temperature {temperature}"
        if "contrast" in helpers and (count == 1 or not temperature):
            raise ValueError(f"{given}: with sampling.contrast, they must be at least 2 and above 0.")
        if count > 1 and not temperature:
            raise ValueError(f"{given}: the samples would be equal, so the former must be 1 or the latter above 0.")
        if (beams := context.sampling.num_beams) > 1 and temperature:
            given = f"sampling.num_beams is {beams} and sampling.temperature {temperature}"
            raise ValueError(f"{given}: beam search does not sample, so the latter must be 0.")
        self.context, self.helpers = context, helpers
        self.acceptance_rate: float | None = None  # acceptance of draft tokens in the last call; None without draft

    def write(self, variables: Any, prompt: str) -> list[str]:
        """Return `num_samples` texts (at least one) for a prompt or an input."""
        request = self._request(prompt)
        return self.texts(request, to_host(self.generate(variables, request)))

    def batches(
        self, variables: Any, batches: EvaluationBatches, facts: Facts
    ) -> Iterator[tuple[Batch, Any, list[str]]]:
        """Yield each batch, whole and on the host, with the generated tokens and their texts."""
        number = batches.first
        for batch in batches:
            batch = to_host(self.context.to_mesh(batch))  # examples of all processes
            request = self._trimmed(self.context.task.requests(batch, facts))
            generated = to_host(self.generate(variables, self._split_over_devices(variables, request), number))
            number += len(request.prompts)
            yield batch, generated, self.texts(request, generated)

    def texts_of(self, variables: Any, parts: Iterable[EvaluationBatches], first: int = 0) -> Iterator[str]:
        """Yield the generated text for each example, in order; the inputs are read in parts.

        Greedy search and sampling use as many slots as a batch has examples (see `Slots`); beam search, speculative
        decoding and `best_of` generate batch by batch.

        Args:
            first: index of the first example among all inputs, on which its samples depend.
        """
        parts = iter(parts)
        if self._by_batch or is_shared(variables):
            for batches in parts:
                texts = (texts for *_, texts in self.batches(variables, batches, self.context.facts))
                yield from islice(chain.from_iterable(texts), len(batches.source))
            return
        for start in parts:
            slots = self._slots(variables, start)
            for out in slots.generate(self._prompts(chain([start], parts)), first):
                yield self._text(out.tokens, out.prompt)

    def check_prompts(self, batches: EvaluationBatches) -> None:
        """Raise ValueError if the model has no room for new tokens after a prompt."""
        if self._by_batch:
            for batch in batches:
                self._trimmed(self.context.task.requests(batch, self.context.facts))
        else:
            for _ in self._prompts([batches]):
                pass

    @property
    def _by_batch(self):
        return self.context.sampling.num_beams > 1 or self.context.sampling.best_of > 1 or bool(self.helpers)

    def _slots(self, variables, batches):
        """Return the slots for inputs that start with `batches`; an eighth of the slots is refilled at a time."""
        shape = (batches.batch_size,)
        sharding = self.context.to_mesh({"": np.zeros(shape)})[""].sharding
        devices = shape[0] // sharding.shard_shape(shape)[0]
        slots = devices * -(-min(len(batches.source), shape[0]) // devices)
        refill = devices * max(1, slots // devices // 8)
        settings = {key: value for key, value in self._settings.items() if key not in ("max_new_tokens", *BEAMS)}
        return Slots(self.context.model, variables, slots, refill, sharding=sharding, **settings)

    def _prompts(self, parts):
        """Yield the prompts for the examples of the inputs, without padding."""
        for batches in parts:
            number, end = batches.first, batches.first + len(batches.source)
            for batch in batches:
                prompts, lengths, inputs = self.context.task.requests(batch, self.context.facts)
                for row, prompt in enumerate(prompts[: end - number]):
                    row_inputs = jax.tree.map(lambda array, row=row: array[row], inputs)
                    tokens = prompt if lengths is None else prompt[: lengths[row]]
                    yield Prompt(tokens, self._new_tokens(len(tokens), f"prompt {number + row}"), row_inputs)
                number += len(prompts)

    def _split_over_devices(self, variables, request):
        """Return a request with its rows split over the devices, except for beam search, which would exchange them."""
        if is_shared(variables) or self.context.sampling.num_beams > 1:
            return request
        leaves, kind = jax.tree.flatten(request)
        placed = self.context.to_mesh({str(number): leaf for number, leaf in enumerate(leaves)})
        return jax.tree.unflatten(kind, placed.values())

    def _trimmed(self, request):
        """Return the request without padding that, with the new tokens, exceeds the model's maximum length.

        Raises:
            ValueError: the model, or a helper, has no room for the new tokens after the longest prompt.
        """
        new, (prompts, lengths, _) = self.context.sampling.max_new_tokens, request
        if lengths is None or not (limits := self._exceeded(prompts.shape[1] + new)):
            return request
        longest, name = int(lengths.max()), min(limits, key=limits.get)
        if longest + new > (limit := limits[name]):
            sizes = f"a prompt has {longest} tokens and sampling.max_new_tokens is {new}"
            raise ValueError(f"{sizes}: in batches, as in beam search, their sum must be at most {name}, {limit}.")
        return request._replace(prompts=prompts[:, : limit - new])

    def _exceeded(self, length):
        """Return the maximum lengths that a sequence of `length` tokens exceeds: name -> tokens."""
        models = {"model.max_length": self.context.model}
        models |= {f"the max_length of sampling.{role}": model for role, (model, _) in self.helpers.items()}
        limits = {}
        for name, model in models.items():
            try:
                model.check_length(length)
            except ValueError:
                limits[name] = model.max_length
        return limits

    def check(self, variables: Any) -> None:
        """Raise the error that `write` would raise for the config's prompt, without computing anything."""
        request = self._request(self.context.sampling.prompt)
        jax.eval_shape(lambda variables: self.generate(variables, request), variables)

    def lead(self, prompt: str) -> str:
        """Return the text to show before a generated text."""
        return prompt if self.context.facts.start_token is None else f"{prompt} → "

    def generate(self, variables: Any, request: Request, first_index: int = 0) -> Any:
        """Return the generated token ids, including the prompts; `first_index` is that of the first example."""
        settings = self._settings | {"first_index": first_index}
        model, count = self.context.model, self.context.sampling.best_of
        if request.lengths is None:
            settings["max_new_tokens"] = self._new_tokens(request.prompts.shape[1])
        if "draft" not in self.helpers:
            settings |= {"inputs": request.inputs, "contrast": self.helpers.get("contrast")}
            return best_of(count, model, variables, request.prompts, request.lengths, **settings)
        if (settings["num_beams"], count) != (1, 1):
            raise ValueError("Speculative decoding needs sampling.num_beams=1 and sampling.best_of=1.")
        settings = {key: value for key, value in settings.items() if key not in BEAMS}
        settings |= {"inputs": request.inputs, "num_drafted": self.context.sampling.num_drafted}
        out = speculate(model, variables, *self.helpers["draft"], request.prompts, request.lengths, **settings)
        self.acceptance_rate = out.acceptance_rate
        return out.generation

    def texts(self, request: Request, generated: Any) -> list[str]:
        """Return the texts that were generated after the prompts, without the end of text."""
        prompts, lengths, _ = request
        starts = np.full(len(prompts), prompts.shape[1]) if lengths is None else lengths
        rows = zip(np.asarray(generated.tokens), starts, np.asarray(generated.lengths))
        return [self._text(row[start:stop], row[:start]) for row, start, stop in rows]

    def _text(self, tokens, prompt):
        """Return the text of the tokens after a prompt, including the space before it, which some decoders strip.

        Special tokens are omitted, except for the sentinels of a task that has these.
        """
        facts, tokenizer, decode = self.context.facts, self.context.tokenizer, self.context.tokenizer.decode
        ends = {*self._stop_tokens, tokenizer.end_of_text} - {None}
        last = max(np.flatnonzero(np.isin(prompt, [*ends])), default=-1)  # the end of an input, before its target
        shown = tokenizer.sentinels if "sentinels" in self.context.task.special_tokens else []
        hidden = [*ends | {facts.begin_token} - {None}, *np.setdiff1d(np.flatnonzero(tokenizer.special), shown)]
        prompt, tokens = (part[~np.isin(part, hidden)] for part in (prompt[last + 1 :], tokens))
        prompt_text, text = decode(prompt), decode(np.concatenate([prompt, tokens]))
        continues = facts.start_token is None and text.startswith(prompt_text)
        return text[len(prompt_text) :] if continues else decode(tokens)

    def _request(self, prompt):
        """Return the inputs of `num_samples` generations (at least one) from a prompt."""
        tokenizer, rows = self.context.tokenizer, self.context.sampling.num_samples or 1
        if tokenizer is None or not self.context.model.is_decoder:
            why = f"{type(self.context.model).__name__} does not generate text, only decoders of texts do"
            raise ValueError(why + (": leave sampling.num_samples at 0." if self.context.sampling.num_samples else "."))
        task = self.context.task
        (tokens,) = (tokenizer.encode_marked if task.marked else tokenizer.encode_batch)([prompt])
        request = task.request(tokens, tokenizer, self.context.facts)
        if not request.prompts.size:
            raise ValueError("The prompt is empty: a language model needs at least one token to continue.")
        return jax.tree.map(lambda row: np.repeat(row, rows, axis=0), request)

    def _new_tokens(self, used, name="the prompt"):
        """Return the maximum number of new tokens for which the model has room after a prompt of `used` tokens.

        Raises:
            ValueError: the model has no room for a new token, or a helper for as many as the model.
        """
        model, new = self.context.model, self.context.sampling.max_new_tokens
        if "model.max_length" in self._exceeded(used + new):
            if used >= model.max_length:
                allowed = f"it must have fewer than model.max_length, {model.max_length}, so that a token can follow"
                raise ValueError(f"{name} has {used} tokens: {allowed}.")
            new = model.max_length - used
        for where, limit in self._exceeded(used + new).items():
            raise ValueError(f"{name} has {used} tokens, and {new} follow: their sum must be at most {where}, {limit}.")
        return new

    @property
    def _settings(self):
        """The arguments of `generate` that the config sets."""
        settings = self.context.sampling.to_dict() | {"seed": self.context.seed, "stop_tokens": self._stop_tokens}
        settings["excluded_tokens"] = self.context.tokenizer.excluded
        if settings["forced_first_token"] is None:
            settings["forced_first_token"] = self._first_token
        for key in ("num_samples", "prompt", "draft", "contrast", "best_of", "num_drafted"):
            del settings[key]
        return settings | {key: settings[key] or None for key in ("top_k", "top_p", "no_repeat_ngram_size")}

    @property
    def _first_token(self):
        """The token before the target of an encoder-decoder, such as BART's <s>; None if there is none."""
        return None if self.context.facts.start_token is None else self.context.facts.begin_token

    @property
    def _stop_tokens(self):
        return self.context.facts.stop_tokens or self.context.tokenizer.ends
