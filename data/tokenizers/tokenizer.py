"""Conversion of text to token ids and back."""

import contextlib
import json
import re
from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from lineage.configs.atomic import MAX_DATA, regular, write_atomic
from lineage.data.documents import split_lines
from lineage.data.tokenizers.checks import check, check_added

FILE = "tokenizer.json"
# Role -> possible names of its token. A loaded tokenizer may have any of them; a trained one has the first or, for
# wordpiece, the one in brackets.
SPECIAL = {
    "pad": ("<pad>", "[PAD]"),
    "unknown": ("<unk>", "[UNK]"),
    "cls": ("<s>", "[CLS]"),
    "sep": ("</s>", "[SEP]"),
    "mask": ("<mask>", "[MASK]"),
    "end_of_text": ("<|endoftext|>", "<|end_of_text|>", "</s>", "[SEP]"),
}
END = "end_of_text"  # key of an added token that ends a text by `Tokenizer.ending`; the library ignores it
EXCLUDED = "excluded"  # key of the model, for `Tokenizer.excluded`; the library ignores it
SENTINELS = tuple(f"<extra_id_{number}>" for number in range(100))  # the tokens of the role "sentinels" (T5)
ANY_CHARACTER = r"[\s\S]"
_CHARACTERS = {"type": "Split", "pattern": {"Regex": ANY_CHARACTER}, "behavior": "Isolated", "invert": False}
_SPACES = "\u2581\u0120\u010a\u0109\u010d \n\t\r"  # first characters of words: Unigram, byte-level, characters
_SURROGATE = re.compile("[\ud800-\udfff]")


# The printable characters that represent bytes in byte-level vocabularies (GPT-2) -> the bytes.
_PRINTABLE, _OTHERS = {*range(33, 127), *range(161, 173), *range(174, 256)}, iter(range(256, 512))
BYTES = {chr(byte if byte in _PRINTABLE else next(_OTHERS)): byte for byte in range(256)}


