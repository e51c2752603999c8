"""Reading of metrics: long files are thinned, growing ones are read from where the last call ended."""

import json
import math
from itertools import pairwise
from pathlib import Path

import pytest

from lineage.report.run import write_report
from lineage.runs import metrics
from lineage.runs.folder import read_metrics
from lineage.runs.metrics import GrowingMetrics


def lines(start, stop, every=50_000):
    for step in range(start, stop):
        yield json.dumps({"step": step, "train/loss": None if step == 77_777 else 1 / step, "time/mfu": 0.3})
        if step % every == 0:
            yield json.dumps({"step": step, "validation/loss": 2.0})


def append(path: Path, some):
    with path.open("a") as file:
        file.writelines(f"{line}\n" for line in some)


@pytest.fixture
def parsed(monkeypatch):
    """Return a list that counts the lines that are parsed."""
    calls, parse = [], metrics.parse_line
    monkeypatch.setattr(metrics, "parse_line", lambda *args: calls.append(1) or parse(*args))
    return calls


def test_short_files_are_read_whole(tmp_path):
    path = tmp_path / "metrics.jsonl"
    append(path, lines(1, 300, every=100))
    assert GrowingMetrics(path).read() == read_metrics(tmp_path)


def test_long_files_are_thinned(tmp_path, parsed):
    path = tmp_path / "metrics.jsonl"
    append(path, lines(1, 200_001))
    growing = GrowingMetrics(path)
    actual = growing.read()
    assert len(actual) == len(parsed) < 1.2 * metrics.MAX_KEPT
    assert len(actual) + growing.left_out == len(path.read_bytes().splitlines())
    assert [line["step"] for line in actual] == sorted(line["step"] for line in actual)
    assert [line["step"] for line in actual if "validation/loss" in line] == [50_000, 100_000, 150_000, 200_000]
    assert [line["step"] for line in actual if math.isnan(line.get("train/loss", 0))] == [77_777]
    training = [line["step"] for line in actual if "train/loss" in line]
    assert training[0] == 1
    assert max(b - a for a, b in pairwise(training)) <= 20
    assert training[-1] > 199_980


def test_only_new_lines_are_parsed(tmp_path, parsed):
    path = tmp_path / "metrics.jsonl"
    append(path, lines(1, 100_000))
    growing = GrowingMetrics(path)
    growing.read()
    parsed.clear()
    for step in range(100_001, 100_006):
        append(path, [json.dumps({"step": step, "train/loss": 0.5})])
        assert growing.read()[-1]["step"] == step
    assert len(parsed) == 5
    with path.open("a") as file:
        file.write('{"step": 100006, "train/l')
    assert growing.read()[-1]["step"] == 100_005
    append(path, ['oss": 1.0}'])
    assert growing.read()[-1] == {"step": 100_006, "train/loss": 1.0}


def test_a_file_that_is_rewritten_is_read_anew(tmp_path):
    path = tmp_path / "metrics.jsonl"
    append(path, lines(1, 100))
    growing = GrowingMetrics(path)
    growing.read()
    for rewritten in ([*lines(1, 50)], [json.dumps({"step": step, "train/loss": 9.0}) for step in range(1, 200)], []):
        path.write_text("".join(f"{line}\n" for line in rewritten))
        assert growing.read() == [json.loads(line) for line in rewritten]


def test_damaged_lines_are_named_and_a_torn_end_is_not(tmp_path):
    path = tmp_path / "metrics.jsonl"
    append(path, [*lines(1, 10), "{", *lines(10, 20)])
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 10, is not a JSON object with an integer `step`: b'{"):
        GrowingMetrics(path).read()
    for end in ("{", "[" * 100_000, '{"step": null}', '{"step": 9.5}', '{"step": NaN}', '{"step": true}', "5"):
        path.write_text("")
        append(path, [*lines(1, 10), end])
        assert len(GrowingMetrics(path).read()) == 9


def test_report_of_a_long_run_draws_few_points(tmp_path, parsed):
    append(tmp_path / "metrics.jsonl", lines(1, 100_001))
    page = write_report(tmp_path).read_text()
    assert len(parsed) < 1.2 * metrics.MAX_KEPT
    assert "not finite at step 77,777" in page
    left_out = 100_000 + 2 - len(parsed)  # with two evaluations
    assert f"{left_out:,} lines of metrics.jsonl with training metrics, evenly spaced, are not shown" in page
    assert len(page) < 200_000


def test_long_lines_and_many_evaluations(tmp_path, monkeypatch, parsed):
    """Check a line that needs much memory, and more evaluations than a page shows."""
    path = tmp_path / "metrics.jsonl"
    monkeypatch.setattr(metrics, "MAX_KEPT", 100)
    append(path, (json.dumps({"step": step, "test/loss": 0.5}) for step in range(1, 10_001)))
    assert len(GrowingMetrics(path).read()) == len(parsed) < 1200
    append(path, [json.dumps({"step": 10_001, "test/loss": 0.5, "a": "a" * 10**7}), *lines(10_002, 10_005)])
    for read in (GrowingMetrics(path).read, lambda: read_metrics(tmp_path)):
        with pytest.raises(ValueError, match=r"metrics\.jsonl, line 10001, has more than 10,000,000 bytes"):
            read()
