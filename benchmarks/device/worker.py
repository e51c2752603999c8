"""Process of `benchmarks.accelerator` for one side of a section.

python -m benchmarks.device.worker SIDE JOB SETTINGS DESCRIPTOR

The process prepares the rows, runs those that it receives through the connection of the file descriptor, and answers.
"""

import gc
import importlib
import json
import sys
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from lineage.runs.process import keep_freed

THREADS = 4  # number of rows that compile concurrently
ATTEMPTS, PAUSE = 20, 3.0  # number of attempts to prepare a row, and seconds between them
MODULES = {"lineage": ("benchmarks.device.ours", "benchmarks.device.checks"), "peer": ("benchmarks.device.peers",)}


def main() -> None:
    side, job, settings, connection = sys.argv[1], sys.argv[2], json.loads(sys.argv[3]), Connection(int(sys.argv[4]))

    def tell(**message: Any) -> None:
        connection.send(message)

    if side == "lineage":  # as in a run
        keep_freed()
    runs = {}
    try:
        importlib.import_module(MODULES[side][0]).check(settings)
        modules = map(importlib.import_module, MODULES[side])
        rows = next(getattr(module, job) for module in modules if hasattr(module, job))(settings)
        with ThreadPoolExecutor(THREADS) as pool:
            # The state of torch.compile and signal handlers are per thread.
            alone = side == "peer" or len(rows) == 1
            prepared = {
                row: partial(patiently, prepare) if alone else pool.submit(patiently, prepare).result
                for row, prepare in rows.items()
            }
            for row, result in prepared.items():
                try:
                    facts, runs[row] = result()
                    tell(row=row, facts=facts)
                except Exception as error:
                    tell(row=row, error=explained(error))
    except Exception as error:
        tell(row=None, error=explained(error))
    tell(ready=True)
    while True:
        row, seconds = connection.recv()
        try:
            tell(value=runs[row](seconds))
        except Exception as error:
            tell(error=explained(error))


def patiently(prepare: Callable[[], Any]) -> Any:
    """Prepare a row, again if other processes that prepare theirs have the memory of the device."""
    for _ in range(ATTEMPTS):
        try:
            return prepare()
        except Exception as error:
            if "out of memory" not in str(error).lower():
                raise
            print(f"again: {explained(error)}", file=sys.stderr)
        gc.collect()
        if "torch" in sys.modules:
            sys.modules["torch"].cuda.empty_cache()
        time.sleep(PAUSE)
    return prepare()


def explained(error: Exception) -> str:
    """Print the traceback of an error, and return its first line."""
    traceback.print_exception(error, file=sys.stderr)
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:300]


if __name__ == "__main__":
    main()
