"""Runs as jobs of a real single-machine SLURM cluster started by the tests: submitted, requeued, and canceled."""

import json
import subprocess
import sys

import pytest

from tests.e2e.conftest import ROOT
from tests.slurm import answer, cluster, is_installed, restart_now, wait_for


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    """Start a SLURM cluster and return its environment variables."""
    if not is_installed():
        pytest.skip("there is no SLURM to start: apt-get install slurm-wlm munge, and be root")
    with cluster(tmp_path_factory.mktemp("slurm")) as environment:
        yield environment | {"XLA_FLAGS": ""}  # one device per process


@pytest.fixture
def launch(slurm):
    def launch(*arguments):
        command = [sys.executable, "launch.py", *arguments]
        return subprocess.run(command, cwd=ROOT, env=slurm, capture_output=True, text=True)

    return launch


def steps(folder):
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line)["step"] for line in lines if line.endswith("}") and "train/loss" in line]


@pytest.mark.slow
def test_preempted_job_of_a_sweep_resumes(slurm, launch, tmp_path):
    """Check that all runs finish, the preempted one from its checkpoint, and that none is submitted twice."""
    work = tmp_path / "runs"
    config = tmp_path / "config.py"
    config.write_text(
        "from tests import tiny\n"
        "def get_config():\n"
        "    config = tiny.get_config('vit')\n"
        "    config.update(total_steps=3000, save_every_steps=500, evaluate_every_steps=3000)\n"
        "    config.cluster.cpus_per_task = 1\n"
        "    return config\n"
        "def sweep():\n"
        "    yield {'seed': 1, 'total_steps': 50}\n"
        "    yield {'seed': 2}\n"
    )
    arguments = ["--sweep", f"--config={config}", f"--workdir={work}"]
    submitted = launch("slurm", "submit", *arguments)
    assert submitted.returncode == 75, submitted.stderr
    assert "2 of 2 runs submitted" in submitted.stdout
    again = launch("slurm", "submit", *arguments)
    assert "0 of 2 runs submitted" in again.stdout, again.stderr
    jobs = json.loads((work / "slurm" / "jobs.json").read_text())
    long = work / next(name for name in jobs if "seed=2" in name)
    wait_for(lambda: len(steps(long)) > 50)
    subprocess.run(["scontrol", "requeue", jobs[long.name]], env=slurm, check=True)
    restart_now(slurm, jobs[long.name])
    assert "of 3,000 after saving a checkpoint: run the same command to resume" in (long / "log.txt").read_text()
    assert launch("slurm", "status", *arguments).returncode == 75
    wait_for(lambda: launch("slurm", "status", *arguments).returncode == 0)
    assert "resuming from step" in (long / "log.txt").read_text()
    assert sorted(set(steps(long))) == steps(long)  # no step is repeated
    assert steps(long)[-1] == 3000
    finished = launch("sweep", *arguments[1:])
    assert finished.returncode == 0, finished.stderr
    assert "2 of 2 runs are done already" in finished.stdout


@pytest.mark.slow
def test_job_at_its_time_limit_is_requeued_and_resumes(slurm, launch, tmp_path):
    """Check that both processes save after the signal that precedes the time limit, and that the job is requeued."""
    changes = {"total_steps": 60, "mesh.data": 2, "cluster.tasks_per_node": 2, "cluster.cpus_per_task": 1}
    arguments = ["--config=tests/tiny.py:vit", *(f"--config.{key}={value}" for key, value in changes.items())]
    arguments.append(f"--workdir={tmp_path / 'run'}")
    assert launch("slurm", "submit", *arguments).returncode == 75
    job = json.loads((tmp_path / "run" / "slurm" / "jobs.json").read_text())["run"]
    wait_for(lambda: len(steps(tmp_path / "run")) > 10)
    subprocess.run(["scancel", "--signal=USR2", job], env=slurm, check=True)
    restart_now(slurm, job)
    assert "of 60 after saving" in (tmp_path / "run" / "log.txt").read_text()
    wait_for(lambda: launch("slurm", "status", *arguments).returncode == 0)
    assert sorted(set(steps(tmp_path / "run"))) == steps(tmp_path / "run")
    assert steps(tmp_path / "run")[-1] == 60


@pytest.mark.slow
def test_canceled_job_saves(slurm, launch, tmp_path):
    arguments = ["--config=tests/tiny.py:vit", "--config.total_steps=100000", f"--workdir={tmp_path / 'run'}"]
    assert launch("slurm", "submit", *arguments).returncode == 75
    wait_for(lambda: steps(tmp_path / "run"))
    assert "1 jobs canceled" in launch("slurm", "cancel", *arguments).stdout
    wait_for(lambda: not answer(slurm, "squeue").strip())
    status = launch("slurm", "status", *arguments)
    assert status.returncode == 1
    assert "failed" in status.stdout
    assert any(path.name.isdigit() for path in (tmp_path / "run" / "checkpoints").iterdir())  # the checkpoint was saved
    refused = launch("slurm", "submit", *arguments, "--config.cluster.partition=none")
    assert refused.returncode == 1
    assert "SLURM refuses the jobs" in refused.stderr
