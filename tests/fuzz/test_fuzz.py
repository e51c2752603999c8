"""A short run of the fuzz harness."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.thorough
def test_damaged_files_are_read_or_refused():
    """Check some mutations for each reader; `python -m tests.fuzz` tries as many as fit into a duration."""
    command = [sys.executable, "-m", "tests.fuzz", "--seconds=600", "--cases=20", "--seed=1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stdout + done.stderr
