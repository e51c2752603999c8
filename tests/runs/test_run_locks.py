"""Locks and signals of a run folder."""

import errno
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from lineage.runs import folder, locks, process
from lineage.runs.live import LOG, Run
from lineage.runs.sweep import Launcher


def test_second_run_in_a_workdir_raises(tmp_path):
    with (
        locks.locked(tmp_path),
        pytest.raises(ValueError, match=f"another run is using {tmp_path}"),
        locks.locked(tmp_path),
    ):
        pass
    with locks.locked(tmp_path):  # released
        pass


@pytest.mark.parametrize("name", [locks.LOCK, locks.CLAIM, LOG])
def test_files_behind_links_in_a_run_folder_are_kept(tmp_path, name):
    (own := tmp_path / "own").write_text("own")
    (run := tmp_path / "run").mkdir()
    (run / name).symlink_to(own)

    def start():
        with locks.locked(run):
            pass
        Launcher(["true"], 1, print).begin(Run("run", run))

    with pytest.raises(OSError, match=name):
        start()
    assert own.read_text() == "own"
    (run / "artifacts").symlink_to(tmp_path)
    with pytest.raises(ValueError, match="run/artifacts is a link"):
        folder.make(run)


@pytest.mark.parametrize("name", ["layers=[0,2]", "why?", "a*", "a\\b"])
def test_folder_whose_path_orbax_takes_for_a_pattern_is_refused(tmp_path, monkeypatch, name):
    """Orbax would merge the files of other folders into a checkpoint, or none."""
    (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / name)
    with pytest.raises(ValueError, match=r"/run has '.*' in its path: choose another workdir"):
        folder.make(Path("run"))
    assert not Path("run").exists()


def test_lock_of_a_killed_run_is_released(tmp_path):
    hold = f"""
import sys
sys.path.insert(0, ".")
from pathlib import Path
from lineage.runs.locks import locked
with locked(Path({str(tmp_path)!r})):
    print("held", flush=True)
    sys.stdin.read()
"""
    holder = subprocess.Popen([sys.executable, "-c", hold], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert holder.stdout.readline() == "held\n"
    with pytest.raises(ValueError, match="another run is using"), locks.locked(tmp_path):
        pass
    holder.kill()
    holder.communicate()
    with locks.locked(tmp_path):
        pass


def test_lock_distinguishes_a_folder_from_its_copy(tmp_path):
    (tmp_path / "run").mkdir()
    with locks.locked(tmp_path / "run"):
        before = locks.holder(tmp_path / "run")
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    with locks.locked(tmp_path / "run"):
        assert locks.holder(tmp_path / "run") != before == locks.holder(tmp_path / "copy") != ""
    assert locks.holder(tmp_path) == ""


def test_deleted_lock_file_admits_no_second_run(tmp_path):
    with locks.locked(tmp_path):
        (tmp_path / locks.LOCK).unlink()
        assert locks.held(tmp_path)
        with pytest.raises(ValueError, match="another run is using"), locks.locked(tmp_path):
            pass
        (tmp_path / locks.LOCK).unlink()
    assert not locks.held(tmp_path)
    with locks.locked(tmp_path):
        pass


def test_second_ctrl_c_ends_a_call_that_hangs():
    script = "import ctypes\nfrom lineage.runs import process\nprocess.GRACE = 0.1\nmutex = bytes(64)\n"
    script += "with process.StopSignal():\n    print('begun', flush=True)\n"
    script += "    for _ in range(2): ctypes.CDLL(None).pthread_mutex_lock(mutex)\n"
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", script], **pipes) as run:
        assert run.stdout.readline() == "begun\n"
        for _ in range(2):
            time.sleep(0.5)
            assert run.poll() is None
            run.send_signal(signal.SIGINT)
        try:
            assert run.wait(20) == 130
        finally:
            run.kill()
        assert run.stderr.read() == "\ninterrupted\n"


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EBADF, errno.EIO])
def test_file_system_without_locks(number, tmp_path, monkeypatch, capsys):
    """Check that a run starts there with a warning; EBADF is the answer of NFS for folders, whose files have locks."""
    real = fcntl.flock

    def flock(file, how):
        if number != errno.EBADF or os.path.isdir(f"/proc/self/fd/{file}"):
            raise OSError(number, os.strerror(number))
        real(file, how)

    monkeypatch.setattr(fcntl, "flock", flock)
    if number == errno.EIO:
        with pytest.raises(OSError, match="Input/output error"), locks.locked(tmp_path):
            pass
        return
    with locks.locked(tmp_path):
        assert locks.held(tmp_path) == (number == errno.EBADF)
        message = "this file system has no locks (" + os.strerror(number)
        assert (message in capsys.readouterr().err) == (number != errno.EBADF)


def test_parent_folder_of_a_relative_path_that_is_moved_is_noticed(tmp_path, monkeypatch):
    (tmp_path / "a" / "run").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "a")
    check = locks.unmoved(Path("run"))
    check()
    (tmp_path / "a").rename(tmp_path / "b")  # the working directory moves with it, absolute paths do not
    with pytest.raises(locks.MovedError, match=r"run was moved"):
        check()


def test_checkpoints_are_folders_named_by_decimal_numbers(tmp_path):
    for name in ("5", "12", "\N{SUPERSCRIPT TWO}", "20.tmp"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    (tmp_path / "checkpoints" / "99").touch()
    assert [path.name for path in folder.checkpoints(tmp_path)] == ["5", "12"]


def test_checkpoints_that_cannot_be_listed_are_not_taken_for_missing(tmp_path, monkeypatch):
    assert folder.last_step(tmp_path) == 0
    (tmp_path / "checkpoints").symlink_to("elsewhere")  # such as a file system that is not mounted
    for _ in range(2):
        with pytest.raises(NotADirectoryError, match="checkpoints is neither a folder nor a link to one that exists"):
            folder.last_step(tmp_path)
        (tmp_path / "elsewhere").touch()
    (tmp_path / "elsewhere").unlink()
    (tmp_path / "elsewhere" / "5").mkdir(parents=True)
    assert folder.last_step(tmp_path) == 5

    def refuse(path):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    for name in ("listdir", "scandir"):
        monkeypatch.setattr(os, name, refuse)
    with pytest.raises(PermissionError, match="checkpoints"):
        folder.last_step(tmp_path)


def test_lock_that_is_looked_at_is_not_in_use(tmp_path):
    """Check that `held` in another process, which locks for a moment, does not stop a run from starting."""
    with locks._opened(tmp_path) as looking:
        assert locks.lock(looking, shared=True)
        threading.Timer(0.1, fcntl.flock, (looking, fcntl.LOCK_UN)).start()
        with locks.locked(tmp_path):
            pass


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP, signal.SIGINT])
def test_signals_are_recorded_and_second_ctrl_c_interrupts(number):
    caught = []
    before = signal.signal(number, lambda *_: caught.append(number))
    try:
        with process.StopSignal() as stop:
            assert not stop.received
            os.kill(os.getpid(), number)
            assert stop.received
            assert not caught
            os.kill(os.getpid(), number)
            assert caught == [number] * (number == signal.SIGINT)
        caught.clear()
        with process.StopSignal() as stop:
            pass
        os.kill(os.getpid(), number)
        assert not stop.received
        assert caught == [number]
    finally:
        signal.signal(number, before)


def test_nohup_is_respected():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with process.StopSignal() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not stop.received
    finally:
        signal.signal(signal.SIGHUP, before)
