"""Mutation testing: `python -m tests.mutants metrics/states.py --tests=tests/metrics --sample=30 --seed=0`.

A mutant is one change in the body of a function or in a constant of a module. The tests that execute its line run in a
process forked after their collection, so that JAX is imported and functions are compiled once, the fastest first, until
one fails. Survivors are printed. Texts, annotations, raised errors and defaults of parameters stay as they are; what
tests execute in other processes is not seen.
"""

import argparse
import contextlib
import gc
import importlib
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import threading
from ast import Assign, Module, dump, parse
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from types import CodeType, FunctionType

import pytest
from _pytest.runner import runtestprotocol

from tests.mutants.changes import Mutants

MEMORY = 5 << 29  # bytes that a mutant may allocate


class Mutation:
    """Plugin of pytest: after the collection, run the tests once unchanged, and those of each mutant's line."""

    def __init__(self, options: argparse.Namespace):
        self.options, self.modules, self.functions = options, {}, []
        self.tests = defaultdict(dict)  # (module, line), or (module, 0) for the whole module -> test -> seconds

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Print the mutants of each module."""
        bridge = sys.modules.get("jax._src.xla_bridge")
        if bridge and bridge.backends_are_initialized():
            raise pytest.UsageError("a file of tests uses JAX when it is imported: forked processes would wait forever")
        for name in self.options.modules:
            self.modules[name] = importlib.import_module(f"lineage.{name.removesuffix('.py').replace('/', '.')}")
        gc.unfreeze()  # `conftest.py` freezes the functions of modules that tests import
        self.functions = [candidate for candidate in gc.get_objects() if type(candidate) is FunctionType]
        for item in session.items:
            fewer_examples(item)
        gc.freeze()  # so that a forked process copies less memory
        status, output = forked(lambda report: self.trace(session.items, report), 3000)
        if status:
            raise pytest.UsageError(f"the tests fail without a change: {status} {output[-400:]}")
        for row in output.splitlines():
            seconds, test, name, line = json.loads(row)
            self.tests[name, line][test] = self.tests[name, 0][test] = seconds
        items = {item.nodeid: item for item in session.items}
        for name, module in self.modules.items():
            mutants = Mutants(Path(module.__file__).read_bytes())
            sample = random.Random(self.options.seed).sample(mutants, min(self.options.sample, len(mutants)))
            killed = sum([self.is_killed(items, name, *mutant) for mutant in sorted(sample)])
            print(f"{name}: {killed} of {len(sample)} mutants killed, {len(mutants)} in all", flush=True)
        return True

    def trace(self, items: Sequence[pytest.Item], report: Callable[[str], object]) -> int:
        """Report the lines of the modules that each test executes, and its seconds of CPU time."""
        seen, names = set(), {module.__file__: name for name, module in self.modules.items()}

        def line(frame, event, argument):
            seen.add((names[frame.f_code.co_filename], frame.f_lineno))
            return line

        def call(frame, event, argument):
            return line(frame, event, argument) if frame.f_code.co_filename in names else None

        for number, item in enumerate(items):
            seen.clear()
            if "jax" in sys.modules:  # functions that are traced again
                sys.modules["jax"].clear_caches()
            started = sum(os.times()[:4])
            threading.settrace(call)
            sys.settrace(call)
            failed = first_failure([item], following=items[number + 1 : number + 2])
            sys.settrace(None)
            if failed:
                report(failed)
                return 1
            seconds = sum(os.times()[:4]) - started
            report("".join(json.dumps([seconds, item.nodeid, *place]) + "\n" for place in seen))
        return 0

    def is_killed(self, items, name, line, constant, change, text) -> bool:
        """Return whether a test of a mutant fails; print the mutant if not."""
        order = sorted((seconds, test) for test, seconds in self.tests[name, 0 if constant else line].items())
        costs, budget = list(accumulate(seconds for seconds, _ in order)), self.options.budget
        chosen = [items[test] for cost, (_, test) in zip(costs, order) if cost <= max(budget, costs[0])]
        status, test = forked(lambda report: self.mutate(chosen, name, text, report), 200, 4 * budget)
        if self.options.verbose or not status:
            reason = test or (f"status {status}" if status else f"{len(chosen)} of {len(order)} tests pass")
            print(f"{'killed' if status else 'survived'} {name}:{line}: {change}  [{reason}]", flush=True)
        return bool(status)

    def mutate(self, items, name, text, report) -> int:
        """Put the mutant's code into the functions and constants of the module; run the tests."""
        module = self.modules[name]
        path = module.__file__
        code = {place(nested): nested for nested in parts(module.__loader__.source_to_code(text, path))}
        for function in self.functions:
            if function.__code__.co_filename == path:
                function.__code__ = code.get(place(function.__code__), function.__code__)
        for old, new in zip(parse(Path(path).read_bytes()).body, parse(text).body):
            if isinstance(new, Assign) and dump(old) != dump(new):
                exec(compile(Module([new], []), path, "exec"), vars(module))
        failed = first_failure(items)
        report(failed)
        return int(bool(failed))


