"""Conditional language modeling: a decoder-only model generates a text for an input text."""

from dataclasses import dataclass

import numpy as np

from lineage.data import Facts, Tokenizer
from lineage.data.examples import pairs
from lineage.models import Model
from lineage.tasks.base import TASKS, Batch, Request, Result, Smoothing
from lineage.tasks.losses import token_loss
from lineage.tasks.sequence_to_sequence import PairTask


@TASKS.register("conditional_lm")
@dataclass(frozen=True)
class ConditionalLM(PairTask):
    """Predict each token of a target, which follows its input, from all tokens before it.

    Attributes:
        sequence_length: number of tokens of an input and its target together, with an end token each; longer pairs are
            left out of the training set, and their inputs are truncated in evaluation.
        label_smoothing: probability mass of the target that is spread evenly over the vocabulary, in training only.
    """

    needs = ("next_token",)
    kind = pairs.Continuations

    label_smoothing: Smoothing = 0.0

    def loss(self, model: Model, batch: Batch) -> Result:
        """Return the next-token loss of `targets` given `tokens`, both [B, T], where `mask` [B, T] is True."""
        return token_loss(model, model(batch["tokens"]), batch, self.label_smoothing)

    def request(self, tokens: np.ndarray, tokenizer: Tokenizer, facts: Facts) -> Request:
        return Request(np.append(tokens, tokenizer.end_of_text)[None])

    def requests(self, batch: dict[str, np.ndarray], facts: Facts) -> Request:
        return Request(batch["tokens"], batch["mask"].argmax(axis=1) + 1)  # up to the first target
