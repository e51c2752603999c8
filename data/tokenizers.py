"""Tokenizers: bytes, characters, words and byte-level BPE, all kept in the format of the `tokenizers` library."""

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

KINDS = ("bytes", "characters", "words", "bpe")
FILE = "tokenizer.json"
# role -> what its token is called: the first in a tokenizer that is trained, any in one that is loaded
SPECIAL = {
    "end_of_text": ("<|endoftext|>",),
    "mask": ("<mask>", "[MASK]"),
    "cls": ("[CLS]", "<s>"),
    "sep": ("[SEP]", "</s>"),
    "pad": ("[PAD]", "<pad>"),
}
_UNKNOWN = "<unk>"
_ANY_CHARACTER = r"[\s\S]"
_PIECE = 1 << 18


def _byte_symbols() -> list[str]:
    """The 256 printable characters that stand for bytes in byte-level vocabularies (GPT-2)."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


_BYTES = {symbol: byte for byte, symbol in enumerate(_byte_symbols())}


class Tokenizer:
    """Text to token ids and back.

    * bytes: the id of a byte is its value; lossless.
    * bpe: byte-level BPE with GPT-2's splitting; lossless.
    * characters: one id for each character of the texts it was made from; another character is a ValueError.
    * words: words and runs of punctuation; another word is `<unk>`, and decoding puts one space between tokens.

    The text of a special token in the input is ordinary text: only `end_of_text` itself ends one.
    """

    def __init__(self, backend: tokenizers.Tokenizer):
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = True
        self._backend = backend
        self.vocab_size: int = max(backend.get_vocab().values()) + 1
        ids = {role: [backend.token_to_id(name) for name in names] for role, names in SPECIAL.items()}
        found = {
            role: next((number for number in numbers if number is not None), None) for role, numbers in ids.items()
        }
        self.end_of_text: int | None = found["end_of_text"]
        self.mask: int | None = found["mask"]
        self.cls: int | None = found["cls"]
        self.sep: int | None = found["sep"]
        self.pad: int | None = found["pad"]
        # Both kinds are a look-up, a hundred times faster as such than through the library.
        spec = json.loads(backend.to_str())
        model, split = spec["model"], spec["pre_tokenizer"] or {}
        self._is_bytes = model["type"] == "BPE" and model["vocab"] == _BYTES
        self._characters = None
        if model["type"] == "WordLevel" and split.get("pattern") == {"Regex": _ANY_CHARACTER}:
            known = {ord(character): number for character, number in model["vocab"].items() if len(character) == 1}
            self._characters = np.full(max(known, default=0) + 2, -1, np.int32)  # The last entry: any beyond.
            self._characters[list(known)] = list(known.values())

    def encode(self, text: str) -> np.ndarray:
        """The token ids int32 [N] of `text`."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The token ids int32 [N] of each text; the library uses all cores."""
        if self._is_bytes:
            return [np.frombuffer(text.encode(), np.uint8).astype(np.int32) for text in texts]
        if self._characters is not None:
            return [self._look_up(np.frombuffer(text.encode("utf-32-le"), np.uint32)) for text in texts]
        pieces = [list(_pieces(text)) for text in texts]
        encodings = iter(self._backend.encode_batch_fast(list(chain(*pieces)), add_special_tokens=False))
        return [np.concatenate([np.array(next(encodings).ids, np.int32) for _ in group]) for group in pieces]

    def encode_with_offsets(self, texts: Sequence[str]) -> list[tuple[np.ndarray, np.ndarray]]:
        """The token ids int32 [N] of each text, and where they are in it: first character and the one after the last,
        int64 [N, 2]."""
        encodings = self._backend.encode_batch(list(texts), add_special_tokens=False)
        return [(np.array(e.ids, np.int32), np.array(e.offsets, np.int64).reshape(-1, 2)) for e in encodings]

    def _look_up(self, points: np.ndarray) -> np.ndarray:
        ids = self._characters[np.minimum(points, len(self._characters) - 1)]
        if (ids < 0).any():
            unknown, known = chr(points[np.argmax(ids < 0)]), np.sum(self._characters >= 0)
            raise ValueError(f"the character {unknown!r} is not one of the {known} that the tokenizer knows")
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        """The text of token ids [N]; bytes that are not UTF-8 become U+FFFD."""
        return self._backend.decode(np.asarray(ids, np.int64).tolist(), skip_special_tokens=False)

    def save(self, path: str | Path) -> None:
        """Writes `tokenizer.json` into the folder `path` (or a .json file `path`); a reader never sees half of it."""
        path = _file(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f"{path.name}.{os.getpid()}")
        temporary.write_text(self._backend.to_str(), encoding="utf-8")
        os.replace(temporary, path)

    @classmethod
    def load(cls, path: str | Path) -> "Tokenizer":
        """Reads a `tokenizer.json`, given the file or its folder.

        Raises FileNotFoundError, or ValueError for a file that is not a tokenizer.
        """
        path = _file(path)
        if not path.is_file():
            raise FileNotFoundError(f"there is no tokenizer at {path}")
        try:
            return cls(tokenizers.Tokenizer.from_str(path.read_text(encoding="utf-8")))
        except Exception as error:  # The library raises nothing narrower.
            raise ValueError(f"{path} is not a tokenizer that the tokenizers library can read: {error}") from error

    def to_str(self) -> str:
        """The content of `tokenizer.json`."""
        return self._backend.to_str()


