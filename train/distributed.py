"""Runs of several processes: coordination of start-up, errors, stopping and shutdown."""

import atexit
import contextlib
import ctypes
import itertools
import math
import os
import pickle
import re
import signal
import socket
import sys
import time
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.multihost_utils import process_allgather
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from lineage.runs import provenance
from lineage.runs.process import ERROR, StopSignal, end_at_once

# Environment variables of launchers (SLURM's srun, Open MPI, GKE with a TPU slice), and patterns of their values for
# several processes.
LAUNCHERS = {"SLURM_STEP_NUM_TASKS": "[^01]|..", "OMPI_COMM_WORLD_SIZE": "[^01]|..", "TPU_WORKER_HOSTNAMES": ".*,"}

PER_PROCESS = ("coordinator", "process", "line", "traceback")  # options that may differ between the processes of a run
# Options of JAX, which environment variables set, that change the numbers that a program computes.
NUMERICS = (
    "jax_default_matmul_precision",
    "jax_default_prng_impl",
    "jax_numpy_dtype_promotion",
    "jax_random_seed_offset",
    "jax_threefry_partitionable",
)
RESUME = "Run the same command on every host again: training resumes from the last checkpoint, predictions continue."


def check_devices() -> None:
    """Raise ValueError if JAX cannot use the platform of `JAX_PLATFORMS`."""
    try:
        jax.devices()
    except (RuntimeError, AssertionError) as error:  # AssertionError: the plugin of the platform is not installed
        if is_lost_process(error):
            raise
        platforms, why = os.environ.get("JAX_PLATFORMS", ""), str(error).partition("\n")[0][:160]
        why = why or "its plugin is not installed"
        raise ValueError(
            f"JAX_PLATFORMS is {platforms!r}, which JAX cannot use ({why}): unset it, or install JAX for the device."
        ) from error


@contextlib.contextmanager
def joined(
    coordinator: str | None = None,
    num_processes: int | None = None,
    process: int | None = None,
    heartbeat: int = 60,
    options: Mapping[str, Any] = MappingProxyType({}),
) -> Iterator[None]:
    """Connect the processes of a run for the block; enter it before JAX initializes its devices.

    Without arguments, the tasks of `srun` or `mpirun` and the workers of a TPU slice on GKE are detected; elsewhere the
    run has one process.

    Args:
        coordinator: "HOST:PORT" of process 0; "auto" lets JAX detect it.
        heartbeat: seconds without a heartbeat after which a process is declared dead and all processes end.
        options: options of the command, which must be the same for all processes apart from those in `PER_PROCESS`.

    Raises:
        ValueError: the arguments are incomplete, the port is in use, or the processes differ in their options, their
            code, the options of JAX in `NUMERICS` or their numbers of devices.
        ConnectionError: the other processes did not connect, or the connection to one was lost.
    """
    given, none = (coordinator, num_processes, process), (None, None, None)
    if given == none and not any(re.match(several, os.environ.get(name, "")) for name, several in LAUNCHERS.items()):
        check_devices()
        yield
        return
    complete = None not in given and re.fullmatch(r".+:\d+", coordinator) and 0 <= process < num_processes
    if not complete and given not in (none, ("auto", None, None)):
        raise ValueError(
            f"--coordinator={coordinator} --num-processes={num_processes} --process={process}: "
            "--coordinator (HOST:PORT of process 0), --num-processes and --process (from 0) must all be given, or "
            "--coordinator=auto alone."
        )
    if process == 0:
        _check_port(coordinator)
    ctypes.CDLL(None).signal(signal.SIGABRT, _aborted)
    try:
        jax.distributed.initialize(
            None if coordinator == "auto" else coordinator,
            num_processes,
            process,
            heartbeat_timeout_seconds=heartbeat,
            shutdown_timeout_seconds=3600,  # process 0 writes the report while the others wait
        )
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # JAX's own handler would only record the signal
        check_devices()
        _check_counts(jax.devices())
        # Results are the same in all processes; process 0 prints them.
        with open(os.devnull, "a") as null, contextlib.redirect_stdout(null if jax.process_index() else sys.stdout):
            _check_programs(options)
            yield
    except BaseException as error:
        atexit.register(_end_at_once, 130 if isinstance(error, KeyboardInterrupt) else 1)
        if is_lost_process(error):
            # The message of Gloo names a line of its source code.
            reason = re.sub(r"\[\S+\.(cc|h):\d+\] ", "", " ".join(str(error).split()))[:200]
            raise ConnectionError(f"a process of this run was lost ({reason}): all processes stop. {RESUME}") from error
        raise


def _check_port(coordinator):
    """Raise ValueError unless process 0 can use its port: JAX would crash, or share it with another run."""
    family = socket.AF_INET6 if (both := socket.has_dualstack_ipv6()) else socket.AF_INET
    try:
        socket.create_server(("", int(coordinator.rpartition(":")[2])), family=family, dualstack_ipv6=both).close()
    except (OSError, OverflowError) as error:
        why = os.strerror(error.errno) if isinstance(error, OSError) else "ports are numbers up to 65535"
        raise ValueError(
            f"--coordinator={coordinator}: process 0 cannot use this port ({why}): choose another."
        ) from error


