"""The history of a run: exact lines, survival of kills, and the progress bar."""

import errno
import io
import json
import math
import re
import resource
import shutil
import struct
import subprocess
import sys
import types
import zlib
from functools import partial

import numpy as np
import pytest

from lineage.runs import progress
from lineage.runs.folder import MEASURED, read_metrics
from lineage.runs.progress import ProgressBar, clock, number
from lineage.train.metrics_writer import MetricsWriter, _wandb_id


def _history(workdir):
    """Return the history without times."""
    return [{key: v for key, v in line.items() if not key.startswith(MEASURED)} for line in read_metrics(workdir)]


def _train(workdir, start, stop, resume_step):
    with MetricsWriter(workdir, resume_step=resume_step) as writer:
        for step in range(start + 1, stop + 1):
            loss = np.float32(1) / np.float32(step)
            writer.write(step, {"train/loss": loss, "time/examples_per_second": np.random.default_rng().random()})
            if step % 5 == 0:
                writer.write(step, {"validation/loss": loss * 2, "validation/accuracy": 0.1 * step})
        assert writer.history.crc32 == zlib.crc32((workdir / "metrics.jsonl").read_bytes())


def _events(workdir):
    """Return (purge steps, {tag: {step: value}}) of the TensorBoard files, without values hidden by a later purge.

    TensorBoard reads them in the order of their names.
    """
    from tensorboardX.proto.event_pb2 import Event

    purges, values = [], {}
    for path in sorted(workdir.glob("events.out.tfevents.*")):
        data, at = path.read_bytes(), 0
        while at < len(data):
            (length,) = struct.unpack_from("<Q", data, at)
            event = Event.FromString(data[at + 12 : at + 12 + length])
            at += 12 + length + 4
            if event.HasField("session_log"):
                purges.append(event.step)
                values = {tag: {s: v for s, v in steps.items() if s < event.step} for tag, steps in values.items()}
            for value in event.summary.value:
                values.setdefault(value.tag, {})[event.step] = value.simple_value
    return purges, values


def test_events_of_later_starts_follow_if_the_clock_goes_back(tmp_path, monkeypatch):
    for start, seconds in enumerate((1_800_000_000, 1_700_000_000, 1_700_000_000, 1_800_000_001)):
        monkeypatch.setattr("time.time", lambda seconds=seconds: seconds)
        _train(tmp_path, 5 * start, 5 * start + 5, 5 * start)
    purges, values = _events(tmp_path)
    assert purges == [0, 6, 11, 16]
    assert [*values["train/loss"]] == [*range(1, 21)]


def test_time_of_earlier_starts(tmp_path):
    def start(resume_step, lines):
        with MetricsWriter(tmp_path, resume_step=resume_step) as writer:
            for step, seconds, goodput in lines:
                known = {"time/seconds": seconds, "time/goodput": goodput} if seconds else {}
                writer.write(step, {"train/loss": 1.0} | known)
            return writer.history.earlier

    assert start(0, [(1, None, None), (2, 20.0, 0.5), (3, None, None), (4, 40.0, 0.75)]) == (0, 0)
    assert start(3, [(4, None, None), (5, 90.0, 0.25)]) == (40, 10)  # step 4 is lost
    assert start(1, [(2, None, None)]) == (90, 0)
    assert start(2, []) == (0, 0)  # no line has a time


@pytest.mark.parametrize(
    "odd", [{"time/seconds": 9.0}, {"time/goodput": 1.0, "time/seconds": "9"}, {"time/seconds": None}]
)
def test_lines_without_a_usable_time_are_ignored(odd, tmp_path):
    line = {"step": 1, "time/seconds": 20.0, "time/goodput": 0.5}
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in (line, {"step": 2} | odd)))
    with MetricsWriter(tmp_path, resume_step=2) as writer:
        assert writer.history.earlier == (9 if odd == {"time/seconds": 9.0} else 20, 10)


