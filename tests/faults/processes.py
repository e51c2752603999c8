"""Faults of a sweep, a search, a run of two processes, and SLURM jobs: processes are killed, stopped or told to end, at
moments that the lines of their histories tell, or a file is damaged between two starts.
"""

import contextlib
import csv
import hashlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import time

from jax import tree

from lineage.runs.command import LAUNCH
from lineage.runs.folder import MEASURED, METRICS
from lineage.runs.live import LOG
from lineage.runs.locks import CLAIM, held
from lineage.runs.process import PREEMPTED, brief_errors
from lineage.train.reading import read_fields
from lineage.train.step import TrainState
from tests.faults.harness import ROOT, Damage, resumed, sound

KINDS = {"sweep": 3, "search": 1, "hosts": 3, "slurm": 1}  # searches and jobs take longer
TOTAL, SECONDS = 8, 600
CONFIG = f"""
import sys
from lineage.configs import cli
from lineage.configs.sweeps import Floats, Search

if "train" in sys.argv:  # a report takes as long as the rest of such a run
    from lineage.train import loop

    def write_no_report(workdir):
        pass

    loop.write_report = write_no_report

def get_config():
    config, _ = cli.load("{ROOT}/tests/tiny.py:gpt")
    config.model.depth, config.source.max_bytes = 1, 6000
    config.update(total_steps={TOTAL}, evaluate_every_steps=4, save_every_steps=2)
    config.cluster.cpus_per_task = 1
    return config

def sweep():
    yield {{"seed": 1}}
    yield {{"seed": 2}}

def search():
    return Search({{"schedule.learning_rate": Floats(1e-4, 1e-2, log=True)}}, trials=3, startup=1, prune=False)
"""
SETTINGS = {"sweep": ["sweep", "--parallel=2"], "search": ["sweep", "--optuna"], "hosts": ["train"]}
SETTINGS["slurm"] = ["slurm", "submit", "--sweep"]
SIGNALS = {"kill": signal.SIGKILL, "end": signal.SIGTERM, "suspend": signal.SIGSTOP, "continue": signal.SIGCONT}
ENDS = {"kill": {0, 1, -signal.SIGKILL}, "end": {0, 1, PREEMPTED, -signal.SIGTERM}}  # exit codes
ENDS |= {"suspend": {0}, "requeue": {0}}


class Group:
    """The processes of a command on the folder `run`, their outputs, and the results of an undisturbed start."""

    disturbances = ("suspend", "end", *["kill"] * 3)
    shared = "*"  # files that are not of one run

    def __init__(self, kind, base):
        self.kind, self.root, self.copy = kind, base / kind, base / f"{kind} copy"
        self.run, self.processes = self.root / "run", []
        os.environ["LINEAGE_CACHE"] = str(base / "cache")
        self.root.mkdir()
        (self.root / "config.py").write_text(CONFIG)
        self.start()
        assert self.wait() == ([0] * len(self.processes)), self.output()
        self.lines, self.expected = self.count(), self.result()
        shutil.copytree(self.run, self.copy)

    def start(self):
        """Start the command."""
        command = [*LAUNCH, *SETTINGS[self.kind], f"--config={self.root}/config.py", f"--workdir={self.run}"]
        commands = [command]
        if self.kind == "hosts":
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                command += [f"--coordinator=127.0.0.1:{free.getsockname()[1]}", "--num-processes=2", "--heartbeat=10"]
            commands = [[*command, f"--process={number}"] for number in range(2)]
        self.processes = []
        for number, arguments in enumerate(commands):
            with (self.root / f"{number}.log").open("wb") as log:
                streams = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
                self.processes.append(subprocess.Popen(arguments, start_new_session=True, **streams))

    def wait(self):
        """Return the exit codes of the processes."""
        try:
            return [process.wait(SECONDS) for process in self.processes]
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the processes hang: {self.output()}") from None

    def output(self):
        """Return the outputs of the processes."""
        return "".join((self.root / f"{number}.log").read_text() for number in range(len(self.processes)))

    def log(self, run):
        """Return the output of a run."""
        return self.output() if self.kind == "hosts" else (run / LOG).read_text()

    def runs(self):
        """Return the folders of the runs."""
        return [self.run] if self.kind == "hosts" else sorted(self.run.glob("*[=_]*"))

    def count(self):
        """Return the number of lines in all histories."""
        paths = [run / METRICS for run in self.runs()]
        return sum(path.read_bytes().count(b"\n") for path in paths if path.exists())

    def parents(self):
        """Return the processes of the command."""
        return [process.pid for process in self.processes]

    def children(self):
        """Return the processes of the runs that are in progress."""
        claims = [path / CLAIM for path in self.runs() if held(path)]
        contents = [path.read_text().split() for path in claims if path.exists()]
        return [int(words[1]) for words in contents if len(words) == 3]

    def result(self):
        """Return what must be equal to that of an undisturbed start."""
        results = {}
        for run in self.runs():
            with brief_errors():
                _, state = read_fields(run / "checkpoints" / str(TOTAL), [*TrainState.__dataclass_fields__])
            digest = hashlib.sha256(b"".join(leaf.tobytes() for leaf in tree.leaves(state))).hexdigest()
            lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
            history = [{key: line[key] for key in line if not key.startswith(MEASURED)} for line in lines]
            results |= {f"state of {run.name}": digest, f"history of {run.name}": history}
        if self.kind in ("sweep", "search"):
            with (self.run / "sweep.csv").open(newline="") as file:
                results["table"] = [{key: row[key] for key in row if key != "seconds"} for row in csv.DictReader(file)]
        return results

    def is_alive(self):
        """Return whether a process of the command has not ended."""
        return any(process.poll() is None for process in self.processes)

    def send(self, processes, how):
        """Send a signal to those of some processes that have not ended."""
        for pid in processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, SIGNALS[how])

    def close(self):
        """End what is left of the processes."""
        self.send([*self.parents(), *self.children()], "kill")
        self.wait()
        while self.children():
            time.sleep(0.01)


