"""Speed and correctness on an accelerator in 8 minutes, compared with PyTorch on the same device; or speed on a CPU.

python -m benchmarks.accelerator --out=outputs/accelerator
python -m benchmarks.accelerator --cpu --minutes=60 --out=outputs/cpu
python -m benchmarks.accelerator --only gpt2 llama --set gpt2:loader.batch_size=64 --set llama:model.remat=None
python -m benchmarks.accelerator --tiny --out=outputs/rehearsal

The two sides of a section compile in separate processes and are then timed in turns, a few steps at a time, while no
other process computes or has a large part of the device's memory; the median over the rounds is reported. Compilation
and warm-up are not timed. If a side fails, only its row is lost, and contains the reason. Rows are written as they are
measured: `rows.jsonl` has all figures, `table.md` is for RESULTS.md, and `failures.txt` has the output of processes
that failed.

The ratio is the time of Lineage over that of the peer. MFU uses the model FLOPs of `lineage describe` for both sides,
without savings from a causal mask, and the data sheet's peak for bfloat16 (on an unknown device, a measured peak).
Bandwidth counts the bytes that must be read: in decoding, the weights and the filled part of the cache.
"""

import argparse
import importlib.util
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.device.report import Report
from benchmarks.device.sections import SECTIONS

ROOT = Path(__file__).resolve().parent.parent
RESERVE = 20  # minimum remaining seconds of the budget to start a section


def main() -> None:
    options = arguments()
    started = time.monotonic()
    deadline = started + 60 * options.minutes
    options.out.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # also ends the other processes
    with tempfile.TemporaryDirectory() as folder:
        report, environment = Report(options.out), environ(Path(folder), options.tiny)
        names = list(options.only or (name for name in SECTIONS if not options.cpu or SECTIONS[name].cpu))
        while names:
            group, names = names[: options.together], names[options.together :]
            if deadline - time.monotonic() < RESERVE:
                for name in (*group, *names):
                    report.add(name, None, {}, {}, {}, {"lineage": f"the {options.minutes:g} minutes were over"})
                break
            pairs = {name: sides(name, options, environment, Path(folder)) for name in group}
            workers = [worker for pair in pairs.values() for worker in pair.values()]
            try:
                limit = min(deadline, time.monotonic() + options.limit)
                for worker in workers:
                    worker.prepare(limit)
                for name, pair in pairs.items():
                    measure(name, pair, options, deadline, report)
                    for worker in pair.values():
                        worker.stop()
            finally:
                for worker in workers:
                    worker.stop()
                report.failures([worker.log for worker in workers if worker.errors])
    print(f"\n{report.table()}\n{time.monotonic() - started:.0f} s, {options.out / 'table.md'}")


def arguments() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("outputs/accelerator"), help="folder of the results")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, metavar="SECTION", help=f"of {', '.join(SECTIONS)}")
    parser.add_argument("--minutes", type=float, default=8.0, help="no row is begun after this time")
    parser.add_argument("--limit", type=float, default=200.0, help="seconds in which a process must have compiled")
    parser.add_argument("--together", type=int, default=3, help="sections that compile at the same time")
    parser.add_argument("--rounds", type=int, default=5, help="turns of both sides")
    parser.add_argument("--seconds", type=float, default=0.7, help="duration of a turn")
    parser.add_argument("--nanogpt", default="", help="path of a nanoGPT checkout, for GPT-2 instead of `transformers`")
    parser.add_argument("--mode", default="default", help="mode of torch.compile in training")
    parser.add_argument("--backend", help="of torch.compile (default inductor; aot_eager with --tiny; none with --cpu)")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION:KEY=VALUE", help="setting or config key")
    sizes = parser.add_mutually_exclusive_group()
    sizes.add_argument("--tiny", action="store_true", help="tiny sizes, to rehearse on a CPU")
    sizes.add_argument("--cpu", action="store_true", help="training in float32 on a CPU, in batches of 4 and 8")
    options = parser.parse_args()
    options.backend = options.backend or ("aot_eager" if options.tiny else "eager" if options.cpu else "inductor")
    return options


