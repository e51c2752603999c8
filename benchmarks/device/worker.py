"""Process of `benchmarks.accelerator` for one side of a section.

python -m benchmarks.device.worker SIDE JOB SETTINGS

The process prepares the rows, runs the row named in each line of standard input, and answers in JSON lines.
"""

import importlib
import json
import os
import sys
import traceback
from concurrent.futures import ThreadPoolExecutor
from typing import Any

THREADS = 4  # number of rows that compile concurrently
MODULES = {"lineage": ("benchmarks.device.ours", "benchmarks.device.checks"), "peer": ("benchmarks.device.peers",)}


def main() -> None:
    side, job, settings = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # libraries print to standard output

    def tell(**message: Any) -> None:
        print(json.dumps(message), file=out)

    runs = {}
    try:
        importlib.import_module(MODULES[side][0]).check(settings)
        modules = map(importlib.import_module, MODULES[side])
        rows = next(getattr(module, job) for module in modules if hasattr(module, job))(settings)
        with ThreadPoolExecutor(THREADS) as pool:
            # The state of torch.compile and signal handlers are per thread.
            alone = side == "peer" or len(rows) == 1
            prepared = {row: prepare if alone else pool.submit(prepare).result for row, prepare in rows.items()}
            for row, result in prepared.items():
                try:
                    facts, runs[row] = result()
                    tell(row=row, facts=facts)
                except Exception as error:
                    tell(row=row, error=explained(error))
    except Exception as error:
        tell(row=None, error=explained(error))
    tell(ready=True)
    for line in sys.stdin:
        row, count = json.loads(line)
        try:
            tell(value=runs[row](count))
        except Exception as error:
            tell(error=explained(error))


def explained(error: Exception) -> str:
    """Print the traceback of an error, and return its first line."""
    traceback.print_exception(error, file=sys.stderr)
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:300]


if __name__ == "__main__":
    main()
