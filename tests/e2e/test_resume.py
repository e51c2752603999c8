"""Killed and restarted runs end bit for bit as uninterrupted runs."""

import json
import os
import random
import re
import signal
import time
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from lineage.runs.folder import MEASURED

TOTAL, SAVE_EVERY = 40, 5


def final(workdir):
    """Return the results of a finished run: leaves of the state by path, history without times, and samples."""
    saved = ocp.StandardCheckpointer().restore(workdir / "checkpoints" / str(TOTAL) / "state")
    leaves = {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(saved)}
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    history = [{key: value for key, value in line.items() if not key.startswith(MEASURED)} for line in lines]
    return leaves, history, (workdir / "artifacts" / "samples.jsonl").read_text()


def assert_same(workdir, reference):
    leaves, history, samples = final(workdir)
    expected_leaves, expected_history, expected_samples = final(reference)
    assert leaves.keys() == expected_leaves.keys()
    assert {"params", "opt_state", "ema"} <= {re.match(r"\['(\w+)'", path)[1] for path in leaves}
    for path, leaf in leaves.items():
        assert leaf.dtype == expected_leaves[path].dtype, path
        assert leaf.tobytes() == expected_leaves[path].tobytes(), path
    assert history == expected_history
    assert samples == expected_samples


def steps_done(workdir):
    path = workdir / "metrics.jsonl"
    return path.read_bytes().count(b'"train/loss"') if path.exists() else 0


def saved_steps(workdir):
    folder = workdir / "checkpoints"
    return {int(path.name) for path in folder.iterdir() if path.name.isdigit()} if folder.exists() else set()


def wait_until(condition, process, seconds=600):
    """Poll until `condition()` is true and return True; return False if the process has ended."""
    end = time.monotonic() + seconds
    while not condition():
        if process.poll() is not None:
            return False
        assert time.monotonic() < end, "the run hangs"
        time.sleep(0.001)
    return True


def in_a_save(workdir, after):
    """Return whether a checkpoint is being written after at least `after` steps."""
    folder = workdir / "checkpoints"
    if not folder.exists():
        return False
    entries = {path.name for path in folder.iterdir()}
    return any("tmp" in name for name in entries) and max([steps_done(workdir)], default=0) >= after


def kill_and_resume(start, arguments, workdir, kills, seed):
    """Run to the end with `kills` kills, every other one during a save; return when they happened."""
    rng, hits = random.Random(seed), []
    while True:
        process = start(*arguments, f"--workdir={workdir}")
        try:
            if len(hits) < kills:
                done = steps_done(workdir) if saved_steps(workdir) else 0
                moment = rng.randint(min(done + 1, TOTAL), TOTAL)
                if len(hits) % 2 == 0:
                    reached = wait_until(lambda at=moment: in_a_save(workdir, at), process)
                else:
                    reached = wait_until(lambda at=moment: steps_done(workdir) >= at, process)
                    time.sleep(rng.random() * 0.2)
                saving = in_a_save(workdir, 0)
                process.send_signal(signal.SIGKILL)
                output, _ = process.communicate()
                if process.returncode == -signal.SIGKILL:
                    hits.append(("saving" if saving else "training", steps_done(workdir), reached))
                    continue
            else:
                output, _ = process.communicate(timeout=900)
            assert process.returncode == 0, output
            return hits
        finally:
            process.kill()


@pytest.mark.thorough
def test_resume_after_kills_is_bit_exact(start, run_arguments, finished, tmp_path):
    hits = kill_and_resume(start, run_arguments, tmp_path / "run", kills=2, seed=0)
    assert len(hits) == 2
    assert_same(tmp_path / "run", finished)


@pytest.mark.slow
def test_resume_of_twenty_killed_runs_is_bit_exact(start, run_arguments, finished, tmp_path):
    all_hits = []
    for seed in range(1, 21):
        all_hits += kill_and_resume(start, run_arguments, tmp_path / str(seed), kills=1 + seed % 3, seed=seed)
        assert_same(tmp_path / str(seed), finished)
        print(seed, all_hits[-3:], flush=True)
    assert sum(where == "saving" for where, _, _ in all_hits) >= 5


@pytest.mark.slow
def test_signals_save_without_losing_a_step(start, run_arguments, finished, tmp_path):
    workdir = tmp_path / "run"
    for number, after in ((signal.SIGTERM, 3), (signal.SIGINT, 17)):
        process = start(*run_arguments, f"--workdir={workdir}")
        assert wait_until(lambda after=after: steps_done(workdir) >= after, process)
        process.send_signal(number)
        while number == signal.SIGTERM and process.poll() is None:  # a cluster may send several
            process.send_signal(number)
            time.sleep(0.02)
        output, _ = process.communicate(timeout=900)
        assert process.returncode == 75, output
        stopped = int(re.search(r"stopped at step (\d+) of 40 after saving", output)[1])
        assert after <= stopped < TOTAL
        assert stopped in saved_steps(workdir)
        assert steps_done(workdir) == stopped
    process = start(*run_arguments, f"--workdir={workdir}")
    output, _ = process.communicate(timeout=900)
    assert process.returncode == 0, output
    assert f"resuming from step {stopped}" in output
    assert_same(workdir, finished)


@pytest.mark.slow
def test_supervised_run_survives_kills(start, run_arguments, finished, tmp_path):
    """Check that a run is started again after SIGKILL, and that a signal to its supervisor makes it save and end."""
    workdir = tmp_path / "run"
    process = start(*run_arguments, f"--workdir={workdir}", "--max-restarts=2")
    assert wait_until(lambda: steps_done(workdir) >= 7, process)
    (child,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(child), signal.SIGKILL)
    assert wait_until(lambda: steps_done(workdir) >= 20, process)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=900)
    assert process.returncode == 75, output
    assert re.search(r"the run failed at step \d+ \(killed by SIGKILL\): restart 1 of 2 in 5 s", output)
    assert "after saving a checkpoint" in output
    process = start(*run_arguments, f"--workdir={workdir}")
    output, _ = process.communicate(timeout=900)
    assert process.returncode == 0, output
    assert_same(workdir, finished)
