import subprocess
import sys
from pathlib import Path

import pytest

from tests.mutants.changes import Mutants

ROOT = Path(__file__).parents[1]


def test_mutants_of_a_module():
    text = 'LIMIT = 3\n\n\ndef f(x, y=4):\n    if x < LIMIT:\n        raise ValueError("x is small")\n    return -x\n'
    actual = Mutants(text.encode())
    assert [(line, constant, change) for line, constant, change, _ in actual] == [
        (1, True, "LIMIT = 3 -> LIMIT = 4"),
        (5, False, "if x < LIMIT: -> if (not (x < LIMIT)):"),
        (5, False, "if x < LIMIT: -> if x <= LIMIT:"),
        (5, False, "if x < LIMIT: -> if x >= LIMIT:"),
        (6, False, 'raise ValueError("x is small") -> if False: raise ValueError("x is small")'),
        (7, False, "return -x -> return None if True else ( -x)"),
        (7, False, "return -x -> return x"),
    ]
    assert all(mutant.decode().count("\n") == text.count("\n") for *_, mutant in actual)


@pytest.mark.thorough
def test_tests_execute_the_mutants():
    arguments = ["configs/directions.py", "--tests=tests/configs/test_directions.py", "--sample=4"]
    actual = subprocess.run([sys.executable, "-m", "tests.mutants", *arguments], cwd=ROOT, stdout=subprocess.PIPE)
    assert b"4 of 4 mutants killed" in actual.stdout
