"""Tokenizers: bytes, characters, words and sub-words of four kinds, all in the format of the `tokenizers` library."""

import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import chain
from pathlib import Path

import numpy as np
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

KINDS = ("bytes", "characters", "words", "bpe", "bpe_words", "wordpiece", "unigram")
FILE = "tokenizer.json"
# role -> what its token is called: any of them in a tokenizer that is loaded, and in one that is trained the first, or
# for wordpiece the one in brackets
SPECIAL = {
    "pad": ("<pad>", "[PAD]"),
    "unknown": ("<unk>", "[UNK]"),
    "cls": ("<s>", "[CLS]"),
    "sep": ("</s>", "[SEP]"),
    "mask": ("<mask>", "[MASK]"),
    "end_of_text": ("<|endoftext|>", "<|end_of_text|>", "</s>", "[SEP]"),
}
SENTINELS = tuple(f"<extra_id_{number}>" for number in range(100))  # the role "sentinels": T5's
_END_OF_WORD = "</w>"
_ALPHABET = 1000  # so many characters, the commonest, do wordpiece and bpe_words know
_SPACES = "\u2581\u0120\u010a\u0109\u010d \n\t\r"  # what a word begins with in Unigram, in bytes and in characters
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
    * bpe_words: BPE of what stands between white space, of which a mark ends each (arXiv 1508.07909).
    * wordpiece: BERT's; words and punctuation, whose later pieces begin with ##; decoding puts one space between them.
    * unigram: SentencePiece's language model of pieces (arXiv 1804.10959), after NFKC, with a mark before each word.

    The last three make white space one space, and do not know characters that the texts they were made from lack.
    The text of a special token in the input is ordinary text: only `end_of_text` itself ends one.

    Attributes:
        vocab_size: one more than the largest id.
        end_of_text, mask, cls, sep, pad, unknown: ids of special tokens; None = it has none.
        sentinels: ids of T5's, in the order in which they stand for spans.
        special: bool [vocab_size], True = a special token.
    """

    def __init__(self, backend: tokenizers.Tokenizer):
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = True
        self._backend = backend
        self.vocab_size: int = max(backend.get_vocab().values()) + 1
        ids = {role: [backend.token_to_id(name) for name in names] for role, names in SPECIAL.items()}
        found = {role: next((id for id in some if id is not None), None) for role, some in ids.items()}
        self.end_of_text: int | None = found["end_of_text"]
        self.mask: int | None = found["mask"]
        self.cls: int | None = found["cls"]
        self.sep: int | None = found["sep"]
        self.pad: int | None = found["pad"]
        self.unknown: int | None = found["unknown"]
        self.sentinels = [id for id in map(backend.token_to_id, SENTINELS) if id is not None]
        self.special = np.zeros(self.vocab_size, bool)
        self.special[[id for id, token in backend.get_added_tokens_decoder().items() if token.special]] = True
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
        if self._characters is not None:
            self.encode_batch(texts)  # which says what character is not known
        encodings = self._backend.encode_batch(list(texts), add_special_tokens=False)
        return [(np.array(e.ids, np.int32), np.array(e.offsets, np.int64).reshape(-1, 2)) for e in encodings]

    def _look_up(self, points: np.ndarray) -> np.ndarray:
        ids = self._characters[np.minimum(points, len(self._characters) - 1)]
        if (ids < 0).any():
            unknown, known = chr(points[np.argmax(ids < 0)]), np.sum(self._characters >= 0)
            raise ValueError(f"the character {unknown!r} is not one of the {known} that the tokenizer knows")
        return ids

    @cached_property
    def word_marks(self) -> tuple[np.ndarray, np.ndarray]:
        """Of each token bool [vocab_size]: does it begin a word, does it end one?

        A word is what its kind of tokenizer makes pieces of; in bytes and characters, what begins with white space.
        """
        model = json.loads(self._backend.to_str())["model"]
        prefix, suffix = model.get("continuing_subword_prefix"), model.get("end_of_word_suffix")
        begins, ends = self.special.copy(), self.special.copy()
        for piece, id in self._backend.get_vocab().items():
            if prefix:
                begins[id] |= not piece.startswith(prefix)
            elif suffix:
                ends[id] |= piece.endswith(suffix)
            else:
                begins[id] |= piece[0] in _SPACES or (model["type"] == "WordLevel" and self._characters is None)
        return begins, ends

    def decode(self, ids: Iterable[int]) -> str:
        """The text of token ids [N]; bytes that are not UTF-8 become U+FFFD."""
        return self._backend.decode(np.asarray(ids, np.int64).tolist(), skip_special_tokens=False)

    def save(self, path: str | Path) -> None:
        """Writes `tokenizer.json` into the folder `path` (or a .json file `path`); a reader never sees half of it."""
        path = _file(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f"{path.name}.{os.uname().nodename}.{os.getpid()}")
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


def train(
    kind: str,
    texts: Iterable[str],
    vocab_size: int = 0,
    special: Sequence[str] = ("end_of_text",),
    lowercase: bool = False,
) -> Tokenizer:
    """Makes a tokenizer of a kind of KINDS from `texts`, the same one each time.

    `vocab_size` is of words (0 = every word) and of sub-words, special tokens among them. `special` are the roles of
    SPECIAL, or "sentinels", that get a token. `lowercase` (also without accents in wordpiece) is for all but the
    lossless bytes, characters and bpe.
    """
    style = "[" if kind == "wordpiece" else "<"
    names = _special_tokens(kind, vocab_size, special, lowercase, style)
    settings = {"special_tokens": names, "vocab_size": vocab_size or 2**31, "show_progress": False}
    unknown, lower = _name("unknown", style), normalizers.Lowercase() if lowercase else normalizers.Sequence([])
    if kind == "bytes":
        backend = tokenizers.Tokenizer(models.BPE(vocab=_BYTES, merges=[]))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.decoder = decoders.ByteLevel()
    elif kind == "characters":
        alphabet = sorted(set(chain.from_iterable(texts)))
        backend = tokenizers.Tokenizer(models.WordLevel({character: i for i, character in enumerate(alphabet)}))
        backend.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex(_ANY_CHARACTER), "isolated")
        backend.decoder = decoders.Fuse()
    elif kind == "words":
        backend = tokenizers.Tokenizer(models.WordLevel(unk_token=unknown))
        backend.normalizer = lower
        backend.pre_tokenizer = pre_tokenizers.Whitespace()
        backend.train_from_iterator(texts, trainers.WordLevelTrainer(**settings))
    elif kind == "bpe":
        backend = tokenizers.Tokenizer(models.BPE())
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        backend.train_from_iterator(texts, trainers.BpeTrainer(initial_alphabet=list(_BYTES), **settings))
    elif kind == "bpe_words":
        backend = tokenizers.Tokenizer(models.BPE(unk_token=unknown, end_of_word_suffix=_END_OF_WORD))
        backend.normalizer = lower
        backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        backend.decoder = decoders.BPEDecoder(_END_OF_WORD)
        settings["end_of_word_suffix"] = _END_OF_WORD
        backend = _train_merges(backend, texts, trainers.BpeTrainer, f"{{}}{_END_OF_WORD}", settings)
    elif kind == "wordpiece":
        backend = tokenizers.Tokenizer(models.WordPiece(unk_token=unknown))
        backend.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
        backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        backend.decoder = decoders.WordPiece(cleanup=False)
        backend = _train_merges(backend, texts, trainers.WordPieceTrainer, "##{}", settings)
    else:
        backend = tokenizers.Tokenizer(models.Unigram())
        backend.normalizer = normalizers.Sequence([normalizers.NFKC(), lower])
        # The name of a special token in a text would be that token, were it in one part.
        parts = [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace(), pre_tokenizers.Split("<", "isolated")]
        backend.pre_tokenizer = pre_tokenizers.Sequence(parts)
        backend.decoder = decoders.Metaspace()
        trainer = trainers.UnigramTrainer(unk_token=unknown, **settings)
        backend.train_from_iterator(texts, trainer)
        backend = _in_order(backend, len(names))
    if vocab_size and backend.get_vocab_size() > vocab_size:
        raise ValueError(
            f"vocab_size={vocab_size} is too small: the characters and special tokens alone are "
            f"{backend.get_vocab_size()}"
        )
    backend.add_special_tokens(names)
    return Tokenizer(backend)


def _special_tokens(kind: str, vocab_size: int, special: Sequence[str], lowercase: bool, style: str) -> list[str]:
    """The names of the special tokens; ValueError for what the kind of tokenizer cannot be asked for."""
    if kind not in KINDS:
        raise ValueError(f"tokenizer={kind!r} is neither a file nor one of {', '.join(KINDS)}")
    if vocab_size and kind in ("bytes", "characters"):
        raise ValueError(f"vocab_size={vocab_size} is for words and sub-words: tokenizer={kind!r} has its own")
    if lowercase and kind in ("bytes", "characters", "bpe"):
        raise ValueError(f"lowercase is for {', '.join(KINDS[2:3] + KINDS[4:])}: tokenizer={kind!r} loses nothing")
    roles = special if kind in ("bytes", "characters", "bpe") else (*special, "unknown")
    names = (SENTINELS if role == "sentinels" else [_name(role, style)] for role in roles)
    names = list(dict.fromkeys(chain(*names)))  # one name may be of two roles
    least = len(names) + (256 if kind == "bpe" else 1)
    if kind in KINDS[3:] and vocab_size < least:
        raise ValueError(f"vocab_size={vocab_size}: {kind} needs at least {least}, special tokens among them")
    return names


def _name(role: str, style: str) -> str:
    return next(name for name in SPECIAL[role] if name.startswith(style))


def _train_merges(backend, texts, trainer, marked, settings):
    """Trains BPE with marked characters, such as "##e", whose ids the library would give in no fixed order: they are
    declared as special tokens, and are none afterwards."""
    texts = list(texts) if iter(texts) is texts else texts  # they are gone through twice
    counts = Counter()
    for text in texts:
        counts.update(backend.normalizer.normalize_str(text))
    alphabet = sorted((c for c in counts if not c.isspace()), key=lambda c: (-counts[c], c))[:_ALPHABET]
    names = settings["special_tokens"]
    settings |= {"special_tokens": [*names, *map(marked.format, alphabet)]}
    settings |= {"initial_alphabet": alphabet, "limit_alphabet": len(alphabet)}
    backend.train_from_iterator(texts, trainer(**settings))
    spec = json.loads(backend.to_str())
    spec["added_tokens"] = [token for token in spec["added_tokens"] if token["content"] in names]
    return tokenizers.Tokenizer.from_str(json.dumps(spec))


def _in_order(backend, count):
    """A Unigram tokenizer whose pieces, behind `count` special tokens, have an order of their own: the library sums in
    no fixed one, and what it leaves of that in the last digits must not order them."""
    spec = json.loads(backend.to_str())
    pieces = [(piece, round(score, 6)) for piece, score in spec["model"]["vocab"]]
    spec["model"]["vocab"] = pieces[:count] + sorted(pieces[count:], key=lambda piece: (-piece[1], piece[0]))
    return tokenizers.Tokenizer.from_str(json.dumps(spec))


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
