import errno
import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lineage.data.examples.windows import Windows
from lineage.data.fingerprint import fingerprint
from lineage.data.sources.text import StandardLibrary, Text, read_blocks


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


@pytest.mark.parametrize(("length", "stride"), [(4, 5), (4, -1)])
def test_invalid_strides_raise(length, stride):
    with pytest.raises(ValueError, match=f"sequence_length is {length} and the stride {stride}"):
        Windows(np.arange(10), length, stride)


def test_windows_without_tokens_raise():
    with pytest.raises(ValueError, match=r"^task.sequence_length is 0: it must be 1 or more.$"):
        Windows(np.arange(10), 0)


def test_too_short_texts_raise():
    with pytest.raises(ValueError, match="The text has 1 tokens"):
        Windows(np.arange(1), 4)


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


def test_linked_folders_are_read_once(tmp_path, monkeypatch):
    """Check a link to a folder elsewhere, one to a folder around it, and a folder that cannot be read."""
    for name in ("texts/a.txt", "elsewhere/b.txt"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(name)
    texts = tmp_path / "texts"
    (texts / "link").symlink_to(tmp_path / "elsewhere")
    (texts / "link" / "up").symlink_to(texts)
    source = Text(str(texts), validation_fraction=0)
    assert list(source.documents()["train"]) == ["texts/a.txt", "elsewhere/b.txt"]
    assert len(fingerprint(source.files())) == 2
    scan = os.scandir

    def denied(path):
        if str(path).endswith("link"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", denied)
    with pytest.raises(PermissionError, match="texts/link"):
        source.documents()


def test_characters_of_a_file_are_counted_once(tmp_path, monkeypatch):
    """Check how often the splits of one file read it, and that a changed file is counted again."""
    (tmp_path / "a.txt").write_text("abcdefghij")
    read = []
    monkeypatch.setattr("lineage.data.sources.text.read_blocks", lambda file: read.append(file) or read_blocks(file))
    splits = Text(str(tmp_path / "a.txt"), validation_fraction=0.2).documents()
    assert {name: list(part) for name, part in splits.items()} == {"train": ["abcdefgh"], "validation": ["ij"]}
    assert len(read) == 3
    (tmp_path / "a.txt").write_text("abcde")
    assert {name: list(part) for name, part in splits.items()} == {"train": ["abcd"], "validation": ["e"]}


def test_newlines_are_kept(tmp_path):
    (tmp_path / "a").write_bytes(b"one\r\ntwo\r")
    assert texts(tmp_path / "a") == ["one\r\ntwo\r"]


def test_byte_order_mark_is_removed(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfabc")
    assert "".join(read_blocks(tmp_path / "a.txt")) == "abc"


def test_invalid_utf8_raises(tmp_path):
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9 au lait")
    with pytest.raises(ValueError, match=r"latin\.txt is not UTF-8 text: byte 0xe9 at offset 3") as caught:
        list(read_blocks(tmp_path / "latin.txt"))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("size", range(3, 9))
def test_blocks_of_texts(tmp_path, size):
    text = "\ufeffaß日\U0001f600\r\nz"
    (tmp_path / "a").write_bytes(text.encode())
    blocks = list(read_blocks(tmp_path / "a", size))
    assert "".join(blocks) == text[1:]
    assert len(blocks) > 2
    (tmp_path / "a").write_bytes(text.encode() + b"z\xe6\x97")
    with pytest.raises(ValueError, match=rf"byte 0xe6 at offset {len(text.encode()) + 1} \(unexpected end of data"):
        list(read_blocks(tmp_path / "a", size))


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


def held_out(folder, texts, fraction):
    """Return the texts for training and those for validation of files with some texts."""
    folder.mkdir(parents=True)
    for number, text in enumerate(texts):
        (folder / f"{number:02}").write_text(text)
    documents = Text(str(folder), validation_fraction=fraction).documents()
    return list(documents["train"]), list(documents["validation"])


def test_hold_out(tmp_path):
    assert held_out(tmp_path / "one", ["abcdefghij"], 0.1) == (["abcdefghi"], ["j"])
    train, held = held_out(tmp_path / "large", ["ß" * 1115394], 0.1)  # in several blocks
    assert len(train[0]) == 1003854  # as nanoGPT splits its text
    assert len(held[0]) == 1115394 - 1003854
    parts = [str(i) for i in range(25)]
    train, held = held_out(tmp_path / "files", parts, 0.1)
    assert held == ["9", "19"]
    assert sorted(train + held) == sorted(parts)
    both = held_out(tmp_path / "both", ["abcdefghij", "k" * 20], 0.1)
    assert both == (["abcdefghi", "k" * 18], ["j", "kk"])
    for fraction in (0.1, 0.25, 0.3, 0.5, 0.7, 0.99):
        assert len(held_out(tmp_path / str(fraction), ["x"] * 100, fraction)[1]) == round(100 * fraction)
    with pytest.raises(ValueError, match=r"source.validation_fraction is 1\.5: it must be 0 or more and below 1"):
        StandardLibrary(validation_fraction=1.5)


def test_fingerprints_of_texts(tmp_path):
    def fingerprints(**options):
        return [part.fingerprint() for part in Text(str(tmp_path / "data"), **options).documents().values()]

    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a").write_text("a text")
    seen = [*fingerprints(), *fingerprints(validation_fraction=0.3)]
    (tmp_path / "data" / "a").write_text("b text")
    seen += fingerprints()
    assert len(set(seen)) == 6
    (tmp_path / "data").rename(tmp_path / "moved")
    (tmp_path / "data").symlink_to("moved")
    assert fingerprints() == seen[-2:]
