"""A run in a folder of its own with the commands that follow it, and the faults that are injected into them."""

import contextlib
import errno
import faulthandler
import hashlib
import importlib
import io
import json
import os
import re
import resource
import shutil
import signal
import sys
import traceback
from pathlib import Path

from lineage import launch
from lineage.runs.folder import MEASURED, read_record
from lineage.runs.process import PREEMPTED
from lineage.train import loop
from lineage.train.profiling import throughput

for _name in ("report.run", "train.export", "train.trained"):  # otherwise each process would import them
    importlib.import_module(f"lineage.{_name}")
ROOT = Path(__file__).parents[2]
TOTAL, SAVE_EVERY = 20, 4
EVENTS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.listdir", "os.scandir"}
HOW = ("flip", "empty", "truncate", "delete", "replace")
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
ERRORS = (errno.EIO, errno.EACCES, errno.ESTALE, errno.ENOSPC, errno.EMFILE)
STOPPED = {0, PREEMPTED, 130}  # exit codes of a command that receives signals
SENTENCE = re.compile(r"^error: (.{1,400})\n\((?:raised in .+; )?use --traceback", re.MULTILINE)


class Killed(BaseException):
    """Death of the process by a signal that nothing handles; a BaseException, so that no handler catches it."""


class Subject:
    """Folder `root` with texts, the cache of the user, a run, and what the commands on the run write."""

    def __init__(self, root):
        self.root, self.run = root, root / "run"
        options = {"source": f"text:{root}/data", "tokenizer": "bpe", "tokenizer.vocab_size": 300, "seed": 1}
        options |= {"model.depth": 1, "model.dropout": 0.1, "ema_decay": 0.9, "sampling.num_samples": 1}
        options |= {"total_steps": TOTAL, "evaluate_every_steps": SAVE_EVERY, "save_every_steps": SAVE_EVERY}
        options |= {"checkpoint.keep": 3, "checkpoint.best": "validation/loss"}
        train = ["train", f"--config={ROOT}/tests/tiny.py:gpt", *(f"--config.{key}={options[key]}" for key in options)]
        predict = ["predict", f"--inputs={root}/inputs.txt", f"--output={root}/out.jsonl"]
        others = [["evaluate"], ["generate"], predict, ["export", f"--output={root}/export"], ["report"]]
        self.commands = {command[0]: [*command, f"--workdir={self.run}"] for command in (train, *others)}
        os.environ["LINEAGE_CACHE"] = str(root / "cache")

    def begin(self):
        """Make the folder, with texts only."""
        shutil.rmtree(self.root, ignore_errors=True)
        (self.root / "data").mkdir(parents=True)
        for name in ("setup.py", "launch.py"):
            shutil.copy(ROOT / name, self.root / "data" / f"{name}.txt")
        (self.root / "inputs.txt").write_text("import os\ndef main\n" * 20)

    def restore(self, copy):
        """Make the folder equal to a copy of it."""
        shutil.rmtree(self.root, ignore_errors=True)
        shutil.copytree(copy, self.root)

    def call(self, command, *options):
        """Run a command in this process; return its exit code, or that of a kill, and its output."""
        with contextlib.redirect_stdout(io.StringIO()) as output, contextlib.redirect_stderr(output):
            try:
                code = launch.main([*self.commands[command], *options])
            except Killed:
                code = -signal.SIGKILL
            except Exception as error:
                traceback.print_exc()
                # Python's threading module raises another error if `Killed` is raised within it.
                code = -signal.SIGKILL if isinstance(error.__context__, Killed) else 1
        return code, output.getvalue()

    def result(self, command, output):
        """Return what must be equal to that of an undisturbed run."""
        if command == "train":
            lines = map(json.loads, (self.run / "metrics.jsonl").read_text().splitlines())
            history = [{key: line[key] for key in line if not key.startswith(MEASURED)} for line in lines]
            samples = (self.run / "artifacts" / "samples.jsonl").read_text()
            return {"state": self._state(), "history": history, "samples": samples}
        if command == "predict":
            return (self.root / "out.jsonl").read_text()
        if command == "export":
            return hashlib.sha256((self.root / "export" / "model.safetensors").read_bytes()).hexdigest()
        return (self.run / "report.html").is_file() if command == "report" else output

    def _state(self):
        import orbax.checkpoint as ocp
        from jax import tree

        saved = ocp.StandardCheckpointer().restore(self.run / "checkpoints" / str(TOTAL) / "state")
        return hashlib.sha256(b"".join(leaf.tobytes() for leaf in tree.leaves(saved))).hexdigest()


