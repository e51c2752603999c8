"""Restoration of corrupted texts: the pre-training of BART and of T5."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from lineage.data import Documents, Examples, Facts, Tokenizer
from lineage.data.content import check_length
from lineage.data.examples import corruption, pairs
from lineage.tasks.base import TASKS, InputExamples, MaskRate, Sizes
from lineage.tasks.sequence_to_sequence import EncoderDecoderTask
from lineage.tasks.text import DocumentTask


@dataclass(frozen=True)
class CorruptionTask(EncoderDecoderTask, DocumentTask):
    """Base class of tasks that restore a text."""

    marked = True

    def input_examples(self, rows: Sequence[str], tokenizer: Tokenizer, facts: Facts) -> InputExamples:
        """Encode corrupted texts (see `marked`)."""
        settings = self.sequence_length, tokenizer.end_of_text, facts.start_token
        inputs = [pairs.after(facts.begin_token, tokens) for tokens in tokenizer.encode_marked(rows)]
        return InputExamples(pairs.encode_inputs(inputs, *settings))


@TASKS.register("denoising")
@dataclass(frozen=True)
class Denoising(CorruptionTask):
    """Restore a text from a corrupted one (BART, arXiv 1910.13461, section 2.2).

    Attributes:
        noise: steps that corrupt a text; by default, those of the published models.
    """

    begins = True
    special_tokens = ("pad", "mask", "end_of_text")

    noise: str = "permute_sentences | infill(0.3, 3)"

    def examples(self, content: Mapping[str, Documents], tokenizer: Tokenizer | None, seed: int) -> Examples:
        length = self.sequence_length
        begin = self.begin_token(tokenizer)
        added = 1 if begin is None else 2
        check_length(length, 1 + added, "a token and those before and after it")
        noise = corruption.AddNoise(corruption.parse(self.noise, tokenizer), length, tokenizer.end_of_text, begin)
        return self.windows(content, tokenizer, length - added, noise)

    def first_token(self, tokenizer: Tokenizer) -> int:
        return tokenizer.end_of_text


@TASKS.register("span_corruption")
@dataclass(frozen=True)
class SpanCorruption(CorruptionTask):
    """Generate the spans that are removed from a text (T5, arXiv 1910.10683, section 3.1.4).

    Attributes:
        sequence_length: number of tokens of an input, with its sentinels and end; windows are as long as possible.
        mask_rate: fraction of the tokens that is removed.
    """

    special_tokens = ("pad", "end_of_text", "sentinels")

    mask_rate: MaskRate = 0.15

    def axes(self, sizes: Sizes) -> dict[str, int]:
        axes = super().axes(sizes)
        return axes | {"T": corruption.lengths(self.mask_rate, axes["S"])[1]}

    def examples(self, content: Mapping[str, Documents], tokenizer: Tokenizer | None, seed: int) -> Examples:
        rate, size = self.mask_rate, self.sequence_length
        length, targets = corruption.lengths(rate, size)
        sentinels, needed = np.array(tokenizer.sentinels), corruption.count_noise(rate, length)[1]
        if len(sentinels) < needed:
            raise ValueError(f"task.sequence_length is {size}: it needs {needed} sentinels; {len(sentinels)} exist.")
        start, end = self.first_token(tokenizer), tokenizer.end_of_text
        corrupt = corruption.CorruptSpans(rate, size, targets, sentinels, start, end)
        return self.windows(content, tokenizer, length, corrupt)

    def first_token(self, tokenizer: Tokenizer) -> int:
        return tokenizer.pad
