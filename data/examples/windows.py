"""Texts: where they come from, and the windows of tokens that models are trained on."""

import glob
import hashlib
import json
import os
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lineage.data.loader import Source
from lineage.data.tokenizers import Tokenizer


class Documents:
    """Texts in a fixed order; `fingerprint` changes when they do ("" = computed from them)."""

    always_ended = False  # the last one needs an end even if it is the only one

    def __init__(self, texts: Sequence[str], fingerprint: str = ""):
        self._texts = texts
        self._fingerprint = fingerprint

    def __len__(self) -> int:
        return len(self._texts)

    def __iter__(self) -> Iterator[str]:
        return iter(self._texts)

    def chunks(self, characters: int = 1 << 22) -> Iterator[list[str]]:
        """The texts in groups of about so many characters."""
        group, size = [], 0
        for text in self:
            group.append(text)
            size += len(text)
            if size >= characters:
                yield group
                group, size = [], 0
        if group:
            yield group

    def fingerprint(self) -> str:
        """A digest of the texts."""
        if not self._fingerprint:
            digest = hashlib.sha256()
            for text in self:
                digest.update(f"{len(text)} {text}".encode())
            self._fingerprint = digest.hexdigest()
        return self._fingerprint


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


class Windows(Tokens, Source):
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


def read(path: str | Path) -> str:
    """The text of a file.

    Raises ValueError with the offset of the first byte that is not UTF-8.
    """
    content = Path(path).read_bytes()
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path} is not UTF-8 text: byte {content[error.start]:#04x} at offset {error.start} ({error.reason})"
        ) from None


def files(path: str, max_bytes: int = 0) -> list[str]:
    """The texts of a file, of the files that match a glob, or of all files in a folder, in the order of their names."""
    if os.path.isdir(path):
        found = [file for file in Path(path).rglob("*") if not any(part.startswith(".") for part in file.parts[-1:])]
    else:
        found = [Path(path)] if os.path.exists(path) else [Path(name) for name in glob.glob(path, recursive=True)]
    return _read_all(sorted(file for file in found if file.is_file()), path, max_bytes)


def stdlib(max_bytes: int = 0) -> list[str]:
    """The source text of the running Python's standard library, a document for each module, tests left out."""
    root, found = sysconfig.get_path("stdlib"), []
    for folder, names, modules in os.walk(root):
        names[:] = set(names) - {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
        # _sysconfigdata is no library: it lists the paths and compiler flags of the machine that built Python.
        found += [Path(folder, name) for name in modules if name.endswith(".py") and name[:14] != "_sysconfigdata"]
    return _read_all(sorted(found), root, max_bytes)


def hold_out(texts: list[str], fraction: float) -> tuple[list[str], list[str]]:
    """Splits texts into those for training and those for validation, the same ones every time.

    Of several texts, that part of them, evenly spread; of so few that none would be, and of a single one, the last
    `fraction` of the characters of each.
    """
    if not 0 < fraction < 1:
        raise ValueError(f"validation_fraction={fraction} must be between 0 and 1")
    # As many of the first i as i x fraction has whole ones, which rounding must not take away.
    held = np.diff(np.floor(np.arange(len(texts) + 1) * fraction + 1e-9)) > 0
    if held.any() and not held.all():
        return [text for text, out in zip(texts, held) if not out], [text for text, out in zip(texts, held) if out]
    cuts = [int(len(text) * (1 - fraction)) for text in texts]
    return [text[:cut] for text, cut in zip(texts, cuts)], [text[cut:] for text, cut in zip(texts, cuts)]


def _read_all(found: list[Path], where: str, max_bytes: int) -> list[str]:
    texts, size = [], 0
    for file in found:
        size += file.stat().st_size
        if max_bytes and size > max_bytes:
            break
        texts.append(read(file))
    if not found:
        raise FileNotFoundError(f"there is no text file at {where}")
    if not any(texts):
        raise ValueError(f"there is no text in {where}" + (f" within max_bytes={max_bytes}" if max_bytes else ""))
    return texts
