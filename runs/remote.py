"""Run folders on remote storage: local copies, and the upload of changes.

Object stores can neither append to a file nor rename a folder, and have no locks. A run therefore works in a local
folder, from which a thread uploads each new checkpoint at once and other files every `SECONDS`. The record of a
checkpoint is uploaded after its other files and deleted before them: a checkpoint without its record is ignored.
"""

import contextlib
import json
import os
import shutil
import signal
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from lineage.configs import storage
from lineage.configs.atomic import check_place
from lineage.configs.storage import RECORD, is_hidden, is_remote, readable_errors, step_of
from lineage.runs.folder import last_step
from lineage.runs.locks import LOCK, locked_file
from lineage.runs.process import say

SECONDS = 30.0  # between two uploads of files that grow
HEARTBEAT = 15.0  # seconds between two changes of the lock file
SILENCE = 60.0  # seconds without a change of the lock file after which its run counts as dead


@contextlib.contextmanager
def opened(workdir: str | os.PathLike, training: bool = False, primary: bool = True) -> Iterator[Path]:
    """Yield the local folder of a run: `workdir` itself, or a copy of it if it is remote.

    Changes of a copy are uploaded: those of a training run while it is in progress, others at the end. The copy of a
    run that is in progress on this machine is used as it is. In a training run of several processes, the `primary` one
    downloads and uploads, and the others use its copy.

    Raises:
        ValueError: for training, if another run uses the folder.
        FileNotFoundError: unless for training, if there is no such folder.
        OSError, ModuleNotFoundError: the storage cannot be used; the message says why.
    """
    if not is_remote(workdir):
        yield Path(workdir)
        return
    mirror = Mirror(os.fspath(workdir), "runs")
    use = mirror.training() if training else mirror.reading()
    with use if primary else contextlib.nullcontext():
        yield mirror.folder


def holder(workdir: str | os.PathLike) -> str:
    """Return the id of the last training run in the local copy of a remote folder; "" if there is none."""
    try:
        return Mirror(os.fspath(workdir), "runs").lease.read_text() if is_remote(workdir) else ""
    except FileNotFoundError:
        return ""


def for_command(command: str, workdir: str) -> contextlib.AbstractContextManager:
    """Return the context manager `opened` for a command; `train` gets a remote URL and opens the folder itself.

    Raises:
        ValueError: the command needs a local folder.
    """
    if is_remote(workdir):
        storage.Files(workdir)  # raises an error before slow imports
        if command in ("sweep", "slurm", "watch"):
            raise ValueError(f"{workdir} is remote: {command} needs a local folder.")
        if command == "train":
            return contextlib.nullcontext(workdir)
    return opened(workdir)


@contextlib.contextmanager
def written(output: str) -> Iterator[str]:
    """Yield the local path of an output; a remote one is uploaded at the end, even after an exception.

    The same applies to files and folders next to it that have its name with another suffix or none. Files that an
    interrupted process uploaded are downloaded first, so that they can be continued.
    """
    if not is_remote(output):
        if output:
            check_place(output)
        yield output
        return
    parent, _, name = output.rstrip("/").rpartition("/")
    stem = Path(name).stem
    mirror = Mirror(parent, "outputs", lambda path: f"{path.partition('/')[0]}.".startswith(f"{stem}."))
    if not mirror.local():
        with contextlib.suppress(FileNotFoundError):
            storage.Files(f"{parent}/{stem}.*").download(mirror.folder)
        mirror.known = mirror.local()
    try:
        yield str(mirror.folder / name)
    finally:
        mirror.push()
        for uploaded in mirror.local():
            (mirror.folder / uploaded).unlink()


