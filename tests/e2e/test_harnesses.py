"""Short runs of the fault harness and of the fuzz harness."""

import subprocess
import sys

import pytest

from tests.e2e.conftest import ROOT
from tests.slurm import is_installed


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    ["tests.faults --faults=6 --seed=2", "tests.fuzz --seconds=600 --cases=8 --seed=1"],
    ids=["faults", "fuzz"],
)
def test_no_failure_is_found(arguments):
    find_no_failure(arguments)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sweep", "search", "hosts", "slurm"])
def test_no_failure_of_several_processes_is_found(kind):
    if kind == "slurm" and not is_installed():
        pytest.skip("there is no SLURM to start, or this user is not root")
    find_no_failure(f"tests.faults --kinds={kind} --faults=2 --seed=0")


def find_no_failure(arguments):
    command = [sys.executable, "-m", *arguments.split()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stdout + done.stderr
