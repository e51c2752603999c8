"""Denoising: how BART is pre-trained."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from lineage.data import Documents, Examples, Tokenizer
from lineage.data.examples import denoising
from lineage.tasks.base import TASKS
from lineage.tasks.documents import WindowTask
from lineage.tasks.sequence_to_sequence import EncoderDecoderTask


@TASKS.register("denoising")
@dataclass(frozen=True)
class Denoising(EncoderDecoderTask, WindowTask):
    """Restore a text from a corrupted one (BART, arXiv 1910.13461, section 2.2).

    Attributes:
        sequence_length: tokens of an input, and of a target, with its end.
        noise: what corrupts a text, steps such as "permute_sentences | infill(0.3, 3)".
    """

    special_tokens: ClassVar[tuple[str, ...]] = ("pad", "mask", "end_of_text")

    noise: str = ""

    def examples(self, content: Mapping[str, Documents], tokenizer: Tokenizer | None, seed: int) -> Examples:
        """Return windows, with a transform that corrupts them.

        Raises:
            ValueError: the sequences are too short, or there is no noise.
        """
        length = self.sequence_length
        if length < 2:
            raise ValueError(f"task.sequence_length is {length}: it must be 2 or more, for a token and the end.")
        found = self.windows(content, tokenizer, length - 1)
        noise = denoising.AddNoise(denoising.parse(self.noise, tokenizer), length, tokenizer.end_of_text)
        facts = replace(found.facts, start_token=tokenizer.end_of_text)
        return replace(found, facts=facts, train_transform=noise, evaluation_transform=noise)