class Mirror:
    """Local folder that is a copy of a remote one.

    Attributes:
        url: URL of the remote folder.
        folder: the local folder.
        known: size and time of each file (see `storage.stamp`) when it was last the same on both sides.
        lease: local file that a command locks while it uses the folder; contains the id of the last training run.
    """

    def __init__(self, url: str, kind: str, chosen: Callable[[str], bool] = lambda name: True):
        """Open a URL; nothing is read or written yet.

        Args:
            kind: subfolder of the cache that contains the local folder.
            chosen: function that returns whether a file is copied, given its path relative to the folder.
        """
        self._files, self._chosen = storage.Files(url), chosen
        self.url, self.folder = self._files.url, storage.copy_of(self._files.url, kind)
        self.known: dict[str, Any] = {}
        self._system, self._at = self._files.system, self._files.at
        self._ended, self._lost = threading.Event(), ""
        self._id = uuid.uuid4().hex  # identifies this run in the lock file
        self.lease = self.folder.with_name(f".{self.folder.name}.lock")

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Download the folder, and upload what was added to it at the end."""
        with locked_file(self.lease) as free:
            if free and not self._is_of_last_run(self._locked()):
                self._files.download(self.folder)
            self.known = self.local()
        yield
        if free:
            self.push()

    @contextlib.contextmanager
    def training(self) -> Iterator[None]:
        """Lock the folder and download it; upload it while a run is in progress, and at the end.

        If the last run could not upload its changes, the local folder is uploaded instead of downloading.
        """
        with locked_file(self.lease) as free:
            previous = self._locked()
            if not free or (previous and not self._is_of_last_run(previous) and self._is_alive(previous)):
                host = previous.get("host", "this machine")
                raise ValueError(
                    f"another run is using {self.url} on {host}: wait for it, stop it, or choose another workdir."
                )
            if not self._is_of_last_run(previous):
                try:
                    self._files.download(self.folder)
                except FileNotFoundError:  # a new run
                    shutil.rmtree(self.folder, ignore_errors=True)
            self._lock(previous)
            yield from self._uploading()

    def _uploading(self):
        """Upload changes until the end of the block."""
        with contextlib.suppress(FileNotFoundError):
            self.known = {name: storage.version(info) for name, info in self._files.listed(incomplete=True).items()}
        targets = self._renew_lock_regularly, self._push_regularly
        threads = [threading.Thread(target=target, daemon=True) for target in targets]
        for thread in threads:
            thread.start()
        try:
            yield
        except BaseException:
            with contextlib.suppress(OSError):  # the first error counts
                self._close(threads)
            raise
        self._close(threads)

    def _close(self, threads):
        """Upload the remaining changes and unlock the folder."""
        self._ended.set()
        for thread in threads:
            thread.join()
        if not self._holds_lock():
            raise ValueError(self._lost)
        self.push()
        with contextlib.suppress(FileNotFoundError):  # a run that failed before it wrote anything
            self._mark_as_copies()
        with readable_errors(self.url):
            self._system.rm_file(self._at(LOCK))

    def local(self) -> dict[str, Any]:
        """Return the size and time of each local file to copy, by its path relative to the folder."""
        stamps = {}
        for folder, _, names in os.walk(self.folder):  # skips folders that are deleted meanwhile
            for file in (Path(folder, name) for name in names):
                name = file.relative_to(self.folder).as_posix()
                with contextlib.suppress(FileNotFoundError):
                    if not is_hidden(name) and self._chosen(name):
                        stamps[name] = storage.stamp(file)
        return dict(sorted(stamps.items()))

    def push(self) -> None:
        """Upload the changes of the local folder, and then delete remote files that no longer exist locally."""
        with readable_errors(self.url):
            now = self.local()
            changed = [name for name in now if self.known.get(name) != now[name]]
            for step in sorted({step_of(name) for name in changed}):  # "" (not a checkpoint) comes first
                record = f"{step}{RECORD}" if step else ""
                names = [name for name in changed if step_of(name) == step]
                if record in names and record in self.known:  # replaces another checkpoint
                    self._remove(record)
                with ThreadPoolExecutor(storage.THREADS) as pool:
                    rest = [name for name in names if name != record]
                    complete = all(list(pool.map(lambda name: self._upload(name, now[name]), rest)))
                if record in names and complete:
                    self._upload(record, now[record])
            gone = [name for name in self.known if name not in now]
            for name in sorted(gone, key=lambda name: not name.endswith(RECORD)):
                self._remove(name)

    def _upload(self, name, facts):
        """Upload a file; return False if it has been deleted meanwhile."""
        file = self.folder / name
        try:
            self._system.put_file(str(file), self._at(name))
        except FileNotFoundError:
            if file.exists():
                raise
            return False
        self.known[name] = facts
        return True

    def _remove(self, name):
        with contextlib.suppress(FileNotFoundError):
            self._system.rm_file(self._at(name))
        del self.known[name]

    def _mark_as_copies(self):
        """Mark the local files as copies of the remote ones, so that they are not downloaded again."""
        for name, info in self._files.listed().items():
            if name in self.known and self.known[name][0] == info.get("size"):
                storage.mark(self.folder / name, info)

    def _is_of_last_run(self, previous: dict[str, Any]) -> bool:
        """Return whether the last run in the local folder wrote the lock file; the folder is then the newer copy."""
        return bool(previous) and self.folder.is_dir() and previous.get("id") in self.lease.read_text().split()

    def _is_alive(self, previous: dict[str, Any]) -> bool:
        """Wait until the lock file changes; return False if it does not change or is deleted."""
        host = ascii(previous.get("host"))
        say(f"{self.url} is locked by a run on {host}: waiting {SILENCE:.0f} s for its heartbeat")
        end = time.monotonic() + SILENCE
        while time.monotonic() < end:
            time.sleep(1)
            if (now := self._locked()) != previous:
                return bool(now)
        return False

    def _locked(self) -> dict[str, Any]:
        """Return the content of the lock file, {} if there is none."""
        with readable_errors(self.url):
            try:
                return dict(json.loads(self._system.cat_file(self._at(LOCK))))
            except (FileNotFoundError, ValueError, TypeError):
                return {}

    def _lock(self, previous):
        """Lock the folder; `previous` is the content of its lock file, that of a dead run, or {}."""
        say(f"{self.url} does not support locks: the file {LOCK} is renewed to keep other runs out")
        # If the folder is the newer copy, it is known by both ids, since this process can end before the lock file has
        # the new one. They are written at once, without truncating the file, which cannot be replaced while locked.
        before = previous["id"] if self._is_of_last_run(previous) else ""
        with self.lease.open("r+") as file:
            file.write(f"{self._id} {before:32}")
        self._renew_lock()
        if self._locked().get("id") != self._id:
            raise ValueError(f"another run has just begun in {self.url}: choose another workdir.")

    def _holds_lock(self) -> bool:
        """Return whether this run still holds the lock file; a run that is suspended for too long loses it."""
        if self._locked().get("id") != self._id:
            self._lost = f"another run has taken over {self.url}: this one was stopped."
        return not self._lost

    def _renew_lock(self):
        content = {"host": os.uname().nodename, "process": os.getpid(), "id": self._id, "time": time.time()}
        with readable_errors(self.url):
            self._system.pipe_file(self._at(LOCK), json.dumps(content).encode())

    def _renew_lock_regularly(self):
        while not self._ended.wait(HEARTBEAT):
            with contextlib.suppress(OSError):  # may be temporary
                if not self._holds_lock():
                    os.kill(os.getpid(), signal.SIGTERM)
                    return
                self._renew_lock()

    def _push_regularly(self):
        step, due, warned = 0, time.monotonic() + SECONDS, False
        while not (self._ended.wait(0.5) or self._lost):
            newest, start = last_step(self.folder), time.monotonic()
            if newest == step and start < due:
                continue
            step = newest
            try:
                if self._holds_lock():
                    self.push()
            except OSError as error:
                if not warned:
                    say(f"{error} The run continues, and uploads later.")
                warned = True
            due = time.monotonic() + max(SECONDS, 5 * (time.monotonic() - start))
