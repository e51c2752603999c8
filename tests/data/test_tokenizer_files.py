"""Files of tokenizers: damaged and hostile ones, and what counts in them."""

import base64
import json
import os
import subprocess
import sys

import pytest
import tokenizers as library

from lineage.data import Facts
from lineage.data.tokenizers import Tokenizer
from lineage.data.tokenizers.settings import read_settings
from tests.data.conftest import train
from tests.data.test_tokenizers import ALL, CHARACTERS, DAMAGED, charsmap


def with_charsmap(table):
    spec = json.loads(library.Tokenizer(library.models.Unigram([("a", 0.0), ("b", 0.0)], 0, False)).to_str())
    inner = {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(table).decode()}
    return spec | {"normalizer": {"type": "Sequence", "normalizers": [inner]}}


def with_id(kind, id):
    return {"version": "1.0", "added_tokens": [], "model": {"type": kind, "vocab": {"a": 0, "b": id}, "merges": []}}


def with_parts(**parts):
    spec = json.loads(library.Tokenizer(library.models.BPE({"a": 0, "b": 1}, [])).to_str())
    return spec | {key: {"type": "Sequence", f"{key}s": found} for key, found in parts.items()}


LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}


BYTE_LEVELS = {"type": "Sequence", "pretokenizers": [LEVEL] * 7}


def replaced(old, new):
    return {"type": "Replace", "pattern": {"String": old}, "content": new}


def library_split(behavior):
    return {"type": "Split", "pattern": {"Regex": r"[\s\S]"}, "behavior": behavior, "invert": False}


def test_sound_table_of_replacements(tmp_path):
    (tmp_path / "tokenizer.json").write_text(json.dumps(with_charsmap(charsmap())))
    assert Tokenizer.load(tmp_path).encode("ab").tolist() == [1, 1]


def test_tokenizer_of_characters_may_split_at_the_empty_text(tmp_path):
    split = {"type": "Split", "pattern": {"String": ""}, "behavior": "Isolated", "invert": False}
    (tmp_path / "tokenizer.json").write_text(json.dumps(with_parts() | {"pre_tokenizer": split}))
    assert Tokenizer.load(tmp_path).encode("abba").tolist() == [0, 1, 1, 0]


@pytest.mark.parametrize(
    ("name", "read", "limit"),
    [
        ("tokenizer.json", Tokenizer.load, "268,435,456"),
        ("facts.json", Facts.load, "268,435,456"),
        ("tokenizer_config.json", lambda path: read_settings(str(path.parent)), "67,108,864"),
    ],
)
def test_large_files_are_not_read(name, read, limit, tmp_path):
    (path := tmp_path / name).touch()
    os.truncate(path, int(limit.replace(",", "")) + 1)
    with pytest.raises(ValueError, match=f"{path} is not a regular file of at most {limit} bytes"):
        read(path)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (with_id("BPE", 4294967290), "a token has the id 4294967290, which must be an integer from 0 to 16,777,215"),
        (with_id("BPE", "1"), "a token has the id '1'"),
        (
            {"model": {"vocab": {}, "continuing_subword_prefix": "x", "merges": [["ã", "Ĥ"]]}},
            "a merge has 'Ĥ', which must begin with continuing_subword_prefix, 'x'",
        ),
        *((with_charsmap(table), "its precompiled_charsmap is damaged") for table in DAMAGED),
        ("[" * 100_000, "recursion"),
        (with_parts(normalizer=[replaced("a", "a" * 30)] * 2), "replaces parts of a text by much longer ones"),
        (with_parts(normalizer=[replaced("", "a")] * 7), "replaces parts of a text by much longer ones"),
        (with_parts(decoder=[replaced("a", "a" * 1000)]), "replaces parts of a text by much longer ones"),
        (
            with_parts(normalizer=[{"type": "Prepend", "prepend": "a" * 1000}]),
            "replaces parts of a text by much longer",
        ),
        (with_parts(normalizer=[{"type": "ByteLevel"}] * 7), "replaces parts of a text by much longer ones"),
        (with_parts() | {"pre_tokenizer": BYTE_LEVELS}, "replaces parts of a text by much longer ones"),
        (
            with_parts(normalizer=[{"type": "Replace", "pattern": {"Regex": "(?=.)"}, "content": "a"}] * 7),
            "replaces parts of a text by much longer ones",
        ),
        (with_charsmap(charsmap(text=b"a" * 200)), "replaces parts of a text by much longer ones"),
        (
            {"model": {"vocab": {}, "max_input_chars_per_word": 10**9}},
            "max_input_chars_per_word is 1000000000, which must be at most 1,000",
        ),
        (
            {"model": {"type": "Unigram", "vocab": [["a" * size, -1.0] for size in range(1, 200)]}},
            "a piece has 199 characters, of which there must be at most 128",
        ),
    ],
)
def test_hostile_files_are_one_sentence(tmp_path, spec, message):
    path = tmp_path / "tokenizer.json"
    path.write_text(spec if isinstance(spec, str) else json.dumps(spec))
    load = f"""
from lineage.data.tokenizers import Tokenizer
try:
    Tokenizer.load({str(tmp_path)!r}).encode("aé b")
except ValueError as error:
    print(error)
"""
    result = subprocess.run([sys.executable, "-c", load], capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.startswith(f"{path} is not a tokenizer that the tokenizers library can read")
    assert message in result.stdout
    assert result.stdout.count("\n") == 1


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            with_parts() | {"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "?"}},
            "Missing \\[UNK\\] token",
        ),
        (
            with_parts()
            | {
                "pre_tokenizer": {
                    "type": "Split",
                    "pattern": {"Regex": "(a+)+$"},
                    "behavior": "Isolated",
                    "invert": False,
                }
            },
            "retry-limit-in-match",
        ),
        (with_parts(decoder=[{"type": "Strip", "content": "a", "start": 9, "stop": 9}]), "index out of bounds"),
    ],
)
def test_errors_of_the_library_at_texts(spec, message, tmp_path):
    """Check errors and panics of the library, such as that of a regular expression which takes exponential time."""
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    tokenizer = Tokenizer.load(tmp_path)
    with pytest.raises(ValueError, match=f"^{tmp_path}/tokenizer.json cannot be used for a text: .*{message}"):
        tokenizer.decode(tokenizer.encode("a" * 40 + "b!"))


