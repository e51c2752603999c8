"""Kinds of tokenizers that can be trained, and their registry."""

import contextlib
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from lineage.configs import cache
from lineage.configs.atomic import in_turn, write_atomic
from lineage.configs.registry import Natural, Registry, check_ranges
from lineage.configs.storage import local
from lineage.data.documents import Documents, are_several
from lineage.data.tokenizers.settings import check_added, configured, read_settings
from lineage.data.tokenizers.tokenizer import ANY_CHARACTER, BYTES, FILE, SENTINELS, SPECIAL, Tokenizer

TOKENIZERS: Registry = Registry("tokenizer")
_END_OF_WORD = "</w>"
_ALPHABET = 1000  # number of most frequent characters in the alphabet of wordpiece and bpe_words


@dataclass(frozen=True)
class TokenizerKind:
    """Base class of the kinds of tokenizers. Training on the same texts always gives the same tokenizer.

    A subclass implements `backend`. If the size of its vocabulary is limited, it has a field `vocab_size`.
    """

    REQUIRED = ("backend",)
    unknown: ClassVar[bool] = True  # whether the tokenizer has an unknown token
    style: ClassVar[str] = "<"  # first character of the names of special tokens
    vocab_size: ClassVar[int] = 0

    def __post_init__(self):
        check_ranges("tokenizer", self)

    def backend(self, texts: Iterable[str], names: list[str]) -> tokenizers.Tokenizer:
        """Train a tokenizer of the library with special tokens of the given names."""
        raise NotImplementedError

    def train(self, texts: Iterable[str], special_tokens: Sequence[str] = ("end_of_text",)) -> Tokenizer:
        """Train a tokenizer on texts, with tokens for some roles of `SPECIAL` or "sentinels"."""
        roles = (*special_tokens, "unknown") if self.unknown else special_tokens
        named = (SENTINELS if role == "sentinels" else [self.special_name(role)] for role in roles)
        names = list(dict.fromkeys(chain(*named)))
        backend = self.backend(texts.split() if isinstance(texts, Documents) else texts, names)
        if self.vocab_size and (size := backend.get_vocab_size()) > self.vocab_size:
            needed = f"it must be at least {size}, the number of characters and special tokens"
            raise ValueError(f"tokenizer.vocab_size is {self.vocab_size}: {needed}.")
        backend.add_special_tokens(names)
        return Tokenizer(backend)

    def train_on_splits(
        self, texts: Mapping[str, Iterable[str]], special_tokens: Sequence[str], optional: Collection[str]
    ) -> Tokenizer:
        """Train a tokenizer on the training split of texts; a kind may also use the other splits."""
        return self.train(texts["train"], special_tokens)

    def special_name(self, role: str) -> str:
        """Return the name of the special token for a role."""
        return next(name for name in SPECIAL[role] if name.startswith(self.style))


@dataclass(frozen=True)
class VocabularyKind(TokenizerKind):
    """Base class of tokenizers that learn a vocabulary of a given size.

    Attributes:
        vocab_size: number of tokens, including special tokens.
    """

    vocab_size: Natural = 0

    alphabet: ClassVar[int] = 1  # the minimum number of tokens that are not special

    def settings(self, names: list[str]) -> dict[str, Any]:
        """Return the settings of the library's trainers; raise ValueError if the vocabulary is too small."""
        minimum = len(names) + self.alphabet
        if self.vocab_size < minimum:
            needed = f"{TOKENIZERS.name_of(self)} needs at least {minimum}, special tokens included"
            raise ValueError(f"tokenizer.vocab_size is {self.vocab_size}: {needed}.")
        return {"special_tokens": names, "vocab_size": self.vocab_size, "show_progress": False}


@dataclass(frozen=True)
class CasedKind(VocabularyKind):
    """Base class of tokenizers that can convert texts to lower case first.

    Attributes:
        lowercase: whether to convert texts to lower case.
    """

    lowercase: bool = False

    @property
    def normalizer(self) -> normalizers.Normalizer:
        return normalizers.Lowercase() if self.lowercase else normalizers.Sequence([])