def _check_counts(devices):
    """Raise ValueError unless all processes have equally many devices, as JAX's collective operations require."""
    counts = Counter(device.process_index for device in devices)
    for process, count in counts.items():
        if count != counts[0]:
            raise ValueError(
                "all processes of a run must have the same number of devices, but process 0 has "
                f"{counts[0]} and process {process} has {count}."
            )


def _check_programs(options):
    """Raise ValueError unless all processes run the same command with the same code and options of JAX."""
    check_same("the command", str({key: options[key] for key in options if key not in PER_PROCESS}))
    check_same("the code of Lineage or the version of a package", provenance.fingerprint())
    for name in NUMERICS:
        check_same(f"JAX's option {name}", str(getattr(jax.config, name)))


def is_lost_process(error: BaseException | None) -> bool:
    """Return whether an error means that another process of the run was lost.

    JAX raises JaxRuntimeError, ValueError or, while it initializes the devices, RuntimeError in this case, and only the
    message distinguishes it: collective operations of Gloo or NCCL fail with the same status codes as other errors.
    """
    pattern = "(?s)(Unable to initialize backend .{,20}: )?[A-Z_]+: "
    pattern += ".*(?i:gloo|nccl|connection|heartbeat|barrier|coordination|unavailable|deadline)"
    return isinstance(error, RuntimeError | ValueError) and re.match(pattern, str(error)) is not None


@contextlib.contextmanager
def agreed() -> Iterator[None]:
    """Raise ChildProcessError in all other processes if the block raises in one."""
    try:
        yield
    except Exception:
        failures()
        raise
    if others := failures(False):
        raise ChildProcessError(f"process {others[0]} of this run failed: see its own error message.")


def failures(failed: bool = True) -> list[int]:
    """Return the indices of the processes that failed; every process must call this function."""
    return np.flatnonzero(process_allgather(np.array([failed]), tiled=True)).tolist() if jax.process_count() > 1 else []


def shared(item: Any) -> list[Any]:
    """Return the item of each process, in process order; every process must call this function."""
    content = np.frombuffer(pickle.dumps(item), np.uint8)
    sizes = process_allgather(np.array([len(content)]), tiled=True)
    rows = process_allgather(np.pad(content, (0, sizes.max() - len(content))))
    return [pickle.loads(row[:size].tobytes()) for row, size in zip(rows.reshape(len(sizes), -1), sizes)]


def in_turns(items: Iterator[Any]) -> Iterator[Any]:
    """Yield the items of all processes on every process: all first items in process order, all second items, and so on.

    Iteration ends at the first process without a next item; the processes after it must have none either.
    """
    while True:
        with agreed():
            item = next(items, None)
        for shared_item in shared(item):
            if shared_item is None:
                return
            yield shared_item


def check_same(what: str, text: str) -> None:
    """Raise ValueError unless the text is the same on every process."""
    sums = process_allgather(np.array([zlib.crc32(text.encode())], np.uint32), tiled=True)
    if (sums != sums[0]).any():
        raise ValueError(f"{what} of process {np.argmax(sums != sums[0])} differs from that of process 0.")


class Requests:
    """Requests to stop a run, by a signal, and to save, when some minutes have passed since the last save.

    All processes get the same answers from the same call. With several processes, a call does not wait for the others
    but returns what was requested before the previous call.

    Args:
        minutes: interval of the requests to save, measured by process 0; 0: none.

    Attributes:
        save: whether a save is due.
    """

    def __init__(self, stop: StopSignal, mesh: Mesh, minutes: float):
        self.stop, self._minutes = stop, minutes
        everywhere, shape = NamedSharding(mesh, PartitionSpec(mesh.axis_names)), (jax.local_device_count(), 2)
        self._any = jax.jit(partial(jnp.any, axis=0), out_shardings=NamedSharding(mesh, PartitionSpec()))
        self._flags = {  # arrays of the two requests for each combination; none with one process
            flags: jax.make_array_from_process_local_data(everywhere, np.full(shape, flags), (mesh.size, 2))
            for flags in itertools.product((False, True), repeat=2)
            if jax.process_count() > 1
        }
        self._before = np.zeros(2, bool)
        self.saved()

    def saved(self) -> None:
        """Begin to count the minutes until the next save."""
        counts = self._minutes and jax.process_index() == 0
        self.save, self._save_at = False, time.monotonic() + 60 * self._minutes if counts else math.inf

    def must_stop(self) -> bool:
        """Return whether the run must stop, and set `save`."""
        stop, due = self.stop.received, time.monotonic() >= self._save_at
        self._save_at = math.inf if due else self._save_at
        if self._flags:
            before, self._before = self._before, self._any(self._flags[stop, due])
            stop, due = np.asarray(before).tolist()
        self.save |= due
        return stop


@ctypes.CFUNCTYPE(None, ctypes.c_int)
def _aborted(number):
    """Print an explanation when JAX, often in its own thread, aborts a process that waits for another one."""
    reason = "this process was aborted, usually because a process of this run was lost or did not start: see above."
    end_at_once(1, f"\n{ERROR}{reason} {RESUME}\n")


def _end_at_once(code):
    """End the process without JAX's wait for the other processes at exit, which may be lost."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # a closed pipe or a full disk
            stream.flush()
    end_at_once(code)
