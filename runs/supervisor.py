"""Supervisor that restarts the process of a run after a failure."""

import os
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from lineage.configs.storage import is_remote
from lineage.runs.folder import METRICS, last_step
from lineage.runs.metrics import GrowingMetrics
from lineage.runs.process import HUNG, MOVED, PREEMPTED, STOP_SIGNALS, end_with_parent, handle_signals, say
from lineage.runs.remote import Mirror

SUPERVISED = "LINEAGE_SUPERVISED"  # environment variable that marks a supervised run
# Exit codes after which a run is not restarted.
FINAL = (0, 2, 130, PREEMPTED, MOVED, *(-number for number in (*STOP_SIGNALS, signal.SIGINT)))
FIRST_DELAY, MAX_DELAY = 5.0, 300.0  # seconds before the first restart, doubled for each further one, and their maximum


def supervise(command: Sequence[str], workdir: str | os.PathLike, max_restarts: int) -> int:
    """Run a command until it succeeds or receives a stop signal, restarting it if it fails; return its exit code.

    A run that fails twice in a row at the same step is not restarted. Failures are reported on standard error.

    Args:
        workdir: folder of the run, whose history and checkpoints give the step.
        max_restarts: maximum number of restarts.
    """
    received: list[int] = []
    process: subprocess.Popen | None = None

    def forward(number, _):
        received.append(number)
        if process:
            process.send_signal(number)

    def groups():
        return [process.pid] if process and process.returncode is None else []

    folder = Mirror(os.fspath(workdir), "runs").folder if is_remote(workdir) else Path(workdir)
    before = handle_signals(forward, groups)
    failed_at, restarts = -1, 0
    try:
        while True:
            # In its own group: a terminal's Ctrl-C reaches only the supervisor, which forwards it once. In another
            # session, a suspended run would stay so after its supervisor was killed; here, Linux continues it.
            settings = {"process_group": 0, "preexec_fn": _begin}
            process = subprocess.Popen(command, env=os.environ | {SUPERVISED: "1"}, **settings)
            for number in received:  # before there was a process
                process.send_signal(number)
            code = process.wait()
            status = code if code >= 0 else 128 - code  # as shells report a signal
            if code in FINAL or received:
                return status
            step = reached(folder)
            failure = f"the run failed at step {step:,} ({reason(code)})"
            if step == failed_at or restarts >= max_restarts:
                why = "for the second time" if step == failed_at else f"after {restarts} restarts"
                say(f"{failure} {why}: it is not restarted")
                return status
            failed_at, seconds, restarts = step, min(FIRST_DELAY * 2 ** min(restarts, 9), MAX_DELAY), restarts + 1
            say(f"{failure}: restart {restarts} of {max_restarts} in {seconds:.0f} s")
            end = time.monotonic() + seconds
            while time.monotonic() < end and not received:
                time.sleep(0.1)
            if received:
                return 128 + received[0]
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _begin() -> None:
    """Let the process of a run end with the supervisor, and write to the terminal from the background."""
    end_with_parent()
    for number in (signal.SIGTTOU, signal.SIGTTIN):
        signal.signal(number, signal.SIG_IGN)


def reached(workdir: Path) -> int:
    """Return the last step in a run's history or checkpoints; 0 if there is none or they cannot be read."""
    steps = [0]
    with suppress(OSError):
        steps.append(last_step(workdir))
    with suppress(OSError, ValueError, IndexError):
        steps.append(GrowingMetrics(workdir / METRICS).read()[-1]["step"])
    return max(steps)


def reason(code: int) -> str:
    """Describe an exit code."""
    if code < 0:
        names = {member.value: member.name for member in signal.Signals}  # without most real-time signals
        return f"killed by {names.get(-code, f'signal {-code}')}"
    return f"exit code {code}: no progress" if code == HUNG else f"exit code {code}"
