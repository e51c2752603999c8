"""Runs as jobs of a real single-machine SLURM cluster started by the tests: submitted, requeued, and canceled."""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CONF = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
SlurmctldPort={port}
SlurmdPort={other}
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=batch_sched_delay=1
KillWait=60
ReturnToService=2
NodeName=localhost NodeHostname={host} NodeAddr=127.0.0.1 CPUs={cpus} State=UNKNOWN
PartitionName=all Nodes=localhost Default=YES MaxTime=INFINITE State=UP
"""


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def wait_for(what, seconds=240):
    end = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.3)
    return found


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    """Start a SLURM cluster and return its environment variables."""
    if os.getuid() or not all(map(shutil.which, ("slurmctld", "slurmd", "munged", "sbatch"))):
        pytest.skip("there is no SLURM to start: apt-get install slurm-wlm munge, and be root")
    folder = tmp_path_factory.mktemp("slurm")
    for name in ("state", "spool"):
        (folder / name).mkdir()
    host = socket.gethostname().partition(".")[0]
    ports = {"port": free_port(), "other": free_port()}
    conf = folder / "slurm.conf"
    conf.write_text(CONF.format(host=host, folder=folder, cpus=os.cpu_count(), **ports))
    environment = os.environ | {"SLURM_CONF": str(conf), "XLA_FLAGS": ""}  # one device per process
    (folder / "munge.key").write_bytes(os.urandom(128))
    (folder / "munge.key").chmod(0o600)
    files = {"socket": "socket", "key-file": "key", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
    munged = ["munged", "--foreground", "--force", *(f"--{name}={folder}/munge.{end}" for name, end in files.items())]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    daemons = [
        subprocess.Popen(command, env=environment, **quiet)
        for command in (munged, ["slurmctld", "-D", "-c"], ["slurmd", "-D"])
    ]
    try:
        idle = ["sinfo", "--noheader", "--format=%T"]
        wait_for(lambda: "idle" in subprocess.run(idle, env=environment, capture_output=True, text=True).stdout, 60)
        yield environment
    finally:
        for daemon in reversed(daemons):
            daemon.terminate()
        for daemon in daemons:
            try:
                daemon.wait(30)
            except subprocess.TimeoutExpired:  # waiting for a job of a failed test
                daemon.kill()


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


def restart_now(slurm, job):
    """Start a requeued job at once, instead of after the two minutes of SLURM.

    Wait for some seconds first, because otherwise the node confuses the new start with the one that has just ended.
    """
    shown = ["squeue", "--noheader", "--format=%T", f"--job={job}"]
    wait_for(lambda: "PENDING" in subprocess.run(shown, env=slurm, capture_output=True, text=True).stdout)
    time.sleep(5)
    subprocess.run(["scontrol", "update", f"JobId={job}", "StartTime=now"], env=slurm, check=True)


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


@pytest.mark.thorough
def test_canceled_job_saves(slurm, launch, tmp_path):
    arguments = ["--config=tests/tiny.py:vit", "--config.total_steps=100000", f"--workdir={tmp_path / 'run'}"]
    assert launch("slurm", "submit", *arguments).returncode == 75
    wait_for(lambda: steps(tmp_path / "run"))
    assert "1 jobs canceled" in launch("slurm", "cancel", *arguments).stdout
    queue = ["squeue", "--noheader"]
    wait_for(lambda: not subprocess.run(queue, env=slurm, capture_output=True, text=True).stdout.strip())
    status = launch("slurm", "status", *arguments)
    assert status.returncode == 1
    assert "failed" in status.stdout
    assert any(path.name.isdigit() for path in (tmp_path / "run" / "checkpoints").iterdir())  # the checkpoint was saved
    refused = launch("slurm", "submit", *arguments, "--config.cluster.partition=none")
    assert refused.returncode == 1
    assert "SLURM refuses the jobs" in refused.stderr
