import functools
import json
import os
import pickle
import unicodedata

import numpy as np
import pytest
import tokenizers as library
from hypothesis import given
from hypothesis import strategies as st

from lineage.configs import schema
from lineage.data.documents import Documents, split_lines
from lineage.data.tokenizers import TOKENIZERS, Bytes, Tokenizer, TokenizerFile, find_tokenizer
from lineage.data.tokenizers.kinds import Characters
from tests.data.conftest import train

TEXT = "def one(two):\n    return two + 1\n\n\nclass Three:\n    '''It's naïve — 日本語 <|endoftext|>.'''\n" * 3
BYTES = train("bytes", [])
BPE = train("bpe", [TEXT], vocab_size=300)
CHARACTERS = train("characters", [TEXT, "xyz"])
WORDS = train("words", [TEXT])
BERT = ("pad", "cls", "sep", "mask")
SUBWORDS = {kind: train(kind, [TEXT, "xyz"], vocab_size=120) for kind in ("bpe_words", "wordpiece", "unigram")}
ALL = {"bytes": BYTES, "bpe": BPE, "characters": CHARACTERS, "words": WORDS, **SUBWORDS}
SIZES = {"bpe": {"vocab_size": 400}, "bpe_words": {"vocab_size": 200}, "wordpiece": {"vocab_size": 200}} | {
    "unigram": {"vocab_size": 80}
}
KINDS = [kind for kind in TOKENIZERS if kind != "file"]
LETTERS = st.text(st.sampled_from(sorted(set(TEXT + "xyz"))), max_size=60)


@given(st.text())
@pytest.mark.parametrize("kind", ["bytes", "bpe"])
def test_lossless(kind, text):
    ids = ALL[kind].encode(text)
    assert ids.dtype == np.int32
    assert ids.ndim == 1
    assert ALL[kind].decode(ids) == text
    assert (ids < ALL[kind].vocab_size).all()
    assert (ids != ALL[kind].end_of_text).all()


@given(st.text(st.sampled_from(sorted(set(TEXT + "xyz")))))
def test_characters_are_lossless_on_their_alphabet(text):
    ids = CHARACTERS.encode(text)
    assert len(ids) == len(text)
    assert CHARACTERS.decode(ids) == text


@given(st.text())
def test_bytes_are_utf8(text):
    assert BYTES.encode(text).tolist() == list(text.encode())
    # The lookup agrees with the library, which reads the same file.
    assert BYTES._backend.encode(text, add_special_tokens=False).ids == list(text.encode())


def test_character_lookup_matches_the_library():
    assert CHARACTERS.encode(TEXT).tolist() == CHARACTERS._backend.encode(TEXT, add_special_tokens=False).ids


def test_unknown_characters_raise():
    for text in ("onß", "\U0001f600", "Q"):
        with pytest.raises(ValueError, match=f"The character '{text[-1]}' is not one of the"):
            CHARACTERS.encode(text)
        with pytest.raises(ValueError, match=f"The character '{text[-1]}' is not one of the"):
            CHARACTERS.encode_with_offsets([text])


def test_words():
    assert WORDS.decode(WORDS.encode("class  unheard\n")) == "class <unk>"
    assert WORDS.decode(WORDS.encode("class Three:")) == "class Three :"
    assert train("words", [TEXT], vocab_size=5).vocab_size == 5


def test_vocabulary_sizes_and_end_of_text():
    assert BYTES.vocab_size == 257
    assert BYTES.end_of_text == 256
    assert BPE.vocab_size == 300
    assert CHARACTERS.vocab_size == len(set(TEXT + "xyz")) + 1
    alone = train("characters", [TEXT], ())
    assert alone.end_of_text is None
    assert alone.vocab_size == len(set(TEXT))
    for tokenizer in (BYTES, BPE, CHARACTERS, WORDS):
        assert tokenizer.decode([tokenizer.end_of_text]) == "<|endoftext|>"


@given(LETTERS)
def test_round_trip_up_to_whitespace_and_normalization(text):
    for kind, form in (("bpe_words", "NFC"), ("unigram", "NFKC")):
        ids = ALL[kind].encode(text)
        assert ALL[kind].decode(ids) == unicodedata.normalize(form, " ".join(text.split()))
    # WordPiece puts spaces around punctuation, and has a maximum word length of 100 characters.
    ids = ALL["wordpiece"].encode(text)
    assert ALL["wordpiece"].decode(ids).replace(" ", "") == "".join(text.split())


