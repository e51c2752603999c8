"""Shards of token ids: files of a corpus that runs map into memory, whose checksums are verified as they are read.

The folder of a corpus has the file `index.json` and the shards 00000.tokens, 00001.tokens, ... A shard consists, in
little-endian order, of the ends of its documents (int64, in tokens from the beginning of the corpus), its token ids
(uint16 or int32) and the CRC-32 of each block of 64 KiB of both (uint32). The index has the name of the folder, which
identifies the corpus and the tokenizer, a `Shard` for each shard, and the CRC-32 of these entries.
"""

import contextlib
import json
import zlib
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lineage.configs.atomic import naming

INDEX = "index.json"
BLOCK = 1 << 16  # bytes with one checksum
DTYPES = (np.dtype(np.uint16), np.dtype(np.int32))


class Shard(NamedTuple):
    """Entry of a shard in the index: its numbers of items, and the CRC-32 of its checksums."""

    tokens: int
    documents: int
    characters: int
    bytes: int
    chunks: int  # number of groups of documents that are encoded together
    crc32: int


class Shards:
    """Token ids [N] in the files of a corpus; slices are arrays, and only the pages that they need are read.

    When a process first reads a block of a file, the checksum is verified, and the ids must be below `vocab_size`. A
    damaged file is deleted, so that the next start encodes it again, and ValueError is raised.
    """

    def __init__(self, folder: str, dtype: str, shards: Sequence[Shard], vocab_size: int):
        self._arguments = folder, dtype, shards, vocab_size
        self._starts = [0, *accumulate(shard.tokens for shard in shards)]
        self._opened: dict[int, ShardFile] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return Shards, self._arguments

    def __len__(self) -> int:
        return self._starts[-1]

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(self._arguments[1])

    def __getitem__(self, index: slice) -> np.ndarray:
        start, stop, _ = index.indices(len(self))
        arrays = []
        while start < stop:
            number = bisect_right(self._starts, start) - 1
            begin, end = self._starts[number], min(stop, self._starts[number + 1])
            arrays.append(self._file(number).read(start - begin, end - begin))
            start = end
        return arrays[0] if len(arrays) == 1 else np.concatenate([np.empty(0, self.dtype), *arrays])

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self[:], dtype)

    def ends(self) -> np.ndarray:
        """Return the position after each document, int64 [D]; raise ValueError if they are not in order."""
        files = map(self._file, range(len(self._starts) - 1))
        ends = np.concatenate([np.zeros(1, np.int64), *(file.read_ends() for file in files)])
        if (ends[1:] < ends[:-1]).any() or ends[-1] > len(self):
            raise ValueError(f"{self._arguments[0]} has documents that end at wrong positions: delete the folder.")
        return ends[1:]

    def _file(self, number):
        if number not in self._opened:
            folder, dtype, shards, vocab_size = self._arguments
            path = shard_path(folder, number)
            self._opened[number] = ShardFile(path, np.dtype(dtype), shards[number], vocab_size=vocab_size)
        return self._opened[number]


class ShardFile:
    """File of a shard, memory-mapped; see `Shards`. With `delete`, the file is deleted if it is damaged.

    A `vocab_size` of 0 means any.
    """

    def __init__(self, path: Path, dtype: np.dtype, shard: Shard, delete: bool = True, vocab_size: int = 0):
        self._path, self._delete, self._vocab_size = path, delete, vocab_size
        if _has_no_end(path):
            self._damaged()
        try:
            with naming(path):  # with too many open files or too little memory
                content = np.asarray(np.memmap(path, np.uint8, mode="r"))
        except FileNotFoundError:
            raise ValueError(f"{path} was deleted: run the same command again to encode it again.") from None
        ends_size = 8 * shard.documents
        self._size = ends_size + dtype.itemsize * shard.tokens
        if len(content) != shard_size(shard, dtype):
            self._damaged()
        self._sums = np.frombuffer(content[self._size :].tobytes(), "<u4").tolist()
        if zlib.crc32(content[self._size :]) != shard.crc32:
            self._damaged()
        self._content, self._unchecked = content, bytearray(b"\1" * len(self._sums))
        self._ends = content[:ends_size].view("<i8")
        self._tokens = content[ends_size : self._size].view(dtype.newbyteorder("<"))

    def read(self, start: int, stop: int) -> np.ndarray:
        """Return tokens of the shard."""
        offset, size = self._ends.nbytes, self._tokens.itemsize
        self._check(offset + start * size, offset + stop * size)
        return self._tokens[start:stop]

    def verify(self) -> None:
        """Verify all checksums."""
        self._check(0, self._size)

    def read_ends(self) -> np.ndarray:
        """Return the ends of the documents in the shard."""
        self._check(0, self._ends.nbytes)
        return self._ends

    def _check(self, start, stop):
        """Verify the checksums of the blocks with the bytes from `start` to `stop`, unless already done."""
        for block in range(start // BLOCK, -(-stop // BLOCK)):
            if self._unchecked[block]:
                place = block * BLOCK
                end = min(place + BLOCK, self._size)
                if zlib.crc32(self._content[place:end]) != self._sums[block]:
                    self._damaged()
                ids = self._content[max(place, self._ends.nbytes) : end].view(f"<u{self._tokens.itemsize}")
                if self._vocab_size and len(ids) and (token := ids.max()) >= self._vocab_size:  # a negative id is large
                    self._damaged(f" (it has the token {token:,} for a vocabulary of {self._vocab_size:,})")
                self._unchecked[block] = 0

    def _damaged(self, reason=""):
        if not self._delete:
            raise ValueError(f"{self._path} is damaged.")
        with contextlib.suppress(OSError):
            self._path.unlink()
        raise ValueError(
            f"{self._path} is damaged{reason} and was deleted: run the same command again to encode it again."
        )


def read_index(folder: Path) -> tuple[list[Shard], bool]:
    """Return the shards in the index of a corpus, and whether they are complete.

    There are none if the index is not intact, or is that of another folder.
    """
    if _has_no_end(folder / INDEX):
        return [], False
    with contextlib.suppress(FileNotFoundError, ValueError, LookupError, AttributeError, TypeError, RecursionError):
        index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
        is_own = index.get("folder", folder.name) == folder.name  # earlier versions wrote no name
        if is_own and index["crc32"] == zlib.crc32(json.dumps(index["shards"]).encode()):
            shards = [Shard(**values) for values in index["shards"]]
            if all(type(number) is int and number >= 0 for shard in shards for number in shard):
                return shards, index["complete"]
    return [], False


def _has_no_end(path):
    return path.is_fifo() or path.is_char_device()


def shard_size(shard: Shard, dtype: np.dtype) -> int:
    """Return the size of the file of a shard."""
    size = 8 * shard.documents + dtype.itemsize * shard.tokens
    return size + 4 * -(-size // BLOCK)


def shard_path(folder: str | Path, number: int) -> Path:
    return Path(folder) / f"{number:05}.tokens"


def verify(folder: Path) -> None:
    """Raise ValueError if the index of a corpus or a shard in it is damaged, OSError if it cannot be read.

    Shards that are not yet encoded are ignored.
    """
    shards, complete = read_index(folder)
    if not (shards or complete):
        raise ValueError(f"{folder / INDEX} is damaged.")
    for number, shard in enumerate(shards):
        path = shard_path(folder, number)
        fits = [dtype for dtype in DTYPES if path.stat().st_size == shard_size(shard, dtype)]
        if not fits:
            raise ValueError(f"{path} is damaged: it has {path.stat().st_size:,} bytes.")
        ShardFile(path, fits[0], shard, delete=False).verify()
