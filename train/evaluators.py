"""What a trained model is asked: numbers over whole splits, and texts."""

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

import flax.linen as nn
import jax
import numpy as np
from jax.experimental.multihost_utils import process_allgather
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Float
from scipy.special import softmax

from data.encoded import Encoded
from metrics.answers import exact_match, f1
from metrics.likelihood import bits, perplexity
from metrics.states import State
from metrics.translation import bleu
from models.generate import best_of
from models.speculative import speculate
from train.checkpoint import Checkpoints
from train.experiment import Experiment
from train.objectives import read
from train.sharding import check_batch, to_mesh
from train.state import TrainState
from train.step import make_asking_step, make_evaluation_step


class Evaluator:
    """Asks the states of an experiment; compiled once. An average of the parameters, where one is kept, is asked.

    Attributes:
        helpers: other models and their variables: "draft" for speculative decoding, "contrast" to choose a sample by.
        acceptance_rate: of the draft's tokens in what was written last.
        written: of pairs, by split, what the model last wrote: `rows` of input, output and reference, their `bleu` and
            its `signature`.
    """

    def __init__(self, experiment: Experiment, helpers: Mapping[str, tuple[nn.Module, Any]] = MappingProxyType({})):
        self.helpers, self.acceptance_rate = helpers, None
        self.experiment, self.config = experiment, experiment.config
        model, precision = experiment.model, self.config.precision
        self._step = jax.jit(make_evaluation_step(model, experiment.objective, precision))
        self._read = jax.jit(make_asking_step(model, read, precision))
        self.written: dict[str, dict[str, Any]] = {}

    def evaluate(self, state: TrainState) -> dict[str, float]:
        """Metrics of every split, as "split/name"."""
        data, variables, metrics = self.experiment.data, state.variables(average=True), {}
        for split, batches in data.splits.items():
            values = evaluate(self._step_taught, variables, batches, self.experiment.mesh)
            values = with_derived(values, data.info, split)
            if data.info["kind"] in ("pairs", "continuations"):
                values |= self._compared(variables, split, batches)
            elif data.info["kind"] == "spans":
                values |= self._answered(variables, batches)
            elif data.info["kind"] == "classification" and batches.source.is_cut:
                values |= pooled_accuracy(self._logits(variables, batches), batches.source)
            metrics |= {f"{split}/{key}": value for key, value in values.items()}
        return metrics

    def write(self, state: TrainState, prompt: str) -> list[str]:
        """What the model writes after a prompt, or of pairs for an input, as the config's `sampling` section says.

        Raises:
            ValueError: the data are images, or the prompt is empty or too long.
        """
        prompts, inputs = self._request(prompt)
        return self._texts(prompts, self._generate(state.variables(average=True), prompts, inputs))

    def check_sampling(self, state: TrainState) -> None:
        """Raises what `write` would for the config's prompt, without computing anything: a run should start with it."""
        request = self._request(self.config.sampling.prompt)
        jax.eval_shape(lambda variables: self._generate(variables, *request), state.variables(average=True))

    def _request(self, prompt):
        """The prompts [B, T] of `num_samples` rows, and the inputs that go with them."""
        data = self.experiment.data
        if data.tokenizer is None or not hasattr(self.experiment.model, "decode"):
            raise ValueError("only a decoder of texts writes: leave sampling.num_samples at 0.")
        tokens = data.tokenizer.encode(prompt)
        if not len(tokens):
            raise ValueError("the prompt is empty: a language model needs at least one token to go on from.")
        rows, end = self.config.sampling.num_samples or 1, data.tokenizer.end_of_text
        if "start" not in data.info:
            tokens = np.append(tokens, end) if data.info["kind"] == "continuations" else tokens
            return np.tile(tokens, (rows, 1)), None
        inputs = np.tile(np.append(tokens, end), (rows, 1)).astype(np.int32)
        return np.full((rows, 1), data.info["start"]), (inputs, np.ones(inputs.shape, bool))

    def lead(self, prompt: str) -> str:
        """What is to be shown before a text that the model wrote for a prompt."""
        return f"{prompt} → " if "start" in self.experiment.data.info else prompt

    def _step_taught(self, variables, batch):
        return self._step(variables, self.experiment.taught(batch))

    def _logits(self, variables, batches):
        """What the model says of a split's rows [N, ...], in their order, on the host."""
        mesh = self.experiment.mesh
        rows = [process_allgather(self._read(variables, to_mesh(batch, mesh)), tiled=True) for batch in batches]
        return np.concatenate(rows)[: batches.num_examples].astype(np.float32)

    def _answered(self, variables, batches):
        """How the answers to a split's questions compare with the references."""
        answers = batches.source.answers(*np.moveaxis(self._logits(variables, batches), -1, 0))
        references = [question.references for question in batches.source.questions]
        return {score.__name__: float(np.mean(list(map(score, answers, references)))) for score in (exact_match, f1)}

    def _compared(self, variables, split, batches):
        """How the texts that the model writes for a split's inputs compare with the targets."""
        coder, outputs, references = self.experiment.data.tokenizer, [], batches.source.references
        right = count = 0
        for batch in batches:
            if "inputs" in batch:
                prompts, lengths = np.full((len(batch["inputs"]), 1), self.experiment.data.info["start"]), None
                inputs = batch["inputs"], batch["inputs_mask"]
            else:  # up to the first token that is to be guessed
                prompts, lengths, inputs = batch["tokens"], batch["mask"].argmax(axis=1) + 1, None
            written = self._generate(variables, prompts, inputs, lengths)
            outputs += self._texts(prompts, written, lengths)
            if "inputs" in batch:
                right += _in_place(written, batch["targets"], batch["mask"])
                count += batch["mask"].sum()
        outputs = outputs[: len(references)]  # without the padding of the last batch
        exact = sum(ours == theirs for ours, theirs in zip(outputs, references)) / len(references)
        score, signature = bleu(outputs, references)
        inputs = [coder.decode(tokens) for tokens in batches.source.inputs]
        self.written[split] = {"bleu": score, "signature": signature, "rows": list(zip(inputs, outputs, references))}
        free = {"free_running_accuracy": float(right / count)} if count else {}
        return {"exact_match": exact, "bleu": score, **free}

    def _generate(self, variables, prompts, inputs, lengths=None):
        """What the model writes after prompts [B, T], of some lengths [B], as token ids."""
        settings = self.config.sampling.to_dict() | {"seed": self.config.seed, "stop_tokens": self._stop_tokens}
        num_choices, num_drafted = settings.pop("num_choices"), settings.pop("num_drafted")
        for key in ("num_samples", "prompt", "draft", "contrast"):
            del settings[key]
        settings |= {key: settings[key] or None for key in ("top_k", "top_p", "no_repeat_ngram_size")}
        model = self.experiment.model
        if "draft" not in self.helpers:
            contrast = self.helpers.get("contrast")
            return best_of(
                num_choices, model, variables, prompts, lengths, inputs=inputs, contrast=contrast, **settings
            )
        if (settings.pop("num_beams"), num_choices) != (1, 1):
            raise ValueError("a draft is for one sample a text: leave sampling.num_beams and num_choices at 1.")
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

    def gathered(self, state: TrainState) -> Mapping[str, Any]:
        """The variables, whole on every process."""
        everywhere = NamedSharding(self.experiment.mesh, PartitionSpec())
        gather = jax.jit(lambda variables: variables, out_shardings=everywhere)
        return jax.tree.map(np.asarray, gather(state.variables(average=True)))


