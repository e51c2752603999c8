"""Conditional language modeling: a decoder-only model generates a text for an input text."""

from dataclasses import dataclass

import numpy as np

from lineage.data import Facts, Tokenizer
from lineage.data.examples import pairs
from lineage.tasks.base import TASKS, Request
from lineage.tasks.sequence_to_sequence import PairTask


@TASKS.register("conditional_lm")
@dataclass(frozen=True)
class ConditionalLM(PairTask):
    """Predict each token of a target, which follows its input, from all tokens before it.

    Attributes:
        sequence_length: number of tokens of an input and its target together, with an end token each; longer pairs are
            left out of the training set, and their inputs are truncated in evaluation.
    """

    needs = ("next_token",)
    kind = pairs.Continuations

    def request(self, tokens: np.ndarray, tokenizer: Tokenizer, facts: Facts) -> Request:
        return Request(np.append(tokens, tokenizer.end_of_text)[None])

    def requests(self, batch: dict[str, np.ndarray], facts: Facts) -> Request:
        return Request(batch["tokens"], batch["mask"].argmax(axis=1) + 1)  # up to the first target
