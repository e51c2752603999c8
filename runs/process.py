"""Settings of this process: memory, signals, exit codes, standard streams, and error messages."""

import _thread
import contextlib
import ctypes
import gc
import json
import logging
import os
import re
import signal
import sys
import sysconfig
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from multiprocessing import process, util
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, TextIO

from lineage.runs.folder import UnknownMetricError, without_nan
from lineage.runs.locks import MovedError

ERROR = "error: "  # begins the line of standard error with which a command or a run fails
PREEMPTED = 75  # exit code (EX_TEMPFAIL) of a run that was stopped by a signal and has saved
HUNG = 76  # exit code of a run that ended itself because a step, an evaluation or a save hung
NOT_FINITE = 77  # exit code of a run whose loss or gradient was not finite
NO_MEMORY = 78  # exit code of a run that needs more memory than there is
UNKNOWN_METRIC = 79  # exit code of a run that has no metric of the name `checkpoint.best`
MOVED = 80  # exit code of a run or sweep whose folder was moved, deleted or replaced
INTERRUPTED = 130  # exit code of a command that Ctrl-C ended at once
GRACE = 5.0  # seconds after a second Ctrl-C in which the process may still end in order
# Signals that clusters send before they reclaim a machine, and that terminals send when they are closed.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)


def keep_freed() -> None:
    """Make glibc keep freed memory for reuse by the next step; without glibc, do nothing.

    XLA's CPU backend allocates the scratch space of each step anew, and by default glibc returns large blocks to the
    kernel, which costs hundreds of thousands of page faults per step. Threads that already exist are not affected.
    """
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "mallopt"):
        mmap_max, trim_threshold, arena_max = -4, -1, -8
        for option, value in ((mmap_max, 0), (trim_threshold, -1), (arena_max, 1)):
            libc.mallopt(option, value)


def end_with_parent() -> None:
    """Ask Linux to send SIGTERM to this process when its parent ends for any reason; elsewhere, do nothing."""
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "prctl"):
        set_parent_death_signal = 1
        libc.prctl(set_parent_death_signal, signal.SIGTERM)


def open_streams() -> None:
    """Open the null device for closed standard streams, so that files of the run do not get their descriptors.

    Standard output becomes UTF-8 in any locale, unless it is a terminal; what cannot be encoded is escaped.
    """
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(number, True)
    os.close(number)
    sys.stdout, sys.stderr = sys.stdout or os.fdopen(1, "w"), sys.stderr or os.fdopen(2, "w")
    with contextlib.suppress(AttributeError):  # not a text file, as in notebooks
        sys.stdout.reconfigure(encoding=None if sys.stdout.isatty() else "utf-8", errors="backslashreplace")


def check_current_folder() -> None:
    """Raise FileNotFoundError if the current folder was deleted: libraries would raise one that names no file."""
    try:
        os.getcwd()
    except FileNotFoundError:
        raise FileNotFoundError("the current folder was deleted: change to another one.") from None


@contextlib.contextmanager
def flushed() -> Iterator[None]:
    """Flush standard output after the block; if that fails, discard it and raise an OSError that names it.

    Otherwise Python would try it at exit, and end with exit code 120 instead of an error message.
    """
    try:
        yield
        sys.stdout.flush()
    except BaseException as error:
        is_unnamed = isinstance(error, OSError) and error.errno is not None and error.filename is None
        try:
            print(end="\n" * is_unnamed, flush=True)  # Python keeps nothing of a large text that it failed to write
        except OSError as failed:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            if isinstance(error, SystemExit) or (isinstance(error, OSError) and error.errno == failed.errno):
                raise OSError(failed.errno, failed.strerror, "standard output") from None
        raise


def is_reported(error: Exception) -> bool:
    """Return whether an error is reported in one sentence. A thread that cannot start is a plain RuntimeError."""
    kinds = (ValueError, OSError, ArithmeticError, MemoryError, ModuleNotFoundError, RecursionError)
    return isinstance(error, kinds) or str(error) == "can't start new thread"


def hint(error: Exception) -> str:
    """Return the line below an error: where the user's own code led to it, if it did, and how to see more."""
    others = (str(Path(__file__).parents[1] / "configs"), *map(sysconfig.get_path, ("stdlib", "purelib", "platlib")))
    place = ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        file, module = frame.f_code.co_filename, frame.f_globals.get("__name__", "")
        if not file.startswith((*others, "<")) and not module.startswith(("lineage.", "__main__")):
            place = f"raised in {printable(file)}, line {line}; "
    return f"({place}use --traceback for the full traceback)"