@given(st.text())
def test_unknown_text_maps_to_the_unknown_token(text):
    for tokenizer in SUBWORDS.values():
        ids = tokenizer.encode(text)
        assert ((ids >= 0) & (ids < tokenizer.vocab_size)).all()
        assert not tokenizer.special[ids[ids != tokenizer.unknown]].any()


def test_lower_case():
    texts = {"wordpiece": "naive three", "unigram": "naïve three", "bpe_words": "naïve three", "words": "naïve three"}
    for kind, text in texts.items():
        tokenizer = train(kind, ["Naïve THREE three naive"], vocab_size=60 if kind != "words" else 0, lowercase=True)
        assert tokenizer.decode(tokenizer.encode("NAÏVE\nThree")) == text


def test_special_tokens_come_first_and_count_in_the_vocabulary_size():
    for kind in SUBWORDS:
        tokenizer = train(kind, [TEXT], BERT, vocab_size=150 if kind != "unigram" else 60)
        assert [tokenizer.pad, tokenizer.cls, tokenizer.sep, tokenizer.mask, tokenizer.unknown] == [0, 1, 2, 3, 4]
        assert np.flatnonzero(tokenizer.special).tolist() == [0, 1, 2, 3, 4]
        assert tokenizer.end_of_text == tokenizer.sep  # `sep` is used if there is no `end_of_text`
        assert tokenizer.encode("[MASK] <mask>").min() > 3
    tokenizer = train("bpe", [TEXT], ("pad", "end_of_text", "sentinels"), vocab_size=400)
    assert (tokenizer.pad, tokenizer.end_of_text, tokenizer.sentinels) == (0, 1, list(range(2, 102)))
    assert tokenizer.decode([tokenizer.sentinels[7]]) == "<extra_id_7>"


@pytest.mark.parametrize("kind", ["bpe", "bpe_words", "wordpiece", "unigram", "characters", "words"])
def test_where_words_begin(kind):
    tokenizer = train(kind, [TEXT, "abcdefghijklmnopqrstuvwxyz \t"], **SIZES.get(kind, {}))
    ids = tokenizer.encode("the two rewritten\twords")
    begins, ends = tokenizer.word_marks
    starts = np.append(True, begins[ids[1:]] | ends[ids[:-1]])
    words = [tokenizer.decode(part).strip() for part in np.split(ids, np.flatnonzero(starts)[1:])]
    unknown = [tokenizer.decode([tokenizer.unknown])] * 2 if kind == "words" else ["the", "two"]
    assert len(words) == 4
    assert words[1] == "two"
    assert words[0] == unknown[0]
    assert begins[tokenizer.end_of_text]


@functools.cache  # training by the library is not deterministic
def reference(family):
    """Return the tokenizer.json of a family of checkpoints, with their names of the special tokens."""
    if family == "bert":
        names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
        tokenizer = library.BertWordPieceTokenizer()
        tokenizer.train_from_iterator([TEXT], vocab_size=200, special_tokens=names, show_progress=False)
        return json.loads(tokenizer.to_str())
    if family == "t5":
        names = ["<pad>", "</s>", "<unk>"]
        tokenizer = library.SentencePieceUnigramTokenizer()
        tokenizer.train_from_iterator([TEXT], 80, special_tokens=names, unk_token="<unk>", show_progress=False)
        tokenizer.add_special_tokens([f"<extra_id_{i}>" for i in reversed(range(100))])
        return json.loads(tokenizer.to_str())
    names = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"] if family == "roberta" else ["<|endoftext|>"]
    tokenizer = library.ByteLevelBPETokenizer()
    tokenizer.train_from_iterator([TEXT], vocab_size=300, special_tokens=names, show_progress=False)
    return json.loads(tokenizer.to_str())


