import json
import os
import time
from functools import partial

import pytest

from lineage.data import Documents
from lineage.data import fingerprint as module
from lineage.data.fingerprint import crc, files_below, fingerprint, identity
from lineage.data.tokenizers.kinds import TOKENIZERS, find_tokenizer
from lineage.data.tokens import tokenize
from tests.data.conftest import train

SETTLED = module.SETTLED


@pytest.fixture
def corpus(tmp_path, monkeypatch):
    """Two files whose checksums are kept, as if they were large and old, and the names of those that are read."""
    seen, crc = [], module.crc
    monkeypatch.setattr(module, "crc", lambda file, limit: seen.append(file.name) or crc(file, limit))
    monkeypatch.setattr(module, "LARGE", 1)
    folder = tmp_path / "corpus"
    folder.mkdir()
    for name in ("a.txt", "b.txt"):
        (folder / name).write_text(f"text of {name}")
    monkeypatch.setattr(module, "SETTLED", 0)
    return folder, seen


def test_checksums_of_unchanged_files_are_kept(corpus, tmp_path, monkeypatch):
    folder, seen = corpus
    first = fingerprint([str(folder)], cache_dir=tmp_path / "kept")
    assert seen == ["a.txt", "b.txt"]
    assert fingerprint([str(folder)], cache_dir=tmp_path / "kept") == first
    assert identity(folder.iterdir(), cache_dir=tmp_path / "kept") == identity(folder.iterdir())
    assert seen == ["a.txt", "b.txt"] * 2  # the second time without a folder
    monkeypatch.setattr(module, "LARGE", 1000)  # small files are always read
    fingerprint([str(folder)], cache_dir=tmp_path / "kept")
    assert len(seen) == 6


def test_changed_files_are_read_again(corpus, tmp_path, monkeypatch):
    """A change that keeps size and modification time changes the ctime, which cannot be set."""
    folder, seen = corpus
    path, kept = folder / "b.txt", tmp_path / "kept"
    first, before = fingerprint([str(folder)], cache_dir=kept), path.stat()
    path.write_text("text of c.txt")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    seen.clear()
    second = fingerprint([str(folder)], cache_dir=kept)
    assert seen == ["b.txt"]
    assert {name for name in first if first[name] != second[name]} == {str(path)}
    path.write_text("text of b.txt")
    os.utime(path)
    assert fingerprint([str(folder)], cache_dir=kept) == first  # only the time is new


def test_files_that_were_just_written_are_read_again(corpus, tmp_path, monkeypatch):
    """Check that what may change again at the same time is not kept, nor a file with a time in the future."""
    future = time.time() + 3600
    os.utime(corpus[0] / "b.txt", (future, future))
    for settled, kept in ((SETTLED, [False, False]), (0, [True, False])):
        monkeypatch.setattr(module, "SETTLED", settled)
        fingerprint([str(corpus[0])], cache_dir=tmp_path)
        (record,) = tmp_path.glob("fingerprints-*.json")
        assert [row != [None] for row in json.loads(record.read_text())["files"]] == kept


def test_checksums_are_kept_from_16_mib_on(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "SETTLED", 0)
    (tmp_path / "file").touch()
    for size, kept in ((2**24 - 1, 0), (2**24, 1)):
        os.truncate(tmp_path / "file", size)
        fingerprint([str(tmp_path / "file")], cache_dir=tmp_path / "kept")
        assert len(list(tmp_path.glob("kept/*"))) == kept


def test_identity_does_not_depend_on_the_location(tmp_path):
    places = [tmp_path / name for name in ("a/x", "b/x", "a/y", "c/x")]
    for place in places:
        place.parent.mkdir(exist_ok=True)
        place.write_text("other" if place.parent.name == "c" else "text")
    first, moved, renamed, changed = (identity([place], 1) for place in places)
    assert first == moved
    assert len({first, renamed, changed, identity(places[:1], 2), identity(places[:2], 1)}) == 5


