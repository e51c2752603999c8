"""Text generation with a trained model, as the config's `sampling` section says."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax
import numpy as np
from jax.experimental.multihost_utils import process_allgather

from lineage.evaluation.base import Context
from lineage.models import Model
from lineage.models.decoding.generate import best_of
from lineage.models.decoding.speculative import speculate


class Sampler:
    """Generates text; the model's variables are given with each request.

    Attributes:
        helpers: other models and their variables: "draft" for speculative decoding, "contrast" to choose a sample by.
        acceptance_rate: fraction of the draft's tokens that were accepted last; None without a draft.
    """

    def __init__(self, context: Context, helpers: Mapping[str, tuple[Model, Any]] = MappingProxyType({})):
        self.context, self.helpers = context, helpers
        self.acceptance_rate: float | None = None

    def write(self, variables: Any, prompt: str) -> list[str]:
        """Return `num_samples` texts (at least one) for a prompt or an input.

        Raises:
            ValueError: the model does not generate text, or the prompt is empty or too long.
        """
        prompts, inputs = self._request(prompt)
        return self.texts(prompts, process_allgather(self.generate(variables, prompts, inputs), tiled=True))

    def check(self, variables: Any) -> None:
        """Raise what `write` would for the config's prompt, without computing anything: a run should start with it."""
        request = self._request(self.context.sampling.prompt)
        jax.eval_shape(lambda variables: self.generate(variables, *request), variables)

    def lead(self, prompt: str) -> str:
        """Return what is to be shown before a generated text."""
        return prompt if self.context.data.facts.start_token is None else f"{prompt} → "

    def generate(
        self,
        variables: Any,
        prompts: np.ndarray,
        inputs: tuple[np.ndarray, np.ndarray] | None,
        lengths: np.ndarray | None = None,
    ) -> Any:
        """Return what the model generates after prompts [B, T] of some lengths [B], as token ids."""
        settings = self.context.sampling.to_dict() | {"seed": self.context.seed, "stop_tokens": self._stop_tokens}
        count, num_drafted = settings.pop("best_of"), settings.pop("num_drafted")
        for key in ("num_samples", "prompt", "draft", "contrast"):
            del settings[key]
        settings |= {key: settings[key] or None for key in ("top_k", "top_p", "no_repeat_ngram_size")}
        model = self.context.model
        if "draft" not in self.helpers:
            contrast = self.helpers.get("contrast")
            return best_of(count, model, variables, prompts, lengths, inputs=inputs, contrast=contrast, **settings)
        if (settings.pop("num_beams"), count) != (1, 1):
            raise ValueError("Speculative decoding needs sampling.num_beams=1 and sampling.best_of=1.")
        del settings["length_penalty"]
        settings |= {"inputs": inputs, "num_drafted": num_drafted}
        out = speculate(model, variables, *self.helpers["draft"], prompts, lengths, **settings)
        self.acceptance_rate = out.acceptance_rate
        return out.generation

    def texts(self, prompts: np.ndarray, written: Any, lengths: np.ndarray | None = None) -> list[str]:
        """Return the texts that were generated after the prompts, without the end of text."""
        starts = np.full(len(prompts), prompts.shape[1]) if lengths is None else lengths
        rows = zip(np.asarray(written.tokens), starts, np.asarray(written.lengths))
        rows = [row[start:stop] for row, start, stop in rows]
        return [self.context.data.tokenizer.decode(row[~np.isin(row, self._stop_tokens)]) for row in rows]

    def _request(self, prompt):
        """Return the prompts [B, T] of `num_samples` rows, and the inputs that go with them."""
        data, task, rows = self.context.data, self.context.task, self.context.sampling.num_samples or 1
        if data.tokenizer is None or not self.context.model.is_decoder:
            raise ValueError("Only decoders of texts generate: leave sampling.num_samples at 0.")
        tokens = data.tokenizer.encode(prompt)
        if not len(tokens):
            raise ValueError("The prompt is empty: a language model needs at least one token to continue.")
        start, inputs = task.request(tokens, data.tokenizer, data.facts)
        if inputs is None:
            return np.tile(start, (rows, 1)), None
        inputs = np.tile(inputs, (rows, 1))
        return np.tile(start, (rows, 1)), (inputs, np.ones(inputs.shape, bool))

    @property
    def _stop_tokens(self):
        end = self.context.data.tokenizer.end_of_text
        return () if end is None else (end,)
