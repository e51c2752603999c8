"""Texts: where they come from, and the windows of tokens that models are trained on."""

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lineage.data.content import Documents
from lineage.data.loader import ExampleSource
from lineage.data.tokenizers import Tokenizer


class Tokens:
    """What holds `tokens` [N], perhaps of a file, which is then mapped in worker processes too."""

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
    """A stream of tokens seen through windows: example i predicts the tokens after i * stride.

    An example has `tokens` and `targets` (each token's next), int32 [T], and `mask` bool [T], False past the end of the
    stream. With a stride of T every token but the first is a target exactly once. Every window but the last is full.
    Of shorter strides that is true where targets count `once`: `mask` is False but in the first window that has one,
    which then shows at least T - stride tokens before it.
    """

    def __init__(self, tokens: np.ndarray, length: int, stride: int = 0, once: bool = False):
        self.tokens = tokens
        self.length = length
        self.stride = stride or length
        self.once = once
        if length < 1 or not 1 <= self.stride <= length:
            raise ValueError(f"sequence_length={length} and stride={stride}: need 1 <= stride <= sequence_length")
        if len(tokens) < 2:
            raise ValueError(f"a text of {len(tokens)} tokens has nothing to predict: at least 2 are needed")

    def __len__(self) -> int:
        return -(-max(len(self.tokens) - 1 - self.length, 0) // self.stride) + 1

    def take(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        starts, width = indices * self.stride, self.length + 1
        full = starts + width <= len(self.tokens)
        mask = np.ones((len(starts), self.length), bool)
        if self.once:
            mask[starts > 0, : self.length - self.stride] = False
        if full.all():
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
    """The tokens [N] of some documents, with the characters and UTF-8 bytes that they stand for."""

    tokens: np.ndarray
    characters: int
    bytes: int


def tokenize(documents: Documents, tokenizer: Tokenizer, cache_dir: str | Path = "") -> Stream:
    """Encodes documents into one stream; where there are several, each is followed by the end of text.

    With a `cache_dir` the stream is kept there and read from there, memory-mapped.
    """
    dtype = np.dtype(np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.int32)
    counts = {"characters": 0, "bytes": 0}
    if not cache_dir:
        return Stream(np.concatenate([np.empty(0, dtype), *_encode(documents, tokenizer, dtype, counts)]), **counts)
    key = hashlib.sha256(f"{documents.fingerprint()} {tokenizer.to_str()}".encode()).hexdigest()[:24]
    path, about = (Path(cache_dir) / f"{key}.{suffix}" for suffix in (dtype.name, "json"))
    if not (path.is_file() and about.is_file()):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f"{path.name}.{os.uname().nodename}.{os.getpid()}")
        with open(temporary, "wb") as file:
            for part in _encode(documents, tokenizer, dtype, counts):
                part.tofile(file)
        os.replace(temporary, path)
        temporary.write_text(json.dumps(counts))
        os.replace(temporary, about)
    counts = json.loads(about.read_text())
    return Stream(np.memmap(path, dtype, mode="r") if path.stat().st_size else np.empty(0, dtype), **counts)


def _encode(
    documents: Documents, tokenizer: Tokenizer, dtype: np.dtype, counts: dict[str, int]
) -> Iterator[np.ndarray]:
    ended = tokenizer.end_of_text is not None and (documents.always_ended or len(documents) > 1)
    end = np.array([tokenizer.end_of_text] if ended else [], dtype)
    for texts in documents.chunks():
        counts["characters"] += sum(map(len, texts))
        counts["bytes"] += sum(len(text.encode()) for text in texts)
        yield np.concatenate([part for ids in tokenizer.encode_batch(texts) for part in (ids.astype(dtype), end)])
