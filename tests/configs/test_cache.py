"""The cache of the user: its place, its switch, and what is kept in it."""

import errno
import io
import json
import os
import pwd
import subprocess
import sys
import time
import zlib

import numpy as np
import pytest

from lineage.configs import cache, storage
from lineage.data.documents import Documents
from lineage.data.tokenizers import kinds
from lineage.data.tokenizers.kinds import BPE, Bytes, find_tokenizer
from lineage.data.tokens import Shards, tokenize

TEXTS = {"train": Documents(["the cat sat on the mat"] * 3), "test": Documents(["a dog"])}


@pytest.fixture
def kept(tmp_path, monkeypatch):
    monkeypatch.setenv("LINEAGE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_place_of_the_cache(tmp_path, monkeypatch):
    assert cache.folder("tokens") is None  # tests keep nothing
    monkeypatch.delenv("LINEAGE_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache.folder("tokens") == tmp_path / "home/.cache/lineage/tokens"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache.folder("tokens") == tmp_path / "xdg/lineage/tokens"
    assert cache.folder("tokens").is_dir()
    monkeypatch.setenv("LINEAGE_CACHE", "~/own")
    assert cache.folder("tokens") == tmp_path / "home/own/tokens"
    (tmp_path / "file").touch()
    monkeypatch.setenv("LINEAGE_CACHE", str(tmp_path / "file"))
    assert cache.folder("tokens") is None


def test_user_without_a_home_directory(monkeypatch):
    def unknown(number):
        raise KeyError(number)

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    for name in ("LINEAGE_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    assert cache.folder("tokens") is None
    assert storage.name("/data/a.txt") == "/data/a.txt"
    with pytest.raises(FileNotFoundError, match="set LINEAGE_CACHE to a folder"):
        storage.copy_of("s3://bucket/a.txt", "files")


def test_compiled_programs_are_kept_unless_the_user_says_where(kept, monkeypatch):
    environment = {}
    cache.keep_compiled_programs(environment)
    assert environment["JAX_COMPILATION_CACHE_DIR"] == str(kept / "programs")
    for given in ({"JAX_COMPILATION_CACHE_DIR": "elsewhere"}, {"JAX_COMPILATION_CACHE_DIR": ""}):
        same = dict(given)
        cache.keep_compiled_programs(same)
        assert same == given
    monkeypatch.setenv("LINEAGE_CACHE", "")
    environment = {}
    cache.keep_compiled_programs(environment)
    assert not environment


def test_files_that_are_not_used_are_deleted(kept):
    now, month = time.time(), time.time() - 31 * 86400
    names = ("programs/jit_{}-cache", "tokenizers/tokenizer-{}.json", f"tokens/{24 * 'a'}/{{}}.tokens")
    names += ("fingerprints/fingerprints-{}.json", "programs/{}.py", "tokens/notes/{}", "tokenizers/my/{}.json")
    for name in names:
        for age, times in (("old", (month, month)), ("read", (now, month)), ("new", (month, now))):
            path = kept / name.format(age)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(zlib.compress(b""))
            os.utime(path, times)
    cache.keep_compiled_programs({})
    (kept / "programs" / cache.CHECKED).unlink()
    actual = {str(path.relative_to(kept)) for path in kept.rglob("*") if path.is_file()}
    others = {name.format("old") for name in names[4:]}  # not files of the cache, whose folder users choose
    assert actual == {name.format(age) for name in names for age in ("read", "new")} | others


def test_programs_that_were_not_written_completely_are_deleted(kept):
    """JAX would warn and compile again at each start, because it does not replace an entry that exists."""
    programs, since = cache.folder("programs"), time.time() - 100
    whole = zlib.compress(os.urandom(3 * cache.BLOCK))
    zeros = zlib.compress(bytes(3 * cache.BLOCK))
    contents = {"whole": whole, "zeros": zeros, "cut": whole[:-9], "cut_zeros": zeros[:-9], "empty": b""}
    contents |= {"changed": whole[:-1] + bytes([whole[-1] ^ 1]), "zstd": bytes.fromhex("28b52ffd00")}
    for name, content in contents.items():
        (programs / f"jit_{name}-cache").write_bytes(content)
    cache.keep_compiled_programs({})
    assert {path.name for path in programs.glob("jit_*")} == {
        f"jit_{name}-cache" for name in ("whole", "zeros", "zstd")
    }
    for name, when in (("old", since), ("new", time.time() + 100)):
        (programs / f"jit_{name}-cache").write_bytes(whole[:-9])
        os.utime(programs / f"jit_{name}-cache", (when, when))
    cache.keep_compiled_programs({})
    assert (programs / "jit_old-cache").exists()  # it was checked before
    assert not (programs / "jit_new-cache").exists()


def test_a_tokenizer_is_trained_once(kept, monkeypatch):
    first = find_tokenizer(BPE(280), TEXTS, ["end_of_text"])
    trained = []
    train = kinds.TokenizerKind.train_on_splits
    monkeypatch.setattr(
        kinds.TokenizerKind, "train_on_splits", lambda self, *args: trained.append(self) or train(self, *args)
    )
    assert find_tokenizer(BPE(280), TEXTS, ["end_of_text"]).to_str() == first.to_str()
    assert not trained
    others = {"train": Documents(["other texts"] * 3), "test": TEXTS["test"]}
    for kind, texts, *more in ((BPE(260), TEXTS), (BPE(280), others), (BPE(280), TEXTS, "pad")):
        assert find_tokenizer(kind, texts, ["end_of_text", *more]).to_str() != first.to_str()
    assert len(trained) == 3
    find_tokenizer(Bytes(), TEXTS, ["end_of_text"])
    assert len(list((kept / "tokenizers").glob("*.json"))) == 4  # one of bytes is not kept: it is not trained


def test_a_damaged_tokenizer_is_trained_again(kept):
    first = find_tokenizer(BPE(280), TEXTS, ["end_of_text"])
    (path,) = (kept / "tokenizers").glob("*.json")
    whole = path.read_text()
    path.write_text(whole.replace("Ġcat", "Ġdog").replace("mat", "tam"))
    assert path.read_text() != whole
    assert find_tokenizer(BPE(280), TEXTS, ["end_of_text"]).to_str() == first.to_str()
    assert path.read_text() == whole


def test_tokens_are_kept(kept):
    tokenizer = find_tokenizer(Bytes(), TEXTS, ["end_of_text"])
    first, again = (tokenize(TEXTS["train"], tokenizer) for _ in range(2))
    assert isinstance(again.tokens, Shards)
    assert len(list((kept / "tokens").rglob("*.tokens"))) == 1
    np.testing.assert_array_equal(first.tokens, again.tokens)


def test_tokens_that_are_used_are_not_deleted(kept):
    """Check that a use counts on a file system that does not record the times of reads (noatime)."""
    tokenizer = find_tokenizer(Bytes(), TEXTS, ["end_of_text"])
    tokenize(TEXTS["train"], tokenizer)
    files = list((kept / "tokens").glob("*/[!.]*"))
    assert len(files) == 2
    for file in files:
        os.utime(file, (0, 0))
    again = tokenize(TEXTS["train"], tokenizer)
    cache.delete_unused(kept)
    assert all(file.exists() for file in files)
    for file in files:
        os.utime(file, (0, 0))
    cache.delete_unused(kept)  # by a process with another clock
    with pytest.raises(ValueError, match=r"00000\.tokens was deleted: run the same command again to encode it again"):
        again.tokens[:1]


def test_nothing_is_kept_where_the_variable_is_empty():
    tokenizer = find_tokenizer(BPE(280), TEXTS, ["end_of_text"])
    assert not isinstance(tokenize(TEXTS["train"], tokenizer).tokens, Shards)


@pytest.mark.thorough
def test_start_of_a_run_imports_no_packages_for_its_end(tmp_path):
    code = "import sys, lineage.configs.cli, lineage.train.loop\n"
    code += f"lineage.train.loop.MetricsWriter({str(tmp_path)!r}).close()\n"
    code += "print(*{'scipy.stats', 'sklearn', 'matplotlib', 'pandas', 'torch'} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == ""


@pytest.mark.slow
def test_a_second_run_compiles_no_step(kept, tmp_path):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}
    environment |= {"JAX_DEBUG_LOG_MODULES": "jax._src.compiler", "JAX_PLATFORMS": "cpu"}
    said = []
    for name in "ab":
        command = [sys.executable, "-m", "lineage.launch", "train", "--config=tests/tiny.py:gpt"]
        command += ["--config.total_steps=2", f"--workdir={tmp_path / name}"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        said.append(done.stderr)
    assert "CACHE MISS for 'jit_step'" in said[0]
    assert "cache hit for 'jit_step'" in said[1]
    assert "CACHE MISS for 'jit_step'" not in said[1]
    numbers = [(tmp_path / name / "metrics.jsonl").read_text().splitlines() for name in "ab"]
    losses = [[json.loads(line).get("train/loss") for line in lines] for lines in numbers]
    assert losses[0] == losses[1]
    assert len(losses[0]) > 1


@pytest.mark.parametrize("forbidden", ["open for writing", "open"])
def test_files_of_another_user_are_not_needed(kept, forbidden, monkeypatch):
    """Check that a run encodes for itself what another user keeps, or is writing, in a shared cache."""
    tokenizer = find_tokenizer(BPE(vocab_size=300), TEXTS, ("end_of_text",))
    expected = tokenize(TEXTS["train"], tokenizer)
    for unfinished in (*kept.glob("tokenizers/*.sha256"), *kept.glob("tokens/*/index.json")):
        if forbidden == "open for writing":
            unfinished.unlink()
    before = {path: path.stat().st_mtime_ns for path in kept.rglob("*")}
    monkeypatch.setattr(os, "open", refusing(os.open, kept))
    if forbidden == "open":
        monkeypatch.setattr(io, "open", refusing(io.open, kept))
    again = find_tokenizer(BPE(vocab_size=300), TEXTS, ("end_of_text",))
    assert again.to_str() == tokenizer.to_str()
    stream = tokenize(TEXTS["train"], again)
    np.testing.assert_array_equal(stream.tokens[:], expected.tokens[:])
    np.testing.assert_array_equal(stream.ends, expected.ends)
    assert (stream.characters, stream.bytes) == (expected.characters, expected.bytes)
    assert before == {path: path.stat().st_mtime_ns for path in kept.rglob("*")}
    with pytest.raises(PermissionError, match=r"refused: .*tokens/"):  # a folder that the user has named
        tokenize(TEXTS["train"], again, kept / "tokens")


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EROFS])
def test_a_full_or_read_only_disk_of_the_cache_does_not_stop_a_run(kept, code, monkeypatch, capsys):
    tokenizer = find_tokenizer(BPE(vocab_size=300), TEXTS, ("end_of_text",))
    expected = tokenize(TEXTS["train"], tokenizer)
    monkeypatch.setenv("LINEAGE_CACHE", str(full := kept / "full"))
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refusing(os.open, full, code))
        assert find_tokenizer(BPE(vocab_size=300), TEXTS, ("end_of_text",)).to_str() == tokenizer.to_str()
        np.testing.assert_array_equal(tokenize(TEXTS["train"], tokenizer).tokens[:], expected.tokens[:])
    assert capsys.readouterr().err.count(f"continuing without the cache: [Errno {code}] refused: ") == 2
    assert not [path for path in full.rglob("*") if path.is_file()]
    monkeypatch.setattr(os, "open", refusing(os.open, full, errno.EIO))
    with pytest.raises(OSError, match="refused"):
        tokenize(TEXTS["train"], tokenizer)


def refusing(function, folder, code=errno.EACCES):
    """Return a function that opens files, but none below a folder, where it raises the error `code`."""

    def opened(path, *arguments, **options):
        if str(path).startswith(str(folder)):
            raise OSError(code, "refused", str(path))
        return function(path, *arguments, **options)

    return opened
