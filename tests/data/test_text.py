import json

import cloudpickle
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lineage.data import Documents
from lineage.data.examples import windows
from lineage.data.examples.windows import Windows, tokenize
from lineage.data.sources.text import StandardLibrary, Text, hold_out, read_text
from tests.data.conftest import train

BYTES = train("bytes", [])


def texts(path, **options):
    """Return the texts of a path, all of them for training."""
    return list(Text(str(path), validation_fraction=0.0, **options).documents()["train"])


@given(n=st.integers(2, 200), length=st.integers(1, 50))
def test_every_target_occurs_once(n, length):
    tokens = np.arange(n, dtype=np.uint16)
    windows = Windows(tokens, length)
    batch = windows.take(np.arange(len(windows)))
    assert batch["targets"][batch["mask"]].tolist() == list(range(1, n))
    assert batch["tokens"][batch["mask"]].tolist() == list(range(n - 1))
    assert not batch["tokens"][:, 1:][~batch["mask"][:, :-1]].any()
    assert batch["mask"].any(axis=1).all()
    assert batch["tokens"].dtype == batch["targets"].dtype == np.int32


@given(n=st.integers(2, 200), length=st.integers(1, 50), data=st.data())
def test_windows_with_any_stride(n, length, data):
    stride = data.draw(st.integers(1, length))
    windows = Windows(np.arange(n, dtype=np.int32), length, stride)
    for index in range(len(windows)):
        window = windows[index]
        count = window["mask"].sum()
        assert window["tokens"][:count].tolist() == list(range(index * stride, index * stride + count))
        assert window["targets"][:count].tolist() == list(range(index * stride + 1, index * stride + count + 1))
        assert count == length or index == len(windows) - 1
    assert index * stride + count == n - 1


@given(n=st.integers(2, 200), length=st.integers(1, 50), data=st.data())
def test_overlapping_windows_count_targets_once_with_enough_context(n, length, data):
    stride = data.draw(st.integers(1, length))
    windows = Windows(np.arange(n, dtype=np.int32), length, stride, once=True)
    batch = windows.take(np.arange(len(windows)))
    counted = batch["targets"][batch["mask"]]
    assert counted.tolist() == list(range(1, n))
    seen = counted - np.broadcast_to(batch["tokens"][:, :1], batch["mask"].shape)[batch["mask"]]  # context length
    assert (seen >= np.minimum(counted, length - stride + 1)).all()


def test_stride_one_gives_every_offset():
    windows = Windows(np.arange(100), 10, stride=1)
    assert len(windows) == 90  # nanoGPT draws from range(len(tokens) - length).
    assert windows[89]["targets"].tolist() == list(range(90, 100))


@pytest.mark.parametrize(("length", "stride"), [(0, 0), (4, 5), (4, -1)])
def test_invalid_strides_raise(length, stride):
    with pytest.raises(ValueError, match=f"sequence_length is {length} and the stride {stride}"):
        Windows(np.arange(10), length, stride)


def test_too_short_texts_raise():
    with pytest.raises(ValueError, match="The text has 1 tokens"):
        Windows(np.arange(1), 4)


def test_documents_are_separated_by_the_end_of_text():
    assert tokenize(Documents(["ab", "", "c"]), BYTES).tokens.tolist() == [97, 98, 256, 256, 99, 256]
    assert tokenize(Documents(["ab"]), BYTES).tokens.tolist() == [97, 98]
    stream = tokenize(Documents(["aß", "日"]), BYTES)
    assert (stream.characters, stream.bytes) == (3, 6)
    assert stream.tokens.dtype == np.uint16


def test_tokens_do_not_depend_on_chunks(monkeypatch):
    documents = Documents([f"text {i} " * (i % 5) for i in range(40)])
    whole = tokenize(documents, BYTES).tokens
    monkeypatch.setattr(Documents.chunks, "__defaults__", (20,))
    assert len(list(documents.chunks())) > 5
    np.testing.assert_array_equal(tokenize(documents, BYTES).tokens, whole)


def test_cache(tmp_path, monkeypatch):
    documents = Documents(["one", "two"])
    plain = tokenize(documents, BYTES)
    for _ in range(2):
        kept = tokenize(documents, BYTES, tmp_path)
        np.testing.assert_array_equal(kept.tokens, plain.tokens)
        assert (kept.characters, kept.bytes) == (6, 6)
        # The second call reads the cache.
        monkeypatch.setattr(windows, "_encode", None)
    assert len(list(tmp_path.iterdir())) == 2
    monkeypatch.undo()
    assert len(tokenize(Documents(["one", "twos"]), BYTES, tmp_path).tokens) == 9
    characters = train("characters", ["onetwo"])
    assert tokenize(documents, characters, tmp_path).tokens[0] == characters.encode("o")[0]
    assert len(list(tmp_path.iterdir())) == 6
    assert len(tokenize(Documents([""]), BYTES, tmp_path).tokens) == 0


