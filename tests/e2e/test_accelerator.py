"""A rehearsal of `benchmarks.accelerator` with tiny sizes on the CPU, beside PyTorch on the CPU."""

import importlib.util
import json
import math
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks.device import worker
from benchmarks.device.checks import idle_fraction
from benchmarks.device.report import Report
from benchmarks.device.sections import SECTIONS

ROOT = Path(__file__).parents[2]


def rehearsed(out, *arguments):
    """Return the rows of a rehearsal, and its table."""
    command = [sys.executable, "-m", "benchmarks.accelerator", "--tiny", "--rounds=1", "--seconds=0.01", "--limit=600"]
    subprocess.run([*command, "--together=2", f"--out={out}", *arguments], cwd=ROOT, check=True)
    return [json.loads(line) for line in (out / "rows.jsonl").open()], (out / "table.md").read_text()


def numbers(tree):
    """Yield the numbers in nested dictionaries."""
    for value in tree.values():
        if isinstance(value, dict):
            yield from numbers(value)
        elif isinstance(value, float):
            yield value


@pytest.mark.parametrize("section", SECTIONS.values(), ids=SECTIONS)
def test_settings_are_texts_on_the_command_line_only(section):
    for changes in (section.tiny, section.cpu or {}):
        settings = section.resolved(changes)
        assert all(settings.get(key, settings["changes"].get(key)) == value for key, value in changes.items())
    numbers = {key: value for key, value in section.settings.items() if isinstance(value, int)}
    assert numbers.items() <= section.resolved({key: str(value) for key, value in numbers.items()}).items()


def test_a_row_without_memory_is_prepared_again(monkeypatch):
    monkeypatch.setattr(worker, "PAUSE", 0.0)
    errors = [RuntimeError("RESOURCE_EXHAUSTED: Out of memory"), RuntimeError("CUDA out of memory")]

    def prepare():
        if errors:
            raise errors.pop(0)
        return "prepared"

    assert worker.patiently(prepare) == "prepared"
    errors += [ValueError("another")]
    with pytest.raises(ValueError, match="another"):
        worker.patiently(prepare)
    errors += [MemoryError("out of memory")] * 100
    with pytest.raises(MemoryError):
        worker.patiently(prepare)
    assert len(errors) == 100 - worker.ATTEMPTS - 1


@pytest.mark.slow
def test_every_section_has_rows_with_finite_numbers(tmp_path):
    rows, table = rehearsed(tmp_path, "--minutes=60")
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


@pytest.mark.slow
def test_a_failure_costs_its_own_row(tmp_path):
    """A size that no model can have fails in both processes of one section, and the other section is measured."""
    rows, table = rehearsed(tmp_path, "--minutes=60", "--only", "gpt2", "ceilings", "--set=gpt2:model.num_heads=3")
    failed, *others = rows
    assert "3 heads" in failed["failed"]["lineage"]
    assert failed["failed"]["peer"].startswith("ValueError")
    assert failed["failed"]["lineage"] in table
    assert "3 heads" in (tmp_path / "failures.txt").read_text()
    assert len(others) == 2
    assert all(row["ratio"] > 0 for row in others)


def test_nothing_is_started_after_the_time_is_over(tmp_path):
    rows, _ = rehearsed(tmp_path, "--minutes=0")
    assert [row["section"] for row in rows] == [*SECTIONS]
    assert all(row["failed"] == {"lineage": "the 0 minutes were over"} for row in rows)


def test_idle_time_is_that_without_an_operation_on_any_stream():
    def line(name, *events):
        kept = [SimpleNamespace(name=kind, start_ns=start, end_ns=end) for kind, start, end in events]
        return SimpleNamespace(name=name, events=kept)

    streams = [
        line("Stream #1(Compute)", ("gemm", 0, 40), ("gemm", 60, 100)),
        line("Stream #2(Compute)", ("reduce", 30, 50)),
        line("Stream #3(MemcpyH2D)", ("MemcpyH2D", 45, 60), ("MemcpyH2D", 100, 500)),
        line("XLA Modules", ("jit_step", 0, 100)),
    ]
    planes = [
        SimpleNamespace(name="/host:CPU", lines=[line("tf_XLAEigen", ("dot", 0, 1000))]),
        SimpleNamespace(name="/device:GPU:0", lines=streams),
    ]
    assert idle_fraction(planes)[0] == pytest.approx(0.1)  # from 50 to 60 of 100


def test_report_has_ratio_utilization_and_bandwidth(tmp_path):
    facts = {
        "device": "NVIDIA H200",
        "peak_flops": 1e12,
        "peak_bandwidth": 4e12,
        "flops": 4e9,
        "bytes": 8e9,
        "steps": 2,
    }
    times = {"lineage": [0.01, 0.01, 0.02], "peer": [0.02, 0.04, 0.01]}
    report = Report(tmp_path)
    report.add("gpt2", "a row", {"lineage": facts, "peer": {}}, times, {}, {})
    row = json.loads((tmp_path / "rows.jsonl").read_text())
    assert row["ratio"] == pytest.approx(0.5)
    assert row["lineage"]["mfu"] == pytest.approx(0.4)
    assert row["peer"]["mfu"] == pytest.approx(0.2)
    assert row["lineage"]["bandwidth"] == pytest.approx(8e11)
    last = (tmp_path / "table.md").read_text().splitlines()[-1]
    assert last == "| GPT-2, a row | 5 | 10 | 0.50 | 40.0% | 20.0% | 800 (20%) | 400 (10%) |  |"
