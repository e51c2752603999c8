"""Local copies of remote files, against a local stand-in of S3."""

import importlib
import io
import re
import sys
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from PIL import Image

from lineage import launch
from lineage.configs import storage
from lineage.configs.storage import local
from lineage.data import SOURCES
from lineage.data.fingerprint import fingerprint
from lineage.data.inputs import from_files


@pytest.fixture
def downloads(bucket, monkeypatch):
    """Return the list of the names of the files that are downloaded from now on."""
    system, found = storage.Files(bucket.url).system, []  # the same object for all URLs
    get_file = system.get_file

    def counted(remote, place):
        found.append(remote.rpartition("/")[2])
        get_file(remote, place)

    monkeypatch.setattr(system, "get_file", counted)
    return found


def again(path, suffixes=()):
    """Return a local copy as another process does, which looks it up anew."""
    storage._local.cache_clear()
    return Path(local(path, suffixes))


def files(folder):
    return {file.relative_to(folder).as_posix(): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def test_a_local_path_is_returned_as_it_is(tmp_path):
    for path in ("", "data", str(tmp_path), "a.en,b.de", "C:/data"):
        assert local(path) == path


def test_suffixes_in_upper_case(bucket):
    bucket.put({"train.csv": b"one", "TEST.CSV": b"two", "a.txt": b"three"})
    assert files(again(bucket.url, (".csv",))) == {"train.csv": b"one", "TEST.CSV": b"two"}


def test_a_folder_a_file_and_a_glob_are_copied(bucket):
    content = {"a.txt": b"one", "inside/b.txt": b"two", "c.csv": b"three"}
    bucket.put(content)
    assert files(again(bucket.url)) == content
    assert again(f"{bucket.url}/c.csv").read_bytes() == b"three"
    pattern = again(f"{bucket.url}/**/*.txt")
    assert sorted(file.read_bytes() for file in pattern.parents[1].glob("**/*.txt")) == [b"one", b"two"]
    parts = local(f"{bucket.url}/a.txt,{bucket.url}/inside/b.txt").split(",")
    assert [Path(part).read_bytes() for part in parts] == [b"one", b"two"]


def test_only_files_with_a_suffix_are_copied(bucket, downloads):
    bucket.put({"a.txt": b"", "b.csv": b"", "c.csv.gz": b""})
    assert set(files(again(bucket.url, (".csv",)))) == {"b.csv", "c.csv.gz"}
    assert sorted(downloads) == ["b.csv", "c.csv.gz"]


def test_only_what_has_changed_is_downloaded_again(bucket, downloads):
    bucket.put({"a.txt": b"one", "b.txt": b"two", "c.txt": b"three"})
    again(bucket.url)
    downloads.clear()
    assert files(again(bucket.url))["a.txt"] == b"one"
    assert downloads == []
    bucket.put({"a.txt": b"new"})  # of the same size
    bucket.delete("b.txt")
    assert files(again(bucket.url)) == {"a.txt": b"new", "c.txt": b"three"}
    assert downloads == ["a.txt"]


def test_a_shard_that_was_deleted_is_no_longer_matched_by_a_glob(bucket):
    bucket.put({"train-0.txt": b"one", "train-1.txt": b"two", "other.txt": b"three"})
    again(bucket.url)
    bucket.delete("train-1.txt")
    assert set(files(again(f"{bucket.url}/train-*.txt").parent)) == {"train-0.txt", "other.txt"}


def test_a_process_looks_up_each_path_once(bucket):
    bucket.put({"a.txt": b"one"})
    path = local(f"{bucket.url}/a.txt")
    bucket.put({"a.txt": b"new"})
    assert Path(local(f"{bucket.url}/a.txt")).read_bytes() == b"one"
    assert again(f"{bucket.url}/a.txt") == Path(path)
    assert Path(path).read_bytes() == b"new"


def test_an_incomplete_download_is_an_error_and_leaves_no_file(bucket, cache, monkeypatch):
    bucket.put({"a.txt": b"a long text"})
    system = storage.Files(bucket.url).system
    monkeypatch.setattr(system, "get_file", lambda remote, place: Path(place).write_bytes(b"a long"))
    with pytest.raises(OSError, match=r"a\.txt cannot be used: .*the download has 6 bytes of 11"):
        again(f"{bucket.url}/a.txt")
    assert not files(cache("cache"))


def test_keys_cannot_lead_out_of_the_folder_of_copies(bucket, cache, tmp_path):
    bucket.put({"a.txt": b"one", "../../../../out.txt": b"two", f"{tmp_path}/out.txt": b"three", ".hidden": b"four"})
    assert files(again(bucket.url)) == {"a.txt": b"one"}
    assert [path.name for path in tmp_path.rglob("*.txt")] == ["a.txt"]
    with pytest.raises(ValueError, match="is not a path on remote storage"):
        again(f"{bucket.url}/../../../../a.txt")


def test_of_checkpoints_only_complete_ones_are_copied(bucket):
    bucket.put({f"checkpoints/{step}/state/data": b"" for step in (1, 2)} | {"checkpoints/1/about/metadata": b""})
    assert set(files(again(bucket.url))) == {"checkpoints/1/state/data", "checkpoints/1/about/metadata"}
    bucket.delete("checkpoints/1/about/metadata")
    bucket.put({"config.json": b""})
    assert [path.name for path in again(bucket.url).rglob("*")] == ["config.json"]


@pytest.mark.parametrize(
    ("path", "kind", "message"),
    [
        ("s3://no-such-bucket/a", FileNotFoundError, "There is no s3://no-such-bucket/a"),
        ("BUCKET/missing", FileNotFoundError, "There is no BUCKET/missing"),
        ("BUCKET/*.csv", FileNotFoundError, r"There is no BUCKET/\*.csv"),
        ("foo://a/b", ValueError, "has the unknown scheme 'foo': it must be a local path, "),
        ("reference://a::BUCKET/a.txt", ValueError, "reference://a::BUCKET/a.txt names several file systems"),
        ("s3:///a", ValueError, "is not a path on remote storage: it must have the form s3://"),
    ],
)
def test_an_error_is_one_sentence(bucket, cache, path, kind, message):
    bucket.put({"a.txt": b""})
    with pytest.raises(kind, match=message.replace("BUCKET", bucket.url)) as caught:
        local(path.replace("BUCKET", bucket.url))
    assert len(str(caught.value)) < 400
    assert "\n" not in str(caught.value)
    assert not cache("cache").exists()


@pytest.mark.parametrize(
    ("scheme", "package", "extra"), [("s3", "s3fs", "s3"), ("gs", "gcsfs", "gcs"), ("s3", "fsspec", "s3")]
)
def test_a_missing_package_is_named_and_nothing_is_left_behind(monkeypatch, tmp_path, capsys, scheme, package, extra):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LINEAGE_CACHE", str(tmp_path / "cache"))
    monkeypatch.delitem(importlib.import_module("fsspec.registry")._registry, scheme, raising=False)
    monkeypatch.setitem(sys.modules, package, None)
    config = f"--config={Path(__file__).parents[1]}/tiny.py:gpt"
    assert launch.main(["train", config, f"--workdir={scheme}://bucket/run"]) == 1
    actual = re.findall(r"^error: (.*)", capsys.readouterr().err, re.MULTILINE)
    assert actual == [f"{scheme}://bucket/run needs a package that is not installed: `pip install 'lineage[{extra}]'`."]
    assert list(tmp_path.iterdir()) == []


def test_sources_read_remote_files(bucket):
    file = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({"text": ["one", "two"]}), file)
    bucket.put({"table/train-0.parquet": file.getvalue(), "table/readme.md": b"", "en.txt": b"a\n", "de.txt": b"b\n"})
    source = SOURCES["parquet"](path=f"{bucket.url}/table")
    assert list(source.read("documents")["train"]) == ["one", "two"]
    pairs = SOURCES["pairs"](path=f"{bucket.url}/en.txt,{bucket.url}/de.txt").read("pairs")["train"]
    assert (list(pairs.inputs), list(pairs.targets)) == (["a"], ["b"])
    assert list(SOURCES["text"](path=f"{bucket.url}/*.txt", validation_fraction=0.0).read("documents")["train"]) == [
        "b\n",
        "a\n",
    ]


