"""Checks of an untrusted `tokenizer.json` for content that would crash the tokenizers library."""

import base64
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

MAX_GROWTH = 100  # factor by which replacements may make a text longer
MAX_ID = (1 << 24) - 1  # arrays have an entry for each id


def check(spec: Mapping[str, Any]) -> None:
    """Raise ValueError for an id out of range, a damaged merge or `precompiled_charsmap`, or a long replacement."""
    model = spec["model"]
    ids = list(model["vocab"].values()) if isinstance(model["vocab"], dict) else []
    wrong = next((id for id in ids if type(id) is not int or not 0 <= id <= MAX_ID), None)
    if wrong is not None:
        raise ValueError(f"a token has the id {wrong!r}, which must be an integer from 0 to {MAX_ID:,}")
    prefix = model.get("continuing_subword_prefix") or ""  # the library removes as many characters
    for merge in model.get("merges", ()) if prefix else ():
        _, second = merge.split(" ") if isinstance(merge, str) else merge
        if not second.startswith(prefix):
            raise ValueError(f"a merge has {second!r}, which must begin with continuing_subword_prefix, {prefix!r}")
    growth = 1
    for part in (*_nested(spec.get("normalizer")), *_nested(spec.get("decoder"))):
        growth *= max(len(part.get("content") or part.get("prepend") or ""), 1)
        if growth > MAX_GROWTH or part.get("pattern") == {"String": ""}:
            raise ValueError("its normalizer or decoder replaces parts of a text by much longer ones")
        if part.get("type") == "Precompiled" and not _is_sound(base64.b64decode(part["precompiled_charsmap"])):
            raise ValueError("its precompiled_charsmap is damaged")


def _nested(part: Any) -> Iterator[Mapping[str, Any]]:
    """Yield a normalizer or decoder and those nested in it."""
    if isinstance(part, dict):
        yield part
        for inner in part.get("normalizers") or part.get("decoders") or ():
            yield from _nested(inner)


def _is_sound(charsmap: bytes) -> bool:
    """Return whether no text can lead to a read outside of SentencePiece's table of replacements.

    The table is a double-array trie of bytes with 32 bits per node, whose leaves are positions in a UTF-8 text; it is
    preceded by its size in bytes. A node at position p has the children p ^ offset ^ byte, which repeat the byte.
    """
    size = int.from_bytes(charsmap[:4], "little")
    nodes, text = charsmap[4 : 4 + size], charsmap[4 + size :]
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    if len(charsmap) < 4 or len(nodes) != size or not size or size % 4:
        return False
    units = np.frombuffer(nodes, "<u4").astype(np.int64)
    offsets, bytes_ = (units >> 10) << ((units & 1 << 9) >> 6), np.arange(1, 0xF5)  # bytes that occur in UTF-8
    seen, frontier = np.zeros(len(units), bool), np.zeros(1, np.int64)
    while frontier.size:
        seen[frontier] = True
        children = (frontier ^ offsets[frontier])[:, None] ^ bytes_
        if children.max() >= len(units):
            return False
        reached = np.unique(children[(units[children] & 0x800000FF) == bytes_])
        leaves = (reached ^ offsets[reached])[(units[reached] >> 8 & 1) == 1]
        if leaves.max(initial=0) >= len(units):
            return False
        starts = units[leaves] & 0x7FFFFFFF
        if any(start >= len(text) or text[start] & 0xC0 == 0x80 for start in starts):  # inside a character
            return False
        frontier = reached[~seen[reached]]
    return True
