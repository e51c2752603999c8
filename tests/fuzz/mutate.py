"""Mutations of the content of a file: of its bytes, of its numbers and words, and of its JSON."""

import json
import re
import struct

VALUES = [None, True, 0, -1, 1.5, 2**31, 2**63, 10**12, 10**30, float("nan"), float("inf"), "", "x", "../x", "\ud800"]
VALUES += [[], {}, [[]], {"a": 1}, "x" * 10_000, [0] * 1000, "\0", "<script>"]
WORDS = [b"-1", b"0", b"4294967290", b"1e999", b"NaN", b"null", b"\xff\xfe", b"\xed\xa0\x80", b"\0", b'"', b"\n", b"\t"]
WORDS += [b"9" * 5000, b"[" * 100_000, b"{" * 3000, b"\x7f\xff\xff\xff", b"\xff" * 8, b"<!DOCTYPE", b"\r", b","]


def mutated(content, rng):
    """Return a mutation of the content of a file, which may be the content of a .safetensors file or JSON."""
    for _ in range(rng.choice((1, 1, 1, 2, 4, 16))):
        content = rng.choices((_bytes, _words, _json), (3, 2, 4))[0](content, rng)
    return content


def _bytes(content, rng):
    """Flip, overwrite, delete, repeat, insert or cut bytes."""
    start = rng.randrange(len(content) + 1)
    stop = min(len(content), start + int(2 ** rng.uniform(0, 12)))
    inserted = rng.choice(
        (b"", rng.randbytes(stop - start), content[start:stop] * rng.choice((2, 2, 50)), rng.choice(WORDS))
    )
    kind = rng.randrange(4)
    if kind == 0 and content:
        place = rng.randrange(len(content))
        return content[:place] + bytes([content[place] ^ 1 << rng.randrange(8)]) + content[place + 1 :]
    return content[:start] + inserted + (b"" if kind == 1 else content[stop if kind == 2 else start :])


def _words(content, rng):
    """Replace a number or word."""
    words = list(re.finditer(rb"-?[0-9.]+|\w+|[^\w\s]", content[:200_000]))
    if not words:
        return _bytes(content, rng)
    chosen = rng.choice(words)
    return content[: chosen.start()] + rng.choice((*WORDS, rng.choice(words)[0])) + content[chosen.end() :]


def _json(content, rng):
    """Change a value of JSON, of a line of it, or of the header of a .safetensors file."""
    size = struct.unpack("<Q", content[:8])[0] if len(content) > 8 else 0
    if 0 < size <= len(content) - 8 and content[8:9] == b"{":
        header = _json(content[8 : 8 + size], rng)
        return struct.pack("<Q", len(header)) + header + content[8 + size :]
    lines = content.splitlines(keepends=True)
    try:
        value = json.loads(content)
    except (ValueError, RecursionError):
        number = rng.randrange(len(lines) or 1)
        if not lines or not lines[number].strip().startswith((b"{", b"[")) or len(lines) == 1:
            return _bytes(content, rng)
        return b"".join([*lines[:number], _json(lines[number], rng), b"\n", *lines[number + 1 :]])
    return json.dumps(_changed(value, rng)).encode()


def _changed(value, rng):
    """Return a value of JSON with a change somewhere in it."""
    if isinstance(value, dict | list) and value and rng.random() < 0.85:
        places = list(value) if isinstance(value, dict) else range(len(value))
        place = rng.choice(places)
        if rng.random() < 0.1:
            del value[place]
        elif rng.random() < 0.05 and isinstance(value, list):
            value.insert(place, rng.choice(value))
        else:
            value[place] = _changed(value[place], rng)
        return value
    if isinstance(value, int | float) and rng.random() < 0.3:
        return rng.choice((-value, value + 1, value * 1000, value - 1, str(value)))
    return rng.choice(VALUES)
