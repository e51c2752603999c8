"""One run over several processes: how they find each other, how they agree, and how they end."""

import atexit
import contextlib
import os
import re
import signal
import sys
import zlib
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.multihost_utils import process_allgather
from jax.sharding import Mesh, NamedSharding, PartitionSpec

# What starts several processes of one run and says so: SLURM's srun, Open MPI, GKE with a slice of TPUs.
SEVERAL = {"SLURM_STEP_NUM_TASKS": "[^01]|..", "OMPI_COMM_WORLD_SIZE": "[^01]|..", "TPU_WORKER_HOSTNAMES": ".*,"}
LOST = "(?i)gloo|nccl|connection|heartbeat|barrier|coordination|unavailable|deadline"


@contextlib.contextmanager
def joined(
    coordinator: str | None = None, num_processes: int | None = None, process: int | None = None, heartbeat: int = 60
) -> Iterator[None]:
    """What is computed inside is computed by all processes of the run. It must be entered before JAX has any device.

    Without arguments the tasks of `srun` or `mpirun` and the workers of a TPU slice on GKE find each other; elsewhere
    there is one process.

    Args:
        coordinator: "HOST:PORT" of process 0, which all can reach; "auto" lets JAX find out.
        num_processes: of the run.
        process: the number of this one.
        heartbeat: seconds after which a process that says nothing counts as dead: all others end then.

    Raises:
        ValueError: the arguments do not fit together.
        ConnectionError: the others do not come, or one was lost; the message says so.
    """
    given, none = (coordinator, num_processes, process), (None, None, None)
    if given == none and not any(re.match(several, os.environ.get(name, "")) for name, several in SEVERAL.items()):
        yield
        return
    whole = None not in given and re.fullmatch(r".+:\d+", coordinator) and 0 <= process < num_processes
    if not whole and given not in (none, ("auto", None, None)):
        raise ValueError(
            f"--coordinator={coordinator} --num-processes={num_processes} --process={process}: all three are needed, "
            "HOST:PORT of process 0, how many there are, and the number of this one from 0; or --coordinator=auto."
        )
    try:
        jax.distributed.initialize(
            None if coordinator == "auto" else coordinator,
            num_processes,
            process,
            heartbeat_timeout_seconds=heartbeat,
            shutdown_timeout_seconds=3600,  # the first one still writes the report when the others are done
        )
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # JAX's own handler would only take note of it
        results = contextlib.redirect_stdout(None) if jax.process_index() else contextlib.nullcontext()
        with results:  # which are the same for all
            yield
    except BaseException as error:
        atexit.register(_end_at_once, 130 if isinstance(error, KeyboardInterrupt) else 1)
        if isinstance(error, jax.errors.JaxRuntimeError) and re.search(LOST, str(error)):
            raise ConnectionError(
                f"a process of this run was lost ({' '.join(str(error).split())[:200]}): all end; the same command on "
                "every host goes on from the last checkpoint."
            ) from error
        raise


@contextlib.contextmanager
def agreed() -> Iterator[None]:
    """What one process cannot do, none goes on from.

    Raises:
        ChildProcessError: another process has raised; its own message says why.
    """
    try:
        yield
    except Exception:
        failures()
        raise
    if others := failures(False):
        raise ChildProcessError(f"process {others[0]} of this run cannot go on: its own message says why.")


def failures(failed: bool = True) -> list[int]:
    """The processes that have failed, if every process asks."""
    return np.flatnonzero(process_allgather(np.array([failed]), tiled=True)).tolist() if jax.process_count() > 1 else []


def check_same(what: str, text: str) -> None:
    """Raises ValueError unless the text is the same on every process."""
    sums = process_allgather(np.array([zlib.crc32(text.encode())], np.uint32), tiled=True)
    if (sums != sums[0]).any():
        raise ValueError(f"{what} of process {np.argmax(sums != sums[0])} is not that of process 0.")


class Vote:
    """Whether any process says yes: all know it at the same call, the one after. It waits for nothing but that call."""

    def __init__(self, mesh: Mesh):
        everywhere = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
        self._any = jax.jit(jnp.any, out_shardings=NamedSharding(mesh, PartitionSpec()))
        self._says = [
            jax.make_array_from_process_local_data(everywhere, np.full(jax.local_device_count(), yes), (mesh.size,))
            for yes in (False, True)
            if jax.process_count() > 1
        ]
        self._before = np.False_

    def __call__(self, yes: bool) -> bool:
        if not self._says:
            return yes
        before, self._before = self._before, self._any(self._says[yes])
        return bool(before)


def _end_at_once(code):
    """Ends without waiting for the other processes, as JAX would: they may never come."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
