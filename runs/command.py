"""Command line of Lineage, as processes start it and as users read it."""

import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from lineage.configs import storage

# Without -P, Python would import modules of the current folder, such as a `queue.py` of the user.
_IMPORTS_HERE = any(os.path.isdir(path or ".") and os.path.samefile(path or ".", ".") for path in sys.path)
LAUNCH = (sys.executable, *([] if _IMPORTS_HERE else ["-P"]), "-m", "lineage.launch")  # works in any folder


def displayed(command: Sequence[str]) -> str:
    """Return a command line as a user types it, with `lineage` if it was called so or from outside the checkout."""
    if tuple(command[: len(LAUNCH)]) == LAUNCH:
        installed = Path(sys.argv[0]).name == "lineage" or not Path("launch.py").is_file()
        program = ("lineage",) if installed else ("python", "launch.py")
        command = [*program, *command[len(LAUNCH) :]]
    return shlex.join(command)


def default_workdir(file: str) -> str:
    """Return outputs/CONFIG or outputs/CONFIG_ARGUMENT, with underscores for the slashes of the argument."""
    path, _, argument = file.partition(":")
    return os.path.join("outputs", Path(path).stem + (f"_{argument}" if argument else "").replace(os.sep, "_"))


def folder_of(run: str | None) -> str | None:
    """Return the folder of a run that is given by its path, or by the name of an experiment as outputs/NAME."""
    if not run or "/" in run.partition(":")[0] or storage.is_remote(run) or os.path.exists(run):
        return run
    return default_workdir(run)
