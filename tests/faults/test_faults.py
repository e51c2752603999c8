"""A short run of the fault harness."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.thorough
def test_faults_change_no_result():
    """Check some faults of each kind; `python -m tests.faults` injects as many as are asked for."""
    command = [sys.executable, "-m", "tests.faults", "--faults=10", "--first=0", "--seed=2"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stdout + done.stderr
