"""Causal and bidirectional language modeling."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from lineage.configs.registry import Natural
from lineage.data import Documents, ExampleSource, Facts, Loader, Tokenizer
from lineage.data.examples.packing import Packed
from lineage.data.examples.pairs import Prompts, after
from lineage.data.tokens import Stream, tokenize
from lineage.metrics.likelihood import bits, perplexity
from lineage.models import Model
from lineage.tasks.base import TASKS, Batch, InputExamples, Request, Result
from lineage.tasks.losses import token_loss
from lineage.tasks.text import DocumentTask, packed


@TASKS.register("causal_lm")
@dataclass(frozen=True)
class CausalLM(DocumentTask):
    """Predict each token of a text from those before it.

    Attributes:
        packing: whether a row has as many whole documents as fit, each with its own attention and positions from 0
            (longer documents are split), instead of a window of the stream of all documents.
        evaluation_stride: distance between the starts of evaluation windows, in tokens; 0: the length of a window. Each
            token is predicted once, given `sequence_length - evaluation_stride` tokens or more, if there are as many.
    """

    needs = ("next_token",)
    generates = True
    begins = True
    special_tokens = ("end_of_text",)
    optional_tokens = ("end_of_text",)
    loader_options = ("order",)

    packing: bool = False
    evaluation_stride: Natural = 0

    @property
    def arrays(self) -> Mapping[str, str]:
        return DocumentTask.arrays | (dict.fromkeys(("segments", "positions"), "int32 B T") if self.packing else {})

    def input_examples(self, rows: Sequence[str], tokenizer: Tokenizer, facts: Facts) -> InputExamples:
        if not self.generates:
            return super().input_examples(rows, tokenizer, facts)
        prompts = [after(facts.begin_token, tokens) for tokens in tokenizer.encode_batch(rows)]
        if empty := [number for number, tokens in enumerate(prompts) if not len(tokens)]:
            raise ValueError(f"The text {rows[empty[0]]!r} has no token: a language model continues at least one.")
        return InputExamples(Prompts(prompts))

    def encode(self, documents: Documents, tokenizer: Tokenizer, workers: int = 0) -> Stream:
        return tokenize(documents, tokenizer, self.cache_dir, workers, self.begin_token(tokenizer))

    def num_predicted(self, stream: Stream, tokenizer: Tokenizer) -> int:
        unpredicted = self.packing and self.begin_token(tokenizer) is not None  # the token before each document
        return len(stream.tokens) - (len(stream.ends) if unpredicted else 0)

    def part(self, stream: Stream, length: int, evaluation: bool) -> ExampleSource:
        return Packed(stream, length) if self.packing else super().part(stream, length, evaluation)

    def check_model(self, model: Model) -> None:
        super().check_model(model)
        if self.packing and not model.accepts("segments"):
            kind = type(model).__name__
            raise ValueError(f"task.packing is True: it must be False for {kind}, which takes no segments.")

    def check_loader(self, loader: Loader) -> None:
        super().check_loader(loader)
        if self.packing and (loader.order or self.stride or self.evaluation_stride):
            raise ValueError("task.packing is True: loader.order must be '', and the strides of the task must be 0.")
        for name in ("stride", "evaluation_stride"):
            if loader.order and (value := getattr(self, name)) not in (0, self.sequence_length):
                why = f"because loader.order={loader.order!r} needs windows that follow each other"
                raise ValueError(f"task.{name} is {value}: it must be 0, {why}.")

    def forward(self, model: Model, batch: Batch) -> Any:
        return model(batch["tokens"], **packed(batch))

    def derived(self, metrics: dict[str, float], facts: Facts, split: str) -> dict[str, float]:
        loss = metrics["loss"]
        return {
            "perplexity": perplexity(loss),
            "bits_per_character": bits(loss, facts.characters_per_token[split]),
            "bits_per_byte": bits(loss, facts.bytes_per_token[split]),
        }

    def request(self, tokens: np.ndarray, tokenizer: Tokenizer, facts: Facts) -> Request:
        return Request(after(facts.begin_token, tokens)[None])

    def requests(self, batch: dict[str, np.ndarray], facts: Facts) -> Request:
        return Request(batch["tokens"], batch["lengths"])


@TASKS.register("bidirectional_lm")
@dataclass(frozen=True)
class BidirectionalLM(CausalLM):
    """Predict each token from those before it, and with a second model from those after it (ELMo, arXiv 1802.05365)."""

    needs = ("both_directions",)
    generates = False
    label_smoothing: ClassVar[float] = 0.0  # not an option
    packing: ClassVar[bool] = False  # not an option
    evaluation_stride: ClassVar[int] = 0  # not an option: the tokens before a window are no context for both models

    def loss(self, model: Model, batch: Batch) -> Result:
        """Return the sum of the forward and backward language modeling losses, where `mask` [B, T] is True.

        The backward model does not predict the last token, because none follows it.
        """
        tokens, mask = batch["tokens"], batch["mask"]
        forward, backward = model(tokens, mask=mask)
        before = {"targets": tokens[:, :-1], "mask": mask[:, :-1] & mask[:, 1:]}
        loss, weight, aux = token_loss(model, forward, batch)
        loss_before, weight_before, aux_before = token_loss(model, backward[:, 1:], before)
        aux = {name: aux[name].merge(aux_before[name]) for name in aux} | {"backward_loss": aux_before["loss"]}
        return loss + loss_before, weight + weight_before, aux
