"""Token ids of documents: in memory, or in a folder of shards that runs map into memory.

The start of a shard depends only on the documents, so the same texts give the same files for any number of processes,
and an interrupted encoding continues after the complete shards.
"""

import contextlib
import hashlib
import json
import multiprocessing
import os
import sys
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lineage.configs import cache
from lineage.configs.atomic import in_turn, replacing, write_atomic
from lineage.data.documents import Documents, Piece, are_several
from lineage.data.loader import live_as_long_as_parent, shielded
from lineage.data.shards import BLOCK, INDEX, Shard, ShardFile, Shards, read_index, shard_path, shard_size
from lineage.data.tokenizers.tokenizer import Tokenizer

FORMAT = 1  # version of the files, in the names of the folders
SHARD = 1 << 24  # tokens after which a shard ends, at the end of a group of documents that are encoded together


class _Part(NamedTuple):
    """Encoded documents: token ids [N], ends of the documents [D], and the number of characters and UTF-8 bytes."""

    tokens: np.ndarray
    ends: np.ndarray
    characters: int
    bytes: int


@dataclass(frozen=True)
class Stream:
    """Tokens [N] of documents, and the numbers of characters and UTF-8 bytes of their texts."""

    tokens: np.ndarray | Shards
    characters: int
    bytes: int
    document_ends: np.ndarray | None = None  # position after each document, int64 [D]; None: the shards contain it

    @property
    def ends(self) -> np.ndarray:
        """Position after each document, int64 [D]; shards read it at each access."""
        return self.tokens.ends() if self.document_ends is None else self.document_ends


def tokenize(
    documents: Documents,
    tokenizer: Tokenizer,
    cache_dir: str | Path = "",
    workers: int = 0,
    begin: int | None = None,
) -> Stream:
    """Encode documents into one stream; if there are several, an end of text follows each.

    The folder `cache_dir` keeps corpora for later runs. If several processes need the same one, one of them encodes it
    while the others wait. Complete shards are kept; those that are missing or have a wrong size are encoded.

    Args:
        cache_dir: folder with a subfolder for each corpus; "": the cache of the user, or memory if there is none, its
            disk is full, or the files of the corpus belong to another user and cannot be opened.
        workers: number of processes that encode; 0: this process, in which the library uses all cores.
        begin: token before each document; None: none.
    """
    dtype = np.dtype(np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.int32)
    end = tokenizer.end_of_text if documents.always_ended or are_several(documents) else None
    encode = _Encode(tokenizer, begin, end, dtype)
    in_memory = partial(_encode_in_memory, documents, encode)
    if not (root := cache_dir or cache.folder("tokens")):
        return in_memory()
    in_folder = partial(_encode_in_folder, Path(root), documents, encode, cache_dir, workers)
    return in_folder() if cache_dir else cache.kept(in_folder, in_memory)


def _encode_in_memory(documents: Documents, encode: "_Encode") -> Stream:
    parts = list(map(encode, documents.chunks()))
    tokens = np.concatenate([np.empty(0, encode.dtype), *(part.tokens for part in parts)])
    return Stream(tokens, **_sizes(parts), document_ends=_ends(parts))


def _encode_in_folder(
    root: Path, documents: Documents, encode: "_Encode", cache_dir: str | Path, workers: int
) -> Stream:
    tokenizer, begin, dtype = encode.tokenizer, encode.begin, encode.dtype
    key = f"{FORMAT} {SHARD} {documents.fingerprint(cache_dir)} {tokenizer.to_str()}"
    if begin is not None:
        key += f" {begin}"
    folder = root / hashlib.sha256(key.encode()).hexdigest()[:24]
    shards, complete = read_index(folder)
    complete = complete and all(_is_intact(folder, number, shard, dtype) for number, shard in enumerate(shards))
    if workers or not complete:
        folder.mkdir(parents=True, exist_ok=True)
        with in_turn(folder / ".lock", f"it encodes texts into {folder}"):
            _write(folder, documents, encode, workers, partial(documents.check_unchanged, cache_dir))
        shards, _ = read_index(folder)
    for path in (folder / INDEX, *(shard_path(folder, number) for number in range(len(shards)))):
        with contextlib.suppress(OSError):  # a read-only folder; files that are not used are deleted
            os.utime(path)
    return Stream(Shards(os.fspath(folder), dtype.name, shards, tokenizer.vocab_size), **_sizes(shards))


def _sizes(parts: Sequence[_Part] | Sequence[Shard]) -> dict[str, int]:
    """Return the total numbers of characters and UTF-8 bytes."""
    return {name: sum(getattr(part, name) for part in parts) for name in ("characters", "bytes")}


@dataclass(frozen=True)
class _Encode:
    """Function that encodes a group of pieces; `begin` and `end`, if any, are put around each document."""

    tokenizer: Tokenizer
    begin: int | None
    end: int | None
    dtype: np.dtype

    def __call__(self, chunk: list[Piece]) -> _Part:
        texts, _, last = zip(*chunk)
        begin, end = (np.array([] if token is None else [token], self.dtype) for token in (self.begin, self.end))
        encoded = self.tokenizer.encode_batch(texts)
        tokens = [
            np.concatenate([begin[: piece.is_first], ids.astype(self.dtype), end[: piece.is_last]])
            for piece, ids in zip(chunk, encoded)
        ]
        ends = np.cumsum([len(ids) for ids in tokens])[np.array(last)]
        return _Part(np.concatenate(tokens), ends, sum(map(len, texts)), sum(len(text.encode()) for text in texts))


def _is_intact(folder: Path, number: int, shard: Shard, dtype: np.dtype, verify: bool = False) -> bool:
    """Return whether the file of a shard has the right size and, with `verify`, the right checksums."""
    try:
        if verify:
            ShardFile(shard_path(folder, number), dtype, shard).verify()
        return shard_path(folder, number).stat().st_size == shard_size(shard, dtype)
    except (OSError, ValueError):
        return False


