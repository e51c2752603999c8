"""Windows of tokens over a stream of documents, and pairs of groups of sentences.

The pairs are for next-sentence prediction (BERT, arXiv 1810.04805, section 3.1 and appendix A.2) and sentence-order
prediction (ALBERT, arXiv 1909.11942, section 3.1).
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lineage.data import shuffle
from lineage.data.content import check_length
from lineage.data.documents import Documents
from lineage.data.examples.encoded import join, num_added
from lineage.data.examples.masking import MaskTokens
from lineage.data.loader import Batch, ExampleSource
from lineage.data.tokenizers import Tokenizer
from lineage.data.tokens import Shards, Stream

# The end of a sentence: . ! or ? before white space, or the end of a line.
ENDS = re.compile(r"(?<=[.!?])(?=[^\S\n])|(?<=\n)")


class Windows(ExampleSource):
    """Windows of T = `length` tokens over a stream of tokens [N]; window i starts at token i * stride.

    An example has `tokens` and `targets` (the next tokens), int32 [T], and `mask` bool [T], which is False past the end
    of the stream. All windows but the last are full.

    Args:
        stride: number of tokens from one window to the next; 0: T, so that every token but the first is a target once.
        once: whether `mask` is True for each target only in the first window that contains it, after at least
            T - stride tokens (except at the beginning of the stream).
    """

    def __init__(self, tokens: np.ndarray | Shards, length: int, stride: int = 0, once: bool = False):
        self.tokens, self.length, self.stride, self.once = tokens, length, stride or length, once
        check_length(length, 1)
        if not 1 <= self.stride <= length:
            sizes = f"task.sequence_length is {length} and the stride {self.stride}"
            raise ValueError(f"{sizes}: the stride must be at least 1 and at most the length.")
        if len(tokens) < 2:
            raise ValueError(f"The text has {len(tokens)} tokens: language modeling needs at least 2.")

    def __len__(self) -> int:
        return -(-max(len(self.tokens) - 1 - self.length, 0) // self.stride) + 1

    def take(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        starts, width = indices * self.stride, self.length + 1
        mask = np.ones((len(starts), self.length), bool)
        if self.once:
            mask[starts > 0, : self.length - self.stride] = False
        block = np.zeros((len(starts), width), np.int32)
        for row, start in enumerate(starts.tolist()):
            window = self.tokens[start : start + width]
            block[row, : len(window)] = window
            mask[row, len(window) - 1 :] = False
        return {"tokens": block[:, :-1], "targets": block[:, 1:], "mask": mask}


class Sentences(Documents):
    """Sentences of documents, with the white space before them, and an empty sentence after each document."""

    always_ended = True

    def items(self) -> Iterator[str]:
        for piece in self._texts.pieces():  # each piece ends with a sentence
            yield from (sentence for sentence in ENDS.split(piece.text) if sentence.strip())
            if piece.is_last:
                yield ""

    def fingerprint(self, cache_dir: str | Path = "") -> str:
        return f"{self._texts.fingerprint(cache_dir)} in sentences"

    def check_unchanged(self, cache_dir: str | Path = "") -> None:
        self._texts.check_unchanged(cache_dir)


class Chunks(ExampleSource):
    """Chunks of at least two consecutive sentences of a document, of about `length` tokens.

    An example has the index of its first sentence as `first`, and this object as `chunks`. Together the chunks contain
    each document once, except for a single remaining sentence. The stream is encoded from `Sentences`.
    """

    def __init__(self, stream: Stream, length: int):
        self.tokens, self.length = stream.tokens, length
        ends = stream.ends - 1  # an end of text follows each sentence and each document
        starts = np.append(0, ends[:-1] + 1)
        kept = ends > starts
        self.starts, self.lengths = starts[kept], (ends - starts)[kept]  # tokens of each sentence [S]
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

    def take(self, indices: np.ndarray) -> dict[str, Any]:
        return {"first": self.firsts[indices], "chunks": [self] * len(indices)}

    def num_fitting(self, first: int, size: int) -> int:
        """Return the number of sentences of a document, starting from `first`, with at most `size` tokens in total."""
        lengths = self.lengths[first : min(self.stops[first], first + size)]
        return int(np.searchsorted(np.cumsum(lengths), size, side="right"))

    def read(self, first: int, count: int) -> np.ndarray:
        """Return the tokens of `count` sentences, starting from sentence `first`."""
        last = first + count - 1
        tokens = self.tokens[self.starts[first] : self.starts[last] + self.lengths[last]]
        return tokens[np.delete(np.arange(len(tokens)), self.starts[first + 1 : last + 1] - 1 - self.starts[first])]


@dataclass(frozen=True)
class PairSentences:
    """Transform of chunks of `length` tokens into `[CLS] A [SEP] B [SEP]`, with masked tokens and a `label` int32 [B].

    A chunk is split between two sentences. In half of the examples, B follows A (label 0); in the others (label 1), B
    starts at a random sentence of another document or, with `order`, A and B are swapped. If A and B are too long
    together, the longer one is truncated first, A at its beginning and B at its end. A tenth of the pairs is shorter.

    The batch also has `segments` int32 [B, T] (0 up to the first [SEP], then 1) and the arrays of `MaskTokens`.
    """

    length: int
    tokenizer: Tokenizer
    masked: MaskTokens
    order: bool = False

    def __call__(self, batch: Batch, keys: np.ndarray) -> Batch:
        length, coder = self.length, self.tokenizer
        tokens = np.full((len(keys), length + num_added(coder, 2)), coder.pad, np.int32)
        segments, real = np.zeros(tokens.shape, np.int32), np.zeros(tokens.shape, bool)
        draws = shuffle.draw(keys, 5)
        label = (draws[:, 0] % np.uint64(2)).astype(np.int32)
        for row, (chunks, first) in enumerate(zip(batch["chunks"], batch["first"].tolist())):
            sequence, second = join(coder, *self._pair(chunks, first, bool(label[row]), *map(int, draws[row, 1:])))
            tokens[row, : len(sequence)] = sequence
            segments[row, second : len(sequence)] = 1
            real[row, : len(sequence)] = batch["mask"][row]
        return self.masked.hide(tokens, real, shuffle.fold(keys, 5)) | {"segments": segments, "label": label}

    def _pair(self, chunks, first, negative, shorter, size, cut, start):
        """Return the tokens of A and B of the chunk with the first sentence `first`; `shorter` to `start` are draws."""
        size = 2 + size % (self.length - 1) if shorter % 10 == 0 else self.length
        count = max(chunks.num_fitting(first, size), 2)
        middle = 1 + cut % (count - 1)
        a = chunks.read(first, middle)
        if negative and not self.order:
            stop = int(chunks.stops[first])
            begin = int(np.searchsorted(chunks.stops, stop))
            start = start % (len(chunks.starts) - (stop - begin))
            start += (stop - begin) * (start >= begin)  # skips the document of A
            b = chunks.read(start, max(chunks.num_fitting(start, size - len(a)), 1))
        else:
            b = chunks.read(first + middle, count - middle)
        if negative and self.order:
            a, b = b, a
        length = min(len(a), max(size - len(b), (size + 1) // 2))  # A keeps one token more, as in BERT's code
        return a[len(a) - length :], b[: size - length]