@pytest.mark.parametrize(
    ("family", "roles"),
    [
        ("bert", {"pad": 0, "unknown": 1, "cls": 2, "sep": 3, "mask": 4, "end_of_text": 3}),
        ("roberta", {"cls": 0, "pad": 1, "sep": 2, "end_of_text": 2, "unknown": 3, "mask": 4}),
        ("t5", {"pad": 0, "end_of_text": 1, "unknown": 2, "mask": None}),
        ("gpt2", {"end_of_text": 0, "pad": None, "mask": None, "cls": None}),
    ],
)
def test_tokenizers_of_reference_checkpoints_load(family, roles, tmp_path):
    (tmp_path / "tokenizer.json").write_text(json.dumps(reference(family)))
    loaded = Tokenizer.load(tmp_path)
    assert {role: getattr(loaded, role) for role in roles} == roles
    assert loaded.special.sum() == (103 if family == "t5" else len({id for id in roles.values() if id is not None}))
    own = library.Tokenizer.from_str(json.dumps(reference(family)))
    assert loaded.encode("class one").tolist() == own.encode("class one", add_special_tokens=False).ids
    assert loaded.decode(loaded.encode("class one")) == "class one"
    sentinels = [own.token_to_id(f"<extra_id_{i}>") for i in range(100)]
    assert loaded.sentinels == (sentinels if family == "t5" else [])
    begins, ends = loaded.word_marks
    ids = loaded.encode("class one return")
    assert np.sum(begins[ids[1:]] | ends[ids[:-1]]) == 2


def test_bpe_compresses():
    assert len(BPE.encode(TEXT)) < 0.75 * len(TEXT.encode())


@pytest.mark.parametrize("kind", KINDS)
def test_saved_and_loaded(kind, tmp_path):
    tokenizer = ALL[kind]
    tokenizer.save(tmp_path / "run")
    assert [file.name for file in (tmp_path / "run").iterdir()] == ["tokenizer.json"]
    for path in (tmp_path / "run", tmp_path / "run" / "tokenizer.json"):
        loaded = Tokenizer.load(path)
        assert loaded.vocab_size == tokenizer.vocab_size
        assert loaded.end_of_text == tokenizer.end_of_text
        np.testing.assert_array_equal(loaded.encode(TEXT), tokenizer.encode(TEXT))
        assert loaded.decode(loaded.encode(TEXT)) == tokenizer.decode(tokenizer.encode(TEXT))
        assert loaded.to_str() == tokenizer.to_str()


@pytest.mark.parametrize("kind", KINDS)
def test_training_is_deterministic(kind):
    texts = [f"{TEXT} {i} {i * i} word{i % 7}" for i in range(50)]
    first = train(kind, texts, **SIZES.get(kind, {}))
    for _ in range(3):
        again = train(kind, iter(texts), **SIZES.get(kind, {}))
        assert json.loads(again.to_str()) == json.loads(first.to_str())


def test_unigram_orders_characters_that_training_drops():
    words = [" ".join(f"word{i}" for i in range(start, start + 9)) for start in range(50)]
    first = train("unigram", words, vocab_size=120).to_str()
    assert all(train("unigram", words, vocab_size=120).to_str() == first for _ in range(5))


@pytest.mark.parametrize("kind", KINDS)
def test_chunking_of_long_texts_does_not_change_tokens(kind, monkeypatch):
    text = (TEXT + "\n\n \n\t\n a\r\n b\n'll\n x\u2028\ny\n1\u00a0\n2\ns \n\tt \nu\n") * 20
    tokenizer = train(kind, [text], **SIZES.get(kind, {}))
    whole = tokenizer._backend.encode(text, add_special_tokens=False).ids
    for piece in (1, 2, 3, 50):
        monkeypatch.setattr("lineage.data.documents._PIECE", piece)
        assert len(list(split_lines([text]))) > 10
        assert "".join(split_lines([text])) == text
        assert tokenizer.encode(text).tolist() == whole
    assert [ids.tolist() for ids in tokenizer.encode_batch([text, "", text])] == [whole, [], whole]


