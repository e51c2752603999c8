"""Two texts in a row: does the second follow the first? BERT's next sentence (arXiv 1810.04805, section 3.1 and
appendix A.2) and ALBERT's sentence order (arXiv 1909.11942, section 3.1)."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from lineage.data import shuffle
from lineage.data.content import Documents
from lineage.data.examples.masking import MaskTokens
from lineage.data.examples.windows import Tokens
from lineage.data.loader import Batch, ExampleSource
from lineage.data.tokenizers import Tokenizer

# what ends a sentence in a text
ENDS = re.compile(r"(?<=[.!?])(?=[^\S\n])|(?<=\n)")


class Sentences(Documents):
    """The lines of texts, and within a line what ends with . ! or ? before white space, which the next one begins with;
    after a text an empty one."""

    always_ended = True

    def __iter__(self) -> Iterator[str]:
        for text in self._texts:
            yield from (sentence for sentence in ENDS.split(text) if sentence.strip())
            yield ""

    def fingerprint(self) -> str:
        """A digest of the texts."""
        return f"{self._texts.fingerprint()} in sentences"


class Chunks(Tokens, ExampleSource):
    """Runs of sentences in a document, of about `length` tokens and of two sentences at least: example i has the number
    of its first sentence as `first`. Together they go through each document once, but for a last sentence left alone.

    Args:
        tokens: [N], each sentence followed by `end`, and each document by one more.
        end: the token.
        length: of the two texts of an example together.

    Attributes:
        starts, lengths: of each sentence, [S].
        stops: [S], the number of the first sentence that is not of its document any more.

    Raises:
        ValueError: no document has two sentences.
    """

    def __init__(self, tokens: np.ndarray, end: int, length: int):
        self.tokens, self.length = tokens, length
        ends = np.flatnonzero(tokens == end)
        starts = np.append(0, ends[:-1] + 1)
        kept = ends > starts
        self.starts, self.lengths = starts[kept], (ends - starts)[kept]
        documents = np.cumsum(~kept)[kept]
        self.stops = np.searchsorted(documents, documents, side="right")
        total, firsts, first = np.append(0, np.cumsum(self.lengths)), [], 0
        while first < len(documents):
            stop = int(self.stops[first])
            if first + 1 < stop:
                firsts.append(first)
            fits = int(np.searchsorted(total, total[first] + length, side="right")) - 1  # up to this sentence
            first = min(max(fits, first + 2), stop)
        self.firsts = np.array(firsts, np.int64)
        if not len(self.firsts):
            raise ValueError("pairs of sentences need texts of several: none has two")

    def __len__(self) -> int:
        return len(self.firsts)

    def take(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        return {"first": self.firsts[indices]}

    def whole(self, first: int, size: int) -> int:
        """How many sentences from the one numbered `first` have `size` tokens together at the most, in its document."""
        lengths = self.lengths[first : min(self.stops[first], first + size)]
        return int(np.searchsorted(np.cumsum(lengths), size, side="right"))

    def read(self, first: int, count: int) -> np.ndarray:
        """The tokens of so many sentences."""
        last = first + count - 1
        part = self.tokens[self.starts[first] : self.starts[last] + self.lengths[last]]
        return part[np.delete(np.arange(len(part)), self.starts[first + 1 : last + 1] - 1 - self.starts[first])]


@dataclass(frozen=True)
class PairSentences:
    """Makes [CLS] A [SEP] B [SEP] of chunks, with words hidden, and a `label` int32 [B] to be told.

    A chunk is cut in two between sentences. In half of the examples, drawn anew each time, B is what follows A (label
    0); in the others (label 1) it begins at any sentence of another document, or with `order` the two change places.
    What is too long loses the beginning of A and the end of B, the longer one more; a tenth of the examples is shorter.

    The batch also has `segments` int32 [B, T] (0 up to the first [SEP], then 1) and what `MaskTokens` makes.
    """

    chunks: Chunks
    tokenizer: Tokenizer
    masked: MaskTokens
    order: bool = False

    def __post_init__(self):
        if not self.order and self.chunks.stops[0] == len(self.chunks.stops):
            raise ValueError("next_sentence needs several texts in each split: what does not follow is of another one")

    def __call__(self, batch: Batch, keys: np.ndarray) -> Batch:
        """Of a batch of chunks; `keys` uint64 [B] draw."""
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
            start += (stop - begin) * (start >= begin)  # past the document that A is of
            b = chunks.read(start, max(chunks.whole(start, size - len(a)), 1))
        else:
            b = chunks.read(first + middle, count - middle)
        if other and self.order:
            a, b = b, a
        kept = min(len(a), max(size - len(b), (size + 1) // 2))
        return a[len(a) - kept :], b[: size - kept]
