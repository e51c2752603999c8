"""Pairs of groups of sentences, for next-sentence prediction (BERT, arXiv 1810.04805, section 3.1 and appendix A.2) and
sentence-order prediction (ALBERT, arXiv 1909.11942, section 3.1)."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from lineage.data import shuffle
from lineage.data.content import Documents
from lineage.data.examples.encoded import longest_first
from lineage.data.examples.masking import MaskTokens
from lineage.data.examples.windows import Tokens
from lineage.data.loader import Batch, ExampleSource
from lineage.data.tokenizers import Tokenizer

# The end of a sentence: . ! or ? before white space, or the end of a line.
ENDS = re.compile(r"(?<=[.!?])(?=[^\S\n])|(?<=\n)")


class Sentences(Documents):
    """Sentences of documents, which begin with the white space before them, and an empty one after each document."""

    always_ended = True

    def __iter__(self) -> Iterator[str]:
        for text in self._texts:
            yield from (sentence for sentence in ENDS.split(text) if sentence.strip())
            yield ""

    def fingerprint(self) -> str:
        return f"{self._texts.fingerprint()} in sentences"


class Chunks(Tokens, ExampleSource):
    """Chunks of at least two consecutive sentences of a document, of about `length` tokens.

    An example has the index of its first sentence as `first`. Together the chunks contain each document once, except
    for a last sentence that is left alone. In the `tokens` [N], `end` follows each sentence and each document.
    """

    def __init__(self, tokens: np.ndarray, end: int, length: int):
        self.tokens, self.length = tokens, length
        ends = np.flatnonzero(tokens == end)
        starts = np.append(0, ends[:-1] + 1)
        kept = ends > starts
        self.starts, self.lengths = starts[kept], (ends - starts)[kept]  # of each sentence [S], in tokens
        documents = np.cumsum(~kept)[kept]
        self.stops = np.searchsorted(documents, documents, side="right")  # first sentence of the next document [S]
        total, firsts, first = np.append(0, np.cumsum(self.lengths)), [], 0
        while first < len(documents):
            stop = int(self.stops[first])
            if first + 1 < stop:
                firsts.append(first)
            too_long = int(np.searchsorted(total, total[first] + length, side="right")) - 1  # the next sentence
            first = min(max(too_long, first + 2), stop)
        self.firsts = np.array(firsts, np.int64)
        if not len(self.firsts):
            raise ValueError("Pairs of sentences need texts of at least two sentences: there is none.")

    def __len__(self) -> int:
        return len(self.firsts)

    def take(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        return {"first": self.firsts[indices]}

    def whole(self, first: int, size: int) -> int:
        """Return the number of sentences of a document from `first` on that have at most `size` tokens together."""
        lengths = self.lengths[first : min(self.stops[first], first + size)]
        return int(np.searchsorted(np.cumsum(lengths), size, side="right"))

    def read(self, first: int, count: int) -> np.ndarray:
        """Return the tokens of `count` sentences from sentence `first` on."""
        last = first + count - 1
        part = self.tokens[self.starts[first] : self.starts[last] + self.lengths[last]]
        return part[np.delete(np.arange(len(part)), self.starts[first + 1 : last + 1] - 1 - self.starts[first])]


@dataclass(frozen=True)
class PairSentences:
    """Transform that makes `[CLS] A [SEP] B [SEP]` of chunks, with masked tokens and a `label` int32 [B].

    A chunk is split between two sentences. In half of the examples, B follows A (label 0); in the others (label 1), B
    begins at a random sentence of another document or, with `order`, A and B are swapped. If A and B are too long
    together, the longer one is truncated first, A at its beginning and B at its end. A tenth of them is shorter.

    The batch also has `segments` int32 [B, T] (0 up to the first [SEP], then 1) and the arrays of `MaskTokens`.
    """

    chunks: Chunks
    tokenizer: Tokenizer
    masked: MaskTokens
    order: bool = False

    def __post_init__(self):
        if not self.order and self.chunks.stops[0] == len(self.chunks.stops):
            raise ValueError(
                "Next-sentence prediction needs several documents in each split: a negative pair is of two documents."
            )

    def __call__(self, batch: Batch, keys: np.ndarray) -> Batch:
        length, coder = self.chunks.length, self.tokenizer
        tokens = np.full((len(keys), length + 3), coder.pad, np.int32)
        segments, real = np.zeros(tokens.shape, np.int32), np.zeros(tokens.shape, bool)
        draws = shuffle.draw(keys, 5)
        label = (draws[:, 0] % np.uint64(2)).astype(np.int32)
        for row, first in enumerate(batch["first"]):
            a, b = self._texts(int(first), bool(label[row]), *map(int, draws[row, 1:]))
            whole = [coder.cls, *a, coder.sep, *b, coder.sep]
            tokens[row, : len(whole)] = whole
            segments[row, len(a) + 2 : len(whole)] = 1
            real[row, : len(whole)] = batch["mask"][row]
        return self.masked.hide(tokens, real, shuffle.fold(keys, 5)) | {"segments": segments, "label": label}

    def _texts(self, first, other, shorter, size, cut, start):
        chunks = self.chunks
        size = 2 + size % (chunks.length - 1) if shorter % 10 == 0 else chunks.length
        count = max(chunks.whole(first, size), 2)
        middle = 1 + cut % (count - 1)
        a = chunks.read(first, middle)
        if other and not self.order:
            stop = int(chunks.stops[first])
            begin = int(np.searchsorted(chunks.stops, stop))
            start = start % (len(chunks.starts) - (stop - begin))
            start += (stop - begin) * (start >= begin)  # skips the document of A
            b = chunks.read(start, max(chunks.whole(start, size - len(a)), 1))
        else:
            b = chunks.read(first + middle, count - middle)
        if other and self.order:
            a, b = b, a
        kept, rest = longest_first(len(a), len(b), size)
        return a[len(a) - kept :], b[:rest]