def restore(experiment: Experiment, which: str = "latest") -> TrainState:
    """The state of the newest or the "best" checkpoint of the experiment's workdir.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it is damaged or of another model.
    """
    folder = experiment.workdir
    if not (folder / "checkpoints").is_dir():
        raise FileNotFoundError(f"there is no trained model in {folder}: give the --workdir of a run.")
    with Checkpoints(folder, **experiment.config.checkpoint) as checkpoints:
        step = checkpoints.best if which == "best" else checkpoints.latest
        if step is None:
            raise FileNotFoundError(f"there is no {which} checkpoint in {checkpoints.folder}.")
        return experiment.state(checkpoints, step)


def evaluate(
    step: Callable[[Any, dict], tuple[dict[str, State], dict]], variables: Any, batches: Iterable[dict], mesh: Mesh
) -> dict[str, float]:
    """The metrics of a split, every example counted once: `step` gives each batch's states, which the host merges.

    A memory goes from batch to batch, empty before the first.

    Raises:
        ValueError: a batch does not divide over the devices, or there is none.
    """
    merged: dict[str, State] = {}
    variables, memory = {name: value for name, value in variables.items() if name != "memory"}, {}
    waiting = None
    for batch in batches:
        check_batch(len(batch["mask"]) * jax.process_count(), mesh)
        states, memory = step({**variables, **memory}, to_mesh(batch, mesh))
        merged = _merge(merged, waiting)  # the batch before, while this one is computed
        waiting = states
    merged = _merge(merged, waiting)
    if not merged:
        raise ValueError("there is nothing to evaluate: the split is empty.")
    return {name: float(state.compute()) for name, state in merged.items()}


def pooled_accuracy(logits: Float[np.ndarray, "N V"], source: Encoded) -> dict[str, float]:
    """How often the class of a whole text is right, by the mean and by the highest of its rows' probabilities."""
    probabilities = softmax(logits, axis=-1)
    first = np.flatnonzero(np.diff(source.origins, prepend=-1))
    pools = {"mean": np.add, "max": np.maximum}
    pooled = {name: pool.reduceat(probabilities, first).argmax(axis=-1) for name, pool in pools.items()}
    return {f"{k}_pooled_accuracy": float((v == source.per_row["label"][first]).mean()) for k, v in pooled.items()}


def with_derived(metrics: dict[str, float], info: Mapping[str, Any], split: str) -> dict[str, float]:
    """A language model's metrics with those that follow from its loss; others' as they are."""
    if info["kind"] != "text":
        return metrics
    loss = metrics["loss"]
    per = {unit: info[f"{unit}s_per_token"][split] for unit in ("character", "byte")}
    return metrics | {"perplexity": perplexity(loss)} | {f"bits_per_{unit}": bits(loss, per[unit]) for unit in per}


def _in_place(written, targets, mask):
    """How many of the targets [B, T], where the mask is True, the model wrote in their places, from one token on."""
    tokens, lengths = np.asarray(written.tokens)[:, 1:], np.asarray(written.lengths) - 1
    size = min(tokens.shape[1], targets.shape[1])
    right = (tokens[:, :size] == targets[:, :size]) & (np.arange(size) < lengths[:, None])
    return (right & mask[:, :size]).sum()


def _merge(merged, states):
    if states is None:
        return merged
    states = {name: state.to_host() for name, state in states.items()}
    return {name: merged[name].merge(state) if merged else state for name, state in states.items()}