def environ(folder: Path, tiny: bool) -> dict[str, str]:
    """Return the environment of the processes: they share the device's memory and import the checkout's package."""
    environment = dict(os.environ, XLA_PYTHON_CLIENT_PREALLOCATE="false", TOKENIZERS_PARALLELISM="false")
    flags = environment.get("XLA_FLAGS", "").split()
    if tiny:
        environment["OMP_NUM_THREADS"] = "1"  # waiting threads of PyTorch slow down the other processes
    environment["XLA_FLAGS"] = " ".join(flag for flag in flags if "host_platform_device_count" not in flag)
    paths = [str(ROOT), *environment.get("PYTHONPATH", "").split(os.pathsep)]
    if importlib.util.find_spec("lineage") is None:  # not installed
        (folder / "lineage").symlink_to(ROOT)
        paths.append(str(folder))
    return environment | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}


def sides(name: str, options: argparse.Namespace, environment: dict[str, str], folder: Path) -> dict[str, "Worker"]:
    """Start the processes of a section, by side ("lineage" and "peer"), with their output in a folder."""
    section = SECTIONS[name]
    changes = dict((options.tiny and section.tiny) or (options.cpu and section.cpu) or {})
    for text in options.set:
        key, _, value = text.partition("=")
        if key.startswith(f"{name}:"):
            changes[key.removeprefix(f"{name}:")] = value
    settings = section.resolved(changes) | {"on_cpu": options.tiny or options.cpu}
    settings |= {key: getattr(options, key) for key in ("nanogpt", "mode", "backend")}
    names = ("lineage", "peer") if section.peer else ("lineage",)
    return {side: Worker(side, section.job, settings, environment, folder / f"{name}.{side}.txt") for side in names}


class Worker:
    """Process of `benchmarks.device.worker`.

    Attributes:
        facts: facts of each row that is ready to be measured.
        errors: errors of the other rows; the key None stands for all rows.
        log: file of the output.
    """

    def __init__(self, side: str, job: str, settings: dict[str, Any], environment: dict[str, str], log: Path):
        self.facts: dict[str, dict[str, Any]] = {}
        self.errors: dict[str | None, str] = {}
        self.log = log
        self.connection, other = multiprocessing.Pipe()
        number, streams = other.fileno(), {"stdout": log.open("w"), "stderr": subprocess.STDOUT}
        command = [sys.executable, "-m", "benchmarks.device.worker", side, job, json.dumps(settings), str(number)]
        places = {"cwd": ROOT, "env": environment, "start_new_session": True, "pass_fds": [number]}
        self.process = subprocess.Popen(command, **places, **streams)
        other.close()

    def receive(self, deadline: float) -> dict[str, Any]:
        """Return the next message; if there is none until the deadline, end the process and return an "error"."""
        try:
            if self.connection.poll(max(0.1, deadline - time.monotonic())):
                return self.connection.recv()
            error = "it took too long"
        except (EOFError, OSError):
            error = f"the process ended with {self.process.wait()}"
        self.stop()
        self.errors[None] = error
        return {"error": error}

    def prepare(self, deadline: float) -> None:
        """Wait until the rows are compiled."""
        while None not in self.errors and not (message := self.receive(deadline)).get("ready"):
            if "error" in message:
                self.errors[message.get("row")] = message["error"]
            else:
                self.facts[message["row"]] = message["facts"]

    def run(self, row: str, seconds: float, deadline: float) -> Any:
        """Return the time of a step, measured for some seconds, or the results of a check.

        Raise RuntimeError if the row has failed.
        """
        if problem := self.errors.get(row) or self.errors.get(None):
            raise RuntimeError(problem)
        self.connection.send((row, seconds))
        message = self.receive(deadline)
        if "error" in message:
            self.errors[row] = message["error"]
            raise RuntimeError(message["error"])
        return message["value"]

    def stop(self) -> None:
        """End the process and its descendants."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


def measure(name: str, pair: dict[str, Worker], options: argparse.Namespace, deadline: float, report: Report) -> None:
    """Measure the rows of a section, in turns if it has two sides, and report each."""
    known = [*(row for worker in pair.values() for row in (*worker.facts, *worker.errors) if row is not None)]
    for row in dict.fromkeys(known) or [None]:
        times, errors, values = {side: [] for side in pair}, {}, {}
        for _ in range(options.rounds if len(pair) > 1 else 1):
            for side, worker in pair.items():
                if side in errors:
                    continue
                try:
                    limit = min(deadline + RESERVE, time.monotonic() + options.limit / 2)
                    value = worker.run(row, options.seconds, limit)
                except (RuntimeError, OSError) as error:
                    errors[side] = str(error)
                    continue
                if isinstance(value, dict):
                    values = value
                else:
                    times[side].append(value)
        facts = {side: worker.facts.get(row, {}) for side, worker in pair.items()}
        report.add(name, row, facts, times, values, errors)


if __name__ == "__main__":
    main()