def test_folders_are_visited_once(tmp_path):
    for folder, link, target in (("one", "parent", "."), ("two", "b", "a")):
        (tmp_path / folder / "a").mkdir(parents=True)
        (tmp_path / folder / "a" / "x").touch()
        (tmp_path / folder / link).symlink_to(tmp_path / folder / target)
        assert list(files_below(tmp_path / folder)) == [tmp_path / folder / "a" / "x"]
    with pytest.raises(FileNotFoundError):
        list(files_below(tmp_path / "lost"))


def test_devices_and_pipes_are_not_read():
    assert fingerprint([os.devnull]) == {}


def test_files_are_read_from_4_kib_on(tmp_path):
    (tmp_path / "a").write_bytes(bytes(5000))
    assert [crc(tmp_path / "a", limit) > 0 for limit in (4095, 4096)] == [False, True]


@pytest.mark.parametrize("content", ["", "0\n[]", "1\n{}", "[[1, 2, 3, 4]]", b"\xff"])
def test_damaged_records_are_replaced(corpus, tmp_path, content):
    folder, _ = corpus
    first = fingerprint([str(folder)], cache_dir=tmp_path)
    (record,) = tmp_path.glob("fingerprints-*.json")
    whole = record.read_bytes()
    record.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert fingerprint([str(folder)], cache_dir=tmp_path) == first
    assert record.read_bytes() == whole
    flipped = bytearray(whole)
    flipped[-3] ^= 1  # a digit of a checksum
    record.write_bytes(flipped)
    assert fingerprint([str(folder)], cache_dir=tmp_path) == first
    record.unlink()
    os.mkfifo(record)  # reading it would wait for a writer
    assert fingerprint([str(folder)], cache_dir=tmp_path) == first
    assert record.read_bytes() == whole


def test_folder_that_cannot_be_written_keeps_nothing(corpus, tmp_path):
    folder, seen = corpus
    (tmp_path / "file").write_text("")
    for _ in range(2):
        assert len(fingerprint([str(folder)], cache_dir=tmp_path / "file")) == 2
    assert seen == ["a.txt", "b.txt"] * 2


def test_texts_that_change_while_they_are_read_are_not_cached(tmp_path):
    """Check tokens and a tokenizer that would be kept as those of the texts before the change."""
    path, cache = tmp_path / "a.txt", {"cache_dir": tmp_path / "cache"}
    path.write_text("a bc " * 30)
    changing = {"train": Documents(lambda: iter([path.read_text()]), partial(identity, [path]))}
    changing["train"].fingerprint()
    path.write_text("changed " * 30)
    with pytest.raises(ValueError, match="the files of texts changed while they were read"):
        find_tokenizer(TOKENIZERS["words"](), changing, [], **cache)
    with pytest.raises(ValueError, match="the files of texts changed while they were read"):
        tokenize(changing["train"], train("bytes", []), **cache)
    path.write_text("a bc " * 30)
    assert find_tokenizer(TOKENIZERS["words"](), changing, [], **cache).decode([1]) in ("a", "bc")
    assert [*tokenize(changing["train"], train("bytes", []), **cache).tokens[:5]] == [*b"a bc "]


def test_caches_of_other_texts_are_not_used(tmp_path):
    """Check token ids and tokenizers in place of each other, with their checksums."""
    texts = [Documents(["a bc " * 30]), Documents(["d efg " * 30])]

    def read():
        kept = [find_tokenizer(TOKENIZERS["words"](), {"train": part}, [], cache_dir=tmp_path) for part in texts]
        return [(one.to_str(), [*tokenize(part, one, cache_dir=tmp_path).tokens[:]]) for part, one in zip(texts, kept)]

    expected = read()
    for pattern in ("*/index.json", "*/00000.tokens", "tokenizer-*.json", "tokenizer-*.sha256"):
        first, second = sorted(tmp_path.glob(pattern))
        content = first.read_bytes()
        first.write_bytes(second.read_bytes())
        second.write_bytes(content)
    assert read() == expected