@TOKENIZERS.register("bytes")
@dataclass(frozen=True)
class Bytes(TokenizerKind):
    """UTF-8 bytes; the id of a byte is its value. Lossless."""

    unknown = False

    def backend(self, texts: Iterable[str], names: list[str]) -> tokenizers.Tokenizer:
        split = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        return _assembled(models.BPE(vocab=BYTES, merges=[]), split, decoders.ByteLevel())


@TOKENIZERS.register("characters")
@dataclass(frozen=True)
class Characters(TokenizerKind):
    """One token for each character in the texts of all splits; encoding any other character is an error."""

    unknown = False

    def backend(self, texts: Iterable[str], names: list[str]) -> tokenizers.Tokenizer:
        alphabet = sorted(set(chain.from_iterable(texts)))
        model = models.WordLevel({character: i for i, character in enumerate(alphabet)})
        return _assembled(model, pre_tokenizers.Split(tokenizers.Regex(ANY_CHARACTER), "isolated"), decoders.Fuse())

    def train_on_splits(
        self, texts: Mapping[str, Iterable[str]], special_tokens: Sequence[str], optional: Collection[str]
    ) -> Tokenizer:
        """Train on all splits, as nanoGPT does, without optional special tokens if no split has several texts."""
        if not any(map(are_several, texts.values())):
            special_tokens = [role for role in special_tokens if role not in optional]
        return self.train(chain(*texts.values()), special_tokens)


@TOKENIZERS.register("words")
@dataclass(frozen=True)
class Words(CasedKind):
    """Words and runs of punctuation; any other word is `<unk>`, and decoding puts one space between tokens.

    Attributes:
        vocab_size: maximum number of tokens, including special tokens; 0: every word of the texts.
    """

    def backend(self, texts: Iterable[str], names: list[str]) -> tokenizers.Tokenizer:
        model = models.WordLevel(unk_token=self.special_name("unknown"))
        backend = _assembled(model, pre_tokenizers.Whitespace(), None, self.normalizer)
        settings = {"special_tokens": names, "vocab_size": self.vocab_size or 2**31, "show_progress": False}
        backend.train_from_iterator(texts, trainers.WordLevelTrainer(**settings))
        return backend


@TOKENIZERS.register("bpe")
@dataclass(frozen=True)
class BPE(VocabularyKind):
    """Byte-level byte-pair encoding with GPT-2's splitting into words. Lossless."""

    unknown = False
    alphabet = 256

    def backend(self, texts: Iterable[str], names: list[str]) -> tokenizers.Tokenizer:
        backend = _assembled(models.BPE(), pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel())
        trainer = trainers.BpeTrainer(initial_alphabet=list(BYTES), **self.settings(names))
        backend.train_from_iterator(texts, trainer)
        return backend


@TOKENIZERS.register("bpe_words")
@dataclass(frozen=True)
class WordBPE(CasedKind):
    """Byte-pair encoding of words between white space, with a mark at the end of each word (arXiv 1508.07909).

    White space is normalized to single spaces; characters that are not in the training texts are unknown.
    """

    def backend(self, texts: Iterable[str], names: list[str]) -> tokenizers.Tokenizer:
        settings = self.settings(names) | {"end_of_word_suffix": _END_OF_WORD}
        model = models.BPE(unk_token=self.special_name("unknown"), end_of_word_suffix=_END_OF_WORD)
        split, decoder = pre_tokenizers.WhitespaceSplit(), decoders.BPEDecoder(_END_OF_WORD)
        backend = _assembled(model, split, decoder, self.normalizer)
        return _train_merges(backend, texts, trainers.BpeTrainer, f"{{}}{_END_OF_WORD}", settings)