def test_character_vocabulary_covers_all_splits_and_optional_end_of_text():
    texts = {"train": ["ab"], "validation": ["bc"]}
    actual = find_tokenizer(Characters(), texts, ("end_of_text", "mask"), optional=("end_of_text",))
    assert actual.end_of_text is None
    assert actual.vocab_size == len("abc") + 1
    assert actual.has("mask")
    assert not actual.has("sentinels")
    assert find_tokenizer(Characters(), texts, ("end_of_text",)).has("end_of_text")
    several = texts | {"test": ["d", "e"]}
    assert find_tokenizer(Characters(), several, ("end_of_text",), optional=("end_of_text",)).vocab_size == 6
    assert find_tokenizer(Bytes(), texts, ("end_of_text",), optional=("end_of_text",)).has("end_of_text")


def test_invalid_tokenizers_raise(tmp_path):
    with pytest.raises(ValueError, match=r"Unknown tokenizer 'bites'. Did you mean 'bytes'\? Available: bpe"):
        train("bites", [])
    with pytest.raises(ValueError, match=r"tokenizer.vocab_size is 256: bpe needs at least 257"):
        train("bpe", [TEXT], vocab_size=256)
    with pytest.raises(ValueError, match=r"tokenizer.vocab_size is 0: unigram needs at least 3, special tokens"):
        train("unigram", [TEXT])
    with pytest.raises(ValueError, match=r"tokenizer.vocab_size is 30: it must be at least \d+, the number of"):
        train("wordpiece", [TEXT], vocab_size=30)
    keys = {"bpe": ["lowercase"], "bytes": ["lowercase", "vocab_size"], "characters": ["vocab_size"]}
    for kind, key in ((kind, key) for kind, some in keys.items() for key in some):
        with pytest.raises(ValueError, match=f"has no key '{key}'"):
            schema.section(TOKENIZERS, kind, **{key: 300})
    with pytest.raises(ValueError, match="The tokenizer 'file' needs a path"):
        TokenizerFile().train([])
    with pytest.raises(FileNotFoundError, match="There is no tokenizer at"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0"')
    with pytest.raises(ValueError, match="is not a tokenizer that the tokenizers library can read"):
        Tokenizer.load(tmp_path)


def test_end_of_text_of_a_folder(tmp_path):
    backend = library.Tokenizer(library.models.WordLevel({"a": 0, "<unk>": 1}, unk_token="<unk>"))
    backend.add_special_tokens(["</s>", "<|im_end|>"])
    backend.save(str(tmp_path / "tokenizer.json"))
    (path := tmp_path / "tokenizer_config.json").write_text("{}")
    tokenizer = TokenizerFile(str(tmp_path))
    assert tokenizer.train([]).ends == (2,)
    for name, ends in (("<|im_end|>", (3,)), ({"content": "<|im_end|>"}, (3,)), ("a", (2,)), ("b", (2,)), (None, (2,))):
        path.write_text(json.dumps({"eos_token": name}))
        assert tokenizer.train([]).ends == TokenizerFile(str(tmp_path / "tokenizer.json")).train([]).ends == ends
    for damaged in ("[]", "{", "[" * 10**5):
        path.write_text(damaged)
        with pytest.raises(ValueError, match=f"^{path} is not a JSON object: "):
            tokenizer.train([])
    path.unlink()
    path.symlink_to("missing")  # as in a cache of the Hub that has lost a file
    with pytest.raises(ValueError, match=f"^{path} is neither a file nor a link to one that exists"):
        tokenizer.train([])


def charsmap(nodes=512, text=b"b\0", **units):
    """Return SentencePiece's table of replacements of "a" by "b", with changed nodes."""
    array = np.zeros(nodes, "<u4")
    array[[97, 353]] = 256 << 10 | 1 << 8 | 97, 0  # the node of "a", and its leaf, which is the start of the text
    for place, unit in units.items():
        array[int(place[1:])] = unit
    return (4 * nodes).to_bytes(4, "little") + array.tobytes() + text


DAMAGED = [
    b"garbage",
    b"",
    charsmap()[:-200],
    charsmap(text=b"\xff"),
    charsmap(text=b""),
    charsmap(_97=9999 << 10 | 97),
]
DAMAGED += [charsmap(_353=2), charsmap(_353=1, text="é".encode()), charsmap(_0=2**30 << 1)]  # _353=2: behind the text


def test_names_of_special_tokens_stay_text_after_pickling():
    tokenizer = pickle.loads(pickle.dumps(train("bpe", ["a"], vocab_size=257)))
    assert len(tokenizer.encode("<|endoftext|>")) == len("<|endoftext|>")


def test_trained_tokenizers_are_kept(tmp_path, monkeypatch):
    def find(texts, kind=None, roles=("end_of_text",)):
        documents = {"train": Documents([texts]), "validation": Documents(["other"])}
        return find_tokenizer(kind or TOKENIZERS["bpe"](280), documents, roles, cache_dir=tmp_path)

    first = find("the fox " * 9)
    assert first.to_str() == train("bpe", ["the fox " * 9], vocab_size=280).to_str()
    assert find("the fox " * 9, TokenizerFile(str(next(tmp_path.glob("*.json"))))).to_str() == first.to_str()
    others = [
        find("the dog " * 9),
        find("the fox " * 9, TOKENIZERS["bpe"](260)),
        find("the fox " * 9, roles=("end_of_text", "mask")),
    ]
    assert len({one.to_str() for one in [first, *others]}) == 4 == len(list(tmp_path.glob("*.json")))
    monkeypatch.setattr(TOKENIZERS["bpe"], "train", None)
    assert find("the fox " * 9).to_str() == first.to_str()


@pytest.mark.parametrize("suffix", ["json", "sha256"])
def test_pipes_in_place_of_kept_tokenizers_are_replaced(suffix, tmp_path):
    texts = {"train": Documents(["the fox " * 9])}
    for _ in range(2):
        find_tokenizer(TOKENIZERS["bpe"](280), texts, ("end_of_text",), cache_dir=tmp_path)
        (path,) = tmp_path.glob(f"*.{suffix}")
        assert path.is_file()
        path.unlink()
        os.mkfifo(path)


@pytest.mark.parametrize("own", ["none", "offsets", "first", "both"])
def test_exported_tokenizer_adds_special_tokens(own):
    """Check single texts and pairs in the library, whatever the tokenizer's own post-processor adds."""
    backend = library.Tokenizer.from_str(train("words", ["good bad"], ("cls", "sep", "end_of_text")).to_str())
    offsets, names = library.processors.ByteLevel(trim_offsets=True), [("<s>", backend.token_to_id("<s>"))]
    first = library.processors.TemplateProcessing(single="<s> $A", special_tokens=names)
    if own != "none":
        processors = {"offsets": offsets, "first": first, "both": library.processors.Sequence([offsets, first])}
        backend.post_processor = processors[own]
    ours = Tokenizer(backend)
    good, bad = ours.encode("good bad").tolist()
    theirs = library.Tokenizer.from_str(ours.exported(ours.cls, ours.sep))
    assert theirs.encode("good").ids == [ours.cls, good, ours.sep]
    assert theirs.encode("good", "bad").ids == [ours.cls, good, ours.sep, bad, ours.sep]
    assert theirs.encode("good", "bad").type_ids == [0, 0, 0, 1, 1]
    assert theirs.encode("good bad").offsets == [(0, 0), (0, 4), (5, 8), (0, 0)]
    without = library.Tokenizer.from_str(ours.exported(None, ours.end_of_text))
    assert without.encode("bad").ids == [bad, ours.end_of_text]
    assert library.Tokenizer.from_str(ours.exported(ours.cls)).encode("bad").ids == [ours.cls, bad]
    assert library.Tokenizer.from_str(ours.exported()).encode("bad").ids == [bad]
    assert (again := Tokenizer(theirs)).exported(ours.cls, ours.sep) == theirs.to_str()
    assert again.begin_of_text is None


@pytest.mark.parametrize("kind", ["characters", "bytes"])
@pytest.mark.parametrize(
    ("template", "begins"), [(None, False), ("<s> $A", True), ("$A <s>", False), ("<s> $A <s>", False)]
)
def test_token_that_begins_a_text(kind, template, begins):
    """Check it for characters among which the letter a is not."""
    backend = library.Tokenizer.from_str(train(kind, ["123"], ("end_of_text", "cls")).to_str())
    begin = backend.token_to_id("<s>")
    if template:
        backend.post_processor = library.processors.TemplateProcessing(single=template, special_tokens=[("<s>", begin)])
    assert Tokenizer(backend).begin_of_text == (begin if begins else None)