def exit_code(error: Exception) -> int:
    """Return the exit code of a command that raised an error."""
    codes = {FloatingPointError: NOT_FINITE, MemoryError: NO_MEMORY}
    codes |= {UnknownMetricError: UNKNOWN_METRIC, MovedError: MOVED}
    return next((code for kind, code in codes.items() if isinstance(error, kind)), 1)


def printable(text: str, kept: str = "") -> str:
    """Return a text, such as the name of somebody else's folder, with control characters except `kept` ones escaped."""
    return "".join(char if char.isprintable() or char in kept else ascii(char)[1:-1] for char in text)


def for_terminal(text: Any, stream: TextIO | None = None) -> str:
    """Return a text to print; for a terminal, which obeys them, its control characters are escaped.

    These include the characters that change the direction of a text. The stream is by default standard output.
    """
    codes = r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]"
    is_terminal = (stream or sys.stdout).isatty()
    return re.sub(codes, lambda code: ascii(code[0])[1:-1], str(text)) if is_terminal else str(text)


def say(text: str) -> None:
    """Print a line to standard error, which may be a closed pipe or terminal, or on a full disk."""
    with contextlib.suppress(OSError):
        print(for_terminal(text, sys.stderr), file=sys.stderr, flush=True)


def print_error(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print the traceback of an exception as `say`, for `sys.excepthook`."""
    say("".join(traceback.format_exception(error)).rstrip("\n"))


def end_at_once(code: int, text: str = "") -> NoReturn:
    """Print a text to standard error as `say`, and end the process without waiting for threads and other processes.

    The text bypasses `sys.stderr`, whose lock a hanging thread may hold. Worker processes are killed: one that hangs or
    is suspended would outlive this process and keep its output open, so that the reader of a pipe would wait.
    """
    for worker in process.active_children():
        with contextlib.suppress(OSError):
            worker.kill()
    with contextlib.suppress(OSError):
        os.write(2, text.encode())
    os._exit(code)


def end_interrupted() -> NoReturn:
    """End the process after a Ctrl-C without Python's shutdown, which crashes if JAX is still compiling in a thread."""
    util._run_finalizers(0)  # deletes semaphores, which Python would otherwise report as leaked
    end_at_once(INTERRUPTED)


def show(text: Any) -> None:
    """Print a text that may contain names or texts from somebody else's files."""
    print(for_terminal(text))


def to_json(metrics: Mapping[str, float], indent: int | None = None) -> str:
    """Return metrics as JSON, with null for NaN and infinity, as in `metrics.jsonl`."""
    return json.dumps(without_nan(metrics), indent=indent)


@contextlib.contextmanager
def brief_errors(traceback: bool = False, until_exit: bool = False) -> Iterator[None]:
    """Hide messages of Orbax and TensorStore about errors that they also raise, unless `traceback` is True.

    `until_exit` also hides those of operations that finish after the context, while the process ends.

    A KeyboardInterrupt that Python raised where it cannot be, as in JAX's callback of the garbage collector, would be
    printed and have no effect: it is raised again after the callback.

    Orbax logs the traceback. After an error in one array, TensorStore's other reads or writes find the event loop
    closed when they finish, which cannot be caught, asyncio reports those that do not finish, and Python reports the
    errors of Orbax's coroutines that it deletes. With too many open files, these do not start, an event loop that could
    not be opened cannot be closed, and Grain cannot join a process that it could not start.
    """
    hook = sys.unraisablehook

    def interrupt_again():
        time.sleep(0.1)  # until the hook has returned
        signal.raise_signal(signal.SIGINT)

    def unless_after_an_error(error):
        if isinstance(error.exc_value, KeyboardInterrupt):
            _thread.start_new_thread(interrupt_again, ())  # does not wait for the thread
            return
        code = getattr(error.object, "cr_code", None)  # of a coroutine
        is_known = str(error.exc_value) in ("Event loop is closed", "can only join a started process")
        is_known |= getattr(error.object, "__qualname__", "") == "BaseEventLoop.__del__"
        if traceback or not (is_known or (code and f"{os.sep}orbax{os.sep}" in code.co_filename)):
            hook(error)

    for library in ("absl", "asyncio"):
        logging.getLogger(library).setLevel(logging.ERROR if traceback else logging.CRITICAL)
    sys.unraisablehook = unless_after_an_error
    if not traceback:
        warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
    try:
        yield
    finally:
        gc.collect(1)  # deletes objects that an error has left while messages about them are hidden
        if not until_exit:
            sys.unraisablehook = hook


@contextlib.contextmanager
def interruptible_imports() -> Iterator[None]:
    """End the process at once on a Ctrl-C during an import; otherwise, raise KeyboardInterrupt as usual.

    A KeyboardInterrupt in the middle of an import aborts the process in some libraries, such as jaxlib, and is taken
    for a damaged installation by others. A Ctrl-C that is ignored or has another handler is left so.
    """

    def interrupt(number, frame):
        while frame:
            if frame.f_globals.get("__name__") == "importlib._bootstrap":
                end_at_once(INTERRUPTED, "\ninterrupted\n")
            frame = frame.f_back
        raise KeyboardInterrupt

    is_main = threading.current_thread() is threading.main_thread()
    is_default = is_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if is_default:
        signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        if is_default:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def handle_signals(
    handler: Callable[[int, Any], None], groups: Callable[[], Iterable[int]] | None = None
) -> dict[int, Any]:
    """Set the handler of SIGINT and `STOP_SIGNALS`; return the previous ones. Under `nohup`, SIGHUP is ignored.

    SIGCHLD, which a parent process may have ignored, gets its default: otherwise every exit code of a child would be 0.
    With `groups`, a function that returns process groups of children, Ctrl-Z (SIGTSTP) suspends them, too.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    hidden = {signal.SIGHUP} if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else set()
    chosen = {*STOP_SIGNALS, signal.SIGINT} - hidden
    handlers: dict[int, Callable] = dict.fromkeys(chosen, handler)
    if groups and signal.getsignal(signal.SIGTSTP) is not signal.SIG_IGN:
        handlers[signal.SIGTSTP] = partial(_suspend, groups)
    # signal.signal returns None for a handler that was not installed from Python.
    return {number: signal.signal(number, function) or signal.SIG_DFL for number, function in handlers.items()}


def _suspend(groups: Callable[[], Iterable[int]], number: int, frame: Any) -> None:
    """Suspend process groups and this process until it gets SIGCONT; groups in other sessions ignore SIGTSTP."""
    send_to_groups(groups(), signal.SIGSTOP)
    os.kill(os.getpid(), signal.SIGSTOP)
    send_to_groups(groups(), signal.SIGCONT)


def send_to_groups(groups: Iterable[int], number: int) -> None:
    """Send a signal to process groups, some of which may have ended."""
    for group in groups:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, number)


def ignore_stop_signals() -> None:
    """Ignore `STOP_SIGNALS`, of which a cluster may send several, so that they do not change the exit code."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


class StopSignal(contextlib.AbstractContextManager):
    """Context manager that records stop signals in `received`.

    The signals are `STOP_SIGNALS`, of which a cluster may send several, and SIGINT. A second SIGINT goes to the
    previous handler. Python calls handlers only in the main thread, between two instructions: if it does not within
    `GRACE` seconds, because a call hangs, a second SIGINT ends the process. For `groups`, see `handle_signals`.
    """

    def __init__(self, groups: Callable[[], Iterable[int]] | None = None):
        self.received, self._groups = False, groups
        self._before: dict[int, Any] = {}
        self._sent = self._handled = 0  # numbers of SIGINTs

    def __enter__(self):
        if threading.current_thread() is threading.main_thread():
            self._before = handle_signals(self._receive, self._groups)
            reading, writing = os.pipe()
            os.set_blocking(writing, False)
            self._wakeup = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
            threading.Thread(target=self._count, args=(reading,), daemon=True).start()
        return self

    def _receive(self, number, frame):
        self.received = True
        if number == signal.SIGINT:
            self._handled = max(self._handled + 1, self._sent)  # during a call, several signals are one
            if self._handled > 1:
                signal.signal(number, self._before.pop(number))
                signal.raise_signal(number)

    def _count(self, reading):
        """Count the SIGINTs, whose numbers Python writes to a pipe at once; end the process if two are not handled."""
        with open(reading, "rb", buffering=0) as numbers:
            while number := numbers.read(1):
                self._sent += number[0] == signal.SIGINT
                if self._sent > 1 and self._handled < 2:
                    time.sleep(GRACE)
                    if self._handled < 2:
                        end_at_once(INTERRUPTED, "\ninterrupted\n")

    def __exit__(self, *_):
        if self._before:
            os.close(signal.set_wakeup_fd(self._wakeup))
        for number, handler in self._before.items():
            signal.signal(number, handler)
