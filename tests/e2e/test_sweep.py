"""Sweeps whose runs, and which themselves, are killed: repeating the command completes all runs exactly once."""

import csv
import json
import os
import re
import signal
import time

import pytest

from lineage.runs.locks import CLAIM, held, is_locked

CONFIG = """
from lineage.configs import cli
from lineage.configs.sweeps import axis, product

def get_config():
    config = cli.load("tests/tiny.py:vit")[0]
    config.update(total_steps={steps}, evaluate_every_steps={steps}, save_every_steps=10)
    return config

def sweep():
    return product(axis("schedule.learning_rate", {rates}), axis("seed", {seeds}))
"""


def wait_for(condition, process):
    """Wait until `condition()` is truthy and return its value; fail if the process exits."""
    end = time.monotonic() + 1200
    while not (found := condition()):
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < end, "the sweep hangs"
        time.sleep(0.01)
    return found


def saved(folder):
    """Return the step of the newest checkpoint, 0 if there is none."""
    return max((int(path.name) for path in (folder / "checkpoints").glob("*") if path.name.isdigit()), default=0)


def survives(start, tmp_path, rates, seeds, deaths, steps):
    """Kill `deaths` runs and then the sweep during training, and repeat the command."""
    (tmp_path / "config.py").write_text(CONFIG.format(steps=steps, rates=rates, seeds=seeds))
    workdir = tmp_path / "sweep"
    arguments = "sweep", f"--config={tmp_path}/config.py", "--parallel=2", f"--workdir={workdir}"
    names = [f"learning_rate={rate},seed={seed}" for rate in rates for seed in seeds]
    names = names if len(rates) > 1 else [f"seed={seed}" for seed in seeds]
    started = {}  # run -> steps from which it was resumed
    process = start(*arguments)

    def at_work():
        """Return a run that has saved and is far from its end."""
        for name in names:
            if name not in started and 10 <= saved(workdir / name) < steps - 30 and held(workdir / name):
                return name
        return None

    try:
        for _ in range(deaths):
            name = wait_for(at_work, process)
            os.kill(int((workdir / name / CLAIM).read_text().split()[1]), signal.SIGKILL)
            wait_for(lambda name=name: not held(workdir / name), process)
            started[name] = [saved(workdir / name)]
        wait_for(at_work, process)
        process.kill()
        process.communicate()
        done = {name for name in names if (workdir / name / "artifacts" / "run.json").exists()}
        left = {name for name in names if held(workdir / name)} - done
        assert left  # runs that continue without the sweep
        before = {name: os.stat(workdir / name / "metrics.jsonl").st_mtime_ns for name in done}
        process = start(*arguments)
        output = process.communicate(timeout=3000)[0]
        assert process.returncode == 0, output
    finally:
        process.kill()
        for name in names:
            if is_locked(workdir / name / CLAIM):
                os.kill(int((workdir / name / CLAIM).read_text().split()[1]), signal.SIGKILL)
    with (workdir / "sweep.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["run"], row["state"]) for row in rows] == [(name, "done") for name in names]
    for row in rows:
        folder = workdir / row["run"]
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        assert [line["step"] for line in lines if "train/loss" in line] == [*range(1, steps + 1)]
        assert float(row["test/loss"]) == pytest.approx(lines[-1]["test/loss"], rel=1e-4)
        resumed = [int(step) for step in re.findall(r"resuming from step (\d+)", (folder / "log.txt").read_text())]
        assert resumed == started.get(row["run"], []), row["run"]
        assert f"--workdir={folder}" in (workdir / "sweep.html").read_text()
    for name, when in before.items():
        assert os.stat(workdir / name / "metrics.jsonl").st_mtime_ns == when
    return output


@pytest.mark.slow
def test_killed_sweep_is_completed(start, tmp_path):
    survives(start, tmp_path, (0.01,), (1, 2, 3), deaths=1, steps=100)


@pytest.mark.slow
def test_killed_sweep_of_twelve_runs_is_completed(start, tmp_path):
    print(survives(start, tmp_path, (0.001, 0.003, 0.01), (0, 1, 2, 3), deaths=3, steps=100))