def inject(fault, group):
    """Inject a fault, and run the command again; return the result and a description, as `harness.inject`."""
    try:
        repair = fault.rng.choice((damage, disturb, disturb))(fault, group)
        runs = [] if group.children() else group.runs()  # a child that goes on saves further checkpoints
        steps = {run: max(sound(run) - (repair.steps if repair else set()), default=0) for run in runs}
        unfinished = {run: step for run, step in steps.items() if step and not (run / "artifacts/run.json").exists()}
        group.start()
        codes, refused = group.wait(), False
        if repair and any(codes):
            refused, messages = True, re.findall("error: (.{1,400})$", group.output(), re.MULTILINE)
            assert "Traceback" not in group.output(), group.output()
            assert all(codes), f"exit codes {codes}: {group.output()}"
            assert any(str(name) in text for text in messages for name in repair.names), f"no file is named: {messages}"
            fault.detail += f": {messages[0]}"
            repair()
            group.start()
            codes = group.wait()
        assert not any(codes), f"exit codes {codes}: {group.output()}"
        assert not group.children(), "a run is still in progress"
        for run, step in unfinished.items() if not refused else ():
            assert resumed(group.log(run)) >= step, f"step {step} of {run} is lost: {group.log(run)}"
        actual, expected = group.result(), dict(group.expected)
        for name in repair.changes if repair and not refused else ():
            key = f"{name} of {repair.path.parent.name}"
            actual.pop(key), expected.pop(key)
        assert actual == expected, f"the result differs: {group.output()}"
        result = "same" if fault.reached else "no fault"
        return "sentence" if refused else result, fault.detail
    except AssertionError as error:
        return "WRONG", f"{fault.detail}: {str(error)[-3000:]}"
    finally:
        group.close()


def disturb(fault, group):
    """Start the command one to three times, and send a signal to the first process, to a run or the second process, or
    to all, when the histories have some number of lines.
    """
    rng, descriptions, fault.reached = fault.rng, [], False
    shutil.rmtree(group.run)
    for _ in range(rng.randint(1, 3)):
        how, whom = rng.choice(group.disturbances), rng.choice(("parent", "child", "all"))
        # A process whose peer is lost before they have connected waits for it for five minutes.
        earliest = group.count() + (group.kind == "hosts" and whom != "all")
        if earliest > group.lines:
            continue
        place, seconds = rng.randint(earliest, group.lines), 2 * rng.random()
        group.start()
        while group.count() < place and group.is_alive():
            time.sleep(0.05)
        time.sleep(seconds)
        parents, children = group.parents(), group.children()
        chosen = {"parent": parents[:1], "child": children or parents[1:], "all": parents + children}[whom]
        descriptions.append(f"{how} {whom} ({len(chosen)}) {seconds:.2f} s after {place} of {group.lines} lines")
        fault.reached |= bool(chosen) and group.is_alive()
        group.send(chosen, how)
        if how == "suspend":
            time.sleep(3)
            group.send(chosen, "continue")
        codes = group.wait()
        fault.detail = "; ".join(descriptions) + f": {codes}"
        assert {*codes} <= ENDS[how], group.output()
        assert "Traceback" not in group.output(), group.output()
        assert codes != [PREEMPTED] or not group.children(), "a run of a sweep that was told to end goes on"


def damage(fault, group):
    """Interrupt a run before its end, and damage one of its files or of those of the sweep; return the `Damage`."""
    shutil.rmtree(group.run)
    shutil.copytree(group.copy, group.run)
    run = fault.rng.choice(group.runs())
    shutil.rmtree(run / "checkpoints" / str(TOTAL))
    (run / "artifacts/run.json").unlink()
    files = group.run.glob(group.shared) if fault.rng.random() < 0.5 else run.rglob("*")
    chosen = Damage(fault.rng, group, sorted(path for path in files if path.is_file()))
    fault.detail = f"{chosen.how} of {chosen.path.relative_to(group.root)} after {run.name} was interrupted"
    return chosen
