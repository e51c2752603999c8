import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data import tokenizers
from data.tokenizers import Tokenizer, train

TEXT = "def one(two):\n    return two + 1\n\n\nclass Three:\n    '''It's naïve — 日本語 <|endoftext|>.'''\n" * 3
BYTES = train("bytes", [])
BPE = train("bpe", [TEXT], vocab_size=300)
CHARACTERS = train("characters", [TEXT, "xyz"])
WORDS = train("words", [TEXT])
ALL = {"bytes": BYTES, "bpe": BPE, "characters": CHARACTERS, "words": WORDS}


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
    # The library, which reads the same file, agrees with the look-up.
    assert BYTES._backend.encode(text, add_special_tokens=False).ids == list(text.encode())


def test_the_look_up_of_characters_is_the_librarys():
    assert CHARACTERS.encode(TEXT).tolist() == CHARACTERS._backend.encode(TEXT, add_special_tokens=False).ids


def test_unknown_characters_are_an_error():
    for text in ("onß", "\U0001f600", "Q"):
        with pytest.raises(ValueError, match=f"the character '{text[-1]}' is not one of the"):
            CHARACTERS.encode(text)


def test_words():
    assert WORDS.decode(WORDS.encode("class  unheard\n")) == "class <unk>"
    assert WORDS.decode(WORDS.encode("class Three:")) == "class Three :"
    assert train("words", [TEXT], vocab_size=5).vocab_size == 5


def test_sizes_and_ends():
    assert BYTES.vocab_size == 257
    assert BYTES.end_of_text == 256
    assert BPE.vocab_size == 300
    assert CHARACTERS.vocab_size == len(set(TEXT + "xyz")) + 1
    alone = train("characters", [TEXT], special=())
    assert alone.end_of_text is None
    assert alone.vocab_size == len(set(TEXT))
    for tokenizer in ALL.values():
        assert tokenizer.decode([tokenizer.end_of_text]) == "<|endoftext|>"


def test_bpe_compresses():
    assert len(BPE.encode(TEXT)) < 0.75 * len(TEXT.encode())


@pytest.mark.parametrize("kind", tokenizers.KINDS)
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


@pytest.mark.parametrize("kind", tokenizers.KINDS)
def test_training_again_gives_the_same(kind):
    texts = [f"{TEXT} {i} {i * i} word{i % 7}" for i in range(50)]
    size = 400 if kind == "bpe" else 0
    assert json.loads(train(kind, texts, size).to_str()) == json.loads(train(kind, iter(texts), size).to_str())


@pytest.mark.parametrize("kind", tokenizers.KINDS)
def test_long_texts_are_cut_without_a_trace(kind, monkeypatch):
    text = (TEXT + "\n\n \n\t\n a\r\n b\n'll\n x\u2028\ny\n1\u00a0\n2\ns \n\tt \nu\n") * 20
    tokenizer = train(kind, [text], 1000 if kind == "bpe" else 0)
    whole = tokenizer._backend.encode(text, add_special_tokens=False).ids
    for piece in (1, 2, 3, 50):
        monkeypatch.setattr(tokenizers, "_PIECE", piece)
        assert len(list(tokenizers._pieces(text))) > 10
        assert "".join(tokenizers._pieces(text)) == text
        assert tokenizer.encode(text).tolist() == whole
    assert [ids.tolist() for ids in tokenizer.encode_batch([text, "", text])] == [whole, [], whole]


def test_errors(tmp_path):
    with pytest.raises(
        ValueError, match="tokenizer='bites' is neither a file nor one of bytes, characters, words, bpe"
    ):
        train("bites", [])
    with pytest.raises(ValueError, match="vocab_size=256: bpe needs at least 257"):
        train("bpe", [TEXT], vocab_size=256)
    with pytest.raises(FileNotFoundError, match="there is no tokenizer at"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0"')
    with pytest.raises(ValueError, match="is not a tokenizer that the tokenizers library can read"):
        Tokenizer.load(tmp_path)