def test_of_prepared_data_sets_only_one_is_copied(bucket):
    bucket.put({"one/1.0.0/features.json": b"{}", "two/1.0.0/features.json": b"{}"})
    with pytest.raises(ValueError, match=r"one/1\.0\.0 cannot be read as a data set: "):
        SOURCES["tfds"](path="one", data_dir=bucket.url).read("documents")
    assert {name.partition("/")[0] for name in files(storage.copy_of(bucket.url, "files"))} == {"one"}


def test_fingerprints_do_not_depend_on_the_place_of_the_copies(bucket, cache):
    bucket.put({"train.csv": b"text\na\n"})
    source, actual = SOURCES["csv"](path=bucket.url), []
    for place in ("one", "two"):
        cache(place)
        actual.append(fingerprint(source.files()))
    assert actual[0] == actual[1]
    assert list(actual[0]) == [f"{bucket.url}/train.csv"]
    assert fingerprint([bucket.url]) == actual[0]


def test_inputs_are_remote_files_or_folders(bucket):
    image = io.BytesIO()
    Image.new("RGB", (2, 2), "red").save(image, "png")
    bucket.put({"texts.jsonl": b'{"text": "a"}\n', "photos/a.png": image.getvalue()})
    assert from_files(f"{bucket.url}/texts.jsonl", "documents").part(0, 9) == ["a"]
    photos = from_files(f"{bucket.url}/photos", "images", channels=3)
    assert photos.identifiers == [{"file": "a.png"}]
    assert photos.rows[0]["image"].shape == (2, 2, 3)