def test_loaded_tokenizers_drop_no_merges(tmp_path):
    spec = json.loads(train("bpe", ["the cat sat on the mat"] * 3, vocab_size=280).to_str())
    spec["model"]["dropout"] = 0.9
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    tokenizer = Tokenizer.load(tmp_path)
    assert len({tuple(tokenizer.encode("the cat sat on the mat")) for _ in range(5)}) == 1


def added(content, id, special=False):
    options = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"added_tokens": [{"id": id, "content": content, "special": special, **options}]}


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("bytes", {"normalizer": {"type": "Lowercase"}}),
        ("bytes", {"pre_tokenizer": LEVEL | {"add_prefix_space": True}}),
        ("bytes", {"pre_tokenizer": {"type": "WhitespaceSplit"}}),
        ("bytes", added("two", 256)),
        ("characters", {"normalizer": replaced("o", "x")}),
        ("characters", {"pre_tokenizer": library_split("Removed")}),
        ("characters", added("two", CHARACTERS.vocab_size - 1)),
        ("characters", {"model": {"type": "WordLevel", "vocab": {"o": 0, "?": 1}, "unk_token": "?"}}),
    ],
)
def test_all_parts_of_a_file_count(kind, changes, tmp_path):
    """Check files with the vocabulary of a kind that is looked up without the library."""
    spec = json.loads(ALL[kind].to_str()) | {"added_tokens": []} | changes
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    for text in ("Two one", "one two"):
        expected = library.Tokenizer.from_str(json.dumps(spec)).encode(text, add_special_tokens=False).ids
        tokenizer = Tokenizer.load(tmp_path)
        assert tokenizer.encode(text).tolist() == expected
        assert tokenizer.encode_with_offsets([text])[0][0].tolist() == expected


def test_added_token_that_would_get_another_id(tmp_path):
    (tmp_path / "tokenizer.json").write_text(json.dumps(with_parts() | added("<pad>", 7)))
    with pytest.raises(ValueError, match="the added token '<pad>' has the id 7, but is read as 2"):
        Tokenizer.load(tmp_path)


def test_added_token_that_is_not_in_the_vocabulary_is_refused(tmp_path):
    spec = json.loads(library.Tokenizer(library.models.BPE({"a": 0, "b": 1}, [])).to_str())
    first = {"SpecialToken": {"id": "b", "type_id": 0}}
    pair = [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}]
    template = {"type": "TemplateProcessing", "single": [first, pair[0]], "pair": pair}

    def begin(*ids):
        special = {"b": {"id": "b", "ids": ids, "tokens": ["b"] * len(ids)}}
        (tmp_path / "tokenizer.json").write_text(
            json.dumps(spec | {"post_processor": template | {"special_tokens": special}})
        )
        return Tokenizer.load(tmp_path).begin_of_text

    assert begin(1) == 1
    assert begin(*[1] * 300_000) is None
    with pytest.raises(ValueError, match=r"tokenizer\.json adds the token 2 to a text: its ids are below 2\."):
        begin(2)
