"""Sequence-to-sequence learning with encoder-decoders or with decoders alone."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np

from lineage.configs.registry import Needs, Rate
from lineage.data import Examples, Facts, PairedTexts, Tokenizer
from lineage.data.examples import pairs
from lineage.models import Model
from lineage.tasks.base import TASKS, Batch, InputExamples, Request, Result
from lineage.tasks.losses import token_loss
from lineage.tasks.text import TextTask

# Probability of teacher forcing, from (about) 1 at progress 0 to `end` at progress 1 (arXiv 1506.03099, section 2.4).
DECAYS = {
    "linear": lambda progress, end: 1 - (1 - end) * progress,
    "exponential": lambda progress, end: end**progress,
    "inverse_sigmoid": lambda progress, end: 100 / (100 + (100 * (1 - end) / end) ** progress),
}


@dataclass(frozen=True)
class EncoderDecoderTask(TextTask):
    """Base class of encoder-decoder tasks.

    Attributes:
        scheduled_sampling: final probability of scheduled sampling (arXiv 1506.03099); for recurrent decoders only.
        decay: schedule of the teacher-forcing probability.
    """

    needs = ("target_tokens",)
    ends = ("", "end_of_text")
    generates = True
    inputs = ("inputs", "inputs_mask", "tokens")
    arguments = ("inputs", "tokens")
    arrays = TextTask.arrays | {"inputs": "int32 B S", "inputs_mask": "bool B S"}

    scheduled_sampling: Rate = 0.0
    decay: Annotated[Literal[*DECAYS], Needs("scheduled_sampling")] = "linear"

    def check_model(self, model: Model) -> None:
        super().check_model(model)
        if self.scheduled_sampling and not model.accepts("own_rate"):
            given = f"task.scheduled_sampling is {self.scheduled_sampling}: it must be 0 for {type(model).__name__}"
            raise ValueError(f"{given}, which reads all tokens at once; it is for seq2seq.")

    def forward(self, model: Model, batch: Batch) -> Any:
        return model(batch["inputs"], batch["tokens"], inputs_mask=batch["inputs_mask"])

    def loss(self, model: Model, batch: Batch) -> Result:
        """Return the next-token loss of `targets` given `tokens`, both [B, T], where `mask` [B, T] is True.

        The model attends to `inputs` [B, S] where `inputs_mask` [B, S] is True.
        """
        options = {}
        if model.has_rng("dropout"):
            if self.scheduled_sampling:
                progress = model.get_variable("run", "progress", 0.0)
                options["own_rate"] = 1 - DECAYS[self.decay](progress, 1 - self.scheduled_sampling)
            if model.uses_batch_statistics:  # without padding
                options["mask"] = batch["mask"]
        logits = model(batch["inputs"], batch["tokens"], inputs_mask=batch["inputs_mask"], **options)
        return token_loss(model, logits, batch, self.label_smoothing)

    def request(self, tokens: np.ndarray, tokenizer: Tokenizer, facts: Facts) -> Request:
        inputs = np.append(pairs.after(facts.begin_token, tokens), tokenizer.end_of_text).astype(np.int32)[None]
        return Request(np.array([[facts.start_token]]), inputs=(inputs, np.ones(inputs.shape, bool)))

    def requests(self, batch: dict[str, np.ndarray], facts: Facts) -> Request:
        prompts = np.full((len(batch["inputs"]), 1), facts.start_token)
        return Request(prompts, inputs=(batch["inputs"], batch["inputs_mask"]))


@dataclass(frozen=True)
class PairTask(TextTask):
    """Base class of tasks on pairs of texts.

    Attributes:
        sequence_length: maximum number of tokens of an input, and of a target, with those before and after the text;
            longer pairs are omitted in training and truncated in evaluation.
        truncate: whether to truncate longer pairs in training, too.
    """

    reads = "pairs"
    special_tokens = ("end_of_text",)
    loader_options = ("buckets",)
    evaluators = ("loss", "generation")
    kind = pairs.EncodedPairs

    truncate: bool = False

    def texts(self, content: Mapping[str, PairedTexts]) -> dict[str, Iterable[str]]:
        return {name: [*part.inputs, *part.targets] for name, part in content.items()}

    def examples(self, content: Mapping[str, PairedTexts], tokenizer: Tokenizer | None, seed: int) -> Examples:
        splits, start, begin = {}, self.first_token(tokenizer), self.begin_token(tokenizer)
        for name, part in content.items():
            drop = name == "train" and not self.truncate
            splits[name] = pairs.encode(part, tokenizer, self.sequence_length, drop, start, begin, self.kind)
        return Examples(splits, self.facts(tokenizer))

    def input_examples(self, rows: Sequence[str], tokenizer: Tokenizer, facts: Facts) -> InputExamples:
        settings = self.sequence_length, tokenizer.end_of_text, facts.start_token
        inputs = [pairs.after(facts.begin_token, tokens) for tokens in tokenizer.encode_batch(rows)]
        return InputExamples(pairs.encode_inputs(inputs, *settings, self.kind))


@TASKS.register("sequence_to_sequence")
@dataclass(frozen=True)
class SequenceToSequence(EncoderDecoderTask, PairTask):
    """Predict each token of a target from an input and the target's tokens before it.

    Attributes:
        start_token: role of the first token of the decoder: "end_of_text", or "pad" as in the checkpoints of T5.
    """

    begins = True
    optional_tokens = ("end_of_text",)

    start_token: Literal["end_of_text", "pad"] = "end_of_text"

    @property
    def special_tokens(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys([self.start_token, "end_of_text"]))

    def first_token(self, tokenizer: Tokenizer) -> int:
        return tokenizer.pad if self.start_token == "pad" else tokenizer.end_of_text


@TASKS.register("conditional_lm")
@dataclass(frozen=True)
class ConditionalLM(PairTask):
    """Predict each token of a target that follows its input, from all tokens before it.

    Attributes:
        sequence_length: number of tokens of an input and its target together, with an end token each; longer pairs are
            omitted in training, and their inputs are truncated in evaluation.
    """

    needs = ("next_token",)
    ends = ("", "end_of_text")
    generates = True
    begins = True
    kind = pairs.Continuations

    def request(self, tokens: np.ndarray, tokenizer: Tokenizer, facts: Facts) -> Request:
        return Request(np.append(pairs.after(facts.begin_token, tokens), tokenizer.end_of_text)[None])

    def requests(self, batch: dict[str, np.ndarray], facts: Facts) -> Request:
        return Request(batch["tokens"], batch["mask"].argmax(axis=1) + 1)  # up to the first target
