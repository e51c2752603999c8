"""Sequence-to-sequence learning: a text is generated for an input text."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import jax.numpy as jnp
import numpy as np

from lineage.data import Examples, Facts, PairedTexts, Tokenizer
from lineage.data.examples import pairs
from lineage.models import Model
from lineage.tasks.base import TASKS, Batch, Request, Result, Spec, check_range, specs
from lineage.tasks.documents import TextTask, windows_spec
from lineage.tasks.losses import token_loss

# From (about) 1 at progress 0 to `end` at progress 1 (arXiv 1506.03099, section 2.4); 100 is the sigmoid's k.
DECAYS = {
    "linear": lambda progress, end: 1 - (1 - end) * progress,
    "exponential": lambda progress, end: end**progress,
    "inverse_sigmoid": lambda progress, end: 100 / (100 + (100 * (1 - end) / end) ** progress),
}


@dataclass(frozen=True)
class EncoderDecoderTask(TextTask):
    """Base class of tasks of inputs and targets.

    Attributes:
        label_smoothing: fraction of the target that is spread evenly over the vocabulary, in training only.
        scheduled_sampling: fraction of the tokens in whose place a recurrent decoder reads its own prediction at the
            end of the training (arXiv 1506.03099); it rises from 0.
        decay: how the fraction of the tokens that are given falls meanwhile.
    """

    needs: ClassVar[tuple[str, ...]] = ("target_tokens",)
    inputs: ClassVar[tuple[str, ...]] = ("inputs", "inputs_mask", "tokens")
    arguments: ClassVar[tuple[str, ...]] = ("inputs", "tokens")

    label_smoothing: float = 0.0
    scheduled_sampling: float = 0.0
    decay: Literal["linear", "exponential", "inverse_sigmoid"] = "linear"

    def __post_init__(self):
        super().__post_init__()
        check_range("label_smoothing", self.label_smoothing, below=1)
        check_range("scheduled_sampling", self.scheduled_sampling, below=1)

    def check_model(self, model: Model) -> None:
        super().check_model(model)
        if self.scheduled_sampling and not model.takes_own_rate:
            raise ValueError(
                f"task.scheduled_sampling is {self.scheduled_sampling}: it must be 0 for {type(model).__name__}, "
                "which reads all tokens at once; it is for seq2seq."
            )

    def batch_spec(self, batch_size: int, model: Model, facts: Callable[[], Facts], length: int | None = None) -> Spec:
        inputs, targets = self.lengths(length or self.sequence_length)
        shape = (batch_size, inputs)
        return windows_spec(batch_size, targets) | specs(jnp.int32, inputs=shape) | specs(bool, inputs_mask=shape)

    def lengths(self, length: int) -> tuple[int, int]:
        """Return the lengths of inputs and of targets, for a `sequence_length`."""
        return length, length

    def forward(self, model: Model, batch: Batch) -> Any:
        return model(batch["inputs"], batch["tokens"], inputs_mask=batch["inputs_mask"])

    def loss(self, model: Model, batch: Batch) -> Result:
        """Cross-entropy of `targets` [B, T], given all `inputs` [B, S] and the `tokens` [B, T] up to each.

        Counted where `mask` [B, T] is True; of the inputs, those where `inputs_mask` [B, S] is True are seen.
        """
        options = {}
        if model.has_rng("dropout"):
            if self.scheduled_sampling:
                progress = model.get_variable("run", "progress", 0.0)
                options["own_rate"] = 1 - DECAYS[self.decay](progress, 1 - self.scheduled_sampling)
            if model.uses_batch_statistics:  # of which padding must not be a part
                options["mask"] = batch["mask"]
        logits = model(batch["inputs"], batch["tokens"], inputs_mask=batch["inputs_mask"], **options)
        return token_loss(model, logits, batch, self.label_smoothing)

    def request(self, tokens: np.ndarray, tokenizer: Tokenizer, facts: Facts) -> Request:
        return np.array([facts.start_token]), np.append(tokens, tokenizer.end_of_text).astype(np.int32)

    def requests(
        self, batch: dict[str, np.ndarray], facts: Facts
    ) -> tuple[np.ndarray, np.ndarray | None, tuple[np.ndarray, np.ndarray] | None]:
        prompts = np.full((len(batch["inputs"]), 1), facts.start_token)
        return prompts, None, (batch["inputs"], batch["inputs_mask"])


@dataclass(frozen=True)
class PairTask(TextTask):
    """Base class of tasks of paired texts.

    Attributes:
        sequence_length: tokens of an input, and of a target, with its end; longer pairs are left out of the training,
            and cut in evaluation.
    """

    reads: ClassVar[str] = "pairs"
    special_tokens: ClassVar[tuple[str, ...]] = ("end_of_text",)
    loader_options: ClassVar[tuple[str, ...]] = ("buckets",)
    kind: ClassVar[type[pairs.EncodedPairs]] = pairs.EncodedPairs

    def texts(self, content: Mapping[str, PairedTexts]) -> dict[str, Iterable[str]]:
        return {name: [*part.inputs, *part.targets] for name, part in content.items()}

    def encoded(
        self, content: Mapping[str, PairedTexts], tokenizer: Tokenizer, start_token: int | None = None
    ) -> Examples:
        """Return the pairs as token ids; `start_token`, if given, is where targets are read from."""
        start = tokenizer.end_of_text if start_token is None else start_token
        splits = {
            name: pairs.encode(part, tokenizer, self.sequence_length, name == "train", start, self.kind)
            for name, part in content.items()
        }
        facts = Facts(vocab_size=tokenizer.vocab_size, sequence_length=self.sequence_length, start_token=start_token)
        return Examples(splits, facts, tokenizer)

    def evaluators(self) -> dict[str, dict[str, Any]]:
        return super().evaluators() | {"generation": {"name": "generation"}}


@TASKS.register("sequence_to_sequence")
@dataclass(frozen=True)
class SequenceToSequence(EncoderDecoderTask, PairTask):
    """Predict each token of a target from an input and the target's tokens before it.

    Attributes:
        start_token: role of the token with which the decoder starts: "end_of_text", or "pad" as in T5's checkpoints.
    """

    optional_tokens: ClassVar[tuple[str, ...]] = ("end_of_text",)

    start_token: Literal["end_of_text", "pad"] = "end_of_text"

    @property
    def special_tokens(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys([self.start_token, "end_of_text"]))

    def examples(self, content: Mapping[str, PairedTexts], tokenizer: Tokenizer | None, seed: int) -> Examples:
        start = tokenizer.pad if self.start_token == "pad" else tokenizer.end_of_text
        return self.encoded(content, tokenizer, start)
