"""Settings of a process."""

import contextlib
import os
import select
import signal
import subprocess
import sys
import time

import pytest

from lineage import launch
from lineage.runs.process import brief_errors, say

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


@pytest.mark.thorough
@pytest.mark.skipif(sys.platform != "linux", reason="needs glibc")
def test_freed_memory_is_used_again():
    kept, returned = (
        int(subprocess.run([sys.executable, "-c", FAULTS, each], capture_output=True, text=True, check=True).stdout)
        for each in ("kept", "returned")
    )
    assert kept < 20 < 300 < returned


@pytest.mark.parametrize("within", [False, True])
def test_processes_import_modules_of_the_current_folder_only_if_this_one_does(within, tmp_path):
    (tmp_path / "mine.py").write_text("raise SystemExit(3)")
    start = [sys.executable, *([] if within else ["-P"]), "-c"]
    code = "import subprocess, sys; from lineage.runs.command import LAUNCH; "
    code += "sys.exit(subprocess.call([*LAUNCH[:-1], 'mine']))"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run([*start, code], cwd=tmp_path, env=environment, stdout=subprocess.PIPE)
    assert done.returncode == (3 if within else 1)


def test_process_of_several_ends_at_once_without_a_place_for_its_output():
    script = "import sys\nfrom lineage.train.distributed import _end_at_once\n"
    script += "sys.stdout = open('/dev/full', 'w')\nsys.stdout.write('unwritten')\n_end_at_once(3)"
    assert subprocess.run([sys.executable, "-c", script]).returncode == 3


def test_process_that_ends_at_once_leaves_no_suspended_worker():
    """Check that the pipe, which the worker inherits, is closed."""
    script = "import multiprocessing, os, signal, time\nfrom lineage.runs.process import end_at_once\n"
    script += "worker = multiprocessing.get_context('spawn').Process(target=time.sleep, args=(60,), daemon=True)\n"
    script += "worker.start()\nos.kill(worker.pid, signal.SIGSTOP)\nprint(worker.pid, flush=True)\nend_at_once(76)"
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as run:
        pid = int(run.stdout.readline())
        assert run.wait(60) == 76
        try:
            assert select.select([run.stdout], [], [], 10)[0] == [run.stdout]
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("is_terminal", [True, False])
def test_notes_on_a_terminal_have_no_control_characters(monkeypatch, capsys, is_terminal):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    shown = r"a\x1b[31m\u202eb\u2066" if is_terminal else "a\x1b[31m\u202eb\u2066"
    say("a\x1b[31m\u202eb\u2066")
    assert capsys.readouterr().err == f"{shown}\n"


def test_event_loop_for_which_there_is_no_file_descriptor_is_not_reported():
    code = "import asyncio, contextlib, resource\nfrom lineage.runs.process import brief_errors\n"
    code += "async def write(): pass\nresource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))\n"
    code += "with brief_errors():\n    with contextlib.suppress(OSError):\n        asyncio.run(write())"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (run.returncode, run.stderr) == (0, "")


@pytest.mark.parametrize("until_exit", [True, False])
def test_operation_that_finishes_while_the_process_ends_is_reported_unless_hidden(until_exit):
    code = "import sys\nfrom lineage.runs.process import brief_errors\n"
    code += "class Reading:\n    def __del__(self): raise RuntimeError('Event loop is closed')\n"
    code += f"with brief_errors(until_exit={until_exit}):\n    left = Reading()"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (run.returncode, "Event loop is closed" in run.stderr) == (0, not until_exit)


@pytest.mark.parametrize("traceback", [False, True])
def test_interrupt_in_a_callback_that_cannot_raise_is_raised_after_it(traceback, capfd):
    class Interrupted:
        def __del__(self):
            signal.raise_signal(signal.SIGINT)

    objects = [Interrupted()]
    with brief_errors(traceback):
        objects.clear()
        with pytest.raises(KeyboardInterrupt):
            time.sleep(5)
    assert not capfd.readouterr().err


def test_interrupt_during_an_import_ends_the_process_at_once(tmp_path):
    """Check an import that takes a KeyboardInterrupt for another error, as those of jaxlib do."""
    (tmp_path / "slow.py").write_text(
        "import signal\ntry:\n    signal.raise_signal(signal.SIGINT)\nexcept BaseException:\n    raise ImportError"
    )
    code = "from lineage.runs import process\n"
    code += "with process.interruptible_imports():\n    {}"
    for statement, ended in (
        ("import slow", 130),
        ("import signal; signal.raise_signal(signal.SIGINT)", -signal.SIGINT),
    ):
        command = [sys.executable, "-c", code.format(statement)]
        run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        assert run.returncode == ended, run.stderr
        assert (run.stderr == "\ninterrupted\n") == (ended == 130)


def test_errors_in_the_code_of_the_user_are_located(tmp_path, capsys):
    (path := tmp_path / "mine.py").write_text("def get_config():\n    return int('a')\n")
    assert launch.main(["config", str(path)]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1] == f"(raised in {path}, line 2; use --traceback for the full traceback)"
    assert launch.main(["config", "no_experiment"]) == 1
    assert capsys.readouterr().err.splitlines()[-1] == "(use --traceback for the full traceback)"
