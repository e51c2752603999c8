"""Fuzzing: `python -m tests.fuzz --seconds=3600 --seed=0` mutates files, reads them, and reports by reader.

A reader must return, or raise an exception that the command line prints as one sentence, within 5 s of CPU time and
with memory of at most twice the file's size and 200 MB. `--seed`, `--readers` and `--first` reproduce a case.
"""

import argparse
import json
import os
import random
import resource
import select
import shutil
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from pathlib import Path

os.environ |= {"JAX_PLATFORMS": "cpu", "LINEAGE_CACHE": "", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}

from tests.fuzz.mutate import mutated
from tests.fuzz.readers import READERS

SECONDS, MEMORY = 5, 200 * 10**6
EXPECTED = (ValueError, OSError, ArithmeticError, RecursionError)  # printed by launch.py as one sentence
BATCH = 50  # cases of a reader in a process


def main():
    """Fuzz until the time is over; return 1 if a reader failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, default=3600)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--readers", default=",".join(READERS), help="names of readers, separated by commas")
    parser.add_argument("--first", type=int, default=0, help="number of the first case of each reader")
    parser.add_argument("--cases", type=int, default=10**9, help="maximum number of cases of each reader")
    options = parser.parse_args()
    results, seen, end = Counter(), set(), time.monotonic() + options.seconds
    with tempfile.TemporaryDirectory(prefix="fuzz_") as folder:
        sound = {name: make(name, Path(folder) / "sound") for name in options.readers.split(",")}
        for first in range(options.first, options.first + options.cases, BATCH):
            for name, path in sound.items():
                if time.monotonic() < end:
                    numbers = range(first, min(first + BATCH, options.first + options.cases))
                    for number, result, detail in cases(name, path, Path(folder) / "work", options.seed, numbers):
                        results[name, result] += 1
                        if result not in ("read", "refused") and (name, detail) not in seen:
                            seen.add((name, detail))
                            print(
                                f"--seed={options.seed} --readers='{name}' --first={number}: {result}: {detail}",
                                flush=True,
                            )
            if time.monotonic() >= end:
                break
    for (name, result), count in sorted(results.items()):
        print(f"{name:30} {result:10} {count:7}")
    return int(any(result not in ("read", "refused") for _, result in results))


def make(name, root):
    """Write the sound file of a reader and return its path."""
    folder = root / name.replace("/", "_").replace(" ", "_")
    folder.mkdir(parents=True)
    pid = os.fork()
    if not pid:  # JAX's threads must not exist in the process that is forked later
        try:
            path = READERS[name][0](folder)
            READERS[name][1](path)
            (folder.parent / f"{folder.name}.path").write_text(str(path.relative_to(folder)))
        except BaseException:
            traceback.print_exc()
        sys.stderr.flush()
        os._exit(0)
    os.waitpid(pid, 0)
    return folder / (folder.parent / f"{folder.name}.path").read_text()


def cases(name, sound, folder, seed, numbers):
    """Read mutations in a process of its own; yield (number, result, detail)."""
    numbers = list(numbers)
    while numbers:
        reading, writing = os.pipe()
        pid = os.fork()
        if not pid:
            os.close(reading)
            try:
                _work(name, sound, folder, seed, numbers, writing)
            finally:
                os._exit(0)
        os.close(writing)
        with open(reading, "rb", buffering=0) as lines:
            while numbers and select.select([lines], [], [], 20 * SECONDS)[0] and (line := lines.readline()):
                yield json.loads(line)
                numbers.pop(0)
        os.kill(pid, 9)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if numbers:
            yield numbers.pop(0), "CRASH", "no answer" if status == -9 else f"exit code {status}"


def _work(name, sound, folder, seed, numbers, writing):
    warnings.simplefilter("ignore")
    top = sound.parents[len(sound.parts) - len(folder.parts) - 2]  # of the reader's files
    read, content = READERS[name][1], sound.read_bytes()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    for number in numbers:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(top, folder)
        path = folder / sound.relative_to(top)
        path.write_bytes(mutated(content, random.Random(f"{seed} {name} {number}")))
        limit = 2 * path.stat().st_size + MEMORY
        before = _memory("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        size = _memory("VmSize")
        resource.setrlimit(resource.RLIMIT_AS, (size + 4 * 10**9, resource.RLIM_INFINITY))
        start = time.process_time()
        try:
            read(path)
            result, detail = "read", ""
        except EXPECTED as error:
            message = str(error)
            where = traceback.extract_tb(error.__traceback__)[-1]
            detail = f"{type(error).__name__}: {message[:500]!r} ({where.filename}:{where.lineno})".replace(
                str(folder), ""
            )
            short, named = len(message.replace(str(folder), "")) <= 400, str(folder) in message
            result = "refused" if short and named and "\n" not in message else "UNCLEAR"
        except BaseException as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            result = "TRACEBACK"
            detail = f"{type(error).__name__}: {str(error)[:100]!r} ({where.filename}:{where.lineno})"
        if time.process_time() - start > SECONDS:
            result = "SLOW"
        if _memory("VmHWM") - before > limit:
            result, detail = "MEMORY", f"{(_memory('VmHWM') - before) / 1e6:.0f} MB {detail}"
        os.write(writing, json.dumps([number, result, detail]).encode() + b"\n")


def _memory(name):
    """Return a number of /proc/self/status in bytes."""
    text = Path("/proc/self/status").read_text()
    return int(text.split(f"{name}:")[1].split()[0]) * 1024


if __name__ == "__main__":
    sys.exit(main())
