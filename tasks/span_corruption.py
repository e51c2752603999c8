"""Span corruption: how T5 is pre-trained."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from lineage.data import Documents, Examples, Tokenizer
from lineage.data.examples import span_corruption
from lineage.tasks.base import TASKS, check_rate
from lineage.tasks.documents import WindowTask
from lineage.tasks.sequence_to_sequence import EncoderDecoderTask


@TASKS.register("span_corruption")
@dataclass(frozen=True)
class SpanCorruption(EncoderDecoderTask, WindowTask):
    """Generate the spans that are taken out of a text (T5, arXiv 1910.10683, section 3.1.4).

    Attributes:
        sequence_length: tokens of an input, sentinels and end included; windows are as long as fits.
        mask_rate: fraction of the tokens that is taken out.
    """

    special_tokens: ClassVar[tuple[str, ...]] = ("pad", "end_of_text", "sentinels")

    mask_rate: float = 0.15

    def __post_init__(self):
        super().__post_init__()
        check_rate("mask_rate", self.mask_rate)

    def lengths(self, length: int) -> tuple[int, int]:
        return length, span_corruption.lengths(self.mask_rate, length)[1]

    def examples(self, content: Mapping[str, Documents], tokenizer: Tokenizer | None, seed: int) -> Examples:
        """Return windows, with a transform that takes spans out.

        Raises:
            ValueError: the tokenizer has too few sentinels for so many spans.
        """
        rate, size = self.mask_rate, self.sequence_length
        length, targets = span_corruption.lengths(rate, size)
        found, needed = self.windows(content, tokenizer, length), span_corruption.count_noise(rate, length)[1]
        sentinels = np.array(tokenizer.sentinels)
        if len(sentinels) < needed:
            raise ValueError(
                f"task.sequence_length is {size}: it needs {needed} sentinels, and {len(sentinels)} exist."
            )
        start, end = tokenizer.pad, tokenizer.end_of_text
        corrupt = span_corruption.CorruptSpans(rate, size, targets, sentinels, start, end)
        facts = replace(found.facts, start_token=start)
        return replace(found, facts=facts, train_transform=corrupt, evaluation_transform=corrupt)