def test_lines_are_exact_and_flushed(tmp_path):
    third = np.float32(1) / np.float32(3)
    with MetricsWriter(tmp_path / "new" / "run") as writer:
        writer.write(np.int64(3), {"train/loss": third, "train/tokens": np.int32(7), "train/accuracy": np.array(0.1)})
        text = (tmp_path / "new/run/metrics.jsonl").read_text()  # before the file is closed
    assert text == f'{{"step": 3, "train/loss": {float(third)!r}, "train/tokens": 7, "train/accuracy": 0.1}}\n'


def test_jax_scalars_are_written_exactly(tmp_path):
    jnp = pytest.importorskip("jax.numpy")
    with MetricsWriter(tmp_path) as writer:
        writer.write(1, {"a": jnp.float32(0.1), "b": jnp.bfloat16(0.1), "c": jnp.int32(4)})
    assert read_metrics(tmp_path) == [{"step": 1, "a": float(np.float32(0.1)), "b": 0.10009765625, "c": 4}]


@pytest.mark.parametrize("value", [math.nan, math.inf, -np.float32(np.inf)])
def test_nonfinite_value_is_written_as_null_and_read_as_nan(tmp_path, value):
    with MetricsWriter(tmp_path) as writer:
        writer.write(1, {"train/loss": value})
    line = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=pytest.fail)
    assert line == {"step": 1, "train/loss": None}
    assert math.isnan(read_metrics(tmp_path)[0]["train/loss"])
    _, values = _events(tmp_path)
    np.testing.assert_equal(values["train/loss"][1], float(value))


def test_array_raises(tmp_path):
    with (
        MetricsWriter(tmp_path) as writer,
        pytest.raises(ValueError, match=r"'train/loss' has shape \(2,\): it must be a scalar"),
    ):
        writer.write(1, {"train/loss": np.zeros(2)})


@pytest.mark.parametrize("killed_after", [10, 11, 14, 15, 19])
@pytest.mark.parametrize("torn", ["", '{"step": 20, "train/lo', "\0\0\0\0"])
def test_resumed_history_equals_uninterrupted_one(tmp_path, killed_after, torn):
    _train(tmp_path / "whole", 0, 20, 0)
    _train(tmp_path / "killed", 0, killed_after, 0)
    with (tmp_path / "killed/metrics.jsonl").open("a") as file:
        file.write(torn)
    assert len(read_metrics(tmp_path / "killed")) == killed_after + killed_after // 5
    _train(tmp_path / "killed", 10, 20, 10)
    assert _history(tmp_path / "killed") == _history(tmp_path / "whole")
    purges, values = _events(tmp_path / "killed")
    assert purges == [0, 11]
    assert values["validation/loss"] == _events(tmp_path / "whole")[1]["validation/loss"]
    assert list(values["train/loss"]) == list(range(1, 21))


def test_evaluation_repeated_after_resuming_is_written_once(tmp_path):
    _train(tmp_path, 0, 10, 0)
    before = _history(tmp_path)
    with MetricsWriter(tmp_path, resume_step=10) as writer:
        writer.write(10, {"validation/loss": 0.2, "validation/accuracy": 1.0, "time/evaluation_seconds": 3.0})
        assert _history(tmp_path) == before
        writer.write(10, {"test/loss": 0.3})
    assert _history(tmp_path) == [*before, {"step": 10, "test/loss": 0.3}]


def test_new_run_starts_empty(tmp_path):
    _train(tmp_path, 0, 5, 0)
    with MetricsWriter(tmp_path, resume_step=0) as writer:
        writer.write(0, {"validation/loss": 1.0})
    assert read_metrics(tmp_path) == [{"step": 0, "validation/loss": 1.0}]
    assert _events(tmp_path)[1] == {"train/loss": {}, "time/examples_per_second": {}} | {
        "validation/loss": {0: 1.0},
        "validation/accuracy": {},
    }


