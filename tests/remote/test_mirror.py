"""Folders of runs that are mirrored to remote storage: uploads, local copies and locks."""

import contextlib
import errno
import json
import os
import signal
import time
from unittest.mock import Mock

import pytest

from lineage.configs import storage
from lineage.runs import remote
from lineage.runs.folder import last_step
from tests.remote.conftest import Killed, write


@pytest.fixture
def mirror(bucket):
    """Return a new mirror of the folder of the bucket."""
    return remote.Mirror(bucket.url, "runs")


def checkpoint(step, content=b"weights"):
    return {f"checkpoints/{step}/state/{part}": content for part in "ab"} | {
        f"checkpoints/{step}/about/metadata": b"record of " + content
    }


def copied(url, cache, name):
    """Return the files of a run by their names, as another machine sees them."""
    cache(name)
    with remote.opened(url) as folder:
        return {file.relative_to(folder).as_posix(): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def test_a_local_workdir_is_used_as_it_is(tmp_path):
    with remote.opened(tmp_path / "run", training=True) as folder:
        assert folder == tmp_path / "run"
    assert not folder.exists()


def test_what_changes_is_uploaded_and_what_is_deleted_too(bucket, mirror, cache):
    files = {"config.json": b"{}", "artifacts/a.npz": b"a"} | checkpoint(1)
    write(
        mirror.folder,
        files | {".lock": b"", ".config.json.host.1.partial": b"", "checkpoints/2.orbax-checkpoint-tmp/a": b""},
    )
    mirror.push()
    assert bucket.get() == files
    write(mirror.folder, {"config.json": b"[]"} | checkpoint(2))
    (mirror.folder / "artifacts/a.npz").unlink()
    for name in checkpoint(1):
        (mirror.folder / name).unlink()
    mirror.push()
    assert bucket.get() == {"config.json": b"[]"} | checkpoint(2)
    assert copied(bucket.url, cache, "other") == {"config.json": b"[]"} | checkpoint(2)


@pytest.mark.parametrize("after", range(12))
def test_an_upload_that_is_killed_leaves_only_whole_checkpoints(cache, monkeypatch, after):
    """Kill an upload that replaces checkpoint 2, adds 3 and deletes 4 after some of its requests."""
    url = f"memory://{after}/run"
    mirror = remote.Mirror(url, "runs")
    write(mirror.folder, {"config.json": b"1"} | checkpoint(1) | checkpoint(2) | checkpoint(4))
    mirror.push()
    second = {"config.json": b"2"} | checkpoint(2, b"others") | checkpoint(3)
    write(mirror.folder, second)
    for name in checkpoint(4):
        (mirror.folder / name).unlink()
    requests = iter(range(1000))

    def killed(function):
        def request(*args):
            if next(requests) >= after:
                raise Killed
            return function(*args)

        return request

    monkeypatch.setattr(storage, "THREADS", 1)
    with monkeypatch.context() as patch, pytest.raises(Killed) if after < 11 else contextlib.nullcontext():
        for name in ("put_file", "rm_file"):
            patch.setattr(mirror._system, name, killed(getattr(mirror._system, name)))
        mirror.push()
    actual = copied(url, cache, "other")
    for step in (1, 2, 3, 4):
        there = {name: content for name, content in actual.items() if name.startswith(f"checkpoints/{step}/")}
        assert there in ({}, checkpoint(step), checkpoint(step, b"others"))
    assert checkpoint(1).items() <= actual.items()
    assert checkpoint(3).items() <= actual.items() or checkpoint(4).items() <= actual.items()
    cache("third")
    with remote.opened(url, training=True) as folder:
        write(folder, second)
        for name in checkpoint(4):
            (folder / name).unlink(missing_ok=True)
    system = mirror._system
    assert {path.removeprefix(f"/{after}/run/") for path in system.find(f"/{after}/run")} == {*second, *checkpoint(1)}
    assert copied(url, cache, "last") == second | checkpoint(1)


def test_a_checkpoint_that_is_deleted_during_its_upload_does_not_count(bucket, mirror, monkeypatch):
    write(mirror.folder, checkpoint(1))
    put_file = mirror._system.put_file

    def deleted(place, name):
        (mirror.folder / "checkpoints/1/state/b").unlink(missing_ok=True)
        put_file(place, name)

    monkeypatch.setattr(storage, "THREADS", 1)
    monkeypatch.setattr(mirror._system, "put_file", deleted)
    mirror.push()
    assert set(bucket.get()) == {"checkpoints/1/state/a"}


@pytest.mark.parametrize(
    ("seconds", "files"), [(0.1, {"metrics.jsonl": b"line"}), (1000.0, checkpoint(1))], ids=["often", "checkpoint"]
)
def test_a_run_is_uploaded_while_it_is_in_progress(bucket, monkeypatch, seconds, files):
    monkeypatch.setattr(remote, "SECONDS", seconds)
    with remote.opened(bucket.url, training=True) as folder:
        write(folder, files)
        deadline = time.monotonic() + 60
        while not files.items() <= bucket.get().items():
            assert time.monotonic() < deadline
            time.sleep(0.1)
    assert bucket.get() == files


def test_an_upload_that_fails_does_not_stop_the_run(bucket, monkeypatch, capsys):
    monkeypatch.setattr(remote, "SECONDS", 0.1)
    system = storage.Files(bucket.url).system
    put_file = system.put_file

    def failing(*_):
        raise RuntimeError("no connection")

    monkeypatch.setattr(system, "put_file", failing)
    with remote.opened(bucket.url, training=True) as folder:
        write(folder, {"metrics.jsonl": b"line"})
        time.sleep(2)
        monkeypatch.setattr(system, "put_file", put_file)
    assert bucket.get() == {"metrics.jsonl": b"line"}
    output = capsys.readouterr().err
    assert output.count(f"{bucket.url} cannot be used: RuntimeError: no connection. The run continues") == 1


def test_changes_that_were_not_uploaded_are_kept_for_the_next_start(bucket, monkeypatch):
    system = storage.Files(bucket.url).system

    def failing(*_):
        raise RuntimeError("no connection")

    def run(patch):
        with remote.opened(bucket.url, training=True) as folder:
            patch.setattr(system, "put_file", failing)
            write(folder, checkpoint(1))

    with monkeypatch.context() as patch, pytest.raises(OSError, match="no connection"):
        run(patch)
    assert set(bucket.get()) == {".lock"}
    with remote.opened(bucket.url) as folder:  # for another command than `train`
        assert last_step(folder) == 1
    with remote.opened(bucket.url, training=True) as folder:
        assert last_step(folder) == 1
    assert bucket.get() == checkpoint(1)


def test_changes_that_were_not_uploaded_survive_a_start_that_ends_while_it_locks(bucket, monkeypatch):
    system = storage.Files(bucket.url).system
    pipe_file = system.pipe_file

    def start():
        with remote.opened(bucket.url, training=True) as folder:
            write(folder, checkpoint(1))
            raise Killed

    def killed(*arguments):
        pipe_file(*arguments)
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(remote.Mirror, "_close", lambda mirror, _: mirror._ended.set())
        patch.setattr(remote.Mirror, "push", lambda *_: None)
        with pytest.raises(Killed):
            start()
        for _ in range(2):
            patch.setattr(system, "pipe_file", killed)
            with pytest.raises(Killed):
                start()
    monkeypatch.setattr(remote, "SILENCE", 0.0)
    with remote.opened(bucket.url, training=True) as folder:
        assert last_step(folder) == 1
    assert bucket.get() == checkpoint(1)


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_uploads_continue_without_a_place_for_messages(bucket, monkeypatch):
    monkeypatch.setattr(remote, "SECONDS", 0.1)
    system = storage.Files(bucket.url).system
    put_file, failed = system.put_file, []

    def failing(*_):
        failed.append(1)
        raise RuntimeError("no connection")

    full = Mock(**{"write.side_effect": OSError(errno.ENOSPC, "No space left on device")})
    with remote.opened(bucket.url, training=True) as folder:
        monkeypatch.setattr("sys.stderr", full)
        monkeypatch.setattr(system, "put_file", failing)
        write(folder, {"metrics.jsonl": b"line"})
        deadline = time.monotonic() + 60
        while not failed:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        monkeypatch.setattr(system, "put_file", put_file)
        while "metrics.jsonl" not in bucket.get():
            assert time.monotonic() < deadline
            time.sleep(0.1)


def test_files_of_an_earlier_run_do_not_come_back(bucket, cache):
    """Start a new run after the remote folder was deleted."""
    with remote.opened(bucket.url, training=True) as folder:
        write(folder, checkpoint(1) | {"config.json": b""})
    for name in bucket.get():
        bucket.delete(name)
    with remote.opened(bucket.url, training=True) as folder:
        assert not folder.exists()
    assert bucket.get() == {}


def test_what_was_uploaded_here_is_not_downloaded_again(bucket, monkeypatch):
    with remote.opened(bucket.url, training=True) as folder:
        write(folder, checkpoint(1) | {"config.json": b"{}"})

    def failing(*_):
        raise AssertionError("a file was downloaded")

    monkeypatch.setattr(storage.Files(bucket.url).system, "get_file", failing)
    with remote.opened(bucket.url) as folder:
        assert (folder / "config.json").read_bytes() == b"{}"


def foreign(bucket, **changes):
    """Write the lock file of a run on another machine."""
    lock = {"host": "other", "process": 1, "id": "other"} | changes
    bucket.put({".lock": json.dumps(lock).encode(), "config.json": b"{}"})


@pytest.mark.thorough
@pytest.mark.parametrize("alive", [True, False])
def test_a_run_on_another_machine_counts_as_dead_if_its_lock_does_not_change(bucket, monkeypatch, alive):
    foreign(bucket)
    monkeypatch.setattr(remote, "SILENCE", 3.0)

    def sleep(seconds):
        if alive:
            foreign(bucket, time=1)

    monkeypatch.setattr(time, "sleep", sleep)
    if alive:
        with pytest.raises(ValueError, match=f"another run is using {bucket.url} on other: wait for it"):
            remote.opened(bucket.url, training=True).__enter__()
        assert set(bucket.get()) == {".lock", "config.json"}
    else:
        with remote.opened(bucket.url, training=True) as folder:
            assert (folder / "config.json").exists()
            assert json.loads(bucket.get()[".lock"])["process"] == os.getpid()
        assert set(bucket.get()) == {"config.json"}


def test_a_run_whose_lock_was_taken_over_stops_without_uploading(bucket, monkeypatch):
    monkeypatch.setattr(remote, "HEARTBEAT", 0.1)
    signals = []

    def run():
        with remote.opened(bucket.url, training=True) as folder:
            foreign(bucket)
            write(folder, {"config.json": b"mine"})
            deadline = time.monotonic() + 60
            while not signals:
                assert time.monotonic() < deadline
                time.sleep(0.1)

    before = signal.signal(signal.SIGTERM, lambda *_: signals.append(1))
    try:
        with pytest.raises(ValueError, match=f"another run has taken over {bucket.url}"):
            run()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert bucket.get()["config.json"] == b"{}"
    assert json.loads(bucket.get()[".lock"])["host"] == "other"


def test_a_run_in_progress_on_this_machine_is_read_where_it_is(bucket):
    bucket.put({"config.json": b"older"})
    with remote.opened(bucket.url, training=True) as folder:
        (folder / "config.json").write_bytes(b"newer")
        with remote.opened(bucket.url) as again:
            assert again == folder
            assert (folder / "config.json").read_bytes() == b"newer"
            (folder / "report.html").write_bytes(b"report")
        assert "report.html" not in bucket.get()  # the run uploads it
        with pytest.raises(ValueError, match=f"another run is using {bucket.url} on {os.uname().nodename}"):
            remote.opened(bucket.url, training=True).__enter__()
    assert bucket.get()["config.json"] == b"newer"
