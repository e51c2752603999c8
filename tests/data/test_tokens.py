import json
import os
import signal
import subprocess
import sys
import time
import zlib
from pathlib import Path

import cloudpickle
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lineage.configs.atomic import in_turn
from lineage.data import Documents, shards, tokens
from lineage.data.documents import split_lines
from lineage.data.examples.windows import Windows
from lineage.data.tokens import tokenize
from tests.data.conftest import train

BYTES = train("bytes", [])
TEXTS = [f"text {i} " * (i % 5 * 10) for i in range(200)]

# Encodes a text file, or numbered texts, with small shards; prints the number of groups of documents that this process
# has encoded, and the peak resident memory of the process and of the largest worker in KiB.
SCRIPT = """
import resource, sys
from lineage.data import Documents, tokens
from lineage.data.sources.text import Text
from lineage.data.tokenizers import Bytes

path, cache_dir, workers = sys.argv[1:]
encode, count = tokens._Encode.__call__, 0
def counted(self, chunk):
    global count
    count += 1
    return encode(self, chunk)
tokens._Encode.__call__ = counted
tokens.SHARD = 1 << 20
documents = Text(path, validation_fraction=0.1).documents()["train"] if path else Documents(
    [f"{number:03} " * 300_000 for number in range(20)], "numbers")
tokens.tokenize(documents, Bytes().train([]), cache_dir, int(workers))
own = next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(count, own, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
"""


