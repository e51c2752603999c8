"""Rows of several documents each, for language modeling with little padding."""

from bisect import bisect_left, insort

import numpy as np

from lineage.data.content import check_length
from lineage.data.loader import ExampleSource
from lineage.data.tokens import Stream

Row = tuple[tuple[int, int], ...]  # lengths of the parts in a row, with the number of parts of each length


class Packed(ExampleSource):
    """Rows of T = `length` tokens, packed with the documents of a stream.

    A document of n tokens has n - 1 targets: all of its tokens but the first. It is split into parts of at most T
    targets, so only a document of more than T + 1 tokens has several parts. Documents of one token are left out. The
    rows are planned at the start, from the lengths of the documents alone.

    An example has, all of shape [T], `tokens` and `targets` int32 (the next token of the same document), `segments`
    int32 (number of the part in its row, starting from 1; 0 for padding), `positions` int32 (starting from 0 in each
    part), and `mask` bool (False for padding).
    """

    def __init__(self, stream: Stream, length: int):
        check_length(length, 1)
        starts = np.append(0, stream.ends)[:-1]
        targets = np.maximum(stream.ends - starts - 1, 0)
        counts = -(-targets // length)
        before = _ranges(counts) * length  # targets of the document before each part [P]
        lengths = np.minimum(np.repeat(targets, counts) - before, length)
        if not len(lengths):
            raise ValueError("No text has two tokens or more, as language modeling requires.")
        order, self.rows = pack(lengths, length)
        self.tokens, self.length = stream.tokens, length
        self.starts, self.lengths = (np.repeat(starts, counts) + before)[order], lengths[order]

    def __len__(self) -> int:
        return len(self.rows) - 1

    def take(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        counts = self.rows[indices + 1] - self.rows[indices]  # number of parts in each row [B]
        number = _ranges(counts)  # index of each part in its row [P]
        parts = np.repeat(self.rows[indices], counts) + number
        starts, lengths = self.starts[parts], self.lengths[parts]
        read = [self.tokens[start : start + size] for start, size in zip(starts.tolist(), (lengths + 1).tolist())]
        positions = _ranges(lengths)
        source = np.repeat(np.cumsum(lengths + 1) - lengths - 1, lengths) + positions
        tokens = np.concatenate(read)
        mask = np.arange(self.length) < np.add.reduceat(lengths, np.cumsum(counts) - counts)[:, None]
        values = {"tokens": tokens[source], "targets": tokens[source + 1], "positions": positions}
        values["segments"] = np.repeat(number + 1, lengths)
        batch = {name: np.zeros(mask.shape, np.int32) for name in values}
        for name, value in values.items():
            batch[name][mask] = value
        return batch | {"mask": mask}


def _ranges(counts: np.ndarray) -> np.ndarray:
    """Return the concatenated ranges 0 to n - 1 for each n in `counts`."""
    return np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)


def pack(lengths: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Distribute parts with `lengths` [P], from 1 to `size`, over rows of that size, by best-fit decreasing.

    From the longest to the shortest, each part goes into the fullest row that has room for it. Parts of equal length
    are distributed together (arXiv 2107.02027, section 3.1), so the time depends on the number of different lengths.
    Return the indices of the parts in the order of the rows, int64 [P], and the position of the first part of each row
    in this order, followed by P, int64 [R + 1].
    """
    counts = np.bincount(lengths, minlength=size + 1)
    positions = np.cumsum(counts[::-1])[::-1] - counts  # position of the next part of each length
    blocks, sizes = [], []
    order = np.argsort(-lengths, kind="stable")
    for row, number in _plan(counts.tolist(), size):
        columns = []
        for length, copies in row:
            columns.append(order[positions[length] :][: number * copies].reshape(number, copies))
            positions[length] += number * copies
        block = np.concatenate(columns, axis=1)
        blocks.append(block.ravel())
        sizes.append(np.full(number, block.shape[1]))
    return np.concatenate(blocks), np.append(0, np.cumsum(np.concatenate(sizes)))


def _plan(counts: list[int], size: int) -> list[tuple[Row, int]]:
    """Return kinds of rows and their numbers, which in total have `counts[n]` parts of each length n."""
    rooms: dict[int, list[tuple[Row, int]]] = {}  # rows by the space left in them
    spaces: list[int] = []  # the keys of `rooms`, sorted

    def add(row, number, space):
        if number and space not in rooms:
            rooms[space] = []
            insort(spaces, space)
        if number:
            rooms[space].append((row, number))

    for length in range(size, 0, -1):
        remaining = counts[length]
        while remaining:
            place = bisect_left(spaces, length)
            if place == len(spaces):
                space, row, number = size, (), -(-remaining // (size // length))
            else:
                space = spaces[place]
                row, number = rooms[space].pop()
                if not rooms[space]:
                    del rooms[space], spaces[place]
            copies = space // length
            filled, remainder = divmod(min(remaining, number * copies), copies)
            add((*row, (length, copies)), filled, space - length * copies)
            if remainder:
                add((*row, (length, remainder)), 1, space - length * remainder)
            add(row, number - filled - bool(remainder), space)
            remaining -= filled * copies + remainder
    return [kind for space in spaces for kind in rooms[space]]
