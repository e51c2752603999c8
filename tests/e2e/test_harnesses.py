"""Short runs of the fault harness and of the fuzz harness."""

import subprocess
import sys

import pytest

from tests.e2e.conftest import ROOT
from tests.slurm import is_installed


@pytest.mark.thorough
@pytest.mark.parametrize(
    "arguments",
    [
        "tests.faults --faults=10 --seed=2",
        "tests.faults --kinds=sweep --faults=1 --seed=46",
        "tests.fuzz --seconds=600 --cases=20 --seed=1",
    ],
    ids=["faults", "processes", "fuzz"],
)
def test_no_failure_is_found(arguments):
    find_no_failure(arguments)


@pytest.mark.slow
@pytest.mark.skipif(not is_installed(), reason="there is no SLURM to start, or this user is not root")
def test_no_failure_of_jobs_is_found():
    find_no_failure("tests.faults --kinds=slurm --faults=2 --seed=0")


def find_no_failure(arguments):
    command = [sys.executable, "-m", *arguments.split()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stdout + done.stderr
