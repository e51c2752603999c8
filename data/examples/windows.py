"""Windows of tokens over a stream of documents."""

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lineage.configs.atomic import replacing, write_atomic
from lineage.data.content import Documents
from lineage.data.loader import ExampleSource
from lineage.data.tokenizers import Tokenizer


class Tokens:
    """Base class of objects with `tokens` [N]; worker processes map the same file if they are memory-mapped."""

    tokens: np.ndarray

    def __getstate__(self) -> dict[str, Any]:
        state = dict(self.__dict__)
        if isinstance(self.tokens, np.memmap):
            state["tokens"] = (os.fspath(self.tokens.filename), self.tokens.dtype)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        if isinstance(state["tokens"], tuple):
            state["tokens"] = np.memmap(*state["tokens"], mode="r")
        self.__dict__.update(state)


class Windows(Tokens, ExampleSource):
    """Windows of `length` T over a stream of tokens [N]; window i starts at token i * stride.

    An example has `tokens` and `targets` (the next tokens), int32 [T], and `mask` bool [T], which is False past the end
    of the stream. All windows but the last are full.

    Args:
        stride: number of tokens from one window to the next; 0: T, so that every token but the first is a target once.
        once: whether `mask` is True for each target only in the first window that contains it, after at least
            T - stride tokens (except at the beginning of the stream).
    """

    def __init__(self, tokens: np.ndarray, length: int, stride: int = 0, once: bool = False):
        self.tokens, self.length, self.stride, self.once = tokens, length, stride or length, once
        if length < 1 or not 1 <= self.stride <= length:
            given = f"task.sequence_length is {length} and the stride {self.stride}"
            raise ValueError(f"{given}: the stride must be at least 1 and at most the length.")
        if len(tokens) < 2:
            raise ValueError(f"The text has {len(tokens)} tokens: language modeling needs at least 2.")

    def __len__(self) -> int:
        return -(-max(len(self.tokens) - 1 - self.length, 0) // self.stride) + 1

    def take(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        starts, width = indices * self.stride, self.length + 1
        mask = np.ones((len(starts), self.length), bool)
        if self.once:
            mask[starts > 0, : self.length - self.stride] = False
        if (starts + width <= len(self.tokens)).all():
            block = np.lib.stride_tricks.sliding_window_view(self.tokens, width)[starts].astype(np.int32)
        else:
            block = np.zeros((len(starts), width), np.int32)
            for row, start in enumerate(starts):
                part = self.tokens[start : start + width]
                block[row, : len(part)] = part
                mask[row, len(part) - 1 :] = False
        return {"tokens": block[:, :-1], "targets": block[:, 1:], "mask": mask}


@dataclass(frozen=True)
class Stream:
    """Tokens [N] of documents, and the number of characters and of UTF-8 bytes that they stand for."""

    tokens: np.ndarray
    characters: int
    bytes: int


def tokenize(documents: Documents, tokenizer: Tokenizer, cache_dir: str | Path = "") -> Stream:
    """Encode documents into one stream; if there are several, an end of text follows each.

    The folder `cache_dir` keeps streams for later runs, which memory-map them; "": they are not kept.
    """
    dtype = np.dtype(np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.int32)
    counts = {"characters": 0, "bytes": 0}
    if not cache_dir:
        return Stream(np.concatenate([np.empty(0, dtype), *_encode(documents, tokenizer, dtype, counts)]), **counts)
    key = hashlib.sha256(f"{documents.fingerprint()} {tokenizer.to_str()}".encode()).hexdigest()[:24]
    path, about = (Path(cache_dir) / f"{key}.{suffix}" for suffix in (dtype.name, "json"))
    if not (path.is_file() and about.is_file()):
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as temporary, temporary.open("wb") as file:
            for part in _encode(documents, tokenizer, dtype, counts):
                part.tofile(file)
        write_atomic(about, json.dumps(counts))
    counts = json.loads(about.read_text())
    return Stream(np.memmap(path, dtype, mode="r") if path.stat().st_size else np.empty(0, dtype), **counts)


def _encode(documents, tokenizer, dtype, counts) -> Iterator[np.ndarray]:
    ended = tokenizer.end_of_text is not None and (documents.always_ended or len(documents) > 1)
    end = np.array([tokenizer.end_of_text] if ended else [], dtype)
    for texts in documents.chunks():
        counts["characters"] += sum(map(len, texts))
        counts["bytes"] += sum(len(text.encode()) for text in texts)
        yield np.concatenate([part for ids in tokenizer.encode_batch(texts) for part in (ids.astype(dtype), end)])
