"""What a trained model writes, as the config's `sampling` section says."""

from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import flax.linen as nn
import jax
import numpy as np
from jax.experimental.multihost_utils import process_allgather

from lineage.data import EvaluationBatches
from lineage.metrics.translation import bleu, bleu_by_length
from lineage.models.decoding.generate import best_of
from lineage.models.decoding.speculative import speculate
from lineage.train.experiment import Experiment
from lineage.train.sharding import to_mesh


class Sampler:
    """Lets the model of an experiment write; its variables are given with each request.

    Attributes:
        helpers: other models and their variables: "draft" for speculative decoding, "contrast" to choose a sample by.
        acceptance_rate: of the draft's tokens in what was written last.
        compared: of pairs, by split, what was last written: `rows` of input, output and reference, their `bleu`, its
            `signature`, and `by_length` as `bleu_by_length` has it.
    """

    def __init__(self, experiment: Experiment, helpers: Mapping[str, tuple[nn.Module, Any]] = MappingProxyType({})):
        self.experiment, self.settings, self.helpers = experiment, experiment.config.sampling, helpers
        self.acceptance_rate: float | None = None
        self.compared: dict[str, dict[str, Any]] = {}
        self._paint = jax.jit(partial(experiment.model.apply, method="pictures"))

    def write(self, variables: Any, prompt: str) -> list[str]:
        """What the model writes after a prompt, or of pairs for an input, as the config's `sampling` section says.

        Raises:
            ValueError: the data are images, or the prompt is empty or too long.
        """
        prompts, inputs = self._request(prompt)
        return self._texts(prompts, process_allgather(self._generate(variables, prompts, inputs), tiled=True))

    def paint(self, variables: Any, count: int = 6) -> dict[str, np.ndarray]:
        """The first images of the first split, without the patches that are hidden, and as a masked autoencoder sees
        them: `image`, `masked` and `painted` [N, h, w, c]."""
        batch = next(iter(self.experiment.data.splits.values()))[0]
        image, noise = batch["image"][:count], batch["noise"][:count]
        return dict(zip(("image", "masked", "painted"), (image, *self._paint(variables, image, noise))))

    def check(self, variables: Any) -> None:
        """Raises what `write` would for the config's prompt, without computing anything: a run should start with it."""
        request = self._request(self.settings.prompt)
        jax.eval_shape(lambda variables: self._generate(variables, *request), variables)

    def lead(self, prompt: str) -> str:
        """What is to be shown before a text that the model wrote for a prompt."""
        return f"{prompt} → " if "start" in self.experiment.data.info else prompt

    def compare(self, variables: Any, split: str, batches: EvaluationBatches) -> dict[str, float]:
        """How the texts that the model writes for a split's inputs compare with its targets."""
        coder, outputs, references = self.experiment.data.tokenizer, [], batches.source.references
        right = count = 0
        for batch in batches:
            batch = process_allgather(to_mesh(batch, self.experiment.mesh), tiled=True)  # that of all processes
            if "inputs" in batch:
                prompts, lengths = np.full((len(batch["inputs"]), 1), self.experiment.data.info["start"]), None
                inputs = batch["inputs"], batch["inputs_mask"]
            else:  # up to the first token that is to be guessed
                prompts, lengths, inputs = batch["tokens"], batch["mask"].argmax(axis=1) + 1, None
            written = process_allgather(self._generate(variables, prompts, inputs, lengths), tiled=True)
            outputs += self._texts(prompts, written, lengths)
            if "inputs" in batch:
                right += _in_place(written, batch["targets"], batch["mask"])
                count += batch["mask"].sum()
        outputs = outputs[: len(references)]  # without the padding of the last batch
        exact = sum(ours == theirs for ours, theirs in zip(outputs, references)) / len(references)
        score, signature = bleu(outputs, references)
        inputs = [coder.decode(tokens) for tokens in batches.source.inputs]
        groups = bleu_by_length(outputs, references, [len(line.split()) for line in inputs])
        self.compared[split] = {
            "bleu": score,
            "signature": signature,
            "by_length": groups,
            "rows": list(zip(inputs, outputs, references)),
        }
        free = {"free_running_accuracy": float(right / count)} if count else {}
        return {"exact_match": exact, "bleu": score, **free}

    def _request(self, prompt):
        """The prompts [B, T] of `num_samples` rows, and the inputs that go with them."""
        data = self.experiment.data
        if data.tokenizer is None or not hasattr(self.experiment.model, "decode"):
            raise ValueError("only a decoder of texts writes: leave sampling.num_samples at 0.")
        tokens = data.tokenizer.encode(prompt)
        if not len(tokens):
            raise ValueError("the prompt is empty: a language model needs at least one token to go on from.")
        rows, end = self.settings.num_samples or 1, data.tokenizer.end_of_text
        if "start" not in data.info:
            tokens = np.append(tokens, end) if data.info["kind"] == "continuations" else tokens
            return np.tile(tokens, (rows, 1)), None
        inputs = np.tile(np.append(tokens, end), (rows, 1)).astype(np.int32)
        return np.full((rows, 1), data.info["start"]), (inputs, np.ones(inputs.shape, bool))

    def _generate(self, variables, prompts, inputs, lengths=None):
        """What the model writes after prompts [B, T], of some lengths [B], as token ids."""
        settings = self.settings.to_dict() | {"seed": self.experiment.config.seed, "stop_tokens": self._stop_tokens}
        count, num_drafted = settings.pop("best_of"), settings.pop("num_drafted")
        for key in ("num_samples", "prompt", "draft", "contrast"):
            del settings[key]
        settings |= {key: settings[key] or None for key in ("top_k", "top_p", "no_repeat_ngram_size")}
        model = self.experiment.model
        if "draft" not in self.helpers:
            contrast = self.helpers.get("contrast")
            return best_of(count, model, variables, prompts, lengths, inputs=inputs, contrast=contrast, **settings)
        if (settings.pop("num_beams"), count) != (1, 1):
            raise ValueError("a draft is for one sample a text: leave sampling.num_beams and best_of at 1.")
        del settings["length_penalty"]
        settings |= {"inputs": inputs, "num_drafted": num_drafted}
        out = speculate(model, variables, *self.helpers["draft"], prompts, lengths, **settings)
        self.acceptance_rate = out.acceptance_rate
        return out.generation

    @property
    def _stop_tokens(self):
        end = self.experiment.data.tokenizer.end_of_text
        return () if end is None else (end,)

    def _texts(self, prompts, written, lengths=None):
        """The texts after the prompts, without the end of text."""
        starts = np.full(len(prompts), prompts.shape[1]) if lengths is None else lengths
        rows = zip(np.asarray(written.tokens), starts, np.asarray(written.lengths))
        rows = [row[start:stop] for row, start, stop in rows]
        return [self.experiment.data.tokenizer.decode(row[~np.isin(row, self._stop_tokens)]) for row in rows]


def _in_place(written, targets, mask):
    """How many of the targets [B, T], where the mask is True, the model wrote in their places, from one token on."""
    tokens, lengths = np.asarray(written.tokens)[:, 1:], np.asarray(written.lengths) - 1
    size = min(tokens.shape[1], targets.shape[1])
    right = (tokens[:, :size] == targets[:, :size]) & (np.arange(size) < lengths[:, None])
    return (right & mask[:, :size]).sum()
