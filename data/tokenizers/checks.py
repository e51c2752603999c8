"""Checks of an untrusted `tokenizer.json` for content that would crash the tokenizers library."""

import base64
import re
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from typing import Any

import numpy as np

MAX_GROWTH = 100  # factor by which replacements may make a text longer
MAX_WORD = 1000  # characters of a word, for which WordPiece needs cubic time
MAX_PIECE = 128  # characters of a piece of Unigram, which tries all pieces at each character of a text
# Parts of a regular expression that may match an empty text, before every character.
EMPTY = re.compile(r"[*?|^$]|\(\)|\{0?[,}]|\\[bBAzZGKyY]|^$")
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
    if (longest := model.get("max_input_chars_per_word") or 0) > MAX_WORD:
        raise ValueError(f"max_input_chars_per_word is {longest}, which must be at most {MAX_WORD:,}")
    pieces = model["vocab"] if model.get("type") == "Unigram" else ()
    if (longest := max((len(piece) for piece, _ in pieces), default=0)) > MAX_PIECE:
        raise ValueError(f"a piece has {longest:,} characters, of which there must be at most {MAX_PIECE}")
    growth = 1
    for part in chain(*(_nested(spec.get(name)) for name in ("normalizer", "pre_tokenizer", "decoder"))):
        charsmap = base64.b64decode(part["precompiled_charsmap"]) if part.get("type") == "Precompiled" else b""
        growth *= _growth(part, charsmap)
        if growth > MAX_GROWTH:
            raise ValueError("it replaces parts of a text by much longer ones")
        if part.get("type") == "Precompiled" and not _is_sound(charsmap):
            raise ValueError("its precompiled_charsmap is damaged")


def check_added(spec: Mapping[str, Any], id_of: Callable[[str], int | None]) -> None:
    """Raise ValueError for an added token to which the library, whose ids are `id_of`, gives another id than the file.

    The library numbers the added tokens that are not in the vocabulary from its size on.
    """
    for token in spec.get("added_tokens") or ():
        if (actual := id_of(token["content"])) != token["id"]:
            name = repr(token["content"])[:60]
            raise ValueError(f"the added token {name} has the id {token['id']}, but is read as {actual}")


def _growth(part: Mapping[str, Any], charsmap: bytes) -> int:
    """Return the largest factor by which a normalizer, pre-tokenizer or decoder can make a text longer."""
    if part.get("type") == "ByteLevel":  # a byte becomes a character of up to two bytes
        return 2
    length = len(part.get("content") or part.get("prepend") or "")
    pattern = part.get("pattern") or {}
    length = -(-length // len(pattern.get("String") or "a"))  # per character that is replaced
    if pattern.get("String") == "" or EMPTY.search(pattern.get("Regex") or "a"):
        length += 1
    return max(length, *map(len, charsmap[4 + int.from_bytes(charsmap[:4], "little") :].split(b"\0")), 1)


def _nested(part: Any) -> Iterator[Mapping[str, Any]]:
    """Yield a normalizer, pre-tokenizer or decoder and those nested in it."""
    if isinstance(part, dict):
        yield part
        for inner in part.get("normalizers") or part.get("pretokenizers") or part.get("decoders") or ():
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