def fewer_examples(item: pytest.Item) -> None:
    """Limit the examples of a property test to 40, which are not made smaller when one fails."""
    import hypothesis  # not before pytest, whose plugin imports it

    name = "_hypothesis_internal_use_settings"
    if old := getattr(item.obj, name, None):
        phases = hypothesis.Phase.explicit, hypothesis.Phase.generate
        setattr(item.obj, name, hypothesis.settings(old, max_examples=min(old.max_examples, 40), phases=phases))


def place(code: CodeType) -> tuple[str, int]:
    """Return what a code object has in common with its mutant."""
    return code.co_qualname, code.co_firstlineno


def parts(code: CodeType) -> Iterator[CodeType]:
    """Yield a code object and those in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from parts(constant)


def first_failure(items: Sequence[pytest.Item], following: Sequence[pytest.Item] = ()) -> str:
    """Run tests until one fails, and return its name, or an empty string."""
    for item, after in zip(items, [*items[1:], *following, None]):
        if any(report.failed for report in runtestprotocol(item, nextitem=after, log=False)):
            return item.nodeid
    return ""


def forked(function: Callable[..., int], seconds: float, cpu: float | None = None) -> tuple[int, str]:
    """Return the exit status (-9: after `seconds`) and the report of a function in a forked process.

    Args:
        cpu: seconds of CPU time that the process may use; None: its time and memory are not limited.
    """
    folder = tempfile.mkdtemp(prefix="mutants_")
    process = os.fork()
    if not process:
        os.setsid()
        null = os.open(os.devnull, os.O_RDWR)
        for descriptor in range(3):
            os.dup2(null, descriptor)
        if cpu:
            resource.setrlimit(resource.RLIMIT_CPU, (int(cpu), int(cpu) + 5))
            resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
        os.environ["TMPDIR"] = tempfile.tempdir = folder
        status = 2
        try:
            with open(f"{folder}/report", "w") as file:
                status = function(file.write)
        finally:
            os._exit(status)
    timer = threading.Timer(seconds, os.killpg, (process, signal.SIGKILL))
    timer.start()
    status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    timer.cancel()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process, signal.SIGKILL)  # processes that its tests started
    output = Path(folder, "report").read_text()
    shutil.rmtree(folder, ignore_errors=True)
    return status, output


def main() -> int:
    """Test the mutants of modules."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("modules", nargs="+", metavar="MODULE", help="path of a module, such as metrics/states.py")
    parser.add_argument("--tests", required=True, help="files or folders of tests, separated by commas")
    parser.add_argument("--sample", type=int, default=30, help="number of mutants of each module (default 30)")
    parser.add_argument("--seed", type=int, default=0, help="random seed of the sample (default 0)")
    parser.add_argument("--budget", type=float, default=12, help="seconds of tests of each mutant (default 12)")
    parser.add_argument("--verbose", action="store_true", help="print killed mutants too, with the test that fails")
    options = parser.parse_args()
    return pytest.main([*options.tests.split(","), "-p", "no:cacheprovider", "-s"], plugins=[Mutation(options)])


if __name__ == "__main__":
    sys.exit(main())
