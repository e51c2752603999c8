"""Fault injection: `python -m tests.faults --faults=1000 --seed=0` disturbs runs and reports the results by kind.

After each fault the same command is started again. It must end with the results of an undisturbed run, bit for bit, or
in one sentence that names a file, without the loss of a sound checkpoint. `--seed` and `--first` reproduce a fault.
"""

import argparse
import contextlib
import copy
import json
import os
import random
import shutil
import signal
import sys
import tempfile
from collections import Counter
from functools import partial
from pathlib import Path

sys.modules["torch"] = None  # TensorBoard's writer would import it, which takes long
os.environ |= {"JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": "1", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
os.environ["XLA_FLAGS"] = "--xla_backend_optimization_level=0"

from lineage.runs.process import brief_errors  # noqa: E402
from tests import slurm  # noqa: E402
from tests.faults import processes  # noqa: E402
from tests.faults.harness import FileEvents, Subject, inject, quick  # noqa: E402
from tests.faults.jobs import Jobs  # noqa: E402

GOOD = ("same", "sentence", "no fault")  # "no fault": the command ended before its moment
BATCH = 40  # faults per process
SECONDS = 1200  # of a process without a result, after which it hangs
KINDS = {"killed": 8, "damaged": 6, "signals": 2, "unreadable": 2, "full disk": 2}  # with the number in twenty


def main():
    """Inject faults; return 1 if a result is wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--faults", type=int, default=1000, help="number of faults (default 1000)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first fault")
    text = f"kinds, separated by commas (default {','.join(KINDS)}), or some of {','.join(processes.KINDS)}"
    parser.add_argument("--kinds", default=",".join(KINDS), help=text)
    options = parser.parse_args()
    chosen = options.kinds.split(",")
    known = processes.KINDS if {*chosen} & {*processes.KINDS} else KINDS
    if unknown := {*chosen} - {*known}:
        parser.error(f"--kinds has {', '.join(sorted(unknown))}: it can be {text}")
    kinds = {kind: known[kind] for kind in chosen}
    faults = [Fault(options.seed, options.first + number, kinds) for number in range(options.faults)]
    results = Counter()
    with tempfile.TemporaryDirectory(prefix="faults_") as folder:
        base = Path(folder)
        os.environ["JAX_COMPILATION_CACHE_DIR"] = str(base / "programs")
        if known is KINDS:
            record(base)
            for first in range(0, len(faults), BATCH):
                results.update(batch(base, faults[first : first + BATCH]))
        else:
            results.update(groups(base, faults))
    for (kind, result), count in sorted(results.items()):
        print(f"{kind:12} {result:10} {count:5}")
    return int(any(result not in GOOD for _, result in results))


class Fault:
    """Fault of a seed and a number: its kind, its random numbers, and its moment as a fraction of all file operations.

    Attributes:
        command: command that is disturbed, or is run after the damage.
        detail: description, as far as it is known.
        reached: whether the command came to that moment.
        loses: parts of the results that the fault may change.
    """

    def __init__(self, seed, number, kinds):
        self.rng, self.number = random.Random(f"{seed} {number}"), number
        self.option = f"--kinds='{','.join(kinds)}' --seed={seed} --first={number} --faults=1"
        self.kind = self.rng.choices([*kinds], kinds.values())[0]
        self.moment, self.command, self.detail, self.reached, self.loses = self.rng.random(), "", "", True, ()


def forked(function, log):
    """Call a function in a new process, with its output in a file; return the process's id."""
    if pid := os.fork():
        return pid
    code = 1
    try:
        with log.open("ab") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        function()
        code = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stderr.flush()
        os._exit(code)


def record(base, places=()):
    """Run all commands in a process, which is stopped before the file operations with the numbers `places`.

    There, the folder is copied to `base/NUMBER`: it is what a kill at this moment leaves. The reference results and the
    number of the last operation of each command are written to `base/reference.json` unless the process is stopped.
    """
    subject, events = Subject(base / "subject"), FileEvents(base / "subject")
    subject.begin()

    def work():
        results, total = {}, 0
        for command in subject.commands:
            (base / "command").write_text(command)
            within_command = {place - total for place in places}
            with events.acting(lambda path: os.kill(os.getpid(), signal.SIGSTOP), within_command):
                code, output = subject.call(command)
            if code:
                raise RuntimeError(output)
            if command == "train":
                shutil.copytree(subject.root, base / "trained", dirs_exist_ok=True)
            results[command] = {"count": events.count, "result": subject.result(command, output)}
            total += events.count
        name = "stopped.json" if places else "reference.json"
        (base / name).write_text(json.dumps(results))

    pid = forked(work, base / "log.txt")
    for place in (*sorted(places), None):
        _, status = os.waitpid(pid, os.WUNTRACED)
        if not os.WIFSTOPPED(status):
            break
        shutil.copytree(subject.root, base / str(place))
        (base / f"{place}.command").write_text((base / "command").read_text())
        os.kill(pid, signal.SIGCONT)
    if status:
        raise RuntimeError((base / "log.txt").read_text()[-5000:])


def batch(base, faults):
    """Inject faults in a process; yield the kind and the result of each, and print what is wrong."""
    reference = json.loads((base / "reference.json").read_text())
    total = sum(entry["count"] for entry in reference.values())
    places = {fault: 1 + int(fault.moment * total) for fault in faults if fault.kind == "killed"}
    if places:
        record(base, sorted({*places.values()}))
        stopped = json.loads((base / "stopped.json").read_text())
        same = all(stopped[command]["result"] == entry["result"] for command, entry in reference.items())
        yield "stopped", "same" if same else "WRONG"
    while faults:
        again = False
        reading, writing = os.pipe()
        pid = forked(partial(work, base, faults, places, reference, writing), base / "log.txt")
        os.close(writing)
        with open(reading) as lines:
            for line in lines:
                result, detail = json.loads(line)
                if result == "killed":
                    faults[0].command, faults[0].detail = detail.split()[0], detail
                    again = True
                    break
                yield say(faults[0], result, detail)
                faults, again = faults[1:], result == "WRONG"
        os.waitpid(pid, 0)
        if faults and not again:
            log = (base / "log.txt").read_text()[-3000:]
            print(f"fault {faults[0].number}, {faults[0].kind}: the process died\n{log}")
            yield faults[0].kind, "DIED"
            faults = faults[1:]
    for place in {*places.values()}:
        shutil.rmtree(base / str(place))


def groups(base, faults):
    """Inject faults into groups of processes; yield the kind and the result of each, and print it."""
    started = {}
    with contextlib.ExitStack() as stack:
        for fault in faults:
            if fault.kind not in started:
                if fault.kind == "slurm":
                    os.environ |= stack.enter_context(slurm.cluster(base / "cluster"))
                started[fault.kind] = (Jobs if fault.kind == "slurm" else processes.Group)(fault.kind, base)
            yield say(fault, *processes.inject(fault, started[fault.kind]))


def say(fault, result, detail):
    """Print what came of a fault; return its kind and the result."""
    print(f"fault {fault.number}, {fault.kind}, {result}: {detail}", flush=True)
    if result == "WRONG":
        print(f"  {fault.option}", flush=True)
    return fault.kind, result


def work(base, faults, places, reference, writing):
    """Inject faults in this process, and write a line of JSON for each."""
    subject, events = Subject(base / "subject"), FileEvents(base / "subject")
    quick()
    with brief_errors(), open(writing, "w") as lines:  # errors also arrive between two commands
        for fault in faults:
            signal.alarm(SECONDS)
            if fault.kind == "killed":
                place = places[fault]
                subject.restore(base / str(place))
                fault.command = (base / f"{place}.command").read_text()
                fault.detail = f"{fault.command} at {place}"
            result, detail = inject(fault, subject, events, base / "trained", copy.deepcopy(reference))
            print(json.dumps([result, detail]), file=lines, flush=True)
            if result in ("killed", "WRONG"):  # threads of the interrupted command may go on
                return


if __name__ == "__main__":
    sys.exit(main())