def test_memory_mapped_tokens_are_pickled_as_a_path(tmp_path):
    stream = tokenize(Documents(["word " * 100_000]), BYTES, tmp_path)
    assert isinstance(stream.tokens, np.memmap)
    windows = Windows(stream.tokens, 16)
    sent = cloudpickle.dumps(windows)
    assert len(sent) < 2000
    received = cloudpickle.loads(sent)
    np.testing.assert_array_equal(received[1000]["tokens"], windows[1000]["tokens"])


def test_files(tmp_path):
    for name, content in {"b.txt": "b", "a.txt": "a", "sub/c.md": "c", ".hidden": "h", "d.txt": ""}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    assert texts(tmp_path) == ["a", "b", "", "c"]
    assert texts(tmp_path / "*.txt") == ["a", "b", ""]
    assert texts(tmp_path / "**/*.md") == ["c"]
    assert texts(tmp_path / "a.txt") == ["a"]
    assert texts(tmp_path, max_bytes=2) == ["a", "b", ""]
    with pytest.raises(FileNotFoundError, match=r"There is no text file at .*nothing"):
        texts(tmp_path / "nothing*")
    with pytest.raises(ValueError, match=r"There is no text in .*d\.txt"):
        texts(tmp_path / "d.txt")


def test_newlines_are_kept(tmp_path):
    (tmp_path / "a").write_bytes(b"one\r\ntwo\r")
    assert texts(tmp_path / "a") == ["one\r\ntwo\r"]


def test_byte_order_mark_is_removed(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfabc")
    assert read_text(tmp_path / "a.txt") == "abc"


def test_invalid_utf8_raises(tmp_path):
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9 au lait")
    with pytest.raises(ValueError, match=r"latin\.txt is not UTF-8 text: byte 0xe9 at offset 3") as caught:
        read_text(tmp_path / "latin.txt")
    assert "\n" not in str(caught.value)


def test_stdlib():
    def stdlib(max_bytes=0):
        return list(StandardLibrary(validation_fraction=0.0, max_bytes=max_bytes).documents()["train"])

    texts = stdlib(1_000_000)
    assert 500_000 < sum(len(part.encode()) for part in texts) <= 1_000_000
    assert texts == stdlib(1_000_000)
    everything = stdlib()
    assert everything[: len(texts)] == texts
    assert any("class OrderedDict" in part for part in everything)
    assert sum(map(len, everything)) > 5_000_000


def test_hold_out():
    assert hold_out(["abcdefghij"], 0.1) == (["abcdefghi"], ["j"])
    assert len(hold_out(["x" * 1115394], 0.1)[0][0]) == 1003854  # as nanoGPT splits its text
    parts = [str(i) for i in range(25)]
    train, held = hold_out(parts, 0.1)
    assert held == ["9", "19"]
    assert sorted(train + held) == sorted(parts)
    assert hold_out(["abcdefghij", "k" * 20], 0.1) == (["abcdefghi", "k" * 18], ["j", "kk"])
    for fraction in (0.1, 0.25, 0.3, 0.5, 0.7, 0.99):
        assert len(hold_out(["x"] * 100, fraction)[1]) == round(100 * fraction)
    with pytest.raises(ValueError, match=r"source.validation_fraction is 1\.5: it must be 0 or more and below 1"):
        StandardLibrary(validation_fraction=1.5)


@pytest.mark.parametrize(
    "damage",
    [
        lambda tokens, about: tokens.write_bytes(tokens.read_bytes()[:-4]),
        lambda tokens, about: tokens.write_bytes(bytes(tokens.stat().st_size)),
        lambda tokens, about: tokens.write_bytes(tokens.read_bytes()[:-1] + b"\xff"),
        lambda tokens, about: tokens.unlink(),
        lambda tokens, about: about.write_text(""),
        lambda tokens, about: about.write_text("[1]"),
        lambda tokens, about: about.write_text(json.dumps({"characters": 7, "bytes": 7})),
    ],
)
def test_damaged_cache_is_made_anew(tmp_path, damage):
    documents = Documents(["one", "two"])
    expected = tokenize(documents, BYTES, tmp_path)
    whole = expected.tokens.tolist()
    damage(next(tmp_path.glob("*.uint16")), next(tmp_path.glob("*.json")))
    again = tokenize(documents, BYTES, tmp_path)
    assert (again.tokens.tolist(), again.characters, again.bytes) == (whole, 6, 6)
    assert next(tmp_path.glob("*.uint16")).stat().st_size == 16