def start(path, cache_dir, workers):
    command = [sys.executable, "-c", SCRIPT, str(path), str(cache_dir), str(workers)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def results(process):
    """Return the numbers that the script prints."""
    out, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    return [int(number) for number in out.split()]


def files(folder):
    """Return the content of the files of a corpus by name."""
    return {path.name: path.read_bytes() for path in next(folder.glob("*/index.json")).parent.iterdir()}


def entries(index):
    """Return the entries of the shards in the index of a corpus."""
    return json.loads(index.read_text())["shards"]


@pytest.fixture
def small(monkeypatch):
    """Make groups of about 100 characters and shards of about 500 tokens."""
    monkeypatch.setattr("lineage.data.documents._CHUNK", 100)
    monkeypatch.setattr(tokens, "SHARD", 500)


def encoded_chunks(monkeypatch):
    """Return a list to which each group of documents that is encoded is added."""
    encode, seen = tokens._Encode.__call__, []
    monkeypatch.setattr(tokens._Encode, "__call__", lambda self, chunk: seen.append(chunk) or encode(self, chunk))
    return seen


def test_documents_are_separated_by_the_end_of_text():
    stream = tokenize(Documents(["ab", "", "c"]), BYTES)
    assert stream.tokens.tolist() == [97, 98, 256, 256, 99, 256]
    assert stream.ends.tolist() == [3, 4, 6]
    stream = tokenize(Documents(["ab"]), BYTES)
    assert (stream.tokens.tolist(), stream.ends.tolist()) == ([97, 98], [2])
    stream = tokenize(Documents(["aß", "日"]), BYTES)
    assert (stream.characters, stream.bytes) == (3, 6)
    assert stream.tokens.dtype == np.uint16


@given(st.text("a \n", max_size=40), st.lists(st.integers(1, 5)))
def test_pieces_do_not_depend_on_blocks(text, sizes):
    blocks, rest = [], text
    for size in sizes:
        blocks.append(rest[:size])
        rest = rest[size:]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lineage.data.documents._PIECE", 3)
        pieces = list(split_lines([*blocks, rest]))
        assert pieces == list(split_lines([text]))
    assert "".join(pieces) == text
    assert all(len(piece) > 3 and piece.endswith("\n") and piece[-2] == "a" for piece in pieces[:-1])
    assert not any(text.startswith((" ", "\n")) for text in pieces[1:])


def test_tokens_do_not_depend_on_chunks_and_blocks(monkeypatch):
    texts = [f"line {i}\n" * i for i in range(40)]
    whole = tokenize(Documents(texts), BYTES)
    monkeypatch.setattr("lineage.data.documents._CHUNK", 20)
    monkeypatch.setattr("lineage.data.documents._PIECE", 10)
    documents = Documents([iter([text[:7], text[7:]]) for text in texts])
    found = tokenize(documents, BYTES)
    np.testing.assert_array_equal(found.tokens, whole.tokens)
    np.testing.assert_array_equal(found.ends, whole.ends)
    assert (found.characters, found.bytes) == (whole.characters, whole.bytes)


def test_corpora_are_kept(tmp_path, monkeypatch):
    documents = Documents(["one", "two"])
    plain, seen = tokenize(documents, BYTES), encoded_chunks(monkeypatch)
    for _ in range(2):  # the second time, the files are read
        kept = tokenize(documents, BYTES, tmp_path)
        np.testing.assert_array_equal(kept.tokens, plain.tokens)
        np.testing.assert_array_equal(kept.ends, plain.ends)
        assert (kept.characters, kept.bytes) == (6, 6)
        assert len(seen) == 1
    assert len(tokenize(Documents(["one", "twos"]), BYTES, tmp_path).tokens) == 9
    characters = train("characters", ["onetwo"])
    assert tokenize(documents, characters, tmp_path).tokens[:1] == characters.encode("o")
    assert len(list(tmp_path.iterdir())) == 3
    empty = tokenize(Documents([""]), BYTES, tmp_path)
    assert (len(empty.tokens), empty.ends.tolist(), np.asarray(empty.tokens).dtype) == (0, [0], np.uint16)
    large = train("words", [" ".join(map(str, range(70_000)))])
    assert tokenize(Documents(["69999 1"]), large, tmp_path).tokens[:].tolist() == large.encode("69999 1").tolist()


@pytest.mark.parametrize("kept", [False, True])
def test_token_before_each_document(kept, small, monkeypatch, tmp_path):
    """Check documents of several pieces and groups of documents, and that a corpus without the token is another one."""
    monkeypatch.setattr("lineage.data.documents._PIECE", 10)
    texts = [f"line {i}\n" * i for i in range(20)]
    folder = tmp_path if kept else ""
    plain = tokenize(Documents(texts), BYTES, folder)
    found = tokenize(Documents(texts), BYTES, folder, begin=7)
    rows = np.split(found.tokens[:], found.ends[:-1])
    assert [row.tolist() for row in rows] == [[7, *text.encode(), BYTES.end_of_text] for text in texts]
    assert (found.characters, found.bytes, len(plain.tokens)) == (plain.characters, plain.bytes, len(found.tokens) - 20)
    assert tokenize(Documents(["ab"]), BYTES, folder, begin=7).tokens[:].tolist() == [7, *b"ab"]


@given(first=st.integers(-3, 9000), size=st.integers(0, 2000))
def test_slices_of_shards(kept_texts, first, size):
    plain, kept = kept_texts
    np.testing.assert_array_equal(kept.tokens[first : first + size], plain.tokens[first : first + size])
    assert len(kept.tokens[:]) == len(kept.tokens) == len(plain.tokens)


@pytest.fixture(scope="module")
def kept_texts(tmp_path_factory):
    """Tokens in memory, and the same in shards."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokens, "SHARD", 500)
        patch.setattr("lineage.data.documents._CHUNK", 100)
        folder, documents = tmp_path_factory.mktemp("tokens"), Documents(TEXTS)
        kept = tokenize(documents, BYTES, folder)
        assert len(files(folder)) > 10
        return tokenize(documents, BYTES), kept


def test_ends_of_documents_in_shards(kept_texts):
    plain, kept = kept_texts
    np.testing.assert_array_equal(kept.ends, plain.ends)
    assert len(kept.ends) == len(TEXTS)
    assert (plain.tokens[plain.ends - 1] == BYTES.end_of_text).all()


def test_shards_are_pickled_as_a_path(tmp_path):
    stream = tokenize(Documents(["word " * 100_000]), BYTES, tmp_path)
    windows = Windows(stream.tokens, 16)
    _ = windows[0]
    sent = cloudpickle.dumps(windows)
    assert len(sent) < 2000
    received = cloudpickle.loads(sent)
    np.testing.assert_array_equal(received[1000]["tokens"], windows[1000]["tokens"])


def test_files_do_not_depend_on_the_number_of_workers(small, tmp_path):
    documents = Documents(TEXTS)
    found = []
    for workers in (0, 1, 2):
        tokenize(documents, BYTES, tmp_path / str(workers), workers)
        found.append(files(tmp_path / str(workers)))
    assert found[0] == found[1] == found[2]
    assert len(found[0]) > 10


def test_errors_of_workers_are_those_of_texts(tmp_path):
    with pytest.raises(ValueError, match="lone surrogate"):
        tokenize(Documents(["a", "\ud800"], "bad"), BYTES, tmp_path, 1)


@pytest.mark.parametrize("after", [1, 7, 40])
def test_interrupted_encoding_continues_after_complete_shards(small, tmp_path, monkeypatch, after):
    documents = Documents(TEXTS)
    tokenize(documents, BYTES, tmp_path / "whole")
    expected, encode = files(tmp_path / "whole"), tokens._Encode.__call__
    seen = encoded_chunks(monkeypatch)
    tokenize(documents, BYTES, tmp_path / "again")
    everything = list(seen)
    seen.clear()

    def interrupted(self, chunk):
        if len(seen) == after:
            raise KeyboardInterrupt
        seen.append(chunk)
        return encode(self, chunk)

    with monkeypatch.context() as patch:
        patch.setattr(tokens._Encode, "__call__", interrupted)
        with pytest.raises(KeyboardInterrupt):
            tokenize(documents, BYTES, tmp_path / "part")
    done = sum(shard["chunks"] for index in tmp_path.glob("part/*/index.json") for shard in entries(index))
    assert after - 6 < done <= after
    seen.clear()
    stream = tokenize(documents, BYTES, tmp_path / "part")
    assert seen == everything[done:]
    assert files(tmp_path / "part") == expected
    np.testing.assert_array_equal(stream.tokens, tokenize(documents, BYTES).tokens)


@pytest.mark.thorough
def test_killed_encoding_continues(tmp_path):
    process = start("", tmp_path, 2)
    while not (done := list(tmp_path.glob("*/00003.tokens"))):
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    process.kill()
    process.wait()
    complete = len(list(done[0].parent.glob("*.tokens")))
    count, *_ = results(start("", tmp_path, 0))
    assert 20 - complete <= count <= 20 - complete + 1  # the last file may be missing in the index
    results(start("", tmp_path / "whole", 0))
    whole = files(tmp_path / "whole")
    assert {path.name: path.read_bytes() for path in done[0].parent.iterdir()} == whole


def started_workers(folder, present="*/00000.tokens"):
    """Start to encode with two workers; return the process, and the ids of the workers."""
    process, workers = start("", folder, 2), []
    while len(workers) < 2 or not list(folder.glob(present)):
        assert process.poll() is None, process.communicate()
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        workers = [int(child) for child in children if "spawn_main" in Path(f"/proc/{child}/cmdline").read_text()]
    return process, workers


@pytest.mark.thorough
def test_workers_ignore_signals_while_they_start(tmp_path):
    process, workers = started_workers(tmp_path, present="*")
    os.kill(workers[0], signal.SIGINT)
    results(process)


@pytest.mark.thorough
def test_killed_worker_is_an_error(tmp_path):
    process, workers = started_workers(tmp_path)
    os.kill(workers[0], signal.SIGKILL)
    assert "A process that encodes texts was killed" in process.communicate(timeout=120)[1]
    assert process.returncode == 1


@pytest.mark.thorough
def test_workers_end_with_a_killed_process(tmp_path):
    process, workers = started_workers(tmp_path)
    process.kill()
    process.wait()
    deadline = time.monotonic() + 60
    while any(os.path.exists(f"/proc/{worker}") for worker in workers):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def damaged(path, change):
    """Replace a byte of a file."""
    data = bytearray(path.read_bytes())
    data[change] ^= 1
    path.write_bytes(data)


def with_entry(index, **values):
    """Replace values of the first entry of an index, and its checksum."""
    shards = entries(index)
    shards[0] |= values
    crc32 = zlib.crc32(json.dumps(shards).encode())
    index.write_text(json.dumps({"complete": True, "shards": shards, "crc32": crc32}))


@pytest.mark.parametrize(
    ("lost", "damage"),
    [
        ("shard", lambda shard, index: shard.write_bytes(shard.read_bytes()[:-4])),
        ("shard", lambda shard, index: shard.unlink()),
        ("index", lambda shard, index: index.write_text("")),
        ("index", lambda shard, index: index.write_text("[1]")),
        ("index", lambda shard, index: index.write_text('{"complete": true, "shards": [{"tokens": 7}]}')),
        ("index", lambda shard, index: index.write_text(index.read_text().replace('"bytes": ', '"bytes": 1'))),
        ("index", lambda shard, index: with_entry(index, tokens="a")),
        ("index", lambda shard, index: with_entry(index, bytes=-1)),
        ("end", lambda shard, index: index.write_text(index.read_text().replace("true", "false"))),
    ],
)
def test_incomplete_corpus_is_completed(small, tmp_path, lost, damage, monkeypatch):
    documents = Documents(TEXTS)
    whole = tokenize(documents, BYTES)
    tokenize(documents, BYTES, tmp_path)
    expected, seen = files(tmp_path), encoded_chunks(monkeypatch)
    index = next(tmp_path.glob("*/index.json"))
    damage(index.parent / "00002.tokens", index)
    again = tokenize(documents, BYTES, tmp_path)
    np.testing.assert_array_equal(again.tokens, whole.tokens)
    assert (again.characters, again.bytes) == (whole.characters, whole.bytes)
    assert files(tmp_path) == expected
    chunks = [shard["chunks"] for shard in entries(index)]
    assert len(seen) == {"shard": chunks[2], "index": sum(chunks), "end": 0}[lost]


def test_index_that_cannot_be_read_is_an_error(small, tmp_path):
    """Check that the text is not taken for an empty one."""
    tokenize(Documents(TEXTS), BYTES, tmp_path)
    index = next(tmp_path.glob("*/index.json"))
    index.unlink()
    index.mkdir()
    with pytest.raises(IsADirectoryError, match=r"index\.json"):
        tokenize(Documents(TEXTS), BYTES, tmp_path)


@pytest.mark.parametrize("name", ["index.json", "00000.tokens"])
@pytest.mark.parametrize("target", ["pipe", "/dev/zero"])
def test_files_without_end_are_replaced(name, target, tmp_path):
    """Check a cache that came from somebody else, also if the index has a shard of the size 0."""
    expected = tokenize(Documents(TEXTS), BYTES, tmp_path)
    path = next(tmp_path.glob(f"*/{name}"))
    path.unlink()
    if target == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to(target)
    with pytest.raises(ValueError, match=f"{path} is damaged"):
        shards.verify(path.parent)
    if name != "index.json":
        with pytest.raises(ValueError, match=f"{path} is damaged"):
            shards.ShardFile(path, expected.tokens.dtype, shards.Shard(0, 0, 0, 0, 0, 0))
    again = tokenize(Documents(TEXTS), BYTES, tmp_path)
    np.testing.assert_array_equal(again.tokens, expected.tokens)
    assert path.is_file()


def test_ids_and_ends_that_a_corpus_cannot_have_raise(tmp_path):
    part = tokens._Part(np.array([1, 2, 300], np.uint16), np.array([5]), 3, 3)
    entry = tokens._write_shard(path := tmp_path / "00000.tokens", [part], 0)
    assert shards.Shards(tmp_path, "uint16", [entry], 301)[:].tolist() == [1, 2, 300]
    with pytest.raises(ValueError, match="has documents that end at wrong positions"):
        shards.Shards(tmp_path, "uint16", [entry], 301).ends()
    with pytest.raises(ValueError, match=rf"{path} is damaged \(it has the token 300 for a vocabulary of 300\)"):
        shards.Shards(tmp_path, "uint16", [entry], 300)[:]
    assert not path.exists()


@pytest.mark.parametrize("place", [0, 700, -1], ids=["ends", "tokens", "checksums"])
def test_damaged_shard_is_found_before_it_is_used(small, tmp_path, place, monkeypatch):
    documents = Documents(TEXTS)
    whole = tokenize(documents, BYTES)
    tokenize(documents, BYTES, tmp_path)
    expected = files(tmp_path)
    shard = next(tmp_path.glob("*/00002.tokens"))
    damaged(shard, place)
    kept, start = tokenize(documents, BYTES, tmp_path), sum(len(text) + 1 for text in TEXTS[:10])
    np.testing.assert_array_equal(kept.tokens[:100], whole.tokens[:100])  # of another shard
    with pytest.raises(ValueError, match=r"00002\.tokens is damaged and was deleted: run the same command again"):
        _ = kept.tokens[start : start + 1000] if place else kept.ends
    seen = encoded_chunks(monkeypatch)
    again = tokenize(documents, BYTES, tmp_path)
    assert 0 < len(seen) < 10
    np.testing.assert_array_equal(again.tokens, whole.tokens)
    assert files(tmp_path) == expected


def test_shards_of_another_corpus_and_of_another_size_are_damaged(tmp_path):
    for name in ("mine", "other"):
        tokenize(Documents([f"{name:5}" * 100]), BYTES, tmp_path / name)
    mine, other = (next((tmp_path / name).glob("*/00000.tokens")) for name in ("mine", "other"))
    shards.verify(mine.parent)
    content = mine.read_bytes()
    assert len(content) == other.stat().st_size
    for damage, message in ((other.read_bytes(), r"\."), (content[:-4], f": it has {len(content) - 4:,} bytes")):
        mine.write_bytes(damage)
        with pytest.raises(ValueError, match=rf"00000\.tokens is damaged{message}"):
            shards.verify(mine.parent)
        assert mine.read_bytes() == damage


def test_preparation_replaces_damaged_shards(small, tmp_path):
    documents = Documents(TEXTS)
    tokenize(documents, BYTES, tmp_path, 1)
    expected = files(tmp_path)
    damaged(next(tmp_path.glob("*/00004.tokens")), 300)
    tokenize(documents, BYTES, tmp_path, 1)
    assert files(tmp_path) == expected


def test_only_blocks_that_are_read_are_verified(tmp_path):
    tokenize(Documents(["word " * 50_000], "words"), BYTES, tmp_path)
    damaged(next(tmp_path.glob("*/00000.tokens")), 400_000)
    kept = tokenize(Documents(["word " * 50_000], "words"), BYTES, tmp_path).tokens
    block = tokens.BLOCK // 2
    place = (400_000 // tokens.BLOCK) * block
    assert len(kept[: place - 4]) == place - 4
    with pytest.raises(ValueError, match="damaged"):
        _ = kept[place : place + 1]


@pytest.mark.thorough
def test_of_two_processes_one_encodes(tmp_path):
    results(start("", tmp_path / "first", 0))
    folder = tmp_path / "second" / next((tmp_path / "first").iterdir()).name
    folder.mkdir(parents=True)
    with in_turn(folder / ".lock", "the test"):  # until both wait
        processes = [start("", tmp_path / "second", 0) for _ in range(2)]
        for process in processes:
            assert process.stderr.readline() == f"waiting for another process: it encodes texts into {folder}\n"
    counts = [results(process)[0] for process in processes]
    assert sorted(counts) == [0, 20]
    assert files(tmp_path / "first") == files(tmp_path / "second")


@pytest.mark.thorough
def test_memory_does_not_grow_with_the_text(tmp_path):
    peaks = []
    for megabytes in (8, 64):
        path = tmp_path / f"{megabytes}.txt"
        path.write_text("A line of a long text.\n" * (megabytes * 2**20 // 23))
        _, *both = results(start(path, tmp_path / "tokens", 2))
        peaks.append(np.array(both) / 1024)
    assert (peaks[1] - peaks[0] < 16).all(), peaks
