"""Locks of run folders, which end with the process that holds them. Uses only the standard library."""

import contextlib
import errno
import fcntl
import os
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

LOCK = ".lock"  # locked while a run uses the folder
CLAIM = ".sweep"  # locked from the moment a sweep starts a run until the run's process has ended
# Errors of file systems without locks; NFS returns EBADF for folders.
NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EBADF)


class MovedError(OSError):
    """Exception raised if the folder of a run was moved, deleted or replaced during the run."""


@contextlib.contextmanager
def locked(workdir: Path) -> Iterator[None]:
    """Keep other runs out of the folder, or raise ValueError; the lock ends with the process, however it ends.

    The lock file has a new id (see `holder`).
    """
    # The folder is locked too: if the lock file is deleted, another run would create and lock a new one.
    with _opened(workdir / LOCK, os.O_RDWR | os.O_CREAT) as file, _opened(workdir) as folder:
        if not (lock(file) and lock(folder)):
            raise ValueError(f"another run is using {workdir}: wait for it, stop it, or choose another workdir.")
        with contextlib.suppress(OSError):  # a full disk
            os.ftruncate(file, 0)
            os.write(file, uuid.uuid4().hex.encode())
            os.fsync(file)
        yield


def holder(workdir: Path) -> str:
    """Return the id of the process that has locked the folder, or was the last to do so; "" if there is none."""
    with contextlib.suppress(OSError), _opened(workdir / LOCK) as file:
        return os.read(file, 32).decode(errors="replace")
    return ""


def unmoved(workdir: Path) -> Callable[[], None]:
    """Return a function that raises MovedError if the folder has been moved, deleted or replaced since.

    The folder must be locked meanwhile: otherwise, a new folder could have the same inode number.
    """
    before, path = os.stat(workdir), workdir.absolute()  # a relative path would follow a parent folder that is moved

    def check():
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            if os.path.samestat(before, os.stat(path)):
                return
        raise MovedError(
            f"{workdir} was moved, deleted or replaced during the run, which stops: to continue a moved run, give its "
            "new folder as --workdir."
        )

    return check


@contextlib.contextmanager
def locked_file(path: Path) -> Iterator[bool]:
    """Lock a file, creating it if it does not exist; yield False if another process holds its lock."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with _opened(path, os.O_RDWR | os.O_CREAT) as file:
        yield lock(file)


def lock(file: int, shared: bool = False) -> bool:
    """Lock an open file or folder; return False if another process holds its lock.

    On file systems without locks nothing is locked, and a warning is printed to standard error.
    """
    for _ in range(1 if shared else 10):  # another process may briefly hold the lock to test it
        try:
            fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            if not shared:
                time.sleep(0.05)
            continue
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
            if not shared and error.errno != errno.EBADF:
                advice = "do not start a second run in this folder"
                with contextlib.suppress(OSError):  # a closed pipe or a full disk
                    print(f"this file system has no locks ({error.strerror}): {advice}", file=sys.stderr)
        return True
    return False


@contextlib.contextmanager
def _opened(path, flags=os.O_RDONLY):
    # A link in somebody else's folder may lead to the user's own file. A pipe would block without a writer.
    number = os.open(path, flags | os.O_NONBLOCK | (os.O_NOFOLLOW if flags & os.O_CREAT else 0), 0o666)
    try:
        yield number
    finally:
        os.close(number)


def held(workdir: Path) -> bool:
    """Return whether a run is in progress in the folder, or a sweep has just started one there."""
    return any(is_locked(workdir / name) for name in (CLAIM, LOCK, ""))


def is_locked(path: Path) -> bool:
    """Return whether a process holds the lock of a file or folder."""
    with contextlib.suppress(FileNotFoundError), _opened(path) as file:
        return not lock(file, shared=True)
    return False