@TOKENIZERS.register("wordpiece")
@dataclass(frozen=True)
class WordPiece(CasedKind):
    """BERT's WordPiece: pieces of words and punctuation; all but the first piece of a word begin with ##.

    Decoding puts a space between words; characters that are not in the training texts are unknown. `lowercase` also
    removes accents.
    """

    style = "["

    def backend(self, texts: Iterable[str], names: list[str]) -> tokenizers.Tokenizer:
        model = models.WordPiece(unk_token=self.special_name("unknown"))
        normalizer = normalizers.BertNormalizer(lowercase=self.lowercase)
        backend = _assembled(model, pre_tokenizers.BertPreTokenizer(), decoders.WordPiece(cleanup=False), normalizer)
        return _train_merges(backend, texts, trainers.WordPieceTrainer, "##{}", self.settings(names))


@TOKENIZERS.register("unigram")
@dataclass(frozen=True)
class Unigram(CasedKind):
    """SentencePiece's unigram language model of pieces (arXiv 1804.10959), after NFKC, with a mark before each word.

    White space is normalized to single spaces; characters that are not in the training texts are unknown.
    """

    def backend(self, texts: Iterable[str], names: list[str]) -> tokenizers.Tokenizer:
        # Without the last split, the name of a special token in a text would become that token.
        splits = [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace(), pre_tokenizers.Split("<", "isolated")]
        normalizer = normalizers.Sequence([normalizers.NFKC(), self.normalizer])
        backend = _assembled(models.Unigram(), pre_tokenizers.Sequence(splits), decoders.Metaspace(), normalizer)
        trainer = trainers.UnigramTrainer(unk_token=self.special_name("unknown"), **self.settings(names))
        backend.train_from_iterator(texts, trainer)
        # The library sums scores in no fixed order, so their last digits vary: sort by rounded scores.
        spec = json.loads(backend.to_str())
        pieces = [(piece, round(score, 6)) for piece, score in spec["model"]["vocab"]]
        learned = sorted(pieces[len(names) :], key=lambda piece: (-piece[1], piece[0]))
        # It adds the characters that training has dropped in no fixed order, with scores 0.0001 apart: sort them, too.
        limit = learned[-1][1] + 1e-4 * sum(len(piece) == 1 for piece, _ in learned)
        dropped = [index for index, (piece, score) in enumerate(learned) if len(piece) == 1 and score < limit]
        for index, character in zip(dropped, sorted(learned[index][0] for index in dropped)):
            learned[index] = character, learned[index][1]
        spec["model"]["vocab"] = pieces[: len(names)] + learned
        return tokenizers.Tokenizer.from_str(json.dumps(spec))


@TOKENIZERS.register("file")
@dataclass(frozen=True)
class TokenizerFile(TokenizerKind):
    """Tokenizer in a file, with the settings of a `tokenizer_config.json` in its folder, such as `eos_token`, if any.

    Attributes:
        path: `tokenizer.json`, or its folder; it may be remote, such as hf:ORG/NAME.
    """

    path: str = ""

    def train(self, texts: Iterable[str], special_tokens: Sequence[str] = ("end_of_text",)) -> Tokenizer:
        """Load the tokenizer; the texts are not read."""
        if not self.path:
            raise ValueError("The tokenizer 'file' needs a path, such as --config.tokenizer=file:PATH.")
        path = self.path if self.path.endswith(".json") else f"{self.path}/{FILE}"
        settings = read_settings(folder := path.rpartition("/")[0] or ".")
        check_added(folder, settings, tokenizer := Tokenizer.load(local(path)))
        return configured(tokenizer, settings)


