"""A rehearsal of `benchmarks.accelerator` with tiny sizes on the CPU, beside PyTorch on the CPU."""

import importlib.util
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.device.sections import SECTIONS

ROOT = Path(__file__).parents[2]


def rehearsed(out, *arguments):
    """Return the rows of a rehearsal, and its table."""
    command = [sys.executable, "-m", "benchmarks.accelerator", "--tiny", "--rounds=1", "--seconds=0.01"]
    subprocess.run([*command, "--together=2", f"--out={out}", *arguments], cwd=ROOT, check=True, timeout=1500)
    return [json.loads(line) for line in (out / "rows.jsonl").open()], (out / "table.md").read_text()


def numbers(tree):
    """Yield the numbers in nested dictionaries."""
    for value in tree.values():
        if isinstance(value, dict):
            yield from numbers(value)
        elif isinstance(value, float):
            yield value


@pytest.mark.thorough
def test_every_section_has_rows_with_finite_numbers(tmp_path):
    rows, table = rehearsed(tmp_path, "--minutes=30", "--limit=600")
    assert {row["section"] for row in rows} == {*SECTIONS}
    has_timm = importlib.util.find_spec("timm") is not None
    for row in rows:
        peer = SECTIONS[row["section"]].peer
        missing = peer == "timm" and not has_timm
        assert row["failed"] == ({"peer": "ModuleNotFoundError: No module named 'timm'"} if missing else {})
        assert all(map(math.isfinite, numbers(row)))
        assert row.get("ok", True)
        assert "errors" in row or row["lineage"]["seconds"] > 0
        assert ("ratio" in row) == (peer is not None and not missing)
        if "ratio" in row:
            assert {"mfu", "bandwidth"} & {*row["peer"]}
    (trace,) = (row for row in rows if row["section"] == "trace")
    assert 0 <= trace["idle"] < 1
    assert table.count("\n| ") == len(rows) + 2


@pytest.mark.thorough
def test_a_failure_costs_its_own_row(tmp_path):
    """A size that no model can have fails in both processes of one section, and the other section is measured."""
    rows, table = rehearsed(tmp_path, "--only", "gpt2", "ceilings", "--set=gpt2:model.num_heads=3")
    failed, *others = rows
    assert "3 heads" in failed["failed"]["lineage"]
    assert failed["failed"]["peer"].startswith("ValueError")
    assert failed["failed"]["lineage"] in table
    assert len(others) == 2
    assert all(row["ratio"] > 0 for row in others)


def test_nothing_is_started_after_the_time_is_over(tmp_path):
    rows, _ = rehearsed(tmp_path, "--minutes=0")
    assert [row["section"] for row in rows] == [*SECTIONS]
    assert all(row["failed"] == {"lineage": "the 0 minutes were over"} for row in rows)
