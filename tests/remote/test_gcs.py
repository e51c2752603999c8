"""Files and runs on Google Cloud Storage, against a local stand-in of its JSON interface."""

from pathlib import Path

import pytest

from lineage.configs import storage
from lineage.configs.storage import local
from lineage.runs import remote
from tests.remote.gcs_server import Storage


@pytest.fixture
def bucket(cache, monkeypatch):
    """Return the stand-in, to which all requests go."""
    storage = Storage()
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", storage.url)
    monkeypatch.setenv("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")  # which asks Google about the bucket
    yield storage
    storage.close()


def test_files_are_copied_again_only_if_they_have_changed(bucket, monkeypatch):
    bucket.objects |= {"data/a.txt": b"one", "data/b.csv": b"two", "other": b""}
    folder = Path(local("gs://bucket/data", (".txt",)))
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == {"a.txt": b"one"}
    storage._local.cache_clear()
    place = Path(local("gs://bucket/data/*.txt"))
    bucket.objects["data/a.txt"] = b"new"
    storage._local.cache_clear()
    assert [file.read_bytes() for file in Path(local("gs://bucket/data/*.txt")).parent.glob("*.txt")] == [b"new"]
    assert place.parent == folder
    with pytest.raises(FileNotFoundError, match=r"There is no gs://bucket/missing"):
        local("gs://bucket/missing")


def test_a_run_is_uploaded_and_continued_elsewhere(bucket, cache):
    with remote.opened("gs://bucket/run", training=True) as folder:
        (folder / "checkpoints/1/about").mkdir(parents=True)
        for name in ("data", "about/metadata"):
            (folder / "checkpoints/1" / name).write_text(name)
    assert set(bucket.objects) == {"run/checkpoints/1/data", "run/checkpoints/1/about/metadata"}
    cache("other")
    with remote.opened("gs://bucket/run", training=True) as folder:
        assert (folder / "checkpoints/1/about/metadata").read_text() == "about/metadata"
        (folder / "config.json").write_text("{}")
        (folder / "checkpoints/1/data").unlink()
        (folder / "checkpoints/1/about/metadata").unlink()
    assert bucket.objects == {"run/config.json": b"{}"}


def test_a_missing_bucket_is_one_sentence(bucket):
    with pytest.raises(FileNotFoundError, match=r"There is no gs://none/run"):
        remote.opened("gs://none/run", training=True).__enter__()