def sound(run):
    """Return the steps of the checkpoints of a run whose records are sound."""
    steps = set()
    for path in (run / "checkpoints").glob("[0-9]*"):
        with contextlib.suppress(ValueError, OSError):
            read_record(path)
            steps.add(int(path.name))
    return steps


class FileEvents:
    """Audit hook that counts Python's file operations in a folder, and calls `act(path)` before chosen ones."""

    def __init__(self, root):
        self._root, self._act, self._places, self.count = f"{root}/", None, (), 0
        sys.addaudithook(self._hook)

    def _hook(self, event, arguments):
        if not self._act or event not in EVENTS or not isinstance(arguments[0], str | os.PathLike):
            return
        if (path := os.fspath(arguments[0])).startswith(self._root):
            self.count += 1
            if self.count in self._places:
                self._act(path)

    @contextlib.contextmanager
    def acting(self, act, places):
        """Call `act` before the operations with the numbers in `places`, counted from 1 on."""
        self.count, self._places, self._act = 0, places, act
        try:
            yield
        finally:
            self._act = None


def first_result(function):
    """Return a function that returns the result of the first call, whatever its arguments are."""
    results = []

    def call(*args):
        if not results:
            results.append(function(*args))
        return results[0]

    return call


def no_report(*args):
    pass


def quick():
    """Share compiled functions between the runs of this process, without reports; end the process if it hangs."""
    throughput.experiment_budget = first_result(throughput.experiment_budget)
    loop.compile_step = first_result(loop.compile_step)
    loop.write_report = loop.artifacts.write_all = no_report
    faulthandler.register(signal.SIGALRM, all_threads=True, chain=True)


def inject(fault, subject, events, trained, reference):
    """Inject a fault, unless it has been, and run its command again; return the result and a description.

    Results are "same", "no fault" (the command ended before its moment), "sentence" (the command named what is damaged
    or changed, and gave the same result after the repair), "killed" (another process must go on), and "WRONG".
    """
    try:
        repair = None if fault.detail else disturb(fault, subject, events, trained, reference)
        kept = sound(subject.run) - (repair.steps if repair else set())
        code, output = subject.call(fault.command)
        refused = code == 1 and repair
        noted = repair and fault.command == "evaluate" and f"{repair.path} changed" in output  # of other data
        if refused:
            fault.detail += f": {refusal(output, repair.names)}"
        if refused or noted:
            assert kept <= sound(subject.run), "a sound checkpoint is lost"
            repair()
            code, output = subject.call(fault.command)
        assert code == 0, f"exit code {code}: {output[-2000:]}"
        if fault.command == "train" and kept and not refused:
            used = resumed(output)
            assert used >= max(kept), f"of the checkpoints {kept}, {used} is used: {output}"
        actual, expected = subject.result(fault.command, output), reference[fault.command]["result"]
        lost = repair.changes if repair else fault.loses
        for key in lost if fault.command == "train" and not refused else ():
            actual.pop(key), expected.pop(key)
        assert actual == expected, f"the result differs: {output[-2000:]}"
        result = "same" if fault.reached else "no fault"
        return "sentence" if refused or noted else result, fault.detail
    except Killed:
        return "killed", fault.detail
    except AssertionError as error:
        return "WRONG", f"{fault.detail}: {str(error)[-1500:]}"


