"""Settings of a process."""

import subprocess
import sys

import pytest

# The smallest number of page faults when a thread, as XLA's are, allocates and fills 1.1 GB.
FAULTS = """
import ctypes, resource, sys, threading
from lineage.runs.process import keep_freed

if sys.argv[1] == "kept":
    keep_freed()
libc, size, found = ctypes.CDLL(None), 1_100_000_000, []
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]

def allocate():
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        block = libc.malloc(size)
        ctypes.memset(block, 1, size)
        libc.free(block)
        found.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)

thread = threading.Thread(target=allocate)
thread.start()
thread.join()
print(min(found))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs glibc")
def test_freed_memory_is_used_again():
    kept, returned = (
        int(subprocess.run([sys.executable, "-c", FAULTS, each], capture_output=True, text=True, check=True).stdout)
        for each in ("kept", "returned")
    )
    assert kept < 20 < 300 < returned