def train(kind: str, texts: Iterable[str], vocab_size: int = 0, special: Sequence[str] = ("end_of_text",)) -> Tokenizer:
    """Makes a tokenizer of a kind of KINDS from `texts`.

    `vocab_size` is for bpe (at least 257: the bytes and the end of text) and words (0 = every word). `special` are the
    roles of SPECIAL that get a token: the end of text among the `vocab_size`, the others beyond them.
    """
    if kind not in KINDS:
        raise ValueError(f"tokenizer={kind!r} is neither a file nor one of {', '.join(KINDS)}")
    if vocab_size and kind not in ("bpe", "words"):
        raise ValueError(f"vocab_size={vocab_size} is for bpe and words: tokenizer={kind!r} has its own")
    added = [SPECIAL[role][0] for role in special]
    first = [name for name in added if name in SPECIAL["end_of_text"]]
    if kind == "bytes":
        backend = tokenizers.Tokenizer(models.BPE(vocab=_BYTES, merges=[]))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.decoder = decoders.ByteLevel()
    elif kind == "characters":
        alphabet = set()
        for text in texts:
            alphabet.update(text)
        backend = tokenizers.Tokenizer(models.WordLevel({character: i for i, character in enumerate(sorted(alphabet))}))
        backend.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex(_ANY_CHARACTER), "isolated")
        backend.decoder = decoders.Fuse()
    elif kind == "words":
        backend = tokenizers.Tokenizer(models.WordLevel(unk_token=_UNKNOWN))
        backend.pre_tokenizer = pre_tokenizers.Whitespace()
        first = [_UNKNOWN, *first]
        size = vocab_size or 2**31
        backend.train_from_iterator(
            texts, trainers.WordLevelTrainer(vocab_size=size, special_tokens=first, show_progress=False)
        )
    else:
        if vocab_size < 257:
            raise ValueError(f"vocab_size={vocab_size}: bpe needs at least 257 (the 256 bytes and the end of text)")
        backend = tokenizers.Tokenizer(models.BPE())
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size, initial_alphabet=list(_BYTES), special_tokens=first, show_progress=False
        )
        backend.train_from_iterator(texts, trainer)
    backend.add_special_tokens([*first, *(name for name in added if name not in first)])
    return Tokenizer(backend)


def _file(path: str | Path) -> Path:
    path = Path(path)
    return path if path.suffix == ".json" else path / FILE


def _pieces(text: str) -> Iterator[str]:
    """Cuts a long text where the split into words cuts anyway, after a single newline between two lines, so that the
    pieces are encoded in parallel to the same tokens."""
    start = 0
    while len(text) - start > _PIECE:
        end = start + _PIECE
        while (end := text.find("\n", end) + 1) and (
            end < 2 or text[end - 2].isspace() or text[end : end + 1].isspace()
        ):
            pass
        if not end:
            break
        yield text[start:end]
        start = end
    yield text[start:]
