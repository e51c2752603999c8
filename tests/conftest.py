"""Settings of all tests: eight simulated devices, a compilation cache for the run, shape checks, float32 products."""

import atexit
import ctypes
import gc
import os
import shutil
import signal
import sys
import tempfile
from importlib import metadata

from packaging.version import Version

# Set before JAX is imported. Compilation dominates, and takes half as long without LLVM's optimizations and, where
# there is a choice, XLA's newer emitters of fusions. On a busy machine, simulated devices may wait for each other for
# more than 40 s, after which XLA would abort the process. Flags of the caller come later and override these. The
# environment is inherited by the xdist workers and by the processes that tests start, so that all of them share the
# compilation cache of the run.
os.environ["XLA_FLAGS"] = " ".join(
    [
        "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1",
        "--xla_cpu_use_fusion_emitters=false" if Version(metadata.version("jaxlib")) < Version("0.11") else "",
        "--xla_cpu_collective_call_terminate_timeout_seconds=600",
        os.environ.get("XLA_FLAGS", ""),
        "--xla_force_host_platform_device_count=8",
    ]
)
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="lineage_tests_")
    atexit.register(shutil.rmtree, os.environ["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ["LINEAGE_CACHE"] = ""  # tests do not write to the cache of the user
os.environ.setdefault("OMP_NUM_THREADS", "1")  # waiting PyTorch threads would slow down the other workers

import hypothesis
import jax
import jaxtyping
import pytest

# Memory of a worker above which compiled functions are dropped after a module (twice this: within a module), and how
# much it must have grown since it was last done.
MEMORY, GROWTH = 1.25 * 2**30, 0.25 * 2**30
LEFT = pytest.StashKey[int]()  # memory after that
# Before any of the packages is imported.
CHECKED = [f"lineage.{name}" for name in ("models", "metrics", "tasks", "evaluation", "train")]
jaxtyping.install_import_hook(CHECKED, "beartype.beartype")
jax.config.update("jax_default_matmul_precision", "highest")
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")
signal.signal(signal.SIGINT, signal.default_int_handler)  # shells start background jobs with SIGINT ignored


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Give each worker a contiguous part of the tests, so that the tests of a module share compiled functions."""
    from xdist.scheduler import WorkStealingScheduling

    return WorkStealingScheduling(config, log) if config.getvalue("dist") == "load" else None


def pytest_collection_finish(session):
    """Spare the garbage collector the imported modules and most of its passes, which take 5% of the time."""
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item, nextitem):
    """Drop compiled functions, preferably between modules, so that a worker stays below 3 GiB."""
    same_module, before = nextitem is not None and nextitem.path == item.path, item.config.stash.get(LEFT, 0)
    if resident() > max(MEMORY * (2 if same_module else 1), before + GROWTH):
        jax.clear_caches()
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        item.config.stash[LEFT] = resident()


def resident() -> int:
    """Return the resident memory of this process in bytes, or 0 if it is unknown."""
    if sys.platform != "linux":
        return 0
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
