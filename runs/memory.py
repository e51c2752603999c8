"""Memory allocation of this process."""

import ctypes
import sys


def keep_freed() -> None:
    """Make glibc keep freed memory for reuse by the next step; without glibc, do nothing.

    XLA's CPU backend allocates the scratch space of each step anew, and by default glibc returns large blocks to the
    kernel, which costs thousands of page faults per step.
    """
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "mallopt"):
        mmap_threshold, trim_threshold, arena_max = -3, -1, -8
        for option, value in ((mmap_threshold, 1 << 30), (trim_threshold, 2**31 - 1), (arena_max, 1)):
            libc.mallopt(option, value)
