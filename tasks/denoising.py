"""Restoration of corrupted texts: the pre-training of BART and of T5."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from lineage.data import Documents, Examples, Tokenizer
from lineage.data.examples import corruption, pairs
from lineage.tasks.base import TASKS, Rate, Sizes
from lineage.tasks.sequence_to_sequence import EncoderDecoderTask
from lineage.tasks.text import DocumentTask


@dataclass(frozen=True)
class CorruptionTask(EncoderDecoderTask, DocumentTask):
    """Base class of tasks that restore a text."""

    def encode_inputs(self, texts: Sequence[str], tokenizer: Tokenizer, start: int) -> pairs.EncodedPairs:
        """Encode corrupted texts, in which the names of special tokens, such as <mask>, stand for the tokens."""
        ids = tokenizer.encode_marked(texts)
        return pairs.encode_inputs(ids, self.sequence_length, tokenizer.end_of_text, start, pairs.EncodedPairs)


@TASKS.register("denoising")
@dataclass(frozen=True)
class Denoising(CorruptionTask):
    """Restore a text from a corrupted one (BART, arXiv 1910.13461, section 2.2).

    Attributes:
        noise: steps that corrupt a text, such as "permute_sentences | infill(0.3, 3)".
    """

    special_tokens = ("pad", "mask", "end_of_text")

    noise: str = ""

    def examples(self, content: Mapping[str, Documents], tokenizer: Tokenizer | None, seed: int) -> Examples:
        length = self.sequence_length
        if length < 2:
            raise ValueError(f"task.sequence_length is {length}: it must be 2 or more, for a token and the end.")
        noise = corruption.AddNoise(corruption.parse(self.noise, tokenizer), length, tokenizer.end_of_text)
        start = tokenizer.end_of_text
        inputs = partial(self.encode_inputs, tokenizer=tokenizer, start=start)
        return self.windows(content, tokenizer, length - 1, noise, start_token=start, inputs=inputs)


@TASKS.register("span_corruption")
@dataclass(frozen=True)
class SpanCorruption(CorruptionTask):
    """Generate the spans that are removed from a text (T5, arXiv 1910.10683, section 3.1.4).

    Attributes:
        sequence_length: number of tokens of an input, with its sentinels and end; windows are as long as fits.
        mask_rate: fraction of the tokens that is removed.
    """

    special_tokens = ("pad", "end_of_text", "sentinels")

    mask_rate: Rate = 0.15

    def axes(self, sizes: Sizes) -> dict[str, int]:
        axes = super().axes(sizes)
        return axes | {"T": corruption.lengths(self.mask_rate, axes["S"])[1]}

    def examples(self, content: Mapping[str, Documents], tokenizer: Tokenizer | None, seed: int) -> Examples:
        rate, size = self.mask_rate, self.sequence_length
        length, targets = corruption.lengths(rate, size)
        sentinels, needed = np.array(tokenizer.sentinels), corruption.count_noise(rate, length)[1]
        if len(sentinels) < needed:
            raise ValueError(
                f"task.sequence_length is {size}: it needs {needed} sentinels, and {len(sentinels)} exist."
            )
        start, end = tokenizer.pad, tokenizer.end_of_text
        corrupt = corruption.CorruptSpans(rate, size, targets, sentinels, start, end)
        inputs = partial(self.encode_inputs, tokenizer=tokenizer, start=start)
        return self.windows(content, tokenizer, length, corrupt, start_token=start, inputs=inputs)
