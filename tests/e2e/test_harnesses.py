"""Short runs of the fault harness and of the fuzz harness."""

import subprocess
import sys

import pytest

from tests.e2e.conftest import ROOT


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
    command = [sys.executable, "-m", *arguments.split()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stdout + done.stderr