def test_killed_process_loses_no_line(tmp_path):
    code = f"""
import os, signal
from lineage.train.metrics_writer import MetricsWriter
writer = MetricsWriter({str(tmp_path)!r})
for step in range(100):
    writer.write(step, {{"train/loss": 0.5}})
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.run([sys.executable, "-c", code]).returncode == -9
    assert [line["step"] for line in read_metrics(tmp_path)] == list(range(100))


def test_damaged_line_raises(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"st\n{"step": 3}\n')
    for use in (read_metrics, partial(MetricsWriter, resume_step=1)):
        with pytest.raises(ValueError, match=r"metrics\.jsonl, line 2, is not a JSON object with an integer `step`"):
            use(tmp_path)
    with pytest.raises(FileNotFoundError):
        read_metrics(tmp_path / "absent")


def test_full_disk_error_names_the_file(tmp_path):
    message = r"No space left on device: '.*metrics\.jsonl'"
    with pytest.raises(OSError, match=message), MetricsWriter(tmp_path) as writer:  # noqa: PT012
        writer.history.file.close()
        writer.history.file = open("/dev/full", "wb", buffering=0)  # noqa: SIM115
        writer.write(1, {"train/loss": 1.0})


def test_full_disk_at_the_start_names_the_file(tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4, limits[1]))
    try:
        with pytest.raises(OSError, match=r"File too large: '.*events'"):
            MetricsWriter(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize("flush", [False, True])
def test_unwritten_lines_are_written_when_there_is_space(flush, tmp_path):
    with MetricsWriter(tmp_path) as writer:
        writer.write(1, {"train/loss": 1.0})
        disk, writer.history.file = writer.history.file, open("/dev/full", "wb", buffering=0)  # noqa: SIM115
        for step in (2, 3):
            with pytest.raises(OSError, match="No space left"):
                writer.write(step, {"train/loss": 1.0 / step})
        writer.history.file.close()
        writer.history.file = disk
        if flush:
            writer.flush()
            assert [line["step"] for line in read_metrics(tmp_path)] == [1, 2, 3]
        writer.write(4, {"train/loss": 0.25})
    assert [(line["step"], line["train/loss"]) for line in read_metrics(tmp_path)] == [(n, 1 / n) for n in range(1, 5)]


def test_only_the_primary_process_writes(tmp_path):
    with MetricsWriter(tmp_path / "run", resume_step=0, primary=False, wandb="lineage") as writer:
        writer.write(1, {"train/loss": 1.0})
        writer.flush()
    assert not (tmp_path / "run").exists()


def test_missing_wandb_raises(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match="Weights & Biases is not installed: `pip install wandb`"):
        MetricsWriter(tmp_path / "run", wandb="lineage")
    assert not (tmp_path / "run").exists()


def test_resumed_run_continues_its_wandb_run(tmp_path, monkeypatch):
    calls = []
    run = types.SimpleNamespace(log=lambda *args, **kw: calls.append((args, kw)), finish=lambda: calls.append("finish"))
    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=lambda **kw: calls.append(kw) or run))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    for resume_step in (0, 5, 0):
        with MetricsWriter(tmp_path, resume_step=resume_step, wandb="lineage", config={"seed": 1}) as writer:
            writer.write(6, {"train/loss": 1.0})
            writer.flush()
    starts = [call for call in calls if isinstance(call, dict)]
    assert all(call["project"] == "lineage" and call["resume"] == "allow" for call in starts)
    assert all(call["config"] == {"seed": 1} and call["name"] == tmp_path.name for call in starts)
    ids = [call["id"] for call in starts]
    assert ids[0] == ids[1] != ids[2]
    assert calls[1:3] == [(({"train/loss": 1.0},), {"step": 6}), "finish"]


@pytest.mark.parametrize("saved", [9, 10], ids=["killed", "stopped"])
def test_wandb_run_has_the_evaluation_that_was_interrupted(saved, tmp_path, monkeypatch):
    rows = {}

    def log(scalars, step):
        if step >= first:  # W&B ignores earlier ones
            rows.setdefault(step, {}).update(scalars)

    run = types.SimpleNamespace(log=log, finish=lambda: None)
    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=lambda **_: run))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    first = 0
    writer = MetricsWriter(tmp_path, wandb="lineage")
    for step in range(2, 11, 2):
        writer.write(step, {"train/loss": float(step)})
    writer.close(complete=False)
    first = max(rows) + 1
    with MetricsWriter(tmp_path, resume_step=saved, wandb="lineage") as writer:
        if saved < 10:
            writer.write(10, {"train/loss": 10.0})
        writer.write(10, {"validation/loss": math.nan})
    assert sorted(rows) == [2, 4, 6, 8, 10]
    assert rows[8] == {"train/loss": 8.0}
    assert rows[10] == pytest.approx({"train/loss": 10.0, "validation/loss": math.nan}, nan_ok=True)


def test_copied_run_has_its_own_wandb_run(tmp_path):
    run, copy, moved = (tmp_path / name for name in ("run", "copy", "moved"))
    run.mkdir()
    first = _wandb_id(run, resumes=False)
    assert _wandb_id(run, resumes=True) == first
    shutil.copytree(run, copy)
    second = _wandb_id(copy, resumes=True)
    assert second != first
    assert _wandb_id(copy, resumes=True) == second
    assert _wandb_id(run.rename(moved), resumes=True) == first
    (moved / "wandb_id.txt").write_text(first)  # as written by earlier versions
    assert _wandb_id(moved, resumes=True) == first


class _Stream(io.StringIO):
    encoding = "utf-8"


class _Terminal(_Stream):
    def isatty(self):
        return True


METRICS = {
    "train/loss": np.float32(0.0312),
    "train/accuracy": 0.991,
    "time/examples_per_second": 18400.4,
    "time/mfu": 0.31,
}


@pytest.fixture
def second(monkeypatch):
    """Simulate a clock that advances by a second per call, and a terminal whose width the test sets."""
    ticks = iter(range(10**6))
    monkeypatch.setattr(progress.time, "monotonic", lambda: float(next(ticks)))
    monkeypatch.setenv("TERM", "xterm")

    def width(columns):
        monkeypatch.setattr(
            progress.shutil, "get_terminal_size", lambda *_, **__: types.SimpleNamespace(columns=columns)
        )

    return width


def _last_line(stream):
    return re.sub(r"\x1b\[\d*[mK]", "", stream.getvalue().split("\r")[-1])


@pytest.mark.parametrize("columns", range(20, 160, 7))
def test_bar_fits_any_width(second, columns):
    second(columns)
    bar = ProgressBar(2000, stream=_Terminal())
    bar.update(1100, METRICS)
    bar.update(1200)
    line = _last_line(bar._stream)
    assert len(line) < columns
    assert line.startswith(("1,200/2,000  60%", "step 1,200/2,000  60%"))
    wanted = {40: "loss 0.0312", 60: "left", 80: "MFU 31%", 90: "━", 115: "accuracy 0.991  18,400 examples/s"}
    assert all(text in line for least, text in wanted.items() if columns >= least)


@pytest.mark.parametrize(("step", "filled"), [(0, ""), (1000, "━" * 20), (1025, "━" * 20 + "╸"), (2000, "━" * 40)])
def test_bar_length_shows_progress(second, monkeypatch, step, filled):
    monkeypatch.setenv("NO_COLOR", "1")
    second(200)
    bar = ProgressBar(2000, stream=_Terminal())
    bar.update(step)
    assert "\x1b[36m" not in bar._stream.getvalue()
    assert re.search(r"[━╸]*$", _last_line(bar._stream).rstrip())[0] == filled


def test_time_left_excludes_the_first_step(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    bar = ProgressBar(110, stream=io.StringIO(), log_seconds=0)
    for step, now[0] in ((11, 100.0), (60, 149.0)):  # resumed at 10; 100 s of compilation; then one step per second
        bar.update(step, {"train/loss": 1.0})
    assert bar._stream.getvalue().splitlines()[-1] == "step 60/110  54%  loss 1.00  0:50 left"


@pytest.mark.parametrize(
    ("step", "total", "shown"), [(2696, 2697, " 99%"), (29, 100, " 29%"), (9, 9, "100%"), (0, 0, "100%")]
)
def test_percentage_is_100_only_at_the_end(step, total, shown):
    bar = ProgressBar(total, stream=io.StringIO(), log_seconds=0)
    bar.update(step, {"train/loss": 1.0})
    assert f"/{total:,} {shown}  loss" in bar._stream.getvalue()


def test_results_are_printed_above_the_bar(second):
    second(100)
    with ProgressBar(2000, stream=_Terminal()) as bar:
        bar.update(1200, METRICS)
        bar.evaluation(
            1200, {"validation/loss": 0.5, "validation/top_5": 1.0, "test/loss": 2e-6, "time/evaluation_seconds": 9}
        )
    text = bar._stream.getvalue()
    assert "\r\x1b[2Kstep 1,200  validation  loss 0.500  top 5 1.00\n" in text
    assert "\r\x1b[2Kstep 1,200  test  loss 2.00e-06\n\r\x1b[2Kstep 1,200/2,000" in text
    assert text.endswith("\n")


def test_control_characters_of_a_message_are_escaped(second):
    bar = ProgressBar(2000, stream=_Terminal())
    bar.message("fine-tuning of run\x1b]0;title\x07")
    assert "fine-tuning of run\\x1b]0;title\\x07\n" in bar._stream.getvalue()


def test_plain_lines_without_a_terminal(second):
    bar = ProgressBar(100, stream=io.StringIO(), log_seconds=10)
    for step in range(1, 101):
        bar.update(step, METRICS if step % 3 == 0 else None)
    bar.evaluation(100, {"validation/loss": 0.5})
    bar.close()
    bar.close()
    lines = bar._stream.getvalue().splitlines()
    assert "\x1b" not in bar._stream.getvalue()
    assert "\r" not in bar._stream.getvalue()
    assert 10 <= len(lines) <= 25
    assert re.fullmatch(
        r"step 3/100   3%  loss 0\.0312  accuracy 0\.991  18,400 examples/s  MFU 31%  \d:\d\d left", lines[0]
    )
    assert lines[-2:] == [
        "step 100  validation  loss 0.500",
        "step 100/100 100%  loss 0.0312  accuracy 0.991  18,400 examples/s  MFU 31%",
    ]


def test_a_line_is_not_repeated(second):
    bar = ProgressBar(1, stream=io.StringIO(), log_seconds=0)
    bar.update(1, METRICS)
    bar.evaluation(1, {"validation/loss": 0.5})
    bar.close()
    assert [line[:10] for line in bar._stream.getvalue().splitlines()] == ["step 1/1 1", "step 1  va"]


@pytest.mark.parametrize("kind", [_Stream, _Terminal])
def test_output_that_cannot_be_written_does_not_stop_the_run(kind, monkeypatch):
    def fail(self):
        raise OSError(errno.EIO, "the terminal is closed")

    monkeypatch.setattr(kind, "flush", fail, raising=False)
    with ProgressBar(10, stream=kind(), log_seconds=0) as bar:
        bar.message("text")
        bar.update(5, METRICS)


def test_only_the_primary_process_shows_progress(second):
    second(80)
    for stream in (io.StringIO(), _Terminal()):
        with ProgressBar(10, stream=stream, primary=False) as bar:
            bar.update(5, METRICS)
            bar.message("text")
        assert stream.getvalue() == ""


def test_formatting_of_numbers_and_times():
    shown = [number(v) for v in (0.04, 1, 12.34, 123.4, 999.96, 1000, 18400.4, 3.1e-5, -2.5, math.nan)]
    assert shown == ["0.0400", "1.00", "12.3", "123", "1,000", "1,000", "18,400", "3.10e-05", "-2.50", "nan"]
    assert [number(v) for v in (math.inf, 1e300)] == ["inf", "1.00e+300"]
    assert [clock(s) for s in (0, 12.4, 185, 3723, 187200)] == ["0:00", "0:12", "3:05", "1:02:03", "2d 4:00:00"]


def test_import_loads_no_heavy_packages():
    code = "import sys, lineage.train.metrics_writer\n"
    code += "print(*{'jax', 'torch', 'tensorboardX'} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == ""