def disturb(fault, subject, events, trained, reference):
    """Bring the folder into the state after a fault; return the `Damage`, None for another kind of fault."""
    rng = fault.rng
    fault.command = rng.choice([*["train"] * 6, *subject.commands])
    subject.restore(trained)
    if fault.command == "train" and rng.random() < 0.6:  # interrupted before its end
        shutil.rmtree(subject.run / "checkpoints" / str(TOTAL))
    if fault.kind == "damaged":
        files = (path for path in subject.root.rglob("*") if path.is_file() and path.suffix != ".lock")
        files = (path for path in files if path.name != "inputs.txt")  # the predictions would be those of other inputs
        damage = Damage(rng, subject, sorted(files))
        fault.detail = f"{fault.command} with {damage.how} of {damage.path.relative_to(subject.root)}"
        return damage
    if fault.command == "train" and rng.random() < 0.6:
        subject.begin()
    options = ()
    if fault.kind == "full disk" and fault.command == "train" and rng.random() < 0.5:
        options, fault.loses = ("--config.checkpoint.on_error=continue",), ("history", "samples")
    count = reference[fault.command]["count"] - (fault.command == "train") * reference["report"]["count"]  # see `quick`
    place = 1 + int(fault.moment * count)
    with DISTURBANCES[fault.kind](rng) as (act, name), events.acting(act, range(place, place + rng.randint(1, 5))):
        code, output = subject.call(fault.command, *options)
    fault.reached = events.count >= place
    fault.detail = f"{' '.join((fault.command, *options))} with {name} at {place} of {events.count}: exit code {code}"
    if code == -signal.SIGKILL:
        raise Killed
    assert "Traceback (most recent" not in output, output
    if code == 1 and fault.kind != "signals":
        fault.detail += f": {refusal(output, [subject.root])}"
    else:
        assert code in STOPPED, output
    return None


def resumed(output):
    """Return the step after which a run went on at its last start; 0 for a new run."""
    matches = re.findall(r"resuming from step (\d+)|has all of its (\d+) steps", output)
    return int("".join(matches[-1])) if matches else 0


def refusal(output, names):
    """Return the sentence that a command ended with, which must name one of the files or folders."""
    assert "Traceback (most recent" not in output, output
    sentences = SENTENCE.findall(output)
    assert len(sentences) == 1, f"there is not one sentence: {output}"
    assert any(str(name) in sentences[0] for name in names), f"no file is named: {sentences[0]}"
    return sentences[0]


class Damage:
    """Damage of one of some files of a run, of its data or of the cache: a bit is flipped, or the file is emptied,
    truncated, deleted or replaced by another one. Calling it repairs the file.

    Attributes:
        names: the file and the folders that it is in, one of which an error must name.
        steps: the step of the checkpoint that it is in, if any.
        changes: parts of a result that the damage may change.
    """

    def __init__(self, rng, subject, files):
        folder = rng.choice(sorted({path.parent for path in files}))
        self.path = rng.choice([path for path in files if path.parent == folder])
        self.how, self.before = rng.choice(HOW), self.path.read_bytes()
        self.names = [path for path in (self.path, *self.path.parents) if path.parent.is_relative_to(subject.root)]
        self.names = [path for path in self.names if path != subject.run]
        self.steps = {int(part) for part in self.path.parts if part.isdigit()}
        self.changes = {"metrics.jsonl": ["history"], "samples.jsonl": ["samples"]}.get(self.path.name, ())
        place = rng.randrange(len(self.before) or 1)
        flipped = bytes([*self.before[place : place + 1]] or b"?")
        flipped = bytes([flipped[0] ^ 1 << rng.randrange(8)])
        after = {"flip": self.before[:place] + flipped + self.before[place + 1 :], "empty": b""}
        after |= {"truncate": self.before[:place], "replace": rng.choice(files).read_bytes()}
        if self.how == "delete":
            self.path.unlink()
        else:
            self.path.write_bytes(after[self.how])

    def __call__(self):
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_bytes(self.before)


@contextlib.contextmanager
def _signals(rng):
    """Yield an action that sends two signals, the second one at a later operation; without handlers, they kill."""

    def die(number, frame):
        raise Killed

    first, *others = numbers = rng.choices(SIGNALS, k=2)
    handlers = {number: signal.signal(number, die) for number in SIGNALS if number != signal.SIGINT}
    try:
        yield lambda path: numbers and os.kill(os.getpid(), numbers.pop()), f"signals {first} and {others[0]}"
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _errors(rng):
    """Yield an action that fails an operation."""
    number = rng.choice(ERRORS)

    def act(path):
        raise OSError(number, os.strerror(number), path)

    yield act, errno.errorcode[number]


@contextlib.contextmanager
def _full_disk(rng):
    """Yield an action from which on no file can grow beyond some bytes."""
    limits, size = resource.getrlimit(resource.RLIMIT_FSIZE), int(10 ** rng.uniform(0, 5))
    try:
        yield lambda path: resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1])), f"{size} bytes per file"
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


DISTURBANCES = {"signals": _signals, "unreadable": _errors, "full disk": _full_disk}
