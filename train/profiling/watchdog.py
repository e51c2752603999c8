"""Watchdog that ends a run with a hanging step, evaluation or save."""

import contextlib
import faulthandler
import sys
import threading
import time
from collections.abc import Iterator

from lineage.runs.process import ERROR, HUNG, end_at_once

FACTOR = 20  # a step hangs if it takes this many times the mean duration
MIN_LIMIT, FIRST_LIMIT = 600.0, 3600.0  # seconds: minimum of this limit; limit of the first step, minimum of activities
COMPILER = "jax._src.compiler"  # module on the stack of a compiling thread


class Watchdog(contextlib.AbstractContextManager):
    """Thread that ends the process, with exit code `HUNG` and the stacks of all threads, if there is no progress.

    The time is counted in ticks of the thread, so that it excludes suspension of the process or the machine.

    Args:
        minutes: limit of a step; None: determined by the mean of the previous steps (see `limit`); 0: none.
    """

    def __init__(self, minutes: float | None = None):
        self._minutes, self._number, self._passed = minutes, 0, 0.0  # step in progress (0: none) and its seconds
        self._activity = ""  # "evaluating" or "saving" after this step
        self._steps, self._seconds = 0, 0.0  # number of completed steps; their seconds, without the first
        self._tick, self._ended = min(1.0, 60 * minutes / 10 if minutes else 1.0), threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    @property
    def limit(self) -> float:
        """Limit of a step, or of the time without progress of an activity after it, in seconds."""
        limit = max(MIN_LIMIT, FACTOR * self._seconds / (self._steps - 1)) if self._steps > 1 else FIRST_LIMIT
        limit = limit if self._minutes is None else 60.0 * self._minutes
        return max(limit, FIRST_LIMIT) if self._activity else limit

    @contextlib.contextmanager
    def step(self, number: int, activity: str = "") -> Iterator[None]:
        """Watch a step or, after it, an activity: "evaluating" or "saving"; `progress` restarts its time."""
        start, self._activity, self._passed, self._number = time.monotonic(), activity, 0.0, number
        try:
            yield
        finally:
            self._number = 0
        if not activity:
            self._seconds += time.monotonic() - start if self._steps else 0.0
            self._steps += 1

    def progress(self) -> None:
        """Restart the time of the current activity."""
        self._passed = 0.0

    def __enter__(self) -> "Watchdog":
        if self._minutes != 0:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()

    def _watch(self):
        while not self._ended.wait(self._tick):
            if self._number and not _is_compiling():
                self._passed += self._tick
            # The limit is read before the time: if an activity begins in between, its time is 0.
            if self._number and self.limit <= self._passed:
                self._end()

    def _end(self):
        faulthandler.dump_traceback(2, all_threads=True)
        what = f"{self._activity} after" if self._activity else "in"
        text = f"no progress for {self.limit:,.0f} s {what} step {self._number:,} (step_timeout_minutes)"
        end_at_once(HUNG, f"\n{ERROR}{text}: the stacks of all threads are above. Start the run again to resume.\n")


def _is_compiling():
    """Return whether a thread is compiling a program, for which there is no limit."""
    for frame in sys._current_frames().values():
        while frame is not None:
            if frame.f_globals.get("__name__") == COMPILER:
                return True
            frame = frame.f_back
    return False
