"""Denoising, the pre-training of BART."""

from collections.abc import Mapping
from dataclasses import dataclass

from lineage.data import Documents, Examples, Tokenizer
from lineage.data.examples import corruption
from lineage.tasks.base import TASKS
from lineage.tasks.sequence_to_sequence import EncoderDecoderTask
from lineage.tasks.text import DocumentTask


@TASKS.register("denoising")
@dataclass(frozen=True)
class Denoising(EncoderDecoderTask, DocumentTask):
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
        return self.windows(content, tokenizer, length - 1, noise, start_token=tokenizer.end_of_text)