def _write(folder: Path, documents: Documents, encode: _Encode, workers: int, check: Callable[[], None]) -> None:
    """Write the missing shards, and the index after each one; with workers, verify the checksums of the others.

    Before a shard enters the index, `check` raises an exception if the texts have changed: the folder is that of the
    texts as they were.
    """
    known, complete = read_index(folder)
    verify = workers > 0
    intact = {number for number, shard in enumerate(known) if _is_intact(folder, number, shard, encode.dtype, verify)}
    if complete and len(intact) == len(known):
        return
    firsts = [0, *accumulate(shard.chunks for shard in known)]
    skipped = {chunk for number in intact for chunk in range(firsts[number], firsts[number + 1])}
    missing = (chunk for number, chunk in enumerate(documents.chunks()) if number not in skipped)
    shards: list[Shard] = []
    with contextlib.closing(_encoded(missing, encode, workers)) as parts:
        while True:
            path = shard_path(folder, len(shards))
            if len(shards) in intact:
                shards.append(known[len(shards)])
            elif content := _take(parts):
                shards.append(_write_shard(path, content, sum(shard.tokens for shard in shards)))
                check()
                _write_index(folder, [*shards, *known[len(shards) :]], complete=False)
                if workers:
                    with contextlib.suppress(OSError):  # a closed pipe or a full disk
                        print(f"{path}: {shards[-1].tokens:,} tokens", file=sys.stderr)
            else:
                break
    try:
        check()
    except ValueError:
        (folder / INDEX).unlink(missing_ok=True)  # some of the shards may have other texts
        raise
    _write_index(folder, shards, complete=True)


def _write_index(folder: Path, shards: Sequence[Shard], complete: bool) -> None:
    entries = [shard._asdict() for shard in shards]
    crc32 = zlib.crc32(json.dumps(entries).encode())
    index = {"folder": folder.name, "complete": complete, "shards": entries, "crc32": crc32}
    write_atomic(folder / INDEX, json.dumps(index))


def _take(parts: Iterator[_Part]) -> list[_Part]:
    """Return the parts of the next shard."""
    content, count = [], 0
    while count < SHARD and (part := next(parts, None)):
        content.append(part)
        count += len(part.tokens)
    return content


def _write_shard(path: Path, parts: Sequence[_Part], start: int) -> Shard:
    """Write the file of a shard whose first token has the number `start`; return its entry in the index."""
    with replacing(path) as temporary, temporary.open("wb+") as file:
        file.write(_ends(parts, start).astype("<i8"))
        for part in parts:
            file.write(part.tokens.astype(part.tokens.dtype.newbyteorder("<")))
        file.seek(0)
        sums = np.array([zlib.crc32(block) for block in iter(partial(file.read, BLOCK), b"")], "<u4")
        file.seek(0, os.SEEK_END)
        file.write(sums)
    counts = {"tokens": sum(len(part.tokens) for part in parts), "documents": sum(len(part.ends) for part in parts)}
    return Shard(**counts, **_sizes(parts), chunks=len(parts), crc32=zlib.crc32(sums))


def _ends(parts: Sequence[_Part], start: int = 0) -> np.ndarray:
    """Return the ends of the documents of consecutive parts, the first of which begins at token `start`."""
    starts = accumulate((len(part.tokens) for part in parts), initial=start)
    return np.concatenate([np.empty(0, np.int64), *(part.ends + start for part, start in zip(parts, starts))])


def _encoded(chunks: Iterable[list[Piece]], encode: _Encode, workers: int) -> Iterator[_Part]:
    """Yield the encoded chunks in order; each worker process encodes one at a time.

    Each worker has its own pipe, which is closed when the worker ends. The workers of a `concurrent.futures` pool share
    one pipe, so the pool waits forever for the rest of a result if a worker is killed while sending it.
    """
    if not workers:
        yield from map(encode, chunks)
        return
    context, waiting = multiprocessing.get_context("spawn"), deque[Connection]()
    with contextlib.ExitStack() as stack:
        free = [_start_worker(encode, context, stack) for _ in range(workers)]
        for chunk in chunks:
            if not free:
                free.append(waiting.popleft())
                yield _receive(free[0])
            waiting.append(free.pop())
            with _killed():
                waiting[-1].send(chunk)
        while waiting:
            yield _receive(waiting.popleft())


def _start_worker(encode: _Encode, context: Any, stack: contextlib.ExitStack) -> Connection:
    """Start a process that encodes the chunks sent over the returned connection until the stack is closed."""
    connection, worker_end = context.Pipe()
    process = context.Process(target=_work, args=(encode, worker_end), daemon=True)
    shielded(process.start)
    worker_end.close()
    for callback in (process.join, process.kill, connection.close):  # called in reverse order
        stack.callback(callback)
    return connection


def _work(encode: _Encode, connection: Connection) -> None:
    """Encode the chunks received over a connection, in a worker process."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # each worker uses one core
    live_as_long_as_parent()
    with contextlib.suppress(EOFError, OSError):
        while True:
            chunk = connection.recv()
            try:
                result = encode(chunk)
            except Exception as error:
                result = error
            connection.send(result)


def _receive(connection: Connection) -> _Part:
    with _killed():
        part = connection.recv()
    if isinstance(part, Exception):
        raise part
    return part


@contextlib.contextmanager
def _killed() -> Iterator[None]:
    """Raise ChildProcessError if the worker at the other end of a connection has ended."""
    try:
        yield
    except (EOFError, OSError):
        raise ChildProcessError("A process that encodes texts was killed: memory may be exhausted.") from None
