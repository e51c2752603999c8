"""Settings of this process: memory allocation, standard streams, and messages of libraries about errors."""

import contextlib
import ctypes
import logging
import os
import sys
from collections.abc import Iterator


def keep_freed() -> None:
    """Make glibc keep freed memory for reuse by the next step; without glibc, do nothing.

    XLA's CPU backend allocates the scratch space of each step anew, and by default glibc returns large blocks to the
    kernel, which costs thousands of page faults per step.
    """
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "mallopt"):
        mmap_threshold, trim_threshold, arena_max = -3, -1, -8
        for option, value in ((mmap_threshold, 1 << 30), (trim_threshold, 2**31 - 1), (arena_max, 1)):
            libc.mallopt(option, value)


def open_streams() -> None:
    """Open the null device for closed standard streams, whose numbers the files of the run would get otherwise."""
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(number, True)
    os.close(number)
    sys.stdout, sys.stderr = sys.stdout or os.fdopen(1, "w"), sys.stderr or os.fdopen(2, "w")


@contextlib.contextmanager
def brief_errors(traceback: bool = False) -> Iterator[None]:
    """Hide what Orbax and TensorStore print about errors that they also raise, unless tracebacks are wanted.

    Orbax logs the traceback. After an error of one array, those of TensorStore's other reads or writes that end later
    find the event loop closed, which nothing can catch.
    """
    log, hook = logging.getLogger("absl"), sys.unraisablehook
    log.setLevel(logging.ERROR if traceback else logging.CRITICAL)
    if not traceback:
        sys.unraisablehook = lambda error: None if str(error.exc_value) == "Event loop is closed" else hook(error)
    try:
        yield
    finally:
        sys.unraisablehook = hook