def find_tokenizer(
    kind: TokenizerKind | Tokenizer,
    texts: Mapping[str, Iterable[str]],
    special_tokens: Sequence[str],
    *,
    optional: Collection[str] = (),
    workdir: str | Path | None = None,
    cache_dir: str | Path = "",
) -> Tokenizer:
    """Return the tokenizer of a run: a given one, else the one in its workdir if there is one, else one of a kind.

    It has tokens for the roles `special_tokens` (of `SPECIAL`, or "sentinels"), except perhaps for the optional ones.
    Trained tokenizers of this module are kept in `cache_dir` ("": the cache of the user); one process trains for all.
    FileNotFoundError is raised if the workdir has no tokenizer and the texts have no training split.
    """
    if isinstance(kind, Tokenizer):
        return kind
    if workdir is not None and (Path(workdir) / FILE).is_file():
        return Tokenizer.load(workdir)
    if "train" not in texts:
        raise FileNotFoundError(f"{Path(workdir or '.') / FILE} is missing, and the training data are not read.")
    folder = Path(cache_dir) if cache_dir else cache.folder("tokenizers")
    is_cacheable = isinstance(kind, VocabularyKind) and type(kind).__module__ == __name__
    train = partial(kind.train_on_splits, texts, special_tokens, optional)
    if folder is None or not is_cacheable or any(iter(part) is part for part in texts.values()):
        tokenizer = train()
    else:
        documents = {name: part if isinstance(part, Documents) else Documents(part) for name, part in texts.items()}
        contents = {name: part.fingerprint(cache_dir) for name, part in documents.items()}
        key = repr((kind, *special_tokens, *sorted(optional), contents, tokenizers.__version__))

        def train_unchanged() -> Tokenizer:
            trained = train()
            for part in documents.values():
                part.check_unchanged(cache_dir)
            return trained

        path = folder / f"tokenizer-{hashlib.sha256(key.encode()).hexdigest()[:24]}.json"
        cached = partial(_cached, path, train_unchanged)
        tokenizer = cached() if cache_dir else cache.kept(cached, train)  # another user may have created the file
    missing = [role for role in special_tokens if role not in optional and not tokenizer.has(role)]
    if missing:
        raise ValueError(f"The task needs the special tokens {', '.join(missing)}, which {kind} does not have.")
    return tokenizer


def _cached(path: Path, train: Callable[[], Tokenizer]) -> Tokenizer:
    """Return the tokenizer in a file, or train it and keep it there."""
    checksum = path.with_suffix(".sha256")

    def digest(text: str) -> str:  # includes the name, so that another tokenizer is not accepted with its own digest
        return hashlib.sha256(f"{path.stem} {text}".encode()).hexdigest()

    def read() -> Tokenizer | None:
        with contextlib.suppress(OSError, ValueError):
            is_there = path.is_file() and checksum.is_file()  # a pipe would be waited for
            if is_there and checksum.read_text() == digest(text := path.read_text(encoding="utf-8")):
                return Tokenizer(tokenizers.Tokenizer.from_str(text))
        return None

    if tokenizer := read():
        return tokenizer
    path.parent.mkdir(parents=True, exist_ok=True)
    with in_turn(path.with_suffix(".lock"), f"it trains the tokenizer {path}"):
        if not (tokenizer := read()):
            tokenizer = train()
            write_atomic(path, tokenizer.to_str())
            write_atomic(checksum, digest(tokenizer.to_str()))
    return tokenizer


def _assembled(model: Any, split: Any, decoder: Any, normalizer: Any = None) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer, backend.decoder, backend.normalizer = split, decoder, normalizer
    return backend


def _train_merges(
    backend: tokenizers.Tokenizer, texts: Iterable[str], trainer: Callable[..., Any], mark: str, options: dict[str, Any]
) -> tokenizers.Tokenizer:
    """Train BPE with marked characters, such as "##e".

    The library numbers them in no fixed order unless they are special tokens during training.
    """
    texts = list(texts) if iter(texts) is texts else texts  # the texts are read twice
    counts = Counter(chain.from_iterable(map(backend.normalizer.normalize_str, texts)))
    alphabet = sorted((c for c in counts if not c.isspace()), key=lambda c: (-counts[c], c))[:_ALPHABET]
    names = options["special_tokens"]
    options = options | {"special_tokens": [*names, *map(mark.format, alphabet)]}
    options |= {"initial_alphabet": alphabet, "limit_alphabet": len(alphabet)}
    backend.train_from_iterator(texts, trainer(**options))
    spec = json.loads(backend.to_str())
    spec["added_tokens"] = [token for token in spec["added_tokens"] if token["content"] in names]
    return tokenizers.Tokenizer.from_str(json.dumps(spec))