class Tokenizer:
    """Tokenizer with a `backend` of the `tokenizers` library.

    The name of a special token in a text is ordinary text, unless a Unigram vocabulary has it as a piece, as that of T5
    does. Truncation, padding and dropout are disabled.

    Attributes:
        vocab_size: largest id + 1.
        end_of_text, mask, cls, sep, pad, unknown: ids of special tokens; None if there is no such token.
        ends: ids of all tokens that end a text, `end_of_text` first.
        excluded: ids of tokens that are never generated, such as the padding of the published Marian models.
        sentinels: ids of T5's sentinels, in order.
        special: bool [vocab_size], True for special tokens.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        name: str = "The tokenizer",
        ends: Sequence[int] = (),
        excluded: Sequence[int] = (),
    ):
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = True
        self._backend, self._name = backend, name
        self.vocab_size: int = max(backend.get_vocab().values()) + 1
        for role, names in SPECIAL.items():
            ids = [backend.token_to_id(name) for name in names]
            setattr(self, role, next((id for id in ids if id is not None), None))
        named = () if self.end_of_text is None else (self.end_of_text,)
        self.ends: tuple[int, ...] = tuple(ends) or named
        self.end_of_text = next(iter(self.ends), None)
        self._marks_ends = self.ends != named  # by the key `END`
        self.excluded: tuple[int, ...] = tuple(excluded)
        self.sentinels = [id for id in map(backend.token_to_id, SENTINELS) if id is not None]
        self.special = np.zeros(self.vocab_size, bool)
        self.special[[id for id, token in backend.get_added_tokens_decoder().items() if token.special]] = True
        spec = json.loads(backend.to_str())
        model, split = spec["model"], spec["pre_tokenizer"] or {}
        if model.get("dropout"):  # would drop merges at random
            backend.model.dropout = None
        # Bytes and characters are looked up here, which is a hundred times faster than the library, if nothing in the
        # file changes the text before.
        plain = spec["normalizer"] is None and all(token["special"] for token in spec["added_tokens"])
        is_byte_level = split.get("type") == "ByteLevel" and not split["add_prefix_space"]
        self._is_bytes = plain and is_byte_level and model["type"] == "BPE" and model["vocab"] == BYTES
        self._characters = None
        if plain and split == _CHARACTERS and model["type"] == "WordLevel" and model["unk_token"] not in model["vocab"]:
            known = {ord(character): number for character, number in model["vocab"].items() if len(character) == 1}
            # The last entry represents all larger characters.
            self._characters = np.full(max(known, default=0) + 2, -1, np.int32)
            self._characters[list(known)] = list(known.values())
        with contextlib.suppress(ValueError):
            before, after = self._added
            if len(before) == len(after) == 1:  # as in BigBird, which has [CLS] and <s>
                self.cls, self.sep = before[0], after[0]

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._backend.encode_special_tokens = True  # not pickled by the library

    def encode(self, text: str) -> np.ndarray:
        """Return the token ids int32 [N] of a text."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the token ids int32 [N] of each text; the library uses all cores.

        Raises ValueError for a text with a lone surrogate, which JSON can contain but UTF-8 cannot.
        """
        with self._errors(texts):
            return self._encode(texts)

    def _encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        if self._is_bytes:
            return [np.frombuffer(text.encode(), np.uint8).astype(np.int32) for text in texts]
        if self._characters is not None:
            return [self._look_up(np.frombuffer(text.encode("utf-32-le"), np.uint32)) for text in texts]
        pieces = [list(split_lines([text])) for text in texts]
        encodings = iter(self._backend.encode_batch_fast(list(chain(*pieces)), add_special_tokens=False))
        return [np.concatenate([np.array(next(encodings).ids, np.int32) for _ in group]) for group in pieces]

    def encode_marked(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the token ids int32 [N] of each text; names of special tokens are encoded as these tokens."""
        self._backend.encode_special_tokens = False
        try:
            with self._errors(texts):
                encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
        finally:
            self._backend.encode_special_tokens = True
        return [np.array(encoding.ids, np.int32) for encoding in encodings]

    def encode_with_offsets(self, texts: Sequence[str]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return the token ids int32 [N] of each text, and the start and end of each token in it, int64 [N, 2]."""
        if self._characters is not None:
            self.encode_batch(texts)  # raises ValueError for an unknown character
        with self._errors(texts):
            encodings = self._backend.encode_batch(list(texts), add_special_tokens=False)
        return [(np.array(e.ids, np.int32), np.array(e.offsets, np.int64).reshape(-1, 2)) for e in encodings]

    def _look_up(self, points: np.ndarray) -> np.ndarray:
        ids = self._characters[np.minimum(points, len(self._characters) - 1)]
        if (ids < 0).any():
            unknown, known = chr(points[np.argmax(ids < 0)]), np.sum(self._characters >= 0)
            raise ValueError(f"The character {unknown!r} is not one of the {known} that the tokenizer knows.")
        return ids

    @property
    def vocabulary(self) -> dict[str, int]:
        """The id of each token."""
        return self._backend.get_vocab()

    @cached_property
    def begin_of_text(self) -> int | None:
        """The only token that the post-processor adds before a text, such as Llama's <s>; None if there is none.

        It is also None if the post-processor adds anything but the end of text after a text.
        """
        before, after = self._added
        return before[0] if len(before) == 1 and after in ([], [self.end_of_text]) else None

    @property
    def encloses(self) -> bool:
        """True if the post-processor adds the tokens `cls` and `sep` around a text, as that of BERT does."""
        return self._added == ([self.cls], [self.sep])

    @cached_property
    def separators(self) -> int:
        """Number of tokens `sep` between two texts: 2 if the post-processor adds two, as RoBERTa's does, else 1."""
        if self._backend.post_processor is None:
            return 1
        with self._errors():
            text = self._backend.encode("a", add_special_tokens=False).ids if self._characters is None else []
            expected = text and [self.cls, *text, self.sep, self.sep, *text, self.sep]
            return 2 if expected and self._backend.encode("a", "a").ids == expected else 1

    @cached_property
    def segments(self) -> int:
        """Number of token types of a pair of texts: 1 if the post-processor gives one to both, as RoBERTa's, else 2."""
        if self._backend.post_processor is None or self._characters is not None:
            return 2
        with self._errors():
            return len({*self._backend.encode("a", "a").type_ids}) or 2

    @cached_property
    def _added(self) -> tuple[list[int], list[int]]:
        """Tokens that the post-processor adds before and after a text."""
        if self._backend.post_processor is None:
            return [], []
        text = "a" if self._characters is None else chr(np.argmax(self._characters >= 0))
        with self._errors():
            plain, enclosed = (self._backend.encode(text, add_special_tokens=added).ids for added in (False, True))
        if (largest := max(enclosed, default=0)) >= self.vocab_size:
            raise ValueError(f"{self._name} adds the token {largest} to a text: its ids are below {self.vocab_size}.")
        starts = [start for start in range(len(enclosed)) if plain and enclosed[start : start + len(plain)] == plain]
        return (enclosed[: starts[0]], enclosed[starts[0] + len(plain) :]) if starts else ([], [])

    @cached_property
    def word_marks(self) -> tuple[np.ndarray, np.ndarray]:
        """Masks bool [vocab_size] of the tokens that start a word and of those that end one.

        Words are what the tokenizer splits into pieces; for bytes and characters, they begin with white space.
        """
        model = json.loads(self._backend.to_str())["model"]
        prefix, suffix = model.get("continuing_subword_prefix"), model.get("end_of_word_suffix")
        begins, ends = self.special.copy(), self.special.copy()
        for piece, id in self.vocabulary.items():
            if prefix:
                begins[id] |= not piece.startswith(prefix)
            elif suffix:
                ends[id] |= piece.endswith(suffix)
            else:
                begins[id] |= piece[:1] in _SPACES or (model["type"] == "WordLevel" and self._characters is None)
        return begins, ends

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of token ids [N]; bytes that are not UTF-8 become U+FFFD."""
        with self._errors():
            return self._backend.decode(np.asarray(ids, np.int64).tolist(), skip_special_tokens=False)

    @contextlib.contextmanager
    def _errors(self, texts: Iterable[str] = ()):
        """Convert errors of the library (`Exception` itself, and a `PanicException` without a module) to ValueError.

        Its errors for a lone surrogate in the texts are of two types.
        """
        try:
            yield
        except BaseException as error:
            wrong = next(filter(None, map(_SURROGATE.search, texts)), None)
            if wrong and isinstance(error, UnicodeEncodeError | TypeError):
                near = wrong.string[max(wrong.start() - 20, 0) : wrong.end() + 20]
                raise ValueError(f"A text has a lone surrogate, which is not a character, in {near!r}.") from error
            if type(error) is not Exception and type(error).__name__ != "PanicException":
                raise
            raise ValueError(f"{self._name} cannot be used for a text: {str(error)[:200]}.") from None

    def has(self, role: str) -> bool:
        """Return whether there is a token for a role of `SPECIAL`, or for "sentinels"."""
        return bool(self.sentinels) if role == "sentinels" else getattr(self, role) is not None

    def save(self, path: str | Path) -> None:
        """Write `tokenizer.json` into the folder `path`, or the file `path` if it ends with .json, atomically."""
        path = _file(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, self.to_str())

    @classmethod
    def load(cls, path: str | Path) -> "Tokenizer":
        """Read a `tokenizer.json`, given the file or its folder."""
        path = _file(path)
        if not path.is_file():
            raise FileNotFoundError(f"There is no tokenizer at {path}.")
        regular(path, MAX_DATA)
        try:
            content = path.read_text(encoding="utf-8")
            check(spec := json.loads(content))
            backend = tokenizers.Tokenizer.from_str(content)
            check_added(spec, backend.token_to_id)
            ends = {token[END]: token["id"] for token in spec.get("added_tokens") or () if END in token}
            tokenizer = cls(backend, str(path), [ends[rank] for rank in sorted(ends)])
            return tokenizer.excluding(spec["model"].get(EXCLUDED) or ())
        except Exception as error:  # The library raises nothing more specific.
            reason = " ".join(str(error).split())[:200]
            raise ValueError(f"{path} is not a tokenizer that the tokenizers library can read: {reason}.") from error

    def ending(self, tokens: Iterable[int | str]) -> "Tokenizer":
        """Return the tokenizer with other ends of text, by id or name; all but special tokens are ignored.

        `SPECIAL` need not have their names, such as <|im_end|>. `end_of_text` changes only if it is none of them.
        """
        ids = (self._backend.token_to_id(token) if isinstance(token, str) else token for token in tokens)
        known = [id for id in ids if id is not None and 0 <= id < self.vocab_size and self.special[id]]
        ends = sorted(dict.fromkeys(known), key=lambda id: id != self.end_of_text)
        return Tokenizer(self._backend, self._name, ends, self.excluded) if ends else self

    def excluding(self, tokens: Sequence[int]) -> "Tokenizer":
        """Return the tokenizer whose tokens of these ids are never generated."""
        if wrong := [token for token in tokens if type(token) is not int or token < 0]:
            raise ValueError(f"an excluded token is {str(wrong[0])[:60]}: it must be an integer of at least 0")
        return Tokenizer(self._backend, self._name, self.ends if self._marks_ends else (), tokens) if tokens else self

    def rebuilt(self, spec: dict[str, Any]) -> "Tokenizer":
        """Return the tokenizer of another content of `tokenizer.json`, with the same `ends` and `excluded` tokens."""
        return Tokenizer(tokenizers.Tokenizer.from_str(json.dumps(spec)), self._name, self.ends, self.excluded)

    def to_str(self, marked: bool = True) -> str:
        """Return the content of `tokenizer.json`, with the marks of `ending` and `excluding`, if desired."""
        content = self._backend.to_str()
        if not (marked and (self._marks_ends or self.excluded)):
            return content
        spec = json.loads(content)
        for token in spec["added_tokens"] if self._marks_ends else ():
            if token["id"] in self.ends:
                token[END] = self.ends.index(token["id"])
        if self.excluded:
            spec["model"][EXCLUDED] = self.excluded
        return json.dumps(spec, ensure_ascii=False)

    def exported(self, first: int | None = None, last: int | None = None) -> str:
        """Return the content of a `tokenizer.json` that adds the tokens `first` and `last`, if any, around each text.

        If the tokenizer adds just these, its own post-processor stays.
        """
        content = self.to_str(marked=False)
        if self._added == tuple([] if id is None else [id] for id in (first, last)):
            return content
        before, after = ("" if id is None else self._backend.id_to_token(id) for id in (first, last))
        template = tokenizers.processors.TemplateProcessing(
            single=" ".join(filter(None, (before, "$A", after))),
            pair=" ".join(filter(None, (before, "$A", after, "$B:1", after and f"{after}:1"))),
            special_tokens=[(name, self._backend.token_to_id(name)) for name in dict.fromkeys((before, after)) if name],
        )
        spec = json.loads(content)
        step, others = json.loads(template.__getstate__()), spec["post_processor"] or {}
        steps = [processor for processor in others.get("processors", [others]) if processor.get("type") == "ByteLevel"]
        steps += [step] if before or after else []
        spec["post_processor"] = {"type": "Sequence", "processors": steps} if steps else None
        return tokenizers.Tokenizer.from_str(json.dumps(spec)).to_str()


def _file(path: str | Path) -> Path:
    path = Path(path)
    return path if path.suffix == ".json" else path / FILE
